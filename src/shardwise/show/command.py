"""``python -m shardwise show <run folder>``: one run as a page."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from shardwise.checkpoint.manifest import printable
from shardwise.errors import ConfigError
from shardwise.show.record import read_record


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{printable(message)} (python -m shardwise show --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page of a run and print what it says first; returns 0, or 2 for a mistake of the user's."""
    parser = _Parser(
        prog="python -m shardwise show",
        description="One run as a page that needs nothing but a browser: curves, the times of every rank, its mesh, "
        "configuration and provenance.",
    )
    parser.add_argument("run", help="run folder, such as outputs/<experiment>/<run id>; also of a run that is going on")
    parser.add_argument("--to", metavar="FOLDER", help="where show.html goes (default: the run folder)")
    try:
        arguments = parser.parse_args(argv)
        folder = Path(arguments.run).expanduser()
        record = read_record(folder)

        from shardwise.show.page import write_page  # matplotlib: only where it is needed

        page = write_page(record, Path(arguments.to).expanduser() if arguments.to else folder)
    except ConfigError as error:
        print(f"error: {printable(error)}", file=sys.stderr)
        return 2
    from shardwise.show.headline import about_ranks, ended, found_slow

    print(printable(ended(record)))
    if record.reason:
        print(printable(record.reason))
    if line := about_ranks(record, found_slow(record)):
        print(printable(line))
    for note in record.notes[:10]:
        print(printable(note))
    print(f"page: {printable(page)}")
    return 0

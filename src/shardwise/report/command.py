"""``python -m shardwise report <folder of runs>``: what a set of runs shows, as a page, plots and a table."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from shardwise.checkpoint.manifest import printable
from shardwise.errors import ConfigError
from shardwise.report.analysis import analyse
from shardwise.report.load import load_runs

SHOWN = 10
"""Skipped folders that are printed; the page has the others."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{printable(message)} (python -m shardwise report --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Write a report; returns 0, or 2 for a mistake of the user's."""
    parser = _Parser(
        prog="python -m shardwise report",
        description="What a set of runs shows: report.html (complete in itself), plots/*.png and runs.csv.",
    )
    parser.add_argument("folder", help="folder of runs: of an experiment, of a sweep, or anything above")
    parser.add_argument("--to", metavar="FOLDER", help="where the report goes (default: <folder>/report)")
    parser.add_argument(
        "--metric", help="what is compared at the end of the runs (default: test/accuracy, or the like)"
    )
    parser.add_argument("--mode", choices=("min", "max"), help="whether a small or a large value of it is good")
    parser.add_argument(
        "--target", help="what counts as reached, such as 'val/loss<=1.9' (default: derived, and stated)"
    )
    try:
        arguments = parser.parse_args(argv)
        runs = load_runs(arguments.folder)
        analysis = analyse(runs, metric=arguments.metric, mode=arguments.mode, target=arguments.target)

        from shardwise.report.page import write_report  # matplotlib: only where it is needed

        page = write_report(analysis, Path(arguments.to or Path(arguments.folder).expanduser() / "report").expanduser())
    except ConfigError as error:
        print(f"error: {printable(error)}", file=sys.stderr)
        return 2
    from shardwise.report.summary import sentences

    for line in sentences(analysis):
        print(printable(line))
    for run in runs.damaged[:SHOWN]:
        print(f"damaged {printable(run.folder)}: {printable(run.reason)}")
    for path, reason in runs.skipped[:SHOWN]:
        print(f"skipped {path}: {reason}")
    if len(runs.skipped) > SHOWN:
        print(f"skipped {len(runs.skipped) - SHOWN} more: the page lists them")
    print(f"report: {printable(page)}")
    return 0

"""A folder of runs: found, read, and told apart."""

import os
import re
from pathlib import Path

from shardwise.checkpoint.manifest import printable
from shardwise.errors import ConfigError
from shardwise.report.find import JOBS, find_runs
from shardwise.report.labels import label_runs
from shardwise.report.reading import first_line, read_run
from shardwise.report.runs import Runs


def find_outputs(name: str = "outputs") -> Path:
    """The folder of outputs, here or, for a notebook that was started in a folder of its own, in the one above.

    Raises:
        ConfigError: it is in neither.
    """
    for folder in (Path(name), Path("..", name)):
        if folder.is_dir():
            return folder
    raise ConfigError(f"there is no {name}/ in {printable(Path.cwd())} or above it: run python train.py first")


def newest_sweep(outputs: Path) -> Path:
    """The folder of the sweep that was last at work and has runs, or ``outputs`` itself without any."""
    lists = sorted((outputs / "sweeps").glob(f"*/{JOBS}"), key=lambda path: path.stat().st_mtime, reverse=True)
    return next((path.parent for path in lists if find_runs(path.parent).folders), outputs)


def load_runs(folder: str | os.PathLike[str]) -> Runs:
    """The runs of an experiment, of a sweep, or anything above; what cannot be read is in ``skipped`` with its reason.

    Raises:
        ConfigError: there is no such folder, or no run in it.
    """
    path = Path(folder).expanduser()
    found = find_runs(path)
    runs, skipped = [], list(found.skipped)
    for run_folder in found.folders:
        try:
            real = run_folder.resolve()
            runs.append(read_run(run_folder, status=found.statuses.get(real), message=found.messages.get(real, "")))
        except (OSError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
            skipped.append((str(run_folder), _reason(error)))
    skipped = [(printable(where), printable(why)) for where, why in skipped]
    if not runs:
        first = f": {skipped[0][0]}: {skipped[0][1]}" if skipped else ""
        more = f" ({len(skipped)} skipped{first})" if skipped else ""
        raise ConfigError(f"{printable(path)}: no run in it{more}; name a folder that python train.py wrote to")
    runs.sort(key=lambda run: (_natural(run.name), _natural(str(run.folder))))
    loaded = Runs(runs, skipped=skipped, folder=path)
    label_runs(loaded)
    return loaded


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that puts run-2 before run-10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{Path(str(error.filename)).name} cannot be read ({error.strerror})"
    return first_line(error)

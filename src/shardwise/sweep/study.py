"""Optuna's side of a search: where its study is kept, who draws, and who ends jobs early."""

import contextlib
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.study import StudyDirection
from optuna.trial import TrialState

from shardwise.errors import ConfigError
from shardwise.provenance import without_secrets
from shardwise.search_space import Choice, Dimension

JOURNAL = "study.journal"
"""In the sweep's folder: Optuna's own log of what has happened, line by line."""
POPULATION = 16
"""Points of a generation of NSGA-II; Optuna's 50 would make most searches a random one."""
WARM_TRIALS = 4
"""Jobs that have to be known before one is compared with their median."""


def open_study(folder: Path, *, storage: str | None, modes: Sequence[str]) -> optuna.Study:
    """The study of a sweep, read or made; made anew where the directions have changed before it knew a value.

    Args:
        folder: the sweep's, which exists; its name is the study's.
        storage: a URL as Optuna takes it; None: a journal in the folder.
        modes: min or max, for each objective.

    Raises:
        ConfigError: it can be neither read nor made.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # the pool tells what happens
    name, place = folder.name, without_secrets(storage or str(folder / JOURNAL))
    try:
        kept = storage or _journal(folder)
        directions = [StudyDirection.MINIMIZE if mode == "min" else StudyDirection.MAXIMIZE for mode in modes]
        if name in optuna.get_all_study_names(kept):
            study = optuna.load_study(study_name=name, storage=kept)
            if study.directions == directions or has_told(study):
                return study
            # Its directions are fixed. The same points will be drawn again, and the ledger knows their results.
            optuna.delete_study(study_name=name, storage=kept)
        return optuna.create_study(study_name=name, storage=kept, directions=directions)
    except Exception as error:
        text = without_secrets(" ".join(str(error).split()))[:300]
        raise ConfigError(
            f"sweep.storage={place}: the study cannot be read or written ({type(error).__name__}: {text}); take "
            f"another sweep.storage, or another sweep.name"
        ) from error


def has_told(study: optuna.Study) -> bool:
    """Whether it is known how any of its trials compares with others."""
    return any(trial.state in (TrialState.COMPLETE, TrialState.PRUNED) for trial in study.get_trials(deepcopy=False))


def sampler(kind: str, *, seed: int, number: int) -> optuna.samplers.BaseSampler:
    """A sampler for one trial: all that it has to remember is in the study."""
    digest = hashlib.sha256(f"{seed}/{number}".encode()).digest()
    drawn = int.from_bytes(digest[:4], "little")
    if kind == "tpe":
        # Trials that are running count as bad ones, or two slots would try the same.
        return optuna.samplers.TPESampler(seed=drawn, constant_liar=True)
    if kind == "gp":
        return optuna.samplers.GPSampler(seed=drawn)
    if kind == "nsga2":
        return optuna.samplers.NSGAIISampler(seed=drawn, population_size=POPULATION)
    assert kind == "random", kind
    return optuna.samplers.RandomSampler(seed=drawn)


def draw(trial: optuna.Trial, key: str, dimension: Dimension) -> Any:
    """A value; the one that it has already, where it has one."""
    if isinstance(dimension, Choice):
        return trial.suggest_categorical(key, dimension.values)
    if dimension.whole:
        low, high, step = int(dimension.low), int(dimension.high), int(dimension.step or 1)
        return trial.suggest_int(key, low, high, step=step, log=dimension.log)
    return trial.suggest_float(key, dimension.low, dimension.high, step=dimension.step, log=dimension.log)


def pruner(kind: str) -> optuna.pruners.BasePruner:
    """Who ends jobs early, by ``sweep.prune``."""
    if kind == "median":
        return optuna.pruners.MedianPruner(n_startup_trials=WARM_TRIALS)
    if kind == "halving":
        return optuna.pruners.SuccessiveHalvingPruner()
    return optuna.pruners.NopPruner()


class _Unlocked:
    """The journal's lock is the sweep's, which dies with its process; Optuna's own would be waited for after a kill."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


def _journal(folder: Path) -> optuna.storages.BaseStorage:
    """The journal in a sweep's folder, without the torn line that a kill may have left at its end."""
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    path = folder / JOURNAL
    with contextlib.suppress(FileNotFoundError):
        data = path.read_bytes()
        if whole := len(data) - (data.rfind(b"\n") + 1):
            with path.open("r+b") as file:
                file.truncate(len(data) - whole)
    lock: Any = _Unlocked()
    return JournalStorage(JournalFileBackend(str(path), lock_obj=lock))

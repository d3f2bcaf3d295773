"""A search: the jobs of a sweep come from a study of Optuna's, which learns from how they end.

Optuna itself, and not Hydra's plugin for it: that one pins Optuna below 3, waits for a whole batch of jobs before it
asks for the next, and cannot end a job early. Only the parent of the sweep draws; a job is a plain configuration like
any other. A new trial is asked for when a slot is free, and what is known of the others by then counts.

The study is kept beside the sweep's ledger: the study has the trials, their values and what was reported of them, the
ledger has their jobs. A trial that was running when the sweep was killed is handed out again with the same parameters;
the pool knows the job by its key, and resumes it, or tells how it has ended meanwhile.
"""

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import optuna
from optuna.trial import TrialState

from shardwise.config import SweepConfig
from shardwise.errors import ConfigError
from shardwise.job import Job
from shardwise.provenance import without_secrets
from shardwise.search_space import Space, overrides_of, plain_space, shown
from shardwise.sweep.objective import Objective, best_lines, values_of
from shardwise.sweep.planning import common_of, label_of
from shardwise.sweep.source import Common, Outcome, Planned, counted
from shardwise.sweep.study import draw, has_told, open_study, pruner, sampler

Plan = Callable[[Sequence[str], int], Planned]
"""From the overrides of a trial and its number to its job, composed and checked; raises ConfigError."""


class Search:
    """Hands out trials, and tells the study what came out.

    Args:
        space: what is searched.
        objectives: what is sought, checked together with ``settings``.
        settings: the ``sweep`` section.
        seed: of the draws. Trial k is drawn from (seed, k), so that a search which is continued goes on as it would
            have.
        folder: the sweep's; its name is the study's.
        fixed: what was typed that is the same in all trials.
        plan: composes and checks a job.
        sample: a job of the space, for what all of them have in common.
    """

    def __init__(
        self,
        space: Space,
        *,
        objectives: Sequence[Objective],
        settings: SweepConfig,
        seed: int,
        folder: Path,
        fixed: Sequence[str],
        plan: Plan,
        sample: Planned,
    ) -> None:
        self._space, self._objectives, self._settings = space, list(objectives), settings
        self._seed, self._folder, self._fixed = seed, folder, list(fixed)
        self._plan, self._sample = plan, sample
        self._study: optuna.Study | None = None
        self._waiting: list[int] = []
        self._counted = self._before = self._ended_before = self._given = 0
        self._trials: dict[int, optuna.Trial] = {}
        self._reported: dict[int, set[int]] = {}
        self._notes: list[str] = []

    # ---- what the pool asks ----------------------------------------------------------------------------------------

    @property
    def total(self) -> int:
        """All trials, those of earlier starts and those that make up for failed ones included. Opens nothing yet."""
        return self._ended_before + max(self._trial_limit - self._before, self._given)

    @property
    def ended_before(self) -> int:
        return self._ended_before

    @property
    def finished(self) -> bool:
        self._open()
        return not self._waiting and self._counted >= self._trial_limit

    def common(self) -> Common:
        self._open()  # under the sweep's lock: nobody else draws from this study now
        return common_of([self._sample], without=self._space)

    def next(self) -> Planned | None:
        """The next trial's job. A point whose configuration is wrong is told, and counts as a failed trial."""
        study = self._open()
        while self._waiting or self._counted < self._trial_limit:
            trial = self._resumed(self._waiting.pop(0)) if self._waiting else self._asked()
            overrides = overrides_of(self._drawn(trial))
            try:
                planned = self._plan([*self._fixed, *overrides], trial.number + 1)
            except ConfigError as error:
                self._fail(trial, f"{label_of(overrides)}: {error}", final=True)
                continue
            self._trials[planned.number] = trial
            known = study.get_trials(deepcopy=False)[trial.number].intermediate_values
            self._reported[planned.number] = set(known)
            trial.set_user_attr("overrides", label_of(overrides))
            self._given += 1
            return replace(planned, label=label_of(overrides))
        return None

    def started(self, planned: Planned, job: Job) -> None:
        self._trials[planned.number].set_user_attr("run_folder", job.run_folder)

    def progress(self, planned: Planned, lines: Sequence[tuple[int, dict[str, float]]]) -> bool:
        """Report what the objective was by the way; a job that goes on from a checkpoint repeats steps."""
        if self._settings.prune == "none":
            return False
        trial, reported = self._trials[planned.number], self._reported[planned.number]
        for step, metrics in lines:
            if self._objectives[0].metric in metrics and step not in reported:
                (value,) = values_of(metrics, self._objectives)
                if not math.isfinite(value):
                    return True  # it will not come back from there
                trial.report(value, step)
                reported.add(step)
                if trial.should_prune():
                    return True
        return False

    def ended(self, planned: Planned, outcome: Outcome) -> None:
        """Tell the study. A job that was asked to end before its time stays open, for the next start of the search.

        Raises:
            ConfigError: the job has completed and has no such metric; the trial stays open, so that its value counts
                once ``sweep.metric`` is right.
        """
        study, trial = self._open(), self._trials[planned.number]
        trial.set_user_attr("run_folder", outcome.job.run_folder)
        if outcome.status == "completed":
            values = values_of(outcome.metrics, self._objectives)
            wrong = [
                f"{objective.metric} is {value}"
                for objective, value in zip(self._objectives, values, strict=True)
                if not math.isfinite(value)
            ]
            if wrong:
                self._fail(trial, ", ".join(wrong), final=True)
                return
            study.tell(trial, values)
        elif outcome.status == "diverged":
            self._fail(trial, outcome.message, final=True)
        elif outcome.status == "pruned":
            study.tell(trial, state=TrialState.PRUNED)
        elif outcome.status == "failed":
            self._fail(trial, outcome.message, final=False)

    def rest(self) -> list[Planned]:
        return []

    def closing(self, outcomes: Sequence[Outcome]) -> list[str]:
        """The best trials of all starts of the search, how to repeat them, and what went wrong with others."""
        if self._study is None:
            return []
        trials = self._study.get_trials(deepcopy=False)
        complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
        best = []
        if complete:
            best = [self._study.best_trial] if len(self._objectives) == 1 else self._study.best_trials
        rows = [self._row(trial) for trial in best]
        pruned = sum(trial.state == TrialState.PRUNED for trial in trials)
        open_ = sum(trial.state == TrialState.RUNNING for trial in trials)
        failed = sum(trial.state == TrialState.FAIL for trial in trials)
        said = [f"{n} {what}" for n, what in ((pruned, "pruned"), (failed, "failed"), (open_, "not at their end")) if n]
        if self._settings.prune != "none" and complete and not any(t.intermediate_values for t in complete):
            metric = self._objectives[0].metric
            self._notes.append(f"sweep.prune={self._settings.prune}: no job has said {metric} before its end")
        return [
            *self._notes,
            f"{counted(len(trials), 'trial')}: {', '.join([f'{len(complete)} completed', *said])}",
            *best_lines(self._objectives, rows, what="trial"),
        ]

    @property
    def found(self) -> bool:
        """Whether any trial has a value."""
        return any(trial.state == TrialState.COMPLETE for trial in self._open().get_trials(deepcopy=False))

    # ---- the study -------------------------------------------------------------------------------------------------

    @property
    def _trial_limit(self) -> int:
        assert self._settings.trials is not None
        return self._settings.trials

    def _open(self) -> optuna.Study:
        """The study, read or made at the first use."""
        if self._study is not None:
            return self._study
        modes = [objective.mode for objective in self._objectives]
        study = open_study(self._folder, storage=self._settings.storage, modes=modes)
        self._check_same(study)
        study.pruner = pruner(self._settings.prune)
        trials = study.get_trials(deepcopy=False)
        ended = [t for t in trials if t.state != TrialState.RUNNING]  # one may be called final and not be told yet
        done = [t for t in ended if t.state != TrialState.FAIL or t.user_attrs.get("final")]
        self._waiting = [t.number for t in trials if t.state == TrialState.RUNNING]
        self._ended_before = len(ended)
        self._before, self._counted = len(done), len(done) + len(self._waiting)
        if done:
            known = "is known" if len(done) == 1 else "are known"
            print(f"search {self._folder.name}: {counted(len(done), 'trial')} of an earlier start {known}", flush=True)
        self._study = study
        return study

    def _check_same(self, study: optuna.Study) -> None:
        """Whether the study that is continued is about the same; a new one is told what it is about.

        A metric that no trial has had a value of may still be put right.
        """
        about = {
            "space": plain_space(self._space),
            "mode": [objective.mode for objective in self._objectives],
            "metric": [objective.metric for objective in self._objectives],
        }
        about = json.loads(json.dumps(about))
        before = study.user_attrs
        other = f"take another sweep.name than {self._folder.name}"
        trials = study.get_trials(deepcopy=False)
        if trials and "space" not in before:
            raise ConfigError(f"sweep.storage: there is a study {self._folder.name} that is no search's: {other}")
        for what, now in about.items():
            was = before.get(what, now)
            if now != was and (what != "metric" or has_told(study)):
                if what == "space":
                    key = next(key for key in {**was, **now} if was.get(key) != now.get(key))
                    what, was, now = f"the space of {key}", shown(was.get(key)), shown(now.get(key))
                else:
                    what, was, now = f"sweep.{what}", ",".join(was), ",".join(now)
                raise ConfigError(f"{what} was {was} when this search began and is {now} now: {other}")
            if what not in before or was != now:
                study.set_user_attr(what, now)

    def _asked(self) -> optuna.Trial:
        study = self._open()
        study.sampler = sampler(self._settings.search, seed=self._seed, number=len(study.get_trials(deepcopy=False)))
        self._counted += 1
        return study.ask()

    def _resumed(self, number: int) -> optuna.Trial:
        """A trial that was running when the sweep ended."""
        study = self._open()
        # For one that was killed between two of its draws.
        study.sampler = sampler(self._settings.search, seed=self._seed, number=number)
        return optuna.Trial(study, study.get_trials(deepcopy=False)[number]._trial_id)

    def _drawn(self, trial: optuna.Trial) -> dict[str, str]:
        return {key: dimension.text(draw(trial, key, dimension)) for key, dimension in self._space.items()}

    def _fail(self, trial: optuna.Trial, why: str, *, final: bool) -> None:
        """Tell that a trial has failed; one whose point would fail again is ``final``, others are made up for when the
        search is started again."""
        line = without_secrets(f"trial {trial.number + 1} counts as failed: {why}")
        if final:  # the pool tells of jobs that have failed
            print(line, file=sys.stderr, flush=True)
            self._notes.append(line)
        trial.set_user_attr("final", final)
        trial.set_user_attr("why", without_secrets(why))
        self._open().tell(trial, state=TrialState.FAIL)

    def _row(self, trial: optuna.trial.FrozenTrial) -> tuple[str, list[float], str, Job | None]:
        folder = trial.user_attrs.get("run_folder")
        job = None if folder is None else replace(self._sample.job, run_folder=folder)
        return f"trial {trial.number + 1}", list(trial.values), trial.user_attrs.get("overrides", ""), job

"""A run on Weights & Biases."""

import argparse
import contextlib
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers.logger import DummyExperiment, Logger, rank_zero_experiment
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from shardwise.errors import ConfigError
from shardwise.provenance import without_secrets
from shardwise.tracking.jsonl import read_lines
from shardwise.tracking.repeats import Repeats, rows_there
from shardwise.tracking.transaction_log import TransactionLog, earlier_logs, mend
from shardwise.tracking.wandb_service import forget_failed_run, is_logged_in, set_up, why_unreachable

log = logging.getLogger(__package__)

AGENTS_RUN = "agents_run.json"
"""In <save_dir>/wandb: the run of an agent that the metrics went to."""

MODES = ("auto", "online", "offline", "disabled")


class WandbTracker(Logger):
    """A run on Weights & Biases that can never stop or hang the training.

    - The config is one plain dictionary, without secrets. wandb's own capture of the command line, of git and of the
      console is off, because it would carry secrets.
    - Metrics are plotted over a step of our own, "step", the optimizer step.
    - A service that is absent at the start means an offline run; one that goes away later means that the rest waits in
      the run folder; a client that breaks means that tracking ends. Each is said in one line, and training goes on.
    - Whoever owns the run calls finish(exit_code) at its end. Lightning's finalize does not, because it comes after
      every fit and test.
    - A run that is resumed keeps its id, and each of its points arrives once: what W&B has is not logged again, and
      what it lost when the run was killed is logged from <save_dir>/metrics.jsonl, which has the same calls line by
      line and has to be cut back to the checkpoint before this tracker is used. Points that were logged past it,
      through `experiment`, are not watched.
    - Under an agent of a W&B sweep (WANDB_SWEEP_ID and WANDB_RUN_ID) the metrics go to the agent's run, in the sweep's
      project, and run_id is no more than its name; the run folder remembers which run it was.

    Args:
        project, entity, group, name, tags: as in wandb.init. name is run_id by default; without an entity, the user's.
        mode: online, offline, disabled, or auto: WANDB_MODE if it is set, else online if the user is logged in at the
            configured host, else offline. Nothing ever asks on the terminal.
        save_dir: the run folder; everything of wandb goes to <save_dir>/wandb.
        run_id: the id on the service, a new one by default.
        resume: whether the run has been here before, in the same save_dir.
        config: the resolved configuration, with the derived values in it.
        init_timeout: seconds that the service has to accept the run.
        finish_timeout: seconds that the last uploads may take at the end.
        settings: further fields of wandb.Settings.
    """

    def __init__(
        self,
        *,
        project: str = "shardwise",
        mode: str = "auto",
        entity: str | None = None,
        group: str | None = None,
        name: str | None = None,
        tags: Sequence[str] = (),
        save_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        resume: bool = False,
        config: Mapping[str, Any] | None = None,
        init_timeout: float = 15.0,
        finish_timeout: float = 30.0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.check_arguments(mode=mode)
        self._init: dict[str, Any] = {
            "project": project,
            "entity": entity,
            "group": group,
            "name": name,
            "tags": tuple(tags),
        }
        self._mode = mode
        self._save_dir = None if save_dir is None else Path(save_dir).absolute()
        self._id = None if run_id is None else re.sub(r"[/\\#?%:]", "-", run_id)
        self._resume = resume
        self._repeats: Repeats | None = None
        self._last_step = 0
        self._config = plain_config(config or {})
        self._settings = {
            "console": "off",
            "silent": True,  # its header and footer; warnings about uploads still come through
            "init_timeout": init_timeout,
            "finish_timeout": finish_timeout,
            "finish_timeout_raises": True,
            # Seconds. A killed process loses what came after the last flush; and what has been uploaded has to be in
            # the file, to be known when the run is resumed.
            "x_transaction_log_flush_interval": 0.05,
            "disable_git": True,
            "disable_code": True,
            "save_code": False,
            "x_disable_meta": True,
            **(settings or {}),
        }
        self._run: Any = None
        self._ended = False

    @classmethod
    def check_arguments(cls, *, mode: str = "auto", **_: Any) -> None:
        """Raise ConfigError for a mode that does not exist. Does not import wandb."""
        if mode not in MODES:
            raise ConfigError(f"logger.mode={mode} is not a mode of W&B: choose one of {', '.join(MODES)}")

    @property
    def name(self) -> str | None:
        return self._init["project"]

    @property
    def version(self) -> str | None:
        return self._id

    @property
    def save_dir(self) -> str | None:
        return None if self._save_dir is None else str(self._save_dir)

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The wandb.Run, started at the first use; on other ranks, or when tracking has ended, an object that ignores
        every call."""
        if self._run is None and not self._ended:
            try:
                self._run = self._start()
            except ConfigError:
                raise
            except Exception as error:
                self._give_up("W&B cannot start", error)
        return DummyExperiment() if self._ended else self._run

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """One row of the run's history. A call without a step counts for the last one that came."""
        run = self.experiment
        self._last_step = self._last_step if step is None else int(step)
        if self._repeats is not None and self._repeats.take(self._last_step, metrics):
            return
        values = {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()}
        values["step"] = self._last_step
        try:
            run.log(values)
        except Exception as error:
            self._give_up("W&B takes no more metrics", error)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Add to the run's config: a mapping, a DictConfig or a Namespace; it arrives plain and without secrets."""
        run = self.experiment
        if self._ended:
            return
        try:
            run.config.update(plain_config(params), allow_val_change=True)
        except Exception as error:
            self._give_up("W&B does not take the configuration", error)

    @rank_zero_only
    def finish(self, exit_code: int = 0) -> None:
        """End the run: 0 is a success, anything else a failure. Takes at most about finish_timeout seconds."""
        if self._run is None or self._ended:
            return
        import wandb

        self._ended = True
        try:
            self._run.finish(exit_code=exit_code)
            if wandb.run is None:
                # finish returns before the exit code is in the file, and the client's hook at exit, which would wait
                # for that, does not run in processes that multiprocessing started.
                wandb.teardown()
        except TimeoutError:
            log.warning(
                "W&B at %s did not take everything within %g s: upload the rest with: wandb sync --include-online %s",
                *(without_secrets(self._run.settings.base_url), self._settings["finish_timeout"], self._folder()),
            )
        except Exception as error:
            self._give_up("W&B did not close the run", error)

    def finalize(self, status: str) -> None:
        """Nothing: see finish."""

    def _start(self) -> Any:
        if self._save_dir is None:
            raise ConfigError("WandbTracker has no save_dir: give it the run folder, such as save_dir=outputs/my-run")
        service_settings = set_up()
        if agents := self._agents_run(service_settings):
            self._init["name"] = self._init["name"] or self._id
            self._id = agents.pop("run_id")
            self._init.update(agents)
        self._id = self._id or service_settings.run_id or secrets.token_hex(4)
        url = without_secrets(service_settings.base_url)

        earlier = self._earlier() if self._resume else []

        mode, reason = self._resolved_mode(service_settings)
        problem = None
        if mode == "online":
            if not is_logged_in(service_settings):
                problem = f"W&B: {reason}, but nobody is logged in at {url} (wandb login, or WANDB_API_KEY)"
            elif unreachable := why_unreachable(service_settings):
                problem = f"W&B at {url} is not reachable ({unreachable})"
            else:
                present = set(self._save_dir.glob("wandb/run-*"))
                try:
                    run = self._wandb_init(mode)
                except Exception as error:
                    problem = f"W&B at {url} did not accept the run ({_one_line(error)})"
                    forget_failed_run()
                    for abandoned in set(self._save_dir.glob("wandb/run-*")) - present:
                        shutil.rmtree(abandoned, ignore_errors=True)
            mode = "offline" if problem else mode
        if mode != "online":
            run = self._wandb_init(mode)
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        self._run = run
        # In the order in which they have to be uploaded, which the client keeps to only within one command.
        waiting = [found.path.parent for found in earlier if found.waits]
        waiting += [self._folder()] if mode == "offline" else []
        upload = f"upload later with: wandb sync {' '.join(map(str, waiting))}"
        if problem:
            log.warning("%s: this run continues offline; %s", problem, upload)
        elif mode == "online":
            log.info("W&B: %s%s", run.url, f"; earlier points wait in the run folder, {upload}" if waiting else "")
        elif mode == "offline":
            log.info("W&B: offline (%s); %s", reason, upload)
        if self._resume and mode != "disabled":
            self._continue(run, earlier, online=mode == "online")
        return run

    def _agents_run(self, service_settings: Any) -> dict[str, Any]:
        """run_id, project and entity of the run that an agent of a sweep has made, which counts instead of a new one;
        empty without an agent. What is resumed outside of it goes on in the same run."""
        assert self._save_dir is not None
        path = self._save_dir / "wandb" / AGENTS_RUN
        if service_settings.sweep_id and service_settings.run_id:
            found = {name: getattr(service_settings, name) for name in ("run_id", "project", "entity")}
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(found), encoding="utf-8")
            return found
        if self._resume:
            with contextlib.suppress(OSError, ValueError):
                found = json.loads(path.read_text(encoding="utf-8"))
                if isinstance(found, dict) and isinstance(found.get("run_id"), str):
                    return {name: found.get(name) for name in ("run_id", "project", "entity")}
        return {}

    def _earlier(self) -> list[TransactionLog]:
        """What earlier processes of this run left in its folder, mended so that it can be uploaded."""
        assert self._save_dir is not None
        assert self._id is not None
        try:
            found = earlier_logs(self._save_dir / "wandb", self._id)
            mended = [str(each.path) for each in found if mend(each)]
        except OSError as error:
            log.warning("W&B: %s: points since the checkpoint may come twice", error)
            return []
        if mended:
            log.info("W&B: cut off the torn end that a killed process left, kept as *.torn: %s", ", ".join(mended))
        return found

    def _continue(self, run: Any, earlier: Sequence[TransactionLog], *, online: bool) -> None:
        """Log what W&B lost of the lines that stay, and remember what it has of those that will come again."""
        assert self._save_dir is not None
        lines = list(read_lines(self._save_dir / "metrics.jsonl"))
        self._last_step = lines[-1][0] if lines else 0
        starting_step = (run.starting_step if run.resumed else 0) if online else None
        self._repeats = Repeats(rows_there(earlier, starting_step=starting_step))
        missing = [line for line in lines if not self._repeats.take(line[0], line[1])]
        known = bool(earlier) if starting_step is None else sum(len(each.rows) for each in earlier) >= starting_step
        if not known:
            if missing:
                log.warning(
                    "W&B: the run folder does not show which points of this run have been logged: those since step %d "
                    "may come twice",
                    self._last_step,
                )
            return
        for step, metrics, when in missing:
            run.log({**metrics, "step": step, "_timestamp": when})

    def _wandb_init(self, mode: str) -> Any:
        import wandb

        # Under an agent these come from the environment; the client says on the terminal that it ignores any other.
        given = {"id": self._id, **{name: self._init[name] for name in ("project", "entity")}}
        if wandb.setup().settings.sweep_id:
            given = {}
        return wandb.init(
            **(self._init | {"name": self._init["name"] or self._id, "project": None, "entity": None} | given),
            dir=str(self._save_dir),
            mode=mode,  # type: ignore[arg-type]
            # Offline, it lets the upload go on with W&B's own number of the row, whatever has arrived before it.
            resume="allow" if self._resume or mode == "offline" else None,
            config=self._config,
            reinit="finish_previous",  # the default hands back an unfinished run of another training in this process
            settings=wandb.Settings(**self._settings),
        )

    def _resolved_mode(self, service_settings: Any) -> tuple[str, str]:
        """The mode for wandb.init, and why."""
        if self._mode != "auto":
            return self._mode, f"logger.mode={self._mode}"
        if "mode" in service_settings.model_fields_set:
            mode = {"run": "online", "dryrun": "offline"}.get(service_settings.mode, service_settings.mode)
            return mode, f"WANDB_MODE={service_settings.mode}, or so in wandb's settings"
        if is_logged_in(service_settings):
            return "online", "logged in"
        return "offline", "not logged in"

    def _folder(self) -> Path:
        return Path(self._run.settings.sync_dir)

    def _give_up(self, what: str, error: Exception) -> None:
        """Say it once and stop tracking: training is worth more."""
        import wandb

        where = f"; what came before is in {self._folder()}" if self._run is not None else ""
        log.warning("%s (%s): this run goes on without it%s", what, _one_line(error), where)
        self._ended = True
        # The client's own hook at exit would raise again on a service process that is gone.
        with contextlib.suppress(Exception, SystemExit):
            wandb.teardown()


def plain_config(params: Any) -> dict[str, Any]:
    """A configuration of any kind as nested dicts and lists of plain values, resolved and without secrets."""
    from omegaconf import OmegaConf

    if OmegaConf.is_config(params):
        params = OmegaConf.to_container(params, resolve=True)
    elif isinstance(params, argparse.Namespace):
        params = vars(params)
    return without_secrets(_plain(params))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _one_line(error: BaseException) -> str:
    """The first line of an error, which can be followed by advice that does not fit here."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return without_secrets(text if len(text) <= 300 else text[:297] + "...")

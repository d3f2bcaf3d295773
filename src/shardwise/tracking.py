"""Loggers of ours: the metrics file of every run, and Weights & Biases.

They follow Lightning's Logger interface. Only global rank 0 writes. TensorBoard and CSV are Lightning's own loggers.
"""

import argparse
import contextlib
import errno
import json
import logging
import math
import os
import re
import secrets
import shutil
import socket
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pytorch_lightning.loggers.logger import DummyExperiment, Logger, rank_zero_experiment
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from shardwise.errors import ConfigError
from shardwise.provenance import without_secrets

log = logging.getLogger(__name__)

MODES = ("auto", "online", "offline", "disabled")
RESERVED = ("step", "time", "nonfinite")
PROBE_TIMEOUT = 5.0  # seconds to wait for the service's port to answer, before its client tries for init_timeout


class MetricsFileError(ConfigError, OSError):
    """The metrics file cannot be written: a full disk, a read-only folder, no folder. One line, as of ConfigError."""


class JsonlLogger(Logger):
    """One line of JSON per logging call, in the file that belongs to every run whatever other logger is chosen.

    A line is {"step": optimizer steps done, "time": Unix seconds, "<metric>": number, ...}. The step is what the caller
    passes; a step can have several lines, one per call. JSON has no NaN and no infinity: such a value is null, and the
    metric's name stands in the list under "nonfinite". Each line is flushed when the call returns.

    Args:
        path: the file, in a folder that exists. New lines come after old ones.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = Path(path).absolute()
        self.last: dict[str, float] = {}
        """The last value of every metric that was logged, as a plain number."""
        self._last_step = 0

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)

    log_dir = save_dir

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Append a line. A call without a step counts for the last one that came.

        Raises:
            ConfigError: a metric that is not one number, or has a name of the line's own.
            MetricsFileError: the line cannot be written; nothing of it stays in the file.
        """
        self._last_step = self._last_step if step is None else int(step)
        line: dict[str, Any] = {"step": self._last_step, "time": round(time.time(), 3)}
        nonfinite = []
        for name, value in metrics.items():
            if name in RESERVED:
                raise ConfigError(
                    f"metric {name!r} has a name that {self.path.name} uses itself: log it as 'my/{name}'"
                )
            self.last[name] = number = _number(name, value)
            if math.isfinite(number):
                line[name] = number
            else:
                line[name] = None
                nonfinite.append(name)
        if nonfinite:
            line["nonfinite"] = nonfinite
        self._append(json.dumps(line, allow_nan=False).encode() + b"\n")

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: the run folder's config.yaml has them."""

    def _append(self, data: bytes) -> None:
        # Opened for each line: no buffer to lose when the process is killed, and no handle to a file that was cut back.
        try:
            with self.path.open("ab", buffering=0) as file:
                before = file.seek(0, os.SEEK_END)
                try:
                    written = file.write(data)
                    while written < len(data):
                        written += file.write(data[written:])
                except OSError:
                    with contextlib.suppress(OSError):
                        file.truncate(before)
                    raise
        except OSError as error:
            reason = error.strerror or str(error)
            fix = "free space there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "make it writable"
            raised = MetricsFileError(
                f"cannot write metrics to {self.path} ({reason}): {fix} or choose another folder with output_root=..."
            )
            raised.errno = error.errno
            raise raised from error


class WandbTracker(Logger):
    """A run on Weights & Biases that can never stop or hang the training.

    - The config is one plain dictionary, without secrets. wandb's own capture of the command line, of git and of the
      console is off, because it would carry secrets.
    - Metrics are plotted over a step of our own, "step", the optimizer step.
    - A service that is absent at the start means an offline run; one that goes away later means that the rest waits in
      the run folder; a client that breaks means that tracking ends. Each is said in one line, and training goes on.
    - Whoever owns the run calls finish(exit_code) at its end. Lightning's finalize does not, because it comes after
      every fit and test.

    Args:
        project, entity, group, name, tags: as in wandb.init. name is run_id by default; without an entity, the user's.
        mode: online, offline, disabled, or auto: WANDB_MODE if it is set, else online if the user is logged in at the
            configured host, else offline. Nothing ever asks on the terminal.
        save_dir: the run folder; everything of wandb goes to <save_dir>/wandb.
        run_id: the id on the service, a new one by default.
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
        self._config = plain_config(config or {})
        self._settings = {
            "console": "off",
            "silent": True,  # its header and footer; warnings about uploads still come through
            "init_timeout": init_timeout,
            "finish_timeout": finish_timeout,
            "finish_timeout_raises": True,
            "x_transaction_log_flush_interval": 1.0,  # seconds; a killed process loses what came after the last flush
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
        run = self.experiment
        values = {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()}
        if step is not None:
            values["step"] = int(step)
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
        service_settings = _wandb_setup()
        self._id = self._id or service_settings.run_id or secrets.token_hex(4)
        url = without_secrets(service_settings.base_url)

        mode, reason = self._resolved_mode(service_settings)
        problem = None
        if mode == "online":
            if not _is_logged_in(service_settings):
                problem = f"W&B: {reason}, but nobody is logged in at {url} (wandb login, or WANDB_API_KEY)"
            elif unreachable := _unreachable(service_settings):
                problem = f"W&B at {url} is not reachable ({unreachable})"
            else:
                present = set(self._save_dir.glob("wandb/run-*"))
                try:
                    run = self._wandb_init(mode)
                except Exception as error:
                    problem = f"W&B at {url} did not accept the run ({_one_line(error)})"
                    _forget_failed_run()
                    for abandoned in set(self._save_dir.glob("wandb/run-*")) - present:
                        shutil.rmtree(abandoned, ignore_errors=True)
            mode = "offline" if problem else mode
        if mode != "online":
            run = self._wandb_init(mode)
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        self._run = run
        if problem:
            log.warning("%s: this run continues offline; upload later with: wandb sync %s", problem, self._folder())
        elif mode == "online":
            log.info("W&B: %s", run.url)
        elif mode == "offline":
            log.info("W&B: offline (%s); upload later with: wandb sync %s", reason, self._folder())
        return run

    def _wandb_init(self, mode: str) -> Any:
        import wandb

        return wandb.init(
            **(self._init | {"name": self._init["name"] or self._id}),
            id=self._id,
            dir=str(self._save_dir),
            mode=mode,  # type: ignore[arg-type]
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
        if _is_logged_in(service_settings):
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


def _wandb_setup() -> Any:
    """Start the client, silent but for its warnings, without a run. Returns the settings it found."""
    import wandb

    logging.getLogger("wandb").propagate = False  # its log is debug.log in the run's folder, not the user's console
    settings = wandb.setup(wandb.Settings(show_info=False, show_errors=False)).settings
    wandb.termsetup(settings, None)  # setup does so only the first time in a process
    return settings


def _forget_failed_run() -> None:
    """Restart the client's service process, which would otherwise call the id of a run that failed to start in use."""
    import wandb

    with contextlib.suppress(Exception, SystemExit):
        wandb.teardown()
    _wandb_setup()


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


def _number(name: str, value: Any) -> float:
    """An int stays one; everything else with a single value becomes a float."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"metric {name!r} is a {type(value).__name__}, not one number: log a scalar") from error


def _is_logged_in(service_settings: Any) -> bool:
    """Whether the environment, netrc or wandb's settings hold a key for the configured host. Asks nobody."""
    from wandb.sdk.lib import wbauth

    credentials = wbauth.authenticate_session(
        host=service_settings.base_url, source="shardwise", prompt=False, update_session=False
    )
    return credentials is not None


def _unreachable(service_settings: Any) -> str | None:
    """Why no connection to the service can be made, or to the proxy on the way; None if one can."""
    if service_settings.http_proxy or service_settings.https_proxy:
        return None
    target = urlsplit(service_settings.base_url)
    proxy = urllib.request.getproxies().get(target.scheme)
    if proxy and target.hostname and not urllib.request.proxy_bypass(target.hostname):
        target = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    address = (target.hostname or "", target.port or (443 if target.scheme == "https" else 80))
    try:
        socket.create_connection(address, timeout=PROBE_TIMEOUT).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _one_line(error: BaseException) -> str:
    """The first line of an error, which can be followed by advice that does not fit here."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return without_secrets(text if len(text) <= 300 else text[:297] + "...")

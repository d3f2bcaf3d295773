"""The run of W&B's client that one process writes to: its start, its continuation, its rows, its end."""

import contextlib
import logging
import re
import secrets
import shlex
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.provenance import without_secrets
from shardwise.tracking.agents_run import agents_run, leave_agent
from shardwise.tracking.place import Place
from shardwise.tracking.repeats import Repeats, rows_there
from shardwise.tracking.transaction_log import TransactionLog, earlier_logs, mend, read_log
from shardwise.tracking.wandb_parts import Part, lines_of, part_of
from shardwise.tracking.wandb_service import forget_failed_run, is_logged_in, set_up, why_unreachable

log = logging.getLogger(__package__)

LEAST_FREE = 2**20
"""Bytes; the client says nothing of a disk that is full, and drops what does not fit."""
DISK_SECONDS = 10.0
"""Seconds between two looks at the disk."""


class WandbRun:
    """What one process writes to W&B. Nothing of it raises, but for ConfigError from ``start``.

    Args:
        init: project, entity, group, name and tags, as in wandb.init.
        mode, save_dir, run_id, resume, settings: as of WandbTracker.
        config: plain; of the process that writes for all of them.
        way, unit: as WandbTracker's ``ranks`` and ``run_per``.
        place: of this process.
    """

    def __init__(
        self,
        *,
        init: Mapping[str, Any],
        mode: str,
        save_dir: Path | None,
        run_id: str | None,
        resume: bool,
        config: Mapping[str, Any],
        settings: Mapping[str, Any],
        way: str,
        unit: str,
        place: Place,
    ) -> None:
        self._init = dict(init)
        self._mode = mode
        self._save_dir = save_dir
        self._id = run_id
        self._resume = resume
        self._config = dict(config)
        self._settings = dict(settings)
        self._way = way
        self._unit = unit
        self.place = place
        self.part = Part("", "")
        self.run: Any = None
        """The wandb.Run, once it has started."""
        self.ended = False
        """Whether nothing is tracked any more, be it for a failure."""
        self._online = False
        self._earlier: list[TransactionLog] | None = None
        self._repeats: Repeats | None = None
        self._last_step = 0
        self._looked = time.monotonic()
        self._is_full = False

    def start(self) -> None:
        """Start the run, or end tracking.

        Raises:
            ConfigError: something has not been given.
        """
        try:
            self._start()
        except ConfigError:
            raise
        except Exception as error:
            self._give_up("W&B cannot start", error)

    def log(self, values: Mapping[str, Any], step: int | None) -> None:
        """One row; a call without a step counts for the last one that came. One that W&B has is left out."""
        if self.ended:
            return
        try:
            if self._earlier is not None:
                self._catch_up(before=step)
            self._last_step = self._last_step if step is None else int(step)
            if self._repeats is not None and self._repeats.take(self._last_step, values, of_more=True):
                return
            self.run.log({**{name: _for_client(value) for name, value in values.items()}, "step": self._last_step})
        except Exception as error:
            self._give_up("W&B takes no more metrics", error)
            return
        if time.monotonic() - self._looked > DISK_SECONDS:
            self._look_at_disk()

    def update_config(self, config: Mapping[str, Any]) -> None:
        """Add to the run's config."""
        if self.ended:
            return
        try:
            self.run.config.update(config, allow_val_change=True)
        except Exception as error:
            self._give_up("W&B does not take the configuration", error)

    def finish(self, exit_code: int) -> None:
        """End the run, within about finish_timeout seconds."""
        if self.run is None or self.ended:
            return
        import wandb

        self._look_at_disk()
        self.ended = True
        try:
            self.run.finish(exit_code=exit_code)
            if wandb.run is None:
                # finish returns before the exit code is in the file, and the client's hook at exit, which would wait
                # for that, does not run in processes that multiprocessing started.
                wandb.teardown()
        except TimeoutError:
            log.warning(
                "W&B at %s did not take everything within %g s: upload the rest with: %s",
                without_secrets(self.run.settings.base_url),
                self._settings["finish_timeout"],
                self._upload([self.folder]),
            )
        except Exception as error:
            self._give_up("W&B did not close the run", error)
        if self._is_full:
            self._mend()

    @property
    def folder(self) -> Path:
        return Path(self.run.settings.sync_dir)

    # ---- start -------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._save_dir is None:
            raise ConfigError("WandbTracker has no save_dir: give it the run folder, such as save_dir=outputs/my-run")
        self._save_dir.mkdir(parents=True, exist_ok=True)
        place_of_wandb = self._save_dir / "wandb" if (self._save_dir / "wandb").exists() else self._save_dir
        if shutil.disk_usage(place_of_wandb).free < LEAST_FREE:
            raise OSError(f"no space left in {place_of_wandb}")
        service_settings = set_up()
        if agents := agents_run(
            service_settings, self._save_dir / "wandb", resume=self._resume, writes=self.place.rank == 0
        ):
            self._init["name"] = self._init["name"] or self._id
            self._id = agents.pop("run_id")
            self._init.update(agents)
            if self.place.rank:  # the agent's run is that of rank 0
                leave_agent()
                forget_failed_run()
        base = self._id or service_settings.run_id
        if base is None and self._way != "gathered" and self.place.world_size > 1:
            raise ConfigError(f"WandbTracker has no run_id: give all ranks the same one for ranks={self._way}")
        self._id = base or secrets.token_hex(4)
        self._take_part(self._way, agents=bool(agents))
        url = without_secrets(service_settings.base_url)
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
                    run = self._wandb_init("online")
                except Exception as error:
                    problem = f"W&B at {url} did not accept the run ({one_line(error)})"
                    forget_failed_run()
                    for abandoned in set(self._save_dir.glob("wandb/run-*")) - present:
                        # Other ranks start at the same time.
                        if abandoned.name.endswith(self.part.label):
                            shutil.rmtree(abandoned, ignore_errors=True)
            mode = "offline" if problem else mode
        elif mode == "offline" and self.part.shared:
            problem = f"W&B: logger.ranks=shared needs the service, and this run is offline ({reason})"
        if mode != "online":
            if mode == "offline" and self.part.shared:
                self._take_part("grouped", agents=bool(agents))
                problem = f"{problem}, where ranks share no run, so that each has one of its own"
            run = self._wandb_init(mode)
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        self.run, self._online = run, mode == "online"
        # In the order in which they have to be uploaded, which the client keeps to only within one command.
        waiting = [found.path.parent for found in self._earlier or [] if found.waits]
        waiting += [self.folder] if mode == "offline" else []
        upload = f"upload later with: {self._upload(waiting)}"
        if problem:
            log.warning("%s: this run continues offline; %s", problem, upload)
        elif mode == "online":
            log.info("W&B: %s%s", run.url, f"; earlier points wait in the run folder, {upload}" if waiting else "")
        elif mode == "offline":
            log.info("W&B: offline (%s); %s", reason, upload)
        if mode == "disabled":
            self._earlier = None
        elif self._earlier is not None and self.place.rank == 0:
            self._catch_up(before=None)

    def _take_part(self, way: str, *, agents: bool) -> None:
        """Decide on the run that this process writes to, and read what its earlier lives have left of it."""
        assert self._save_dir is not None
        assert self._id is not None
        names = {name: self._init[name] for name in ("name", "group")}
        self.part = part_of(way, self.place, self._id, unit=self._unit, **names)
        if agents and self.place.rank == 0:
            self.part = replace(self.part, run_id=self._id)
        if not self._resume:
            return
        try:
            found = earlier_logs(
                self._save_dir / "wandb", self.part.run_id, label=self.part.label if self.part.shared else ""
            )
            mended = [str(each.path) for each in found if mend(each)]
        except OSError as error:
            log.warning("W&B: %s: points since the checkpoint may come twice", error)
            self._earlier = []
            return
        self._earlier = found
        if mended:
            log.info("W&B: cut off the torn end that a killed process left, kept as *.torn: %s", ", ".join(mended))

    def _wandb_init(self, mode: str) -> Any:
        import wandb

        part, settings = self.part, dict(self._settings)
        if part.shared and mode == "online":
            mode = "shared"
            settings |= {
                "x_label": part.label,
                "x_primary": self.place.rank == 0,
                "x_update_finish_state": self.place.rank == 0,
                # The client names a folder by the run and the second: ranks of one node would share it.
                "x_sync_dir_suffix": part.label,
            }
        config = self._config
        if part.label and not part.shared:
            place = {part.job_type: self.place.node if part.job_type == "node" else self.place.rank}
            config = config | {"place": {**place, "host": socket.gethostname()}}
        # Under an agent these come from the environment; the client says on the terminal that it ignores any other.
        given = {"id": part.run_id, **{name: self._init[name] for name in ("project", "entity")}}
        if wandb.setup().settings.sweep_id:
            given = {}
        return wandb.init(
            **({"project": None, "entity": None} | given),
            name=part.name,
            group=part.group,
            job_type=part.job_type,
            tags=self._init["tags"],
            dir=str(self._save_dir),
            mode=mode,  # type: ignore[arg-type]
            # Offline, it lets the upload go on with W&B's own number of the row, whatever has arrived before it.
            resume="allow" if (self._resume and mode != "shared") or mode == "offline" else None,
            config=config,
            reinit="finish_previous",  # the default hands back an unfinished run of another training in this process
            settings=wandb.Settings(**settings),
        )

    def _resolved_mode(self, service_settings: Any) -> tuple[str, str]:
        """The mode for wandb.init, and why."""
        if self._mode != "auto":
            return self._mode, f"logger.mode={self._mode}"
        if "mode" in service_settings.model_fields_set:
            said = service_settings.mode
            mode = {"run": "online", "shared": "online", "dryrun": "offline"}.get(said, said)
            return mode, f"WANDB_MODE={said}, or so in wandb's settings"
        if is_logged_in(service_settings):
            return "online", "logged in"
        return "offline", "not logged in"

    # ---- continuation ------------------------------------------------------------------------------------------------

    def _catch_up(self, *, before: int | None) -> None:
        """Log what W&B lost of the lines that stay, and remember what it has of those that will come again."""
        assert self._save_dir is not None
        assert self._earlier is not None
        earlier, self._earlier = self._earlier, None
        lines = lines_of(self.part, self.place, self._save_dir, before=before)
        self._last_step = lines[-1][0] if lines else 0
        starting_step = None
        if self._online and not self.part.shared:  # of a shared run, nobody says what has arrived from which rank
            starting_step = self.run.starting_step if self.run.resumed else 0
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
        for step, values, when in missing:
            row = {name: _for_client(value) for name, value in values.items()}
            self.run.log({**row, "step": step, "_timestamp": when})

    # ---- trouble -----------------------------------------------------------------------------------------------------

    def _upload(self, folders: Sequence[Path], *, online: bool | None = None) -> str:
        """The command that brings these to the service; rank 0's does it for all ranks that have some of their own."""
        assert self._save_dir is not None
        online = self._online if online is None else online
        command = "wandb sync --include-online" if online and self.folder in folders else "wandb sync"
        if self.place.rank or not self.part.label or self.place.world_size == 1 or not folders:
            return f"{command} {' '.join(map(shlex.quote, map(str, folders)))}"
        kind = "run" if "--include" in command else "offline-run"
        return f"{command} {shlex.quote(str(self._save_dir / 'wandb'))}/{kind}-*-{self._id}*"

    def _look_at_disk(self) -> None:
        """Say once that there is no space, of which the client says nothing."""
        self._looked = time.monotonic()
        if self._is_full:
            return
        try:
            self._is_full = shutil.disk_usage(self.folder).free < LEAST_FREE
        except OSError:
            return
        if self._is_full:
            # What an online run holds goes to the service all the same.
            log.warning(
                "W&B: no space left in %s: what comes now may be missing there, and is in the run's own files; free "
                "space, and upload what is there later with: %s",
                self.folder, self._upload([self.folder]),
            )  # fmt: skip

    def _give_up(self, what: str, error: Exception) -> None:
        """Say it once and stop tracking: training is worth more."""
        import wandb

        self.ended = True
        # The client's own hook at exit would raise again on a service process that is gone.
        with contextlib.suppress(Exception, SystemExit):
            wandb.teardown()
        where = "; metrics are in the run folder"
        if self.run is not None:
            where = f"; upload what came before with: {self._upload([self.folder])}"
            self._mend()
        log.warning("%s (%s): this run goes on without it%s", what, one_line(error), where)

    def _mend(self) -> None:
        """Make what a client that broke has left behind fit to be uploaded."""
        with contextlib.suppress(Exception):
            for path in self.folder.glob("*.wandb"):
                mend(read_log(path))


def one_line(error: BaseException) -> str:
    """The first line of an error, which can be followed by advice that does not fit here."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return without_secrets(text if len(text) <= 300 else text[:297] + "...")


def plain_id(run_id: str) -> str:
    """A run id without what the service does not take in one."""
    return re.sub(r"[/\\#?%:]", "-", run_id)


def _for_client(value: Any) -> Any:
    if isinstance(value, tuple):
        import wandb

        return wandb.Histogram(np_histogram=value)
    return value.item() if hasattr(value, "item") else value

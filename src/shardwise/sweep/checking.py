"""The check of what is plugged in, in a process of the warm template: the parent of a sweep imports neither torch nor a
user's modules, and starts in a second."""

import multiprocessing
import traceback
from collections.abc import Callable
from typing import Any

from shardwise.config import from_plain, to_plain
from shardwise.errors import ConfigError
from shardwise.launch import RanksFailedError, how_it_ended, share_template
from shardwise.resolve import Resolved, World, resolve_in
from shardwise.signals import die_with_parent


class Checker:
    """Calls ``check`` elsewhere, as ``checker(resolved)``; one process does it all, and ends with :meth:`close`.

    Args:
        check: a function of a module, which raises ConfigError.
    """

    def __init__(self, check: Callable[[Resolved], None]) -> None:
        self._check = check
        self._process: Any = None

    def __call__(self, resolved: Resolved) -> None:
        """
        Raises:
            ConfigError: as ``check`` has raised it.
            RanksFailedError: something else went wrong, with its traceback.
        """
        if self._process is None:
            context = multiprocessing.get_context("forkserver")
            self._pipe, other = context.Pipe()
            self._process = context.Process(target=_check_process, args=(other, self._check), name="check", daemon=True)
            self._process.start()
            other.close()
        try:
            self._pipe.send((to_plain(resolved.config), vars(resolved.world)))
            kind, text = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            kind, text = "error", f"the process that checks the configuration {how_it_ended(self._process.exitcode)}"
        if kind == "config":
            raise ConfigError(text)
        if kind == "error":
            raise RanksFailedError(text, cause=text.splitlines()[-1])

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._pipe.close()
            self._process.terminate()
            self._process.join()
            self._process = None


def _check_process(pipe: Any, check: Callable[[Resolved], None]) -> None:
    die_with_parent()
    share_template()
    while True:
        try:
            config, world = pipe.recv()
        except EOFError:
            return
        try:
            check(resolve_in(from_plain(config), World(**world)))
            pipe.send(("fine", ""))
        except ConfigError as error:
            pipe.send(("config", str(error)))
        except Exception:
            pipe.send(("error", traceback.format_exc().rstrip()))

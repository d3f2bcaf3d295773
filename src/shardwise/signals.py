"""The one owner of signals, and the end of processes whose parent is gone."""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from typing import Any

GRACE_SECONDS = 5.0
"""Between a signal and the end of a worker that is stuck outside Python."""


def die_with_parent() -> None:
    """End this process as soon as the one that asked for it is gone, whatever ended that one.

    Workers that come from a forkserver are no children of the process that waits for them, and torchrun's ranks are not
    ended with it, so nothing else does.
    """
    parent, pid = multiprocessing.parent_process(), os.getppid()

    def watch() -> None:
        if parent is not None:
            wait([parent.sentinel])
        else:
            while os.getppid() == pid:
                time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name="die-with-parent", daemon=True).start()


@contextlib.contextmanager
def end_on_signals() -> Iterator[None]:
    """Fatal signals unwind the stack (so that trackers learn of it) and end a process that is stuck.

    A process that waits inside a collective runs no Python handler; the wake-up descriptor is written all the same.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    fatal, main = fatal_signals(), threading.get_ident()
    unwinding, ended = threading.Event(), threading.Event()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def watch() -> None:
        while signals := os.read(reader, 64):
            signum = next((one for one in signals if one in fatal), None)
            if signum is not None:
                # Of two signals at once another thread may take both, and the main thread would sleep on.
                if not unwinding.wait(0.2):
                    signal.pthread_kill(main, signum)
                if not ended.wait(GRACE_SECONDS):
                    os._exit(128 + signum)
        os.close(reader)

    before_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=watch, name="end-on-signals", daemon=True).start()
    try:
        with unwind_on_signals(unwinding):
            yield
    finally:
        ended.set()
        signal.set_wakeup_fd(before_fd)
        os.close(writer)


def fatal_signals() -> list[signal.Signals]:
    """Signals that end a run: those that end a program, but for what is ignored (``nohup``, a shell's ``&``)."""
    asked = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return [one for one in asked if signal.getsignal(one) is not signal.SIG_IGN]


@contextlib.contextmanager
def unwind_on_signals(unwinding: threading.Event | None = None) -> Iterator[None]:
    """The first fatal signal raises SystemExit with a shell's status for it (130 for Ctrl-C); later ones are ignored.

    Sets ``unwinding`` as it does so.
    SystemExit rather than KeyboardInterrupt, because Lightning swallows the latter and ends the process with status 1.
    """
    fatal = fatal_signals()

    def unwind(signum: int, frame: Any) -> None:
        for one in fatal:
            signal.signal(one, lambda signum, frame: None)  # SIG_IGN makes Python complain of what has just arrived
        if unwinding is not None:
            unwinding.set()
        raise SystemExit(128 + signum)

    before = {one: signal.signal(one, unwind) for one in fatal}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Puts fatal signals off to the end of a block that has to come to its end: the peers of a rank that fails are
    told to end while they write down that they have lost it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {one: signal.signal(one, lambda signum, frame: came.append(signum)) for one in fatal_signals()}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    if came:
        signal.raise_signal(came[0])

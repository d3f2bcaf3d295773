"""The one owner of signals, and the end of processes whose parent is gone.

While a process trains, the first signal is a request: training goes on to the end of its step, saves a checkpoint and
ends. What may not wait (a second Ctrl-C, SIGQUIT, a signal while nothing is there to be saved) unwinds the stack.
"""

import contextlib
import multiprocessing
import multiprocessing.util
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from multiprocessing.connection import wait
from signal import Signals
from typing import Any

GRACE_SECONDS = 5.0
"""Between a signal that ends a process at once and its end where it is stuck outside Python."""

AGAIN_SECONDS = 0.3
"""A terminal's Ctrl-C and the same one handed on by a parent arrive closer together than two of a user's."""

PREEMPTED = os.EX_TEMPFAIL
"""Exit status (75) of a run that was asked to end and has saved: try again, which schedulers take as a requeue."""

OWNED = (Signals.SIGINT, Signals.SIGTERM, Signals.SIGHUP, Signals.SIGUSR1, Signals.SIGUSR2, Signals.SIGQUIT)
"""Signals that mean a run; SLURM and other schedulers warn by SIGTERM, SIGUSR1 or SIGUSR2."""


class Stop:
    """What signals have asked of this process; read :attr:`requested` after each step of training."""

    def __init__(self, *, again: float = AGAIN_SECONDS, console: bool = False) -> None:
        self.requested: str | None = None
        """Why training shall save and end: the name of the first signal, or another reason; None while nobody asks."""
        self.deferring = False
        """Whether somebody looks at requests; a signal ends the process at once otherwise."""
        self._again = again
        self._console = console
        self._since = 0.0
        self._tell: Callable[[Signals], None] | None = None

    def add(self, reason: str) -> None:
        """Ask for a save and an end for a reason that is no signal; the first reason counts."""
        if self.requested is None:
            self.requested, self._since = reason, time.monotonic()

    @contextlib.contextmanager
    def deferred(self, tell: Callable[[Signals], None] | None = None) -> Iterator[None]:
        """Within this block signals are requests; ``tell`` hands each first one on to the processes that obey it."""
        before = self.deferring, self._tell
        self.deferring, self._tell = True, tell
        try:
            yield
        finally:
            self.deferring, self._tell = before

    @property
    def signal(self) -> Signals:
        """The signal of the request (SIGTERM for another reason)."""
        return Signals.__members__.get(self.requested or "", Signals.SIGTERM)

    def ends_at_once(self, one: Signals) -> bool:
        """Take a signal in: whether it ends the process at once; it is a request otherwise."""
        if one == Signals.SIGQUIT or (self.requested is None and not self.deferring):
            return True
        # Schedulers repeat theirs; only a person at the terminal means another thing by the second.
        if self.requested is not None and one == Signals.SIGINT and time.monotonic() - self._since >= self._again:
            return True
        if self.requested is None:
            self.add(one.name)
            if self._console:
                self._acknowledge(one)
            if self._tell is not None:
                self._tell(one)
        return False

    @staticmethod
    def _acknowledge(one: Signals) -> None:
        again = "; Ctrl-C again ends it at once, without one" if one == Signals.SIGINT else ""
        with contextlib.suppress(OSError):  # not print(), in whose midst the signal may have come
            os.write(2, f"\n{one.name}: the run ends after this step and saves a checkpoint{again}\n".encode())


@contextlib.contextmanager
def owned_signals(
    *,
    console: bool = False,
    deaf: Collection[Signals] = (),
    again: float = AGAIN_SECONDS,
    now: Callable[[Signals, Stop], bool] = lambda one, stop: False,
    grace: float = GRACE_SECONDS,
) -> Iterator[Stop]:
    """Own this process's signals, but for those that are ignored (``nohup``, a shell's ``&``).

    What ends the process at once raises SystemExit with a shell's status for it (130 for Ctrl-C), so that trackers
    learn of it, and ends it the hard way where that does not help. A process that waits inside a collective runs no
    Python handler; the wake-up descriptor is written all the same, and a thread reads it.

    Args:
        console: whether a request is acknowledged on the console, by this process of all that a signal may reach.
        deaf: signals that somebody else answers to, such as a Ctrl-C that the parent gets as well.
        again: seconds after a request from which on a Ctrl-C is a second one.
        now: asked about every signal before all else: whether it ends the process at once.
        grace: seconds from a signal that ends the process at once to its hard end.
    """
    stop = Stop(again=again, console=console)
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    owner = _Owner(stop, deaf=deaf, now=now, grace=grace)
    owner.start()
    try:
        yield stop
    finally:
        owner.end()


class _Owner:
    """The handlers of :func:`owned_signals`, and the thread that sees a signal where they cannot run."""

    def __init__(
        self, stop: Stop, *, deaf: Collection[Signals], now: Callable[[Signals, Stop], bool], grace: float
    ) -> None:
        self._stop = stop
        self._deaf = deaf
        self._now = now
        self._grace = grace
        self._main = threading.get_ident()
        self._pid = os.getpid()
        self._taking = threading.RLock()
        self._leaving: Signals | None = None
        self._unwinding, self._ended = threading.Event(), threading.Event()
        self._before: dict[Signals, Any] = {}

    def start(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()
        self._before = {one: signal.signal(one, self._handle) for one in owned()}
        multiprocessing.util.register_after_fork(self, _Owner._forked)
        # What came before this process could answer has waited: see signals_wait().
        self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, OWNED)

    def end(self) -> None:
        self._ended.set()
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        for one, handler in self._before.items():
            signal.signal(one, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._writer)

    def _handle(self, signum: int, frame: Any) -> None:
        if os.getpid() != self._pid:
            return
        self._take()
        if self._leaving is not None and not self._unwinding.is_set():
            self._unwinding.set()
            # Not KeyboardInterrupt, because Lightning swallows it and ends the process with status 1.
            raise SystemExit(128 + self._leaving)

    def _watch(self) -> None:
        ready = select.poll()
        ready.register(self._reader, select.POLLIN)
        while ready.poll() and self._take():
            if self._leaving is not None:
                # Of two signals at once another thread may take both, and the main thread would sleep on.
                if not self._unwinding.wait(0.2) and not self._ended.is_set():
                    signal.pthread_kill(self._main, self._leaving)
                if not self._ended.wait(self._grace):
                    os._exit(128 + self._leaving)
        os.close(self._reader)

    def _take(self) -> bool:
        """Decide on what has arrived, once, whoever comes first; whether more may come."""
        with self._taking:
            try:
                arrived = os.read(self._reader, 64)
            except BlockingIOError:
                return True
            for number in arrived:
                if self._leaving is None and number in self._before and number not in self._deaf:
                    one = Signals(number)
                    if self._now(one, self._stop) or self._stop.ends_at_once(one):
                        self._leaving = one
            return bool(arrived)

    def _forked(self) -> None:
        """In a child of multiprocessing's (a loader's worker): its parent answers to signals, and tells it to end.

        A scheduler's SIGTERM reaches every process, and a loader without its workers would end training before it has
        saved. The parent's own SIGTERM still ends the child, also where it is stuck.
        """
        if self._ended.is_set():
            return
        signal.set_wakeup_fd(-1)  # or the parent would read of the child's signals
        for one in self._before:
            signal.signal(one, lambda signum, frame: None)
        if Signals.SIGTERM not in self._before:
            return
        signal.pthread_sigmask(signal.SIG_BLOCK, [Signals.SIGTERM])  # torch installs a handler of its own afterwards

        def watch() -> None:
            while signal.sigwaitinfo([Signals.SIGTERM]).si_pid != os.getppid():
                pass
            os._exit(0)  # any other status is an error to the loader

        threading.Thread(target=watch, name="signals", daemon=True).start()


def owned() -> list[Signals]:
    """:data:`OWNED` without what is ignored, or handled outside Python."""
    return [one for one in OWNED if signal.getsignal(one) not in (signal.SIG_IGN, None)]


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """A process that is started within this block, and every one that comes from it, is ended by no signal before it
    owns its signals: they wait until then. A forkserver never does, and outlives what is sent to all processes of a
    run."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, OWNED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Puts signals off to the end of a block that has to come to its end: the peers of a rank that fails are
    told to end while they write down that they have lost it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {one: signal.signal(one, lambda signum, frame: came.append(signum)) for one in owned()}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    if came:
        handler = before[Signals(came[0])]
        if callable(handler):
            handler(came[0], None)  # raised again, a Ctrl-C would count as a second one
        else:
            signal.raise_signal(came[0])


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

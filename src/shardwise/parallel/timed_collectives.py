"""The time in which a rank waits for other ranks, charged to a clock wherever in PyTorch it is spent.

Only waiting is charged: while a collective is under way and the rank computes, it computes. On a CPU that is the time
that its thread spends in ``wait``; on a GPU, whose host never waits, that for which the stream it computes on stands.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.step_clock import Event, StepClock

HOOK = 0x5A1D
"""By which the hooks of a process group are told from those of others."""


def recorder(stream: Any) -> Callable[[], Event]:
    """What records a moment on a stream of a GPU, for ``StepClock.record``."""

    def record() -> Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    return record


def time_collectives(clock: StepClock, groups: Iterable[Any] = (), *, stream: Any = None) -> Callable[[], None]:
    """Charge ``communication`` while the calling thread waits for collectives, from now on.

    Nothing is charged to other threads, such as one that writes checkpoints. The gradients of DistributedDataParallel,
    for which C++ waits, are ``timed_reducer``'s.

    Args:
        clock: whose ``begin_waiting`` and ``end_waiting`` are called.
        groups: process groups, of which some collectives run on ``stream`` itself.
        stream: of the GPU that this rank computes on; None on a CPU. What is waited for on other streams, as FSDP2
            gathers parameters, is hidden until this one waits for them. No GPU has run this so far.

    Returns:
        What ends it, and leaves PyTorch as it was.
    """
    timed, undo = _Timed(clock, stream), ExitStack()
    # Every collective of Python, torch's own (FSDP) and ours, ends here, at once or later.
    timed.replace(undo, dist.Work, "wait", _name_of_work)
    # Functional collectives: DTensor and compiled code call the one operator or the other.
    for operator in (torch.ops._c10d_functional.wait_tensor, torch.ops._c10d_functional.wait_tensor.default):
        timed.replace(undo, operator, "_op", lambda *_: "functional collective")
    # DistributedDataParallel: buffers before a forward pass; C++ waits.
    timed.replace(undo, dist, "_broadcast_coalesced", lambda *_: "broadcast of buffers")
    if stream is not None:
        # FSDP2 lets the stream that computes wait for those that communicate, by events.
        name = "event of another stream"
        timed.replace(undo, torch.cuda.Stream, "wait_event", lambda *_: name, only=lambda waits, *_: waits == stream)
        for group in groups:
            timed.watch(undo, group)
    return undo.close


@contextmanager
def timed_reducer(clock: StepClock, loss: Tensor) -> Iterator[None]:
    """Around ``loss.backward()`` through DistributedDataParallel: charge what it waits for its buckets.

    Its reducer queues a callback for the end of the backward pass, in which it waits. One that is queued before, when
    the pass begins, is called right before it, and one that this one queues right after it.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    around: list[str | None] = []

    def begin() -> None:
        around.append(clock.begin_waiting("allreduce of gradients"))
        engine.queue_callback(end)

    def end() -> None:
        while around:
            clock.end_waiting(around.pop())

    handle = loss.register_hook(lambda _: engine.queue_callback(begin))
    try:
        yield
    finally:
        handle.remove()
        end()  # an error in the reducer has kept the callback from being called


class _Timed:
    """Lets functions charge their time."""

    def __init__(self, clock: StepClock, stream: Any) -> None:
        self._clock = clock
        self._thread = threading.get_ident()
        self._stream = stream

    def replace(
        self,
        undo: ExitStack,
        owner: Any,
        attribute: str,
        name: Callable[..., str],
        *,
        only: Callable[..., bool] = lambda *_: True,
    ) -> None:
        """Replace ``owner.attribute`` by what charges its time where ``only`` says so."""
        # What is put back is what the class holds, which is not always what it gives.
        clock, inner, held = self._clock, getattr(owner, attribute), vars(owner)[attribute]

        def timed(*args: Any, **kwargs: Any) -> Any:
            if not (self._trains() and only(*args)):
                return inner(*args, **kwargs)
            around = clock.begin_waiting(name(*args))
            try:
                return inner(*args, **kwargs)
            finally:
                clock.end_waiting(around)

        setattr(owner, attribute, timed)
        undo.callback(setattr, owner, attribute, held)

    def watch(self, undo: ExitStack, group: Any) -> None:
        """A collective of NCCL that is waited for at once is made by the stream that computes; it is the waiting."""
        if not hasattr(group, "register_pre_hook"):  # before torch 2.14: it counts as what is around it
            return
        clock, around = self._clock, list[str | None]()

        def before(call: Any) -> None:
            waits = not call.async_op and self._trains()
            around.append(clock.begin_waiting(call.name.name.lower()) if waits else None)

        def after(_: Any) -> None:
            clock.end_waiting(around.pop())

        group.register_pre_hook(HOOK, before)
        undo.callback(group.unregister_pre_hook, HOOK)
        group.register_post_hook(HOOK, after)
        undo.callback(group.unregister_post_hook, HOOK)

    def _trains(self) -> bool:
        """Whether this is the thread that trains, and the stream that it computes on."""
        here = threading.get_ident() == self._thread
        if self._stream is None:
            return here
        # Autograd's threads for GPUs, none of which Python has started, work while the thread that trains waits.
        here = here or isinstance(threading.current_thread(), threading._DummyThread)
        return here and bool(torch.cuda.current_stream(self._stream.device) == self._stream)


def _name_of_work(work: Any, *_: Any) -> str:
    return _OPERATIONS.get(work._get_op_type(), "a collective without a name")


_OPERATIONS: dict[int, str] = {
    int(kind): name.lower().strip("_")
    for name, kind in torch._C._distributed_c10d.OpType.__members__.items()  # type: ignore[attr-defined]
    if name != "UNKNOWN"  # gloo's reduce-scatter
}

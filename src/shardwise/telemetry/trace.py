"""What a trace of PyTorch's profiler says: the steps, the phases of each, operators by kind, collectives, GPU streams.

Times are milliseconds since the first step that was profiled.
"""

import gzip
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MARK = "from here: "
"""What the names of ranges begin with that say what a step's clock charges from there on."""
WAITING = "communication"
"""The phase in which a rank waits for others; its marks say for which collective."""
RANGE = "user_annotation"
"""Category of the ranges that a program marks."""
TRACK = "phases"
"""Category, and name of the row, of the phases in a file."""

KINDS = (
    ("hooks of autograd", r"^autograd::engine"),
    ("communication", r"c10d|fsdp::|symm_mem::|^_(Enter|Leave|Gather|Scatter|RegisterPost|PostBackward)|^RegisterPost"),
    ("optimizer", r"_foreach_|_fused_|Optimizer\."),
    ("attention", r"attention|sdpa"),
    ("convolution", r"conv"),
    ("matrix products", r"(^|::|_)(mm|addmm|bmm|baddbmm|matmul|linear|mv|dot|einsum|Mm|Addmm|Bmm)($|_|Backward)"),
    ("normalisation", r"norm(?!al)|Norm"),
    ("softmax and loss", r"softmax|Softmax|nll_loss|NllLoss|cross_entropy|logsumexp|mse_loss|Loss|CrossEntropy"),
    ("embedding and indexing", r"embedding|Embedding|index|gather|scatter|one_hot|topk|argmax"),
    ("copies", r"copy|::to$|::_to_|clone|contiguous|::cat$|::stack$|fill_|zero_|zeros|ones|full|AccumulateGrad"),
)
"""Kind -> by which names of operators it is known; the first that fits. What fits none belongs to what is around it."""
OTHER = "elementwise and others"
STEP = re.compile(r"step \d+")
COLLECTIVE = re.compile(r"^(?:gloo|nccl|mpi|xccl):(\w+)")


@dataclass(frozen=True)
class Span:
    """Something that took from ``start`` to ``end``."""

    name: str
    start: float
    end: float

    @property
    def length(self) -> float:
        return self.end - self.start

    def within(self, window: "Span") -> "Span | None":
        """What of it lies in ``window``; None if nothing does."""
        start, end = max(self.start, window.start), min(self.end, window.end)
        return Span(self.name, start, end) if end > start else None


@dataclass(frozen=True)
class Total:
    """Calls of one operator or kernel, and the time in it without what it calls."""

    name: str
    calls: int
    milliseconds: float


@dataclass
class Trace:
    """One rank's trace."""

    steps: list[Span]
    """The profiled steps, ``step 11`` and so on, in order."""
    phases: list[Span]
    """What the clock charged, one after the other."""
    waits: list[Span]
    """Of these, the waiting for other ranks, by the names of the collectives."""
    kinds: list[Span]
    """Where an operator was at work on the host, by kind."""
    collectives: list[Span]
    """From the start of each collective to its end, waiting for the others included."""
    streams: dict[str, list[Span]] = field(default_factory=dict)
    """GPU stream -> kernels and copies."""
    operators: list[Total] = field(default_factory=list)
    """The most expensive first."""
    kernels: list[Total] = field(default_factory=list)

    def typical_step(self) -> Span:
        """The step of median length."""
        return sorted(self.steps, key=lambda step: step.length)[(len(self.steps) - 1) // 2]


def add_phases(path: Path, *, last_step: int) -> None:
    """Turn the marks in a file that PyTorch's profiler has exported into a row of their own, with what was charged.

    Ranges of the profiler cannot be that: they have to lie inside of one another, and a rank that waits for others at
    the end of an operator begins to do so in it.

    Args:
        path: the file.
        last_step: a step after it has only begun, and its range is left out.

    Raises:
        OSError: it cannot be read or written.
    """
    with gzip.open(path, "rt", encoding="utf-8") as file:
        plain = json.load(file)
    events = plain["traceEvents"]
    ranges = [e for e in events if e.get("cat") == RANGE]
    marks = sorted((e for e in ranges if e["name"].startswith(MARK)), key=lambda e: float(e["ts"]))
    steps = [e for e in ranges if STEP.fullmatch(e["name"]) and int(e["name"].split()[1]) <= last_step]
    end = max((float(step["ts"]) + float(step["dur"]) for step in steps), default=0.0)
    row: list[dict[str, Any]] = []
    for mark, ends in zip(marks, [*(float(later["ts"]) for later in marks[1:]), end], strict=True):
        phase, _, collective = mark["name"].removeprefix(MARK).partition(" ")
        if row and row[-1]["name"] == phase and row[-1].get("args", {}).get("collective", "") == collective:
            row[-1]["dur"] = max(0.0, ends - float(row[-1]["ts"]))
            continue
        event = {"ph": "X", "cat": TRACK, "name": phase, "pid": mark["pid"], "tid": TRACK, "ts": mark["ts"]}
        event["dur"] = max(0.0, ends - float(mark["ts"]))
        row.append({**event, "args": {"collective": collective}} if collective else event)
    if row and steps:  # what was charged when the first step began is marked a moment later
        begins = min(float(step["ts"]) for step in steps)
        late = max(0.0, float(row[0]["ts"]) - begins)
        row[0] |= {"ts": float(row[0]["ts"]) - late, "dur": row[0]["dur"] + late}
    # Also the shadows that ranges cast on a GPU's streams.
    left_out = {e["name"] for e in ranges if STEP.fullmatch(e["name"])} - {e["name"] for e in steps}
    kept = [e for e in events if not str(e.get("name")).startswith(MARK) and e.get("name") not in left_out]
    plain["traceEvents"] = kept + [e for e in row if float(e["ts"]) < end]
    temporary = path.with_name(path.name + ".tmp")
    with gzip.open(temporary, "wt", encoding="utf-8", compresslevel=5) as file:
        json.dump(plain, file, separators=(",", ":"))
    temporary.replace(path)


def read_trace(path: Path) -> Trace:
    """Read a file that PyTorch's profiler has exported.

    Raises:
        ValueError: it is no such file, or holds no profiled step.
        OSError: it cannot be read.
    """
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = [event for event in json.load(file).get("traceEvents", ()) if event.get("ph") == "X"]
    marks = [event for event in events if STEP.fullmatch(event["name"]) and event.get("cat") == RANGE]
    if not marks:
        raise ValueError(f"{path} holds no profiled step")
    origin = min(float(event["ts"]) for event in marks)

    def span(event: dict[str, Any], name: str) -> Span:
        start = (float(event["ts"]) - origin) / 1000
        return Span(name, start, start + float(event.get("dur", 0.0)) / 1000)

    steps = sorted((span(event, event["name"]) for event in marks), key=lambda step: step.start)
    whole = Span("window", steps[0].start, steps[-1].end)
    charged = [event for event in events if event.get("cat") == TRACK]
    by_thread: dict[Any, list[Span]] = defaultdict(list)
    collectives: list[Span] = []
    on_gpu: list[Span] = []
    streams: dict[str, list[Span]] = defaultdict(list)
    kernels = []
    for event in events:
        category, name = event.get("cat"), event["name"]
        if category == "cpu_op":
            by_thread[event["tid"]].append(span(event, name))
        elif category in ("kernel", "gpu_memcpy", "gpu_memset"):
            details = event.get("args", {})
            kernels.append(span(event, name))
            streams[f"GPU {details.get('device', 0)} stream {details.get('stream', event['tid'])}"].append(kernels[-1])
        elif match := COLLECTIVE.match(name):
            # On a GPU the host's range is only of handing the work over.
            (on_gpu if category == "gpu_user_annotation" else collectives).append(span(event, match[1]))
    threads = [_clipped(spans, whole) for spans in by_thread.values()]
    on_device = _clipped(kernels, whole)
    return Trace(
        steps=steps,
        phases=_clipped([span(event, event["name"]) for event in charged], whole),
        waits=_clipped(
            [span(event, event["args"]["collective"]) for event in charged if event.get("args", {}).get("collective")],
            whole,
        ),
        kinds=_joined(Span(kind, start, end) for spans in threads for kind, start, end in _by_kind(spans)),
        collectives=_clipped(on_gpu or collectives, whole),
        streams={name: _clipped(spans, whole) for name, spans in sorted(streams.items())},
        operators=_totals([piece for spans in threads for piece in innermost(spans)], calls=itertools.chain(*threads)),
        kernels=_totals(on_device, calls=on_device),
    )


def innermost(spans: Iterable[Span]) -> list[Span]:
    """Nested spans as a row of pieces that do not overlap, each named for the innermost span that it is in."""
    return [Span(stack[-1], start, end) for stack, start, end in _pieces(spans)]


def time_in(spans: Iterable[Span], window: Span) -> dict[str, float]:
    """Name -> milliseconds within ``window``; what overlaps under one name counts once. The longest first."""
    by_name: dict[str, list[Span]] = defaultdict(list)
    for one in spans:
        if inside := one.within(window):
            by_name[one.name].append(inside)
    totals = {name: sum(one.length for one in _joined(found)) for name, found in by_name.items()}
    return dict(sorted(totals.items(), key=lambda pair: -pair[1]))


def kind_of(stack: Sequence[str]) -> str:
    """The kind of the innermost operator of ``stack`` (the outermost first) of which the kind is known."""
    for name in reversed(stack):
        for kind, pattern in KINDS:
            if re.search(pattern, name):
                return kind
    return OTHER


def _pieces(spans: Iterable[Span]) -> Iterable[tuple[list[str], float, float]]:
    """(names of the spans around it, start, end) of each stretch of time that is in any of nested ``spans``."""
    stack: list[Span] = []
    at = 0.0
    for one in [*sorted(spans, key=lambda one: (one.start, -one.end)), Span("", float("inf"), float("inf"))]:
        while stack and stack[-1].end <= one.start:
            if stack[-1].end > at:
                yield [outer.name for outer in stack], at, stack[-1].end
            at = max(at, stack.pop().end)
        if stack and one.start > at:
            yield [outer.name for outer in stack], at, one.start
        at = max(at, one.start) if stack else one.start
        stack.append(one)


def _by_kind(spans: Iterable[Span]) -> Iterable[tuple[str, float, float]]:
    known: dict[tuple[str, ...], str] = {}
    for stack, start, end in _pieces(spans):
        key = tuple(stack)
        if key not in known:
            known[key] = kind_of(stack)
        yield known[key], start, end


def _clipped(spans: Iterable[Span], window: Span) -> list[Span]:
    return [inside for one in spans if (inside := one.within(window))]


def _joined(spans: Iterable[Span]) -> list[Span]:
    """Spans of the same name that touch or overlap as one, by name and then in time."""
    joined: list[Span] = []
    for one in sorted(spans, key=lambda one: (one.name, one.start)):
        last = joined[-1] if joined else None
        if last is not None and last.name == one.name and one.start <= last.end:
            joined[-1] = Span(one.name, last.start, max(last.end, one.end))
        else:
            joined.append(one)
    return joined


def _totals(own: Iterable[Span], *, calls: Iterable[Span]) -> list[Total]:
    times: dict[str, float] = defaultdict(float)
    numbers: dict[str, int] = defaultdict(int)
    for one in own:
        times[one.name] += one.length
    for one in calls:
        numbers[one.name] += 1
    totals = [Total(name, numbers[name], times[name]) for name in numbers]
    return sorted(totals, key=lambda total: -total.milliseconds)

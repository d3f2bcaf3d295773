"""A page about one rank's profile: the timeline of a step, where its time went, and its most expensive operators."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from shardwise.quantities import shown_ms
from shardwise.report.figure import DPI, Theme, in_both_themes, plain
from shardwise.report.web import inline, render_page
from shardwise.step_clock import PHASES
from shardwise.telemetry.trace import WAITING, Span, Total, Trace, read_trace, time_in

WIDTH = 11.0
"""Inches of the picture."""
ROW = 0.27
"""Inches of a row of it."""
MAX_OPERATORS = 25
MAX_STREAMS = 8
"""GPU streams that get a row, those with the most work."""
LEAST = 1 / 2000
"""Share of the step below which a bar is drawn as wide as this, so that it can be seen."""

Lane = tuple[str, Sequence[Span], str]
"""Label of a row, its bars, and the group that gives it its colour."""


def write_timeline(trace: Path, page: Path, *, rank: int, world: int) -> None:
    """Write the page about the trace of one of ``world`` ranks.

    Raises:
        ValueError: the file holds no profiled step.
        OSError: it cannot be read, or the page not be written.
    """
    page.write_text(render(read_trace(trace), trace.name, rank=rank, world=world), encoding="utf-8")


def render(trace: Trace, file: str, *, rank: int, world: int) -> str:
    """The page, with the picture in it, for light and dark."""
    step = trace.typical_step()
    light, dark = in_both_themes(lambda theme: draw(trace, step, theme))
    return render_page(
        "report/timeline.html.jinja",
        title=f"Rank {rank} of {world}: where {step.name} spent its time",
        sentences=sentences(trace, step),
        light=inline(light),
        dark=inline(dark),
        file=file,
        steps=[one.name for one in trace.steps],
        lengths=[one.length for one in trace.steps],
        phases=phase_rows(trace),
        collectives=[(name, len(spans), total) for name, spans, total in _by_name(trace, step)],
        step=step,
        operators=trace.operators[:MAX_OPERATORS],
        kernels=trace.kernels[:MAX_OPERATORS],
        operator_total=_total(trace.operators),
        kernel_total=_total(trace.kernels),
    )


def sentences(trace: Trace, step: Span) -> list[str]:
    """What the picture says, in words."""
    said = [
        f"{_number(len(trace.steps), 'step')} profiled; the picture is of {step.name}, "
        f"{'the one' if len(trace.steps) == 1 else 'the one of median length'}: {_shown(step.length)}."
    ]
    spent = time_in(trace.phases, step)
    largest = [f"{name} {_share(time, step)}" for name, time in list(spent.items())[:3]]
    if largest:
        said.append(f"Most of it went to {', '.join(largest)}.")
    if WAITING in spent:
        most = next(iter(time_in(trace.waits, step).items()), None)
        where = f", most of all for {most[0]} ({_shown(most[1])})" if most else ""
        said.append(f"It waited {_shown(spent[WAITING])} ({_share(spent[WAITING], step)}) for other ranks{where}.")
    elif not trace.collectives:
        said.append("No collective: this rank waited for no other.")
    if trace.streams:
        # A kernel of NCCL also runs while it waits for the other ranks.
        own = [one for spans in trace.streams.values() for one in spans if not one.name.startswith("nccl")]
        busy = time_in([Span("", one.start, one.end) for one in own], step)
        said.append(f"The GPU computed or copied for {_share(sum(busy.values()), step)} of it.")
    said.append("The profiler itself takes time: metrics.jsonl has the speed of steps without it.")
    return said


def phase_rows(trace: Trace) -> list[tuple[str, list[float]]]:
    """Phase -> milliseconds in each profiled step, in the order of PHASES; the rest of a step is ``other``."""
    found = [time_in(trace.phases, step) for step in trace.steps]
    for spent, step in zip(found, trace.steps, strict=True):
        spent["other"] = max(0.0, step.length - sum(time for name, time in spent.items() if name != "other"))
    names = [name for name in PHASES if any(name in spent for spent in found)]
    return [(name, [spent.get(name, 0.0) for spent in found]) for name in names]


def lanes(trace: Trace, step: Span) -> list[Lane]:
    """The rows of the picture, from the top."""

    def rows(spans: Sequence[Span], group: str, *, order: Sequence[str] = ()) -> list[Lane]:
        inside = [one for span in spans if (one := span.within(step))]
        spent = time_in(inside, step)
        names = [name for name in order if name in spent] if order else list(spent)
        return [
            (f"{name}  {_shown(spent[name])}", [one for one in inside if one.name == name], group) for name in names
        ]

    found = rows(trace.phases, "phases", order=[name for name in PHASES if name != "other"])
    found += rows(trace.waits, "waiting for")
    found += rows(trace.kinds, "operators")
    found += rows(trace.collectives, "collectives")
    streams = [
        row
        for name, spans in trace.streams.items()
        for row in rows([Span(name, one.start, one.end) for one in spans], "GPU")
    ]
    return found + sorted(streams, key=lambda lane: -sum(one.length for one in lane[1]))[:MAX_STREAMS]


def draw(trace: Trace, step: Span, theme: Theme) -> Figure:
    """The timeline of one step: a row for each phase, kind of operator, collective and GPU stream."""
    found = lanes(trace, step)
    groups = list(dict.fromkeys(group for _, _, group in found))
    gaps = 0.7
    height = ROW * (len(found) + gaps * len(groups)) + 0.75
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
    axes: Axes = figure.add_subplot()
    colours = dict(zip(("phases", "operators", "collectives", "GPU"), theme.colours, strict=False))
    at, ticks, labels = 0.0, [], []
    for group in groups:
        at += gaps
        axes.text(0.0, at - 0.55, group, color=theme.text, fontsize=9.5, fontweight="bold", va="bottom")
        for label, spans, _ in (lane for lane in found if lane[2] == group):
            # Waiting for others is what the eye has to find.
            waits = group == "waiting for" or (group == "phases" and label.startswith(WAITING))
            colour = theme.mark if waits else colours[group]
            bars = [(one.start - step.start, max(one.length, step.length * LEAST)) for one in spans]
            axes.broken_barh(bars, (at - 0.38, 0.76), facecolors=colour, linewidth=0)
            ticks.append(at)
            labels.append(plain(label))
            at += 1
    axes.set_yticks(ticks, labels, fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(at - 0.4, -0.2)
    axes.set_xlim(0, step.length)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(8))
    axes.set_xlabel(f"milliseconds since the start of {step.name}")
    return figure


def _by_name(trace: Trace, step: Span) -> list[tuple[str, list[Span], float]]:
    inside = [one for span in trace.collectives if (one := span.within(step))]
    return [(name, [one for one in inside if one.name == name], time) for name, time in time_in(inside, step).items()]


def _total(totals: Sequence[Total]) -> float:
    return sum(one.milliseconds for one in totals) or 1.0


def _shown(milliseconds: float) -> str:
    return shown_ms(milliseconds / 1000)


def _share(milliseconds: float, step: Span) -> str:
    return f"{milliseconds / step.length:.0%}"


def _number(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"

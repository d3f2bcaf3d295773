"""What the runs show, in plain sentences; nothing that their numbers do not say."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from shardwise.report.analysis import MEASURED, POINT, Analysis, is_number
from shardwise.report.diverged import DIVERGED, curves_apart, loss_curve, said_of
from shardwise.report.labels import MISSING, PART, short_names, show, telling
from shardwise.report.runs import DAMAGED, STATUSES, Runs
from shardwise.report.scaling import PERFECT

MAX_SHOWN = 8
"""Values, or settings, that one sentence lists."""
MAX_ROWS = 60
"""Settings that the table by setting has rows for."""


def sentences(analysis: Analysis) -> list[str]:
    """The summary of a report, a sentence or two an item."""
    lines = [_counted(analysis.runs)]
    if damaged := analysis.runs.damaged:
        why = f": {damaged[0].reason}" if len(damaged) == 1 else ""
        lines.append(f"{_runs(len(damaged), 'damaged ')}, not compared: {said_of(damaged)}{why}.")
    differ = _differences(analysis.runs)
    if differ:
        lines.append(f"They differ in {differ}.")
    if not analysis.runs.completed:
        return [*lines, "No run has completed, so nothing is compared: only the curves and the table are shown."]
    metric = analysis.metric
    lines += _diverged(analysis)
    without = sum(run.final(metric) is None for run in analysis.runs.completed)
    if without:
        lines.append(f"{_runs(without, 'completed ')} never logged {metric}: left out of comparisons.")
    best = analysis.best_run
    if best is not None:
        value = best.final(metric)
        lines.append(f"The {'lowest' if analysis.below else 'highest'} {metric} is {value:.4g}: {best.label}.")
    else:
        lines.append(f"No completed run has a number for {metric}.")
    return [*lines, *_holding(analysis), *_reaching(analysis), *_noise(analysis)]


def by_setting(analysis: Analysis) -> list[list[str]]:
    """A heading and a row for each setting with several batch sizes: how far it holds, its regions, its noise.

    Empty for a single setting, of which the sentences say it all.
    """
    several = [series for series in analysis.best if len(analysis.means(series)) > 1]
    if len(several) < 2:
        return []
    rows = [["setting", f"best {analysis.metric}", "at batch", "holds to", "then"]]
    if analysis.target is not None:
        rows[0] += ["perfect scaling to", "plateau from", "target not reached at"]
    rows[0] += ["noise scale"] if analysis.noise else []
    for series in several[:MAX_ROWS]:
        means, held = analysis.means(series), analysis.holds_to(series)
        top = _best_batch(analysis, series)
        later = [batch for batch in means if held is not None and batch > held]
        row = [series, f"{means[top]:.4g}", f"{top:,}", "" if held is None else f"{held:,}"]
        row.append(f"{_mean(means[later[0]])} at {later[0]:,}" if later else "largest tried")
        if analysis.target is not None:
            reaching = analysis.reaching[series]
            found = reaching.regions
            row += ["too few batches", ""] if found is None else [f"{found.perfect_to:,}", _plateau(found.plateau_from)]
            row.append(", ".join(f"{cell.batch:,}" for cell in reaching.missed))
        if analysis.noise:
            row.append(_two_digits(analysis.noise[series].middle) if series in analysis.noise else "")
        rows.append(row)
    return rows


def worth_showing(analysis: Analysis) -> list[str]:
    """Metrics that the table has columns for: the one that is compared, and the usual others, five at most."""
    names = analysis.runs.metric_names()
    usual = [name for name in names if name.startswith(("test/", "val/")) or name == "train/loss"]
    counted = [name for name in usual if any(is_number(run.final(name)) for run in analysis.runs)]
    target = [analysis.target.metric] if analysis.target else []
    return list(dict.fromkeys([analysis.metric, *target, *counted]))[:5]


def _counted(runs: Runs) -> str:
    counts = Counter(run.status for run in runs)
    order = [status for status in (*STATUSES, DAMAGED, "unfinished") if counts[status]]
    text = f"{_runs(len(runs))}: " + ", ".join(f"{counts[status]} {status}" for status in order) + "."
    if runs.skipped:
        number = len(runs.skipped)
        text += f" {number} other{'' if number == 1 else 's'} skipped, listed with the reason at the end."
    return text


def _diverged(analysis: Analysis) -> list[str]:
    """One sentence on the runs that plots and means leave out."""
    metric, everything = analysis.metric, list(analysis.runs)
    curve = loss_curve(everything, metric)
    gone = curves_apart(everything, curve)[1] if curve is not None else []
    diverged = {id(run): run for run in (*gone, *analysis.diverged)}
    if not diverged:
        return []
    parts = [f"{len(gone)} by {curve}"] if gone else []
    number = len(analysis.diverged)
    parts += [f"{number} completed by {metric}, left out of means"] if number else []
    how = "; ".join(parts)
    return [f"{_runs(len(diverged))} diverged, not shown ({how}): {said_of(diverged.values())}. They {DIVERGED}."]


def _differences(runs: Runs) -> str:
    names, parts = short_names(runs.varying), []
    for key in runs.varying:
        values = list(dict.fromkeys(run.varying[key] for run in runs if run.varying[key] != MISSING))
        if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
            values.sort()
        parts.append(f"{names[key]} ({_listed([show(value) for value in values])})")
    seeds = len({str(run.seed) for run in runs})
    parts += [f"seed ({seeds} values)"] if seeds > 1 else []
    extra = len(parts) - 12
    return "; ".join([*parts[:12], *([f"{extra} more keys"] if extra > 0 else [])])


def _holding(analysis: Analysis) -> list[str]:
    """How far each line keeps its result."""
    held = {series: batch for series in analysis.best if (batch := analysis.holds_to(series)) is not None}
    if not held:
        return []
    if len(held) == 1:
        ((series, batch),) = held.items()
        means, top = analysis.means(series), _best_batch(analysis, series)
        near = f"{_within(analysis)}, {means[top]:.4g} at batch {top:,}"
        text = f"{_of(series)}{analysis.metric} holds up to batch {batch:,} ({near})"
        later = [size for size in means if size > batch]
        return [
            text + (f"; at batch {later[0]:,} {_it_is(means[later[0]])}." if later else ", the largest that was tried.")
        ]
    groups = _grouped(held, list(held))
    largest = max(cell.batch for cells in analysis.best.values() for cell in cells)
    parts = []
    for size, settings in groups:
        parts.append(f"up to {'the largest batch, ' if size == largest else 'batch '}{size:,} for {settings}")
    return [f"{analysis.metric} holds ({_within(analysis)}) {'; '.join(parts)}."]


def _reaching(analysis: Analysis) -> list[str]:
    target = analysis.target
    if target is None:
        return []
    completed = analysis.runs.completed
    there = sum(analysis.to_target(run) is not None for run in completed)
    lines = [f"The target {target} ({target.why}) is reached by {there} of {len(completed)} completed runs."]
    found = {series: reaching for series, reaching in analysis.reaching.items() if reaching.regions is not None}
    if len(found) == 1:
        ((series, reaching),) = found.items()
        batches = [cell.batch for cell in reaching.cells]
        assert reaching.regions is not None
        if reaching.regions.perfect_to == batches[-1]:
            text = f"Steps to the target scale perfectly up to batch {batches[-1]:,}, the largest that reached it"
        elif reaching.regions.perfect_to == batches[0]:
            text = f"Already batch {batches[1]:,} takes more than {PERFECT:g} times the steps of perfect scaling"
        else:
            perfect_to = f"{reaching.regions.perfect_to:,}"
            text = f"Steps to the target scale perfectly up to batch {perfect_to}, with diminishing returns above"
        if reaching.regions.plateau_from is not None:
            text += f"; from batch {reaching.regions.plateau_from:,} on a larger one saves next to none (the plateau)"
        elif reaching.regions.perfect_to != batches[-1]:
            text += "; no plateau within the batches that reached it"
        missed = _listed([f"{cell.batch:,}" for cell in reaching.missed])
        lines.append(f"{_of(series)}{text}.{f' Not reached at batch {missed}.' if missed else ''}")
    elif found:
        lines += _perfect(analysis)
        flat = {
            series: one.regions.plateau_from
            for series, one in found.items()
            if one.regions and one.regions.plateau_from
        }
        if flat:
            parts = [f"from batch {batch:,} for {settings}" for batch, settings in _grouped(flat, list(found))]
            lines.append(f"A larger batch saves next to none (the plateau) {'; '.join(parts)}.")
        else:
            lines.append("No setting shows a plateau within the batches that reached the target.")
    return lines


def _perfect(analysis: Analysis) -> list[str]:
    """Where perfect scaling ends, of several settings."""
    ends: dict[str, float] = {}
    starts: dict[str, float] = {}
    for series, reaching in analysis.reaching.items():
        if reaching.regions is not None:
            first, end = reaching.cells[0].batch, reaching.regions.perfect_to
            (ends if end > first else starts)[series] = end
    among = [*ends, *starts]
    parts = [f"up to batch {batch:,} for {settings}" for batch, settings in _grouped(ends, among)]
    parts += [
        f"not beyond batch {batch:,}, the smallest that reached it, for {settings}"
        for batch, settings in _grouped(starts, among)
    ]
    return [f"Steps to the target scale perfectly (at most {PERFECT:g} times the ideal) {'; '.join(parts)}."]


def _noise(analysis: Analysis) -> list[str]:
    middle = analysis.critical_batch
    if middle is None:
        return []
    low = _two_digits(min(noise.low for noise in analysis.noise.values()))
    high = _two_digits(max(noise.high for noise in analysis.noise.values()))
    runs = sum(noise.count for noise in analysis.noise.values())
    return [
        f"The gradient noise puts the critical batch size at about {_two_digits(middle)} samples (median; range {low} "
        f"to {high}, {_runs(runs)} with at least {MEASURED} measurements): beyond it, larger batches save few steps."
    ]


def _grouped(batches: dict[str, int] | dict[str, float], among: Sequence[str]) -> list[tuple[float, str]]:
    """(batch, the settings that have it), the largest batch first; named for what differs ``among`` all there are."""
    groups: dict[float, list[str]] = {}
    names = dict(zip(among, telling(among, width=200), strict=True))
    for series, batch in batches.items():
        groups.setdefault(batch, []).append(_setting(names[series]))
    named = {batch: "every setting" if len(own) == len(among) else _listed(own) for batch, own in groups.items()}
    return [(batch, named[batch]) for batch in sorted(groups, reverse=True)]


def _setting(series: str) -> str:
    """``rule=linear with warmup_steps=50 and width=8``: what can stand in a list, which has commas of its own."""
    first, *others = PART.split(series)
    return f"{first} with {' and '.join(others)}" if others else first


def _it_is(value: float) -> str:
    return f"it is {value:.4g}" if math.isfinite(value) else "every run diverged"


def _mean(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "diverged"


def _best_batch(analysis: Analysis, series: str) -> int:
    fine = {batch: mean for batch, mean in analysis.means(series).items() if math.isfinite(mean)}
    return (min if analysis.below else max)(fine, key=fine.__getitem__)


def _within(analysis: Analysis) -> str:
    """What counts as holding, in words."""
    finals = [cell.final.middle for cells in analysis.best.values() for cell in cells if cell.final]
    if not analysis.below and all(0 <= value <= 1 for value in finals):
        return f"within one point ({POINT:g}) of the best of its line"
    return f"within {POINT:.0%} of the best of its line"


def _plateau(batch: float | None) -> str:
    return "none seen" if batch is None else f"{batch:,}"


def _two_digits(value: float) -> str:
    return f"{float(f'{value:.2g}'):,.0f}"


def _listed(texts: Iterable[str]) -> str:
    texts = list(texts)
    more = len(texts) - MAX_SHOWN
    return ", ".join(texts[:MAX_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _runs(number: int, what: str = "") -> str:
    return f"{number} {what}run{'' if number == 1 else 's'}"


def _of(series: str) -> str:
    return "" if series == "all runs" else f"{series}: "

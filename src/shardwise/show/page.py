"""The page of one run, complete in itself."""

import math
import os
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from shardwise.checkpoint.manifest import printable
from shardwise.errors import ConfigError
from shardwise.quantities import shown_bytes
from shardwise.report.figure import in_both_themes
from shardwise.report.runs import number
from shardwise.report.web import inline, render_page
from shardwise.show.findings import Slow, mean_times, own_time, usual
from shardwise.show.headline import (
    about_memory,
    about_ranks,
    about_step,
    also_slow,
    ended,
    finals,
    found_slow,
    slow_link,
)
from shardwise.show.mesh import make_mesh
from shardwise.show.plots import Plot, curve_plots, heat_maps, memory_plots, other_plots, time_plots
from shardwise.show.record import Record

PAGE = "show.html"
MAX_TABLE = 1024
"""Ranks that the table has rows for."""
MAX_TYPED = 100
MAX_DIFF = 2**17
"""Characters of changes to the code that the page shows."""

Drawn = tuple[str, str, str, str]
"""Title, caption, and the addresses of the picture on a light page and on a dark one."""


def write_page(record: Record, folder: Path) -> Path:
    """Write show.html into ``folder``; returns its path.

    Raises:
        ConfigError: it cannot be written there.
    """
    text = render(record, linked=folder.resolve() == record.folder.resolve())
    path = folder / PAGE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            path.unlink()  # a stranger's folder does not say where else is written
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"cannot write {printable(path)} ({reason}): choose another folder with --to") from error
    return path


def render(record: Record, *, linked: bool = False) -> str:
    """The page. Every text in it is escaped.

    Args:
        record: the run.
        linked: whether it lies in the run folder, so that its files can be opened from it.
    """
    slow, ranks = found_slow(record), record.ranks
    heat: list[Plot] = []
    sections: list[tuple[str, str, str, list[Plot]]] = []
    if ranks is not None:
        heat = heat_maps(ranks, slow)
        sections.append(("Phases, rank x step", "phases", "", heat[1:]))
        sections.append(("Time split", "split", "", time_plots(ranks, slow)))
        sections.append(("Memory", "memory", "", memory_plots(ranks, slow)))
        sections.append(("Losses, devices and nodes, by rank", "measured", "", other_plots(ranks, slow)))
    curves, more = curve_plots(record)
    note = f"{more:,} more metrics are in metrics.jsonl." if more else ""
    sections.insert(0, ("Curves", "curves", note, curves))
    title = printable(record.folder.resolve().name)
    heads, rows, hidden = table(record, slow)
    return render_page(
        "show/page.html.jinja",
        title=title,
        status=record.status if record.status != "unfinished" else "failed",
        ended=printable(ended(record)),
        finals=finals(record),
        reason=printable(record.reason),
        log=record.log,
        alarm=bool(slow or slow_link(record)),
        marked=bool(slow),
        said=[(f"{step:,}", text) for step, _, text in record.said],
        found=printable(about_ranks(record, slow)),
        also=printable(also_slow(record, slow)),
        sentences=[printable(line) for line in (*about_step(record), about_memory(record)) if line],
        top=[_drawn(plot) for plot in heat[:1]],
        sections=[(name, key, text, [_drawn(plot) for plot in plots]) for name, key, text, plots in sections if plots],
        mesh=make_mesh(record, slow),
        heads=heads,
        rows=rows,
        hidden=hidden,
        typed=[printable(line) for line in record.overrides[:MAX_TYPED]],
        more_typed=len(record.overrides) - MAX_TYPED,
        config=record.config_text,
        facts=facts(record),
        diff=_diff(record),
        repeat=printable(record.repeat),
        files=[
            (printable(name), _link(name) if linked else "", shown_bytes(held) if held else "")
            for name, held in record.files
        ],
        more_files=record.more_files,
        notes=record.notes,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        last=_ago(record),
    )


def table(record: Record, slow: Sequence[Slow]) -> tuple[list[str], list[dict[str, Any]], int]:
    """The headings, a row a rank with cells as (what is shown, what it sorts by), and how many have no room."""
    ranks = record.ranks
    if ranks is None:
        return [], [], 0
    own = ranks.means(own_time(ranks))
    ratio = np.divide(own, usual(own), out=np.full(len(own), np.nan), where=usual(own) > 0)
    columns: list[tuple[str, np.ndarray, float, str]] = []
    if np.isfinite(own).any():
        columns += [("own ms", own, 1e3, ".4g"), ("x median", ratio, 1, ".2f")]
    columns += [(f"{phase} ms", values, 1e3, ".3g") for phase, values in mean_times(ranks).items()]
    if "time/step" in ranks.values:
        columns.append(("step ms", ranks.means(ranks.values["time/step"]), 1e3, ".4g"))
    if "memory/peak" in ranks.largest:
        columns.append(("peak MiB", ranks.largest["memory/peak"], 2**-20, ",.0f"))
    for name in sorted(ranks.values):
        if name.startswith(("gpu/", "rank/")):
            columns.append((name.replace("_", " "), ranks.means(ranks.values[name]), 1, ".4g"))
    stands_out = {one.row for one in slow}
    rows = []
    for row, rank in enumerate(ranks.numbers[:MAX_TABLE]):
        place = record.places.get(rank, {})
        cells = [(str(rank), str(rank)), (record.host(rank), record.host(rank))]
        cells += [_whole(place.get(key)) for key in ("node", "dp", "tp")]
        cells += [_cell(float(values[row]) * factor, form) for _, values, factor, form in columns]
        rows.append({"cells": cells, "slow": row in stands_out})
    heads = ["rank", "host", "node", "dp", "tp", *(printable(name)[:40] for name, *_ in columns)]
    return heads, rows, max(0, len(ranks.numbers) - MAX_TABLE)


def facts(record: Record) -> list[tuple[str, str]]:
    """Where the run comes from, as (what, value)."""
    found, rows = record.provenance, []
    git = found.get("git")
    if isinstance(git, Mapping):
        state = ", with uncommitted changes" if git.get("dirty") else ""
        rows.append(("git commit", f"{git.get('commit')}{state}"))
        if isinstance(git.get("untracked"), list) and git["untracked"]:
            rows.append(("new files", ", ".join(map(str, git["untracked"][:20]))))
    command = found.get("command")
    rows.append(("command", " ".join(map(str, command)) if isinstance(command, list) else ""))
    rows += [(key.replace("_", " "), str(found.get(key, ""))) for key in ("folder", "start_time", "seed", "parent")]
    for key in ("versions", "hosts", "platform", "cpu", "accelerators", "environment"):
        rows.append((key, _told(found.get(key))))
    attempts = found.get("attempts")
    if isinstance(attempts, list) and attempts:
        starts = [str(one.get("start_time")) for one in attempts if isinstance(one, Mapping)]
        rows.append(("earlier attempts", f"{len(attempts)}, started {', '.join(starts[:10])}"))
    return [(key, printable(value)[:2000]) for key, value in rows if value not in ("", "None")]


def _drawn(plot: Plot) -> Drawn:
    light, dark = in_both_themes(plot.draw)
    return plot.title, plot.caption, inline(light), inline(dark)


def _told(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {inner}" for key, inner in list(value.items())[:60])
    if isinstance(value, list):
        names = list(map(str, value[:10_000]))
        counts = [(names.count(name), name) for name in list(dict.fromkeys(names))[:32]]
        return ", ".join(f"{count} x {name}" if count > 1 else name for count, name in counts)
    return "" if value is None else str(value)


def _diff(record: Record) -> str:
    git = record.provenance.get("git")
    text = git.get("diff") if isinstance(git, Mapping) else None
    if not isinstance(text, str) or not text:
        return ""
    return "\n".join(map(printable, text[:MAX_DIFF].split("\n"))) + ("\n…" if len(text) > MAX_DIFF else "")


def _link(name: str) -> str:
    """The address of a file beside the page: whatever its name, it lies in the run folder."""
    return "./" + quote(os.fsencode(name))


def _ago(record: Record) -> str:
    """How long ago the last line of metrics was written, of a run that has not said how it ended."""
    if record.status not in ("running", "unfinished") or record.last_time is None:
        return ""
    seconds = max(0.0, time.time() - record.last_time)
    shown = (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:,.0f} h"
    )
    return f"Metrics were last written {shown} before this page was made."


def _whole(value: Any) -> tuple[str, str]:
    found = number(value)
    return ("", "") if found is None or not math.isfinite(found) else (f"{found:.0f}", f"{found:.0f}")


def _cell(value: float, form: str) -> tuple[str, str]:
    return (f"{value:{form}}", repr(value)) if math.isfinite(value) else ("", "")

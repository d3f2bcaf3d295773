"""The report's files: one page with everything in it, the plots as PNG files, the runs as a table for other tools."""

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwise.checkpoint.manifest import printable
from shardwise.errors import ConfigError
from shardwise.report.analysis import Analysis
from shardwise.report.figure import in_both_themes
from shardwise.report.labels import MISSING, short_names, show
from shardwise.report.plots import Plot, make_plots
from shardwise.report.runs import DAMAGED
from shardwise.report.summary import by_setting, sentences, worth_showing
from shardwise.report.web import inline, render_page

PAGE, TABLE, PLOTS = "report.html", "runs.csv", "plots"
MAX_KEYS = 8
"""Keys that vary which the page has columns for; runs.csv has all."""
MAX_REASONS = 50
"""Runs that failed which the page lists."""
MAX_LISTED = 200
"""Skipped folders that the page lists."""


def write_report(analysis: Analysis, folder: Path) -> Path:
    """Write report.html, runs.csv and plots/*.png into ``folder``; returns the page's path.

    Raises:
        ConfigError: they cannot be written there.
    """
    plots, lacking = make_plots(analysis)
    try:
        (folder / PLOTS).mkdir(parents=True, exist_ok=True)
        with (folder / TABLE).open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows(csv_rows(analysis))
        images = []
        for plot in plots:
            light, dark = in_both_themes(plot.draw)
            (folder / PLOTS / f"{plot.name}.png").write_bytes(light)
            images.append((plot, inline(light), inline(dark)))
        for old in (folder / PLOTS).glob("*.png"):
            if old.stem not in {plot.name for plot in plots}:
                old.unlink()  # of a report that stood here before
        (folder / PAGE).write_text(render(analysis, images, lacking), encoding="utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"cannot write the report to {printable(folder)} ({reason}): choose another with --to"
        ) from error
    return folder / PAGE


def render(analysis: Analysis, images: Sequence[tuple[Plot, str, str]], lacking: Sequence[str]) -> str:
    """The page. Every text in it is escaped, and a policy lets nothing run but the one script that is ours."""
    runs = analysis.runs
    commands = list(dict.fromkeys(run.typed_command for run in runs if run.typed_command))
    heads, rows = table(analysis)
    ill = [run for run in runs if run.reason or run.status in ("failed", DAMAGED)]
    hidden = len(runs.varying) - MAX_KEYS
    return render_page(
        "report/page.html.jinja",
        title=printable(runs.folder.resolve().name if runs.folder is not None else "runs"),
        sentences=[printable(line) for line in sentences(analysis)],
        images=[(plot.title, plot.caption, plot.rules, light, dark) for plot, light, dark in images],
        lacking=lacking,
        ill=[
            (printable(run.name), run.status, printable(run.reason) or "no reason is recorded", run.log)
            for run in ill[:MAX_REASONS]
        ],
        more_ill=len(ill) - MAX_REASONS,
        hidden=hidden,
        heads=heads,
        rows=rows,
        by_setting=[[printable(cell) for cell in row] for row in by_setting(analysis)],
        shared=[printable(line) for line in runs.shared],
        commands=[printable(line) for line in commands[:3]],
        more_commands=len(commands) - 3,
        skipped=runs.skipped[:MAX_LISTED],
        more_skipped=len(runs.skipped) - MAX_LISTED,
    )


def table(analysis: Analysis) -> tuple[list[str], list[dict[str, Any]]]:
    """The headings, and a row a run: cells as (what is shown, what it sorts by), and its status."""
    runs, names = analysis.runs, short_names(analysis.runs.varying)
    metrics = worth_showing(analysis)
    lr = any(run.lr != run.base_lr for run in runs)
    keys = runs.varying[:MAX_KEYS]
    heads = ["run", "status", *metrics, *(names[key] for key in keys), *(["used lr"] if lr else []), "seed"]
    heads += ["steps", "seconds", *(["steps to target"] if analysis.target else []), "to repeat it"]
    rows, best = [], analysis.best_run
    for run in runs:
        cells: list[Any] = [
            run.name,
            run.status,
            *(run.final(metric) for metric in metrics),
            *(run.varying[key] for key in keys),
            *([run.lr] if lr else []),
        ]
        cells += [run.seed, run.steps, run.seconds]
        if analysis.target:
            way = analysis.to_target(run)
            cells.append("not reached" if way is None else round(way[0], 1))
        rows.append(
            {
                "cells": [_cell(value) for value in cells],
                "status": run.status,
                "best": run is best,
                "command": printable(run.command),
            }
        )
    return [printable(head) for head in heads], rows


def csv_rows(analysis: Analysis) -> list[list[Any]]:
    """The headings and a row a run, with every key that varies and every metric's last value."""
    runs, metrics = analysis.runs, analysis.runs.metric_names()
    heads = ["run", "folder", "status", "series", "batch_global_size", "base_lr", "effective_lr", "seed", *runs.varying]
    heads += ["steps", "seconds", *metrics, "steps_to_target", "samples_to_target", "seconds_to_target"]
    heads += ["reason", "log", "command"]
    rows: list[list[Any]] = [heads]
    for run in runs:
        row: list[Any] = [run.name, str(run.folder), run.status, run.series, run.batch, run.base_lr, run.lr, run.seed]
        row += [*(run.varying[key] for key in runs.varying), run.steps, run.seconds]
        way = analysis.to_target(run) or ("", "", "")
        rows.append([*row, *(run.final(metric) for metric in metrics), *way, run.reason, run.log, run.command])
    return [[_safe(value) for value in row] for row in rows]


def _cell(value: Any) -> tuple[str, str]:
    if value is None or value == MISSING:
        return "", ""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN", ""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return (f"{value:,}" if isinstance(value, int) else f"{value:.4g}"), repr(value)
    return printable(show(value)), printable(value)


def _safe(value: Any) -> Any:
    """A value of a CSV file: a text that a spreadsheet would take for a formula is marked as text."""
    if value is None:
        return ""
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    text = printable(value) if isinstance(value, str) else value
    return f"'{text}" if isinstance(text, str) and text[:1] in ("=", "+", "-", "@") and text != "-" else text

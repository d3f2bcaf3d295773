"""How every plot looks: colours for light and dark, axes whose numbers can be read, legends that fit."""

import contextlib
import io
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator
from PIL import Image

SIZE = (5.4, 4.0)
"""Inches. Small, so that the letters stay readable where the page is as narrow as a telephone."""
DPI = 160
LABEL = 52
"""Letters of a label in a legend."""
MAX_ENTRIES = 8
"""Entries of a legend, and lines that get a colour of their own."""
MAX_SHADES = 12
"""Sizes in a legend, above which a scale of colours takes its place."""
MARKERS = "osD^vPX*"
LINES = ("-", "--", "-.", ":", "-", "--", "-.", ":")


@dataclass(frozen=True)
class Theme:
    """Colours on a light or a dark page."""

    name: str
    background: str
    text: str
    grid: str
    faint: str
    """For what is beside the point: lines without a name, areas."""
    mark: str
    """For what has to be seen: a target, the best."""
    colours: tuple[str, ...]
    shades: tuple[float, float]
    """The part of the scale of colours that can be seen on the background."""

    def shade(self, share: float) -> Any:
        """A colour for a number between 0 and 1."""
        low, high = self.shades
        return matplotlib.colormaps["viridis"](low + (high - low) * share)


LIGHT = Theme(
    *("light", "#ffffff", "#1f2328", "#d8dee4", "#8c959f", "#cf222e"),
    colours=("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#bf3989", "#57606a", "#9a6700", "#1b7c83"),
    shades=(0.0, 0.88),
)
DARK = Theme(
    *("dark", "#161b22", "#e6edf3", "#30363d", "#8b949e", "#ff7b72"),
    colours=("#58a6ff", "#ffa657", "#56d364", "#bc8cff", "#f778ba", "#b1bac4", "#e3b341", "#39c5cf"),
    shades=(0.22, 1.0),
)


@contextlib.contextmanager
def drawing(theme: Theme) -> Iterator[None]:
    """matplotlib's settings of a theme, for as long as a figure is made and written."""
    settings: Any = {
        "font.size": 11,
        "font.family": "DejaVu Sans",
        "text.color": theme.text,
        "axes.labelcolor": theme.text,
        "axes.edgecolor": theme.faint,
        "axes.facecolor": theme.background,
        "figure.facecolor": theme.background,
        "savefig.facecolor": theme.background,
        "xtick.color": theme.text,
        "ytick.color": theme.text,
        "axes.grid": True,
        "grid.color": theme.grid,
        "grid.linewidth": 0.7,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "legend.fontsize": 9.5,
        "lines.linewidth": 1.8,
        "lines.markersize": 6.5,
    }
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        # A name in a writing that the font does not have shows as boxes; the table on the page has it in full.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        warnings.filterwarnings("ignore", message="constrained_layout not applied")
        yield


def new_figure() -> tuple[Figure, Axes]:
    """A figure with one pair of axes."""
    figure = Figure(figsize=SIZE, dpi=DPI, layout="constrained")
    return figure, figure.add_subplot()


def png(figure: Figure) -> bytes:
    """The figure as the bytes of a PNG file with 256 colours, a third of what all colours take."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    buffer = io.BytesIO()
    picture = Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3])
    picture.quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(buffer, format="png")
    return buffer.getvalue()


def in_both_themes(draw: Callable[[Theme], Figure]) -> tuple[bytes, bytes]:
    """A plot as PNG files, for a light page and for a dark one."""
    files = []
    for theme in (LIGHT, DARK):
        with drawing(theme):
            files.append(png(draw(theme)))
    return files[0], files[1]


def plain(text: str, *, width: int = 44) -> str:
    """Text for a plot: taken as it is, no formulas, no longer than fits."""
    text = text if len(text) <= width else f"{text[: width // 2 - 1]}…{text[-(width // 2) :]}"
    return text.replace("$", r"\$")


def count(value: float, _: Any = None) -> str:
    """A number as an axis has room for: 0.01, 250, 2,500, 20k, 3M, 1e13."""
    if abs(value) >= 1e12 or 0 < abs(value) < 1e-3:
        digits, _, power = f"{value:.3g}".partition("e")
        return f"{digits}e{int(power)}" if power else digits
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= (size if size > 1e3 else 1e4):
            return f"{value / size:.4g}{letter}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def number_axis(axes: Axes, which: str, *, log: bool, label: str) -> None:
    """Scale, ticks and label of the axis ``which`` (x or y)."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xlabel if which == "x" else axes.set_ylabel)(plain(label, width=60))
    if log:
        (axes.set_xscale if which == "x" else axes.set_yscale)("log")
        low, high = axis.get_view_interval()
        decades = math.log10(high / low) if 0 < low < high else 1.0
        if decades < 1:
            axis.set_major_locator(MaxNLocator(5))
        else:
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if decades < 2 else (1.0,), numticks=7))
        axis.set_minor_formatter(NullFormatter())
        axis.set_minor_locator(NullLocator())
    else:
        axis.set_major_locator(MaxNLocator(5 if which == "x" else 6))
    axis.set_major_formatter(FuncFormatter(count))


def batch_axis(axes: Axes, batches: Sequence[int], *, base: int = 2) -> None:
    """The x axis of a plot against the batch size, with a tick at each size that was tried, as many as fit."""
    axes.set_xscale("log", base=base)
    axes.set_xlabel("global batch size (samples)")
    shown = list(batches)
    while len(shown) > 8:
        shown = shown[::2]
    axes.xaxis.set_major_locator(FixedLocator([float(batch) for batch in shown]))
    axes.xaxis.set_major_formatter(FuncFormatter(count))
    axes.xaxis.set_minor_locator(NullLocator())


def wants_log(values: Sequence[float] | np.ndarray, *, ratio: float = 30.0) -> bool:
    """Whether positive values span so much that an even axis would hide most of them."""
    array = np.asarray(values, dtype=float)
    array = array[np.isfinite(array)]
    return bool(len(array)) and float(array.min()) > 0 and float(array.max() / array.min()) > ratio


def legend(figure: Figure, handles: Sequence[Line2D]) -> None:
    """A legend below the axes; none where there is nothing to tell apart, or too much."""
    entries = [(handle, str(handle.get_label())) for handle in handles]
    if not 1 <= len(entries) <= MAX_SHADES + 2:
        return
    # A label that begins with an underscore would be left out.
    labels = [f" {label}" if label.startswith("_") else label for _, label in entries]
    columns = 1 if max(map(len, labels)) > 30 else 2 if max(map(len, labels)) > 14 else 4
    rows = math.ceil(len(labels) / columns)
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.19 * max(0, rows - 2))  # the axes keep their height
    figure.legend([handle for handle, _ in entries], labels, loc="outside lower center", ncols=columns)


def log_shares(values: Sequence[float]) -> dict[float, float]:
    """Value -> its place between the smallest (0) and the largest (1), counted in ratios."""
    low, high = math.log(min(values)), math.log(max(values))
    return {value: (math.log(value) - low) / (high - low) if high > low else 0.5 for value in values}


def shade_bar(figure: Figure, axes: Axes, values: Sequence[float], theme: Theme, label: str) -> None:
    """The scale of colours beside the axes, where there are too many values for a legend."""
    colours = [theme.shade(share) for share in np.linspace(0, 1, 128)]
    scale = matplotlib.colors.ListedColormap(colours)
    bar = figure.colorbar(ScalarMappable(LogNorm(min(values), max(values)), scale), ax=axes, pad=0.02)
    bar.set_label(label)
    bar.ax.yaxis.set_major_formatter(FuncFormatter(count))
    bar.ax.yaxis.set_minor_formatter(NullFormatter())
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.outline.set_visible(False)

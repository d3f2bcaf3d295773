"""The plots of a report in a notebook: the last expression of a cell shows itself."""

from collections.abc import Sequence

from markupsafe import Markup

from shardwise.errors import ConfigError
from shardwise.report.analysis import Analysis
from shardwise.report.figure import in_both_themes
from shardwise.report.plots import make_plots
from shardwise.report.web import inline

FIGURE = Markup('<figure><h3>{}</h3><img src="{}" alt="{}" width="640"><figcaption>{}{}</figcaption></figure>')
RULES = Markup("<details><summary>How it is measured</summary>{}</details>")


class Gallery:
    """The plots that an analysis allows, with their captions.

    Args:
        analysis: from ``analyse``.
        only: names of plots, such as ``loss_over_steps``; empty for all.

    Raises:
        ConfigError: a name that is no plot of these runs.
    """

    def __init__(self, analysis: Analysis, *, only: Sequence[str] = ()) -> None:
        plots, self.lacking = make_plots(analysis)
        """For every plot that the runs do not allow, what it needs."""
        for name in only:
            if name not in {plot.name for plot in plots}:
                raise ConfigError(f"{name}: no plot of these runs (there are {', '.join(plot.name for plot in plots)})")
        self.plots = [plot for plot in plots if not only or plot.name in only]

    def __repr__(self) -> str:
        return "\n".join(f"{plot.title}: {plot.caption}" for plot in self.plots)

    def _repr_html_(self) -> str:
        return "".join(
            FIGURE.format(
                *(plot.title, inline(in_both_themes(plot.draw)[0]), plot.title, plot.caption),
                RULES.format(plot.rules) if plot.rules else "",
            )
            for plot in self.plots
        )

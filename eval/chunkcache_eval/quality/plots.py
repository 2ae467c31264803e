"""PNG plots of a quality run: fidelity against what it costs, one curve per way of answering.

This file knows colours, axes and bytes. It doesn't know outcomes, only their summaries. Matplotlib
is loaded when the first plot is drawn, and its global state is left alone.
"""

import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from chunkcache.errors import ChunkCacheError
from chunkcache_eval.quality.bootstrap import Interval
from chunkcache_eval.quality.summary import ArmSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#333333",
    "#56b4e9",
    "#e0a800",
    "#6a3d9a",
    "#8c564b",
    "#e31a1c",
)
_LINES = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"), ("-", "v"), ("--", "P"))
_WIDTH_INCHES = 8.0
_AXES_HEIGHT_INCHES = 4.4
_LEGEND_LINE_INCHES = 0.21
_LEGEND_COLUMNS = 3
_DPI = 120
_MAX_LABEL = 34
_MARGIN = 0.03
"""Free room on either side of the points, in shares of their range."""

_LOWEST_KL = 1e-9
"""Stands on the log axis for an arm that is exact, where nothing else gives the axis a floor."""

Curve: TypeAlias = tuple[str, str]
"""Policy and preparation."""


class PlottingUnavailableError(ChunkCacheError):
    """Plots were asked for and the library that draws them isn't installed."""

    code = "plotting_unavailable"
    status = 501


@dataclass(frozen=True)
class Plot:
    """One drawn plot.

    Attributes:
        name: What it shows, in words fit for a file name.
        description: What it shows, for a reader who can't see it.
        png: The picture.
    """

    name: str
    description: str
    png: bytes


@dataclass(frozen=True)
class _View:
    """What one plot has on its axes."""

    name: str
    x_label: str
    y_label: str
    x: Callable[[ArmSummary], float | None]
    y: Callable[[ArmSummary], float]
    interval: Callable[[ArmSummary], Interval | None]
    log_y: bool


_CHARGED = "charged ratio (share of the context's layer-rows that was run)"
_TTFT = "time to first token (share of the full prefill's)"
_KL = "mean KL to the full prefill (nats, log)"
_VIEWS = (
    _View(
        "kl-by-charged-ratio",
        _CHARGED,
        _KL,
        lambda s: s.charged_ratio,
        lambda s: s.mean_kl,
        lambda s: s.mean_kl_interval,
        True,
    ),
    _View(
        "kl-by-ttft",
        _TTFT,
        _KL,
        lambda s: s.ttft_share,
        lambda s: s.mean_kl,
        lambda s: s.mean_kl_interval,
        True,
    ),
    _View(
        "agreement-by-charged-ratio",
        _CHARGED,
        "leading agreement with the full prefill",
        lambda s: s.charged_ratio,
        lambda s: s.agreement,
        lambda s: s.agreement_interval,
        False,
    ),
)


def require_plotting() -> None:
    """Makes sure that plots can be drawn.

    Raises:
        PlottingUnavailableError: If matplotlib isn't installed.
    """
    try:
        import matplotlib.backends.backend_agg  # noqa: F401
    except ImportError as error:
        raise PlottingUnavailableError(
            f"plots need matplotlib ({error}); install chunkcache with its 'eval' extra"
        ) from error


def draw_plots(
    summaries: Sequence[ArmSummary], *, styled_like: Iterable[ArmSummary] | None = None
) -> list[Plot]:
    """Draws the plots of one data set: KL by charged ratio and by TTFT, agreement by charged ratio.

    The same summaries give the same bytes. Arms that run all of the context are what the others
    are held against; they are left out, so as not to squeeze the others into a corner.

    Args:
        summaries: Arms of one data set, not split by task.
        styled_like: Arms of all data sets, so that a curve looks alike in each plot.

    Raises:
        PlottingUnavailableError: If matplotlib isn't installed.
    """
    require_plotting()
    styles = _styles(summaries if styled_like is None else styled_like)
    return [_draw(view, summaries, styles) for view in _VIEWS]


def _styles(summaries: Iterable[ArmSummary]) -> dict[Curve, tuple[str, str, str]]:
    """Colour, line and marker of each curve: colours tell policies apart, lines preparations."""
    curves = sorted({(s.policy, s.preparation) for s in summaries})
    policies = sorted({policy for policy, _ in curves})
    preparations = sorted({preparation for _, preparation in curves})
    return {
        (policy, preparation): (
            _COLOURS[policies.index(policy) % len(_COLOURS)],
            *_LINES[preparations.index(preparation) % len(_LINES)],
        )
        for policy, preparation in curves
    }


def _draw(
    view: _View, summaries: Sequence[ArmSummary], styles: dict[Curve, tuple[str, str, str]]
) -> Plot:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    fused = [s for s in summaries if s.charged_ratio < 1] or summaries
    curves = sorted({(s.policy, s.preparation) for s in fused})
    num_lines = math.ceil(len(curves) / _LEGEND_COLUMNS)
    height = _AXES_HEIGHT_INCHES + _LEGEND_LINE_INCHES * (num_lines + 1)
    figure = Figure(figsize=(_WIDTH_INCHES, height), dpi=_DPI, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    floor = _floor(fused) if view.log_y else 0.0
    for curve in curves:
        arms = [s for s in fused if (s.policy, s.preparation) == curve]
        _draw_curve(axes, view, arms, styles[curve], floor)
    _dress(axes, view, floor)
    if curves:
        legend = figure.legend(
            loc="outside lower center", ncols=_LEGEND_COLUMNS, fontsize=8, frameon=False
        )
        for text in legend.get_texts():
            text.set_parse_math(False)
    target = io.BytesIO()
    canvas.print_png(target, metadata={"Software": None})
    description = f"{view.y_label}, by {view.x_label}: {len(curves)} curves"
    return Plot(view.name, description, target.getvalue())


def _draw_curve(
    axes: "Axes",
    view: _View,
    arms: Sequence[ArmSummary],
    style: tuple[str, str, str],
    floor: float,
) -> None:
    points = [
        (x, max(view.y(arm), floor), view.interval(arm))
        for arm in sorted(arms, key=lambda a: (a.charged_ratio, a.key))
        if (x := view.x(arm)) is not None
    ]
    xs, ys = [x for x, _, _ in points], [y for _, y, _ in points]
    ends = [interval or (y, y) for _, y, interval in points]
    below = [max(0.0, y - max(low, floor)) for y, (low, _) in zip(ys, ends, strict=True)]
    above = [max(0.0, high - y) for y, (_, high) in zip(ys, ends, strict=True)]
    colour, line, marker = style
    _, _, bars = axes.errorbar(
        xs,
        ys,
        yerr=(below, above),
        label=_label(arms[0]),
        color=colour,
        linestyle=line,
        marker=marker,
        markersize=5,
        linewidth=1.6,
        elinewidth=0.8,
    )
    for bar in bars:
        bar.set_alpha(0.45)


def _dress(axes: "Axes", view: _View, floor: float) -> None:
    axes.set_xlabel(view.x_label, fontsize=10)
    axes.set_ylabel(view.y_label, fontsize=10)
    _, right = axes.get_xlim()
    axes.set_xlim(-_MARGIN * right, right)
    if view.log_y:
        _log_scale(axes)
        axes.set_ylim(bottom=floor * 0.8)
    else:
        axes.set_ylim(0, 1.02)
    axes.grid(True, which="both", color="#d8d8d8", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _log_scale(axes: "Axes") -> None:
    """A log axis with 1, 2 and 5 of each decade written out: its range is often less than one."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _floor(summaries: Iterable[ArmSummary]) -> float:
    """Where the log axis ends below: half of the smallest KL that isn't zero.

    Intervals that reach below it are cut there, and exact arms are drawn on it.
    """
    return min((s.mean_kl for s in summaries if s.mean_kl > 0), default=_LOWEST_KL) / 2


def _label(arm: ArmSummary) -> str:
    """The curve's name in characters that the bundled font has."""
    text = f"{arm.policy}, {arm.preparation}".encode("ascii", "replace").decode("ascii")
    printable = "".join(c if c.isprintable() else "?" for c in text)
    text = printable if len(printable) <= _MAX_LABEL else f"{printable[: _MAX_LABEL - 3]}..."
    return f" {text}" if text.startswith("_") else text

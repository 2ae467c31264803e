"""A PNG plot of reuse over capacity, one curve per policy, beside what it is held against."""

import io
from typing import TYPE_CHECKING

from chunkcache_eval.quality.plots import require_plotting
from chunkcache_eval.trace.replay import TraceReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#6a3d9a")
_BOUND_COLOUR = "#333333"


def draw_reuse(report: TraceReport) -> bytes:
    """Draw a report; the same report gives the same bytes.

    Raises:
        PlottingUnavailableError: Matplotlib isn't installed.
    """
    require_plotting()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.8), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    optimum = sorted((100 * point.capacity, 100 * point.token_reuse) for point in report.optimum)
    axes.plot(*zip(*optimum, strict=True), "--", marker="D", color=_BOUND_COLOUR, label="optimum")
    for number, policy in enumerate(dict.fromkeys(run.policy for run in report.runs)):
        _draw_policy(axes, report, policy, _COLOURS[number % len(_COLOURS)])
    for name, share, style in (
        ("unlimited", report.unlimited, ":"),
        ("prefix only, unlimited", report.prefix_only, "-."),
    ):
        axes.axhline(100 * share, linestyle=style, color=_BOUND_COLOUR, label=name)
    axes.set_xscale("log")
    axes.set_xlabel("capacity, % of the bytes of all distinct segments")
    axes.set_ylabel("tokens reused, %")
    axes.set_xticks([x for x, _ in optimum], [f"{x:g}" for x, _ in optimum])
    axes.minorticks_off()
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=8, frameon=False)
    target = io.BytesIO()
    canvas.print_png(target, metadata={"Software": None})
    return target.getvalue()


def _draw_policy(axes: "Axes", report: TraceReport, policy: str, colour: str) -> None:
    points = sorted(
        (100 * run.capacity, 100 * run.token_reuse) for run in report.runs if run.policy == policy
    )
    axes.plot(*zip(*points, strict=True), marker="o", color=colour, label=policy)

"""The summary of a quality run as tables, for a person to read."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from chunkcache_eval.quality.by_task import TaskBreakdown
from chunkcache_eval.quality.summary import ArmSummary

_WIDTH = 160
"""Columns where the output is no terminal: a table in a file should not be squeezed."""

_COLUMNS = (
    "data",
    "policy",
    "preparation",
    "ratio",
    "ingest",
    "charged",
    "n",
    "KL first",
    "mean KL",
    "95 %",
    "agreement",
    "F1",
    "recovery",
    "TTFT ms",
    "full ms",
)


def print_summaries(summaries: Sequence[ArmSummary], breakdown: TaskBreakdown) -> None:
    """Print all arms to stdout, and under them the tasks of each data set that has several."""
    # Names come from files: what looks like markup in them is text.
    console = Console(markup=False, emoji=False)
    if not console.is_terminal:
        console = Console(width=_WIDTH, markup=False, emoji=False)
    console.print(_arms(summaries))
    for data in breakdown.tasks:
        if breakdown.has_several(data):
            console.print(_tasks(data, [s for s in summaries if s.data == data], breakdown))


def _arms(summaries: Sequence[ArmSummary]) -> Table:
    table = Table(title="against the full prefill of the same prompts; KL in nats, lower is closer")
    for name in _COLUMNS:
        is_text = name in ("data", "policy", "preparation")
        table.add_column(name, justify="left" if is_text else "right")
    for arm in summaries:
        table.add_row(
            arm.data,
            *_name(arm),
            f"{arm.ingest_cost:.1f}",
            f"{arm.charged_ratio:.1%}",
            str(arm.n),
            f"{arm.kl_first:.4f}",
            f"{arm.mean_kl:.4f}",
            _interval(arm.mean_kl_interval),
            f"{arm.agreement:.2f}",
            _number(arm.f1),
            _number(arm.gap_recovery),
            f"{arm.ttft_ms:,.0f}",
            f"{arm.full_ttft_ms:,.0f}",
        )
    return table


def _tasks(data: str, arms: Sequence[ArmSummary], breakdown: TaskBreakdown) -> Table:
    table = Table(title=f"{data} by task: mean KL, F1 (questions)")
    for name in ("policy", "preparation"):
        table.add_column(name)
    for name in ("ratio", *(task or "no task" for task in breakdown.tasks[data])):
        table.add_column(name, justify="right")
    for arm in arms:
        table.add_row(*_name(arm), *(_task(summary) for summary in breakdown.row(arm)))
    return table


def _name(arm: ArmSummary) -> tuple[str, str, str]:
    return arm.policy, arm.preparation, "" if arm.ratio is None else f"{arm.ratio:.3g}"


def _task(summary: ArmSummary | None) -> str:
    if summary is None:
        return "-"
    return f"{summary.mean_kl:.4f}, {_number(summary.f1)} ({summary.n})"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _interval(value: tuple[float, float] | None) -> str:
    return "-" if value is None else f"{value[0]:.3f}-{value[1]:.3f}"

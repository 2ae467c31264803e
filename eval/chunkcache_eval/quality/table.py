"""The summary of a quality run as a table, for a person to read."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from chunkcache_eval.quality.summary import ArmSummary

_WIDTH = 160
"""Columns where the output is no terminal: a table in a file should not be squeezed."""

_COLUMNS = (
    "data",
    "policy",
    "preparation",
    "ratio",
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


def print_summaries(summaries: Sequence[ArmSummary]) -> None:
    """Print a table to stdout."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    table = Table(title="against the full prefill of the same prompts; KL in nats, lower is closer")
    for name in _COLUMNS:
        is_text = name in ("data", "policy", "preparation")
        table.add_column(name, justify="left" if is_text else "right")
    for arm in summaries:
        table.add_row(
            arm.data,
            arm.policy,
            arm.preparation,
            "" if arm.ratio is None else f"{arm.ratio:.3g}",
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
    console.print(table)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _interval(value: tuple[float, float] | None) -> str:
    return "-" if value is None else f"{value[0]:.3f}-{value[1]:.3f}"

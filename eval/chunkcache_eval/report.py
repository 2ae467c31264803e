"""Tables of what was measured, for a person to read."""

from rich.console import Console
from rich.table import Table

from chunkcache_eval.speed import SpeedReport

_WIDTH = 140
"""Columns where the output is no terminal: a table in a file should not be squeezed."""


def print_speed(report: SpeedReport) -> None:
    """Print a speed report to stdout."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    table = Table(title=f"{report.model}, {report.threads} threads, medians in ms")
    columns = ("question", "prompt tokens", "policy", "charged", "full", "fused", "speed-up")
    for name in (*columns, "floor", "load", "place", "probe", "recompute"):
        table.add_column(name, justify="left" if name in ("question", "policy") else "right")
    for run in report.runs:
        table.add_row(
            run.question_id,
            str(run.prompt_tokens),
            f"{run.policy} {run.ratio:.0%}",
            f"{run.charged_ratio:.1%}",
            f"{run.full_ttft_ms:,.0f}",
            f"{run.fused_ttft_ms:,.0f}",
            f"{run.speedup:.1f}x",
            f"{run.floor_ms:,.0f}",
            f"{run.load_ms:,.0f}",
            f"{run.place_ms:,.0f}",
            f"{run.probe_ms:,.0f}",
            f"{run.recompute_ms:,.0f}",
        )
    console.print(table)
    console.print(f"median speed-up {report.speedup_median:.1f}x")
    console.print(
        f"full prefill: {report.forward_vs_transformers:.2f}x the speed of transformers; "
        f"pre-caching: {report.precache_efficiency:.0%} of bare forwards"
    )
    memory = report.peak_rss_mb
    if memory is not None:
        console.print(
            f"peak memory: answering {memory.answer:,.0f} MB (limit {memory.answer_limit:,.0f}), "
            f"pre-caching {memory.precache_half:,.0f} MB for half of the passages, "
            f"{memory.precache_all:,.0f} MB for all"
        )

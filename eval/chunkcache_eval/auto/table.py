"""The outcome of a calibration as tables, for a person to read."""

from rich.console import Console
from rich.table import Table

from chunkcache_eval.auto.run import AutoRun

_CHECKED = (
    "target",
    "met",
    "90 % within",
    "mean KL",
    "stated bound",
    "in full",
    "charged",
    "as close",
    "as sure",
)
_FIXED = ("ratio", "90 % within", "charged")


def print_run(run: AutoRun) -> None:
    """Print what held-back questions say, to stdout."""
    console = Console(markup=False, emoji=False)
    num_questions = run.checks[0].num_questions
    console.print(
        _table(
            f"auto on {num_questions} questions held back from calibration; KL in nats. As close, "
            "as sure: what a fixed ratio is charged whose 90th percentile is that of auto, or "
            "within the target",
            _CHECKED,
            [
                (
                    f"{c.target_kl:g}",
                    f"{c.met_ratio:.0%}",
                    f"{c.high_kl:.4f}",
                    f"{c.mean_kl:.4f}",
                    f"{c.estimated_kl:.4f}",
                    f"{c.full_ratio:.0%}",
                    f"{c.charged_ratio:.3f}",
                    "-" if c.fixed_charged_ratio is None else f"{c.fixed_charged_ratio:.3f}",
                    f"{c.same_promise_charged_ratio:.3f}",
                )
                for c in run.checks
            ],
        )
    )
    console.print(
        _table(
            "hybrid at fixed ratios on the same questions",
            _FIXED,
            [(f"{f.ratio:g}", f"{f.high_kl:.4f}", f"{f.charged_ratio:.3f}") for f in run.fixed],
        )
    )


def _table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    return table

"""``chunkcache eval trace``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from chunkcache_api.cli.console import print_json, reporting_errors, results, say
from chunkcache_api.cli.help_text import help_text
from chunkcache_api.cli.options import JsonOption

if TYPE_CHECKING:
    from chunkcache_eval.trace.replay import TraceReport

DEFAULT_CAPACITIES = (0.05, 0.10, 0.25)
DEFAULT_POLICIES = ("value", "s3fifo", "lru")

HELP = help_text(
    """Replay recorded traffic through the RAM tier, and tell how many prompt tokens it reuses.

    Takes traces of RAGPulse (segments) and of Mooncake (blocks of 512 tokens). Runs no model.
    Capacity is a share of the bytes of all distinct segments of the trace. Beside the policies
    stand the best that a cache which knows the future could do, a cache without a limit, and one
    without a limit that reuses only what an earlier prompt began with.""",
    "chunkcache eval trace ragpulse.jsonl",
    "chunkcache eval trace traffic.jsonl --capacity 0.05 --policy value",
    "chunkcache eval trace traffic.jsonl --plot reuse.png --json | jq .runs",
)


def register(eval_app: typer.Typer) -> None:
    """Add the command."""
    eval_app.command("trace", help=HELP)(trace)


def trace(
    file: Annotated[Path, typer.Argument(help="A trace, one JSON object per line.")],
    capacity: Annotated[
        list[float] | None,
        typer.Option(
            help="Bytes of the tier, as a share of those of all distinct segments; repeat for more.",
            show_default="0.05, 0.10, 0.25",
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="value, s3fifo or lru; repeat for more.",
            show_default="all three",
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw reuse over capacity (PNG).")] = None,
    as_json: JsonOption = False,
) -> None:
    """Replay, print, draw."""
    with reporting_errors(as_json=as_json):
        from chunkcache_eval.trace.replay import replay_trace
        from chunkcache_eval.trace.requests import read_trace

        if plot is not None:
            from chunkcache_eval.quality.plots import require_plotting

            require_plotting()
        report = replay_trace(
            read_trace(file),
            capacity or DEFAULT_CAPACITIES,
            policy or DEFAULT_POLICIES,
            progress=say,
        )
        if plot is not None:
            _write_plot(plot, report)
    if as_json:
        print_json(report.to_dict())
    else:
        _print(file.name, report)


def _write_plot(path: Path, report: "TraceReport") -> None:
    from chunkcache.errors import InvalidValueError
    from chunkcache_eval.trace.plot import draw_reuse

    try:
        path.write_bytes(draw_reuse(report))
    except OSError as error:
        raise InvalidValueError(
            f"{path} cannot be written: {error.strerror}", param="plot"
        ) from error
    say(f"plot: {path}")


def _print(name: str, report: "TraceReport") -> None:
    table = Table(title=f"{name}: share of {report.num_tokens:,} prompt tokens reused", box=None)
    table.add_column("policy")
    table.add_column("capacity", justify="right")
    table.add_column("reused", justify="right")
    table.add_column("evictions", justify="right")
    table.add_column("not admitted", justify="right")
    for run in report.runs:
        table.add_row(
            run.policy,
            f"{run.capacity:.1%}",
            f"{run.token_reuse:.2%}",
            f"{run.evictions:,}",
            f"{run.rejections:,}",
        )
    for point in report.optimum:
        table.add_row("optimum", f"{point.capacity:.1%}", f"{point.token_reuse:.2%}", "", "")
    table.add_row("unlimited", "", f"{report.unlimited:.2%}", "", "")
    table.add_row("prefix only, unlimited", "", f"{report.prefix_only:.2%}", "", "")
    results.print(table)

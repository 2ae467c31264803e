"""The results of ``eval store`` as tables, for a person to read."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from chunkcache_eval.store.fidelity import CodecFidelity
from chunkcache_eval.store.loads import LoadReport

_WIDTH = 120
"""Columns where the output is no terminal: a table in a file should not be squeezed."""


def print_loads(report: LoadReport) -> None:
    """Print what was loaded, beside memory copies, to stdout."""
    table = Table(
        title=f"{report.model}, {report.dtype} pages, {report.threads} threads: warm loads of "
        f"{report.num_chunks} entries of {report.chunk_tokens} tokens"
    )
    table.add_column("codec")
    for name in ("bytes/token", "stored", "load ms", "place ms", "tokens/s", "GB/s", "of memcpy"):
        table.add_column(name, justify="right")
    for codec in report.codecs:
        table.add_row(
            codec.codec,
            f"{codec.bytes_per_token:,}",
            f"{codec.stored_bytes_per_token:,.0f}",
            f"{codec.load_ms:.2f}",
            f"{codec.place_ms:.2f}",
            f"{codec.tokens_s:,.0f}",
            f"{codec.gb_s:.2f}",
            f"{codec.memcpy_share:.0%}",
        )
    console = _console()
    console.print(table)
    console.print(
        f"memcpy, one thread: {report.memcpy_gb_s:.1f} GB/s; torch copy, {report.threads} threads: "
        f"{report.copy_gb_s:.1f} GB/s. Load and place: ms per entry."
    )


def print_fidelity(codecs: Sequence[CodecFidelity]) -> None:
    """Print how close each codec is, to stdout."""
    table = Table(title="against the full prefill of the same prompts; KL in nats, lower is closer")
    for name in ("data", "policy", "codec"):
        table.add_column(name)
    for name in ("n", "mean KL", "added to raw", "95 %", "agreement"):
        table.add_column(name, justify="right")
    for codec in sorted(codecs, key=lambda c: (c.data, c.policy != "none", c.policy)):
        low, high = codec.added_low, codec.added_high
        interval = "-" if low is None or high is None else f"{low:+.4f} to {high:+.4f}"
        ratio = "" if codec.ratio is None else f" {codec.ratio:.3g}"
        table.add_row(
            codec.data,
            f"{codec.policy}{ratio}",
            codec.codec,
            str(codec.n),
            f"{codec.mean_kl:.4f}",
            f"{codec.added_mean_kl:+.4f}",
            interval,
            f"{codec.agreement:.2f}",
        )
    _console().print(table)


def _console() -> Console:
    """Stdout; names come from files, so what looks like markup in them is text."""
    console = Console(markup=False, emoji=False)
    if console.is_terminal:
        return console
    return Console(width=_WIDTH, markup=False, emoji=False)

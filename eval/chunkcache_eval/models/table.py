"""A models report for a person to read."""

from rich.console import Console
from rich.table import Table

from chunkcache_eval.models.matrix import BF16_NOISE_FACTOR, KEY_LIMIT, LOGIT_LIMIT, CellResult
from chunkcache_eval.models.run import ModelsReport

_WIDTH = 120
"""Columns where the output is no terminal: a table in a file should not be squeezed."""


def print_models(report: ModelsReport) -> None:
    """Print a report to stdout."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    if report.matrix:
        console.print(_matrix(report.matrix))
    for real in report.real:
        gate = "gate passed" if real.gate_passed else "GATE FAILED"
        console.print(
            f"{real.model} ({real.family}): {real.num_equal} of {real.num_prompts} greedy answers "
            f"of full prefills are the library's, prompts up to {real.longest_prompt_tokens:,} "
            f"tokens; {gate}"
        )
    for int8 in report.int8:
        console.print(
            f"{int8.model} with int8 weights: decodes {int8.decode_tokens_per_second_int8:.1f} "
            f"tokens/s, {int8.decode_speedup:.1f} times {int8.dtype}'s; KL from it "
            f"{int8.mean_kl:.4f} nats per token, same likeliest token {int8.top1_agreement:.0%}"
        )
    if report.digest is not None:
        d = report.digest
        console.print(
            f"digest of {d.megabytes:,} MB: {d.cold_seconds:.2f} s from disk, "
            f"{d.warm_seconds:.2f} s from memory, {d.remembered_seconds * 1e3:.1f} ms remembered"
        )
    if report.failures:
        console.print(f"over the limit: {', '.join(report.failures)}", markup=False)


def _matrix(cells: tuple[CellResult, ...]) -> Table:
    table = Table(
        title="largest difference from the library's forward, over the same token ids",
        caption=f"allowed: logits {LOGIT_LIMIT:.0e}, keys {KEY_LIMIT:.0e}, bf16 "
        f"{BF16_NOISE_FACTOR} times the library's own",
    )
    for name in ("family", "rotation", "logits", "layer-0 keys", "bf16 over its noise", ""):
        is_text = name in ("family", "rotation", "")
        table.add_column(name, justify="left" if is_text else "right")
    for cell in cells:
        ratio = cell.bf16_logit_diff / cell.bf16_noise if cell.bf16_noise else 0.0
        table.add_row(
            cell.family,
            cell.rope,
            f"{cell.max_logit_diff:.1e}",
            f"{cell.layer0_k_diff:.1e}",
            f"{ratio:.2f}",
            "" if cell.passed else "WRONG",
        )
    return table

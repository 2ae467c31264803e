"""Results as tables and lines for people. Knows no command, and prints nothing itself."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from chunkcache_api.cli.console import printable

if TYPE_CHECKING:
    from chunkcache.estimate import EstimateReport
    from chunkcache.precache_estimate import PrecacheEstimate
    from chunkcache.results import Answer, PrecacheSummary

MAX_FAILURES_SHOWN = 50


def answer_table(answer: "Answer") -> Table:
    """What was reused for an answer, what was run, and how long it took."""
    report, table = answer.report, _facts()
    account, timings = report.account, report.timings
    _fact(
        table,
        "prompt",
        f"{account.prompt_tokens:,} tokens = {account.exact_prefix_tokens:,} exact prefix + "
        f"{account.fused_tokens:,} fused + {account.recomputed_tokens:,} recomputed + "
        f"{account.computed_tokens:,} computed{_tiers(answer)}",
    )
    _fact(
        table,
        "first token",
        f"{timings.ttft_ms:,.0f} ms = load {timings.load_ms:,.0f} (prefill of misses "
        f"{timings.prefill_ms:,.0f}) + place {timings.place_ms:,.0f} + probe "
        f"{timings.probe_ms:,.0f} + recompute {timings.recompute_ms:,.0f} + queue {timings.queue_ms:,.0f}",
    )
    _fact(table, "answer", f"{len(answer.token_ids)} tokens in {timings.decode_ms:,.0f} ms more")
    exact = ", exact" if report.exact else ""
    _fact(
        table,
        "policy",
        f"{report.policy} over {report.preparation}; charged ratio "
        f"{report.charged_ratio:.2f}{exact}",
    )
    if report.estimate is not None:
        _fact(table, "estimate", _estimated(report.estimate))
    return table


def _estimated(estimate: "EstimateReport") -> str:
    """What a policy with a target chose, and what it takes its answer for."""
    if estimate.ran_full:
        return f"no share is enough for a target of {estimate.target_kl:g}: everything ran"
    return (
        f"mean KL at most {estimate.estimated_kl:.2g} with {estimate.ratio:.0%}, for a target of "
        f"{estimate.target_kl:g}"
    )


def documents_table(answer: "Answer") -> Table:
    """Each document's share of the prompt."""
    table = Table(box=None, pad_edge=False)
    table.add_column("document", overflow="fold")
    table.add_column("source")
    for name in ("tokens", "recomputed", "load ms"):
        table.add_column(name, justify="right")
    for document in answer.report.documents:
        table.add_row(
            Text(printable(document.id)),
            document.source,
            f"{document.tokens:,}",
            f"{document.recomputed_tokens:,}",
            f"{document.load_ms:,.1f}",
        )
    return table


def warning_lines(answer: "Answer") -> Iterator[str]:
    """Every fallback taken."""
    for warning in answer.report.warnings:
        name = "" if warning.document_id is None else f"{warning.document_id}: "
        yield f"warning: {name}{warning.message} ({warning.code})"


def verification_table(answer: "Answer") -> Table:
    """A fused answer beside the full prefill's answer to the same prompt."""
    verification, account = answer.verification, answer.report.account
    assert verification is not None
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    table.add_column("fused", overflow="fold", ratio=1)
    table.add_column("full prefill", overflow="fold", ratio=1)
    prompt = f"{account.prompt_tokens:,}"
    table.add_row("prompt tokens", prompt, prompt)
    table.add_row("  reused", f"{account.cached_tokens:,}{_tiers(answer)}", "0")
    table.add_row("    exact prefix", f"{account.exact_prefix_tokens:,}", "")
    table.add_row("    fused", f"{account.fused_tokens:,}", "")
    table.add_row("  recomputed", f"{account.recomputed_tokens:,}", "")
    table.add_row("  computed", f"{account.computed_tokens:,}", prompt)
    ttft_ms = answer.report.timings.ttft_ms
    table.add_row("first token", f"{ttft_ms:,.0f} ms", f"{verification.full_ttft_ms:,.0f} ms")
    full_answer = Text(printable(verification.full_answer))
    table.add_row("answer", Text(printable(answer.text)), full_answer)
    return table


def verification_line(answer: "Answer") -> str:
    """How close and how much faster an answer is, in one line."""
    verification = answer.verification
    assert verification is not None
    if verification.agreement == 1.0:
        agreement = "same answer"
    else:
        agreement = (
            f"{verification.agreement:.0%} of the answer is the same "
            f"(its first {verification.agreeing_tokens} tokens)"
        )
    return (
        f"first token {answer.speedup:.1f} times faster; its KL divergence from the full "
        f"prefill's {verification.kl_first:.4f} nats, mean over the first tokens "
        f"{verification.mean_kl:.4f}; {agreement}"
    )


def precache_table(summary: "PrecacheSummary") -> Table:
    """What a pre-caching run did."""
    table = _facts()
    _fact(
        table,
        "documents",
        f"{summary.documents:,} ({summary.created:,} new, {summary.updated:,} changed, "
        f"{summary.unchanged:,} unchanged), {len(summary.failures):,} failed",
    )
    _fact(table, "chunks", f"{summary.chunks:,} with {summary.tokens:,} tokens")
    _fact(
        table,
        "prefilled",
        f"{summary.prefilled_chunks:,} chunks with {summary.prefilled_tokens:,} tokens at "
        f"{summary.tokens_per_second:,.0f} tokens/s",
    )
    if summary.prefilled_tokens:
        _fact(
            table,
            "cost",
            f"{summary.prefill_rows_per_token:.2f} tokens run per chunk token, with what "
            "stands before it",
        )
    if summary.without_neighbours:
        _fact(
            table,
            "left over",
            f"{summary.without_neighbours:,} chunks have no neighbours; the preamble stands in",
        )
    if summary.not_kept_chunks:
        _fact(
            table,
            "not kept",
            f"{summary.not_kept_chunks:,} chunks: the budget on disk has no room for them; they are "
            "computed when they are asked for",
        )
    _fact(table, "time", f"{summary.seconds:,.1f} s")
    if summary.interrupted:
        _fact(table, "interrupted", "run it again to go on")
    return table


def estimate_table(estimate: "PrecacheEstimate") -> Table:
    """What a pre-caching run would take."""
    table = _facts()
    _fact(
        table,
        "documents",
        f"{estimate.documents:,} readable, {len(estimate.failures):,} not; {estimate.chunks:,} "
        f"chunks with {estimate.tokens:,} tokens",
    )
    _fact(
        table,
        "to prefill",
        f"{estimate.new_chunks:,} chunks with {estimate.new_tokens:,} tokens; the rest is cached",
    )
    _fact(table, "size", f"{size(estimate.new_bytes)} of entries")
    _fact(
        table,
        "time",
        f"about {estimate.seconds:,.0f} s at {estimate.tokens_per_second:,.0f} tokens/s"
        if estimate.new_tokens
        else "none",
    )
    return table


def failure_lines(summary: "PrecacheSummary | PrecacheEstimate") -> Iterator[str]:
    """Each item that failed, and why."""
    for failure in summary.failures[:MAX_FAILURES_SHOWN]:
        yield f"failed: {failure.item}: {failure.message} ({failure.code})"
    num_more = len(summary.failures) - MAX_FAILURES_SHOWN
    if num_more > 0:
        yield f"... and {num_more:,} more; --json lists them all"


def stats_table(stats: dict[str, Any]) -> Table:
    """What a store holds, as ``store_stats`` found it."""
    table = _facts()
    _fact(table, "store", stats["store"])
    _fact(
        table,
        "documents",
        f"{stats['documents']:,} in {stats['chunks']:,} chunks with {stats['tokens']:,} tokens",
    )
    for tier, num_entries in stats["entries"].items():
        _fact(table, "entries", f"{num_entries:,} on {tier}, {size(stats['bytes'][tier])}")
    _fact(table, "file", f"{size(stats['file_bytes'])} of at most {size(stats['max_bytes'])}")
    if stats["quarantined"]:
        _fact(table, "damaged", f"{stats['quarantined']:,} entries were taken out")
    for gate in stats["gate_reports"]:
        outcome = "passed" if gate["passed"] else "failed"
        _fact(
            table,
            "model gate",
            f"{gate['model_name']} {outcome}: logits differ by {gate['logits_difference']:.1e}, "
            f"layer 0 by {gate['layer0_difference']:.1e}, allowed {gate['tolerance']:.1e}",
        )
    return table


def gate_table(checked: dict[str, Any]) -> Table:
    """What ``models check`` found, figure by figure."""
    table, gate = _facts(), checked["gate"]
    weights = checked["dtype"]
    if checked["quantisation"] != "none":
        weights += f", weights in {checked['quantisation']}"
    _fact(table, "model", f"{checked['model']} ({checked['family']}, {weights})")
    if checked["adapter"] is not None:
        adapter = checked["adapter"]
        _fact(table, "adapter", f"{adapter['name']} (content {adapter['digest'][:16]})")
    windows = ", ".join(f"{w:,}" for w in checked["windows"]) or "none"
    _fact(
        table,
        "form",
        f"{checked['layers']} layers, {checked['heads']} heads over {checked['kv_heads']} of "
        f"{checked['head_dim']}, {checked['max_positions']:,} positions, sliding windows: {windows}",
    )
    for what, name in (
        ("full prefill", "logits_difference"),
        ("layer 0", "layer0_difference"),
        ("rotation", "rotation_difference"),
    ):
        outcome = "right" if gate[name] <= gate["tolerance"] else "WRONG"
        _fact(
            table, what, f"{outcome}: differs by {gate[name]:.1e}, allowed {gate['tolerance']:.1e}"
        )
    _fact(table, "template", _template_line(checked["template"]))
    serves = "reused chunks" if checked["serves"] == "reuse" else "full prefills alone, no reuse"
    _fact(table, "serves", f"{serves} (checked over {gate['num_tokens']:,} tokens)")
    return table


def _template_line(template: dict[str, Any]) -> str:
    """How the chat template is used, and where tokens would be others in one piece with it."""
    how = "plain text: the model has no chat template"
    if template["form"] == "chat":
        place = "in its own place" if template["system"] == "turn" else "in the user's turn"
        how = f"the model's own, system text {place}"
    outcome = "" if template["right"] else "; DIFFERS from the template's own tokens"
    changed = ", ".join(f"{n} {kind}" for kind, n in template["changed_joints"].items()) or "none"
    return f"{how}{outcome}; {template['num_joints']} joints, tokenised otherwise: {changed}"


def facts_table(**facts: str) -> Table:
    """Named facts, one a line."""
    table = _facts()
    for name, value in facts.items():
        _fact(table, name, value)
    return table


def size(num_bytes: int) -> str:
    """Bytes for people: ``12 B``, ``3.4 MiB``."""
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:,.0f} B" if units[0] == "B" else f"{value:,.1f} {units[0]}"


def _tiers(answer: "Answer") -> str:
    by_source = answer.report.account.cached_tokens_by_source
    found = ", ".join(f"{n:,} from {tier}" for tier, n in by_source.items() if n)
    return f" ({found})" if found else ""


def _facts() -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _fact(table: Table, name: str, value: str) -> None:
    table.add_row(name, Text(printable(value)))

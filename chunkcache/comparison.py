"""A fused answer beside the full prefill's answer to the same prompt."""

from chunkcache.engine.stream import Finished
from chunkcache.fusion.fidelity import kl_divergence, leading_agreement
from chunkcache.results import Comparison


def compare_answers(fused: Finished, full: Finished) -> Comparison:
    """Compare two finished answers to one prompt.

    Args:
        fused: The answer that reused entries.
        full: The full prefill's.
    """
    fused_ms, full_ms = fused.report.timings.ttft_ms, full.report.timings.ttft_ms
    return Comparison(
        full_text=full.text,
        full_token_ids=full.token_ids,
        full_ttft_ms=full_ms,
        speedup=full_ms / fused_ms if fused_ms else 0.0,
        kl_first=kl_divergence(full.first_logits, fused.first_logits),
        agree=fused.token_ids == full.token_ids,
        agreement=leading_agreement(full.token_ids, fused.token_ids),
    )

"""How close two answers are: divergences of distributions, agreement of tokens."""

from collections.abc import Sequence

import torch


def kl_divergence(reference_logits: torch.Tensor, other_logits: torch.Tensor) -> float:
    """KL(reference || other) in nats, of the softmax of two logit vectors ``[vocab]``.

    Computed in fp64 and never below 0 (rounding could leave -1e-17).
    """
    reference = torch.log_softmax(reference_logits.double(), dim=-1)
    other = torch.log_softmax(other_logits.double(), dim=-1)
    return max(0.0, float((reference.exp() * (reference - other)).sum()))


def mean_kl(reference_logits: torch.Tensor, other_logits: torch.Tensor) -> float:
    """Mean of KL(reference || other) in nats over rows of logits.

    Args:
        reference_logits: ``[N, vocab]``, N at least 1.
        other_logits: ``[N, vocab]``.
    """
    assert reference_logits.shape == other_logits.shape
    rows = zip(reference_logits, other_logits, strict=True)
    return sum(kl_divergence(a, b) for a, b in rows) / len(reference_logits)


def num_agreeing(reference: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens of two answers are the same."""
    same = 0
    for a, b in zip(reference, other, strict=False):
        if a != b:
            break
        same += 1
    return same


def leading_agreement(reference: Sequence[int], other: Sequence[int]) -> float:
    """Share of leading tokens that are the same, over the longer of both; 1 for two empty ones."""
    longest = max(len(reference), len(other))
    return num_agreeing(reference, other) / longest if longest else 1.0

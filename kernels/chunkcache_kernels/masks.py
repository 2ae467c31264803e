"""Owns which key a row sees and what a soft-cap does; knows no pages and no heads."""

import torch
from torch import Tensor


def visible(query_positions: Tensor, key_positions: Tensor, window: int | None) -> Tensor:
    """Return bool ``[R, T]``: whether row ``i`` sees key ``t``, by positions alone."""
    ahead = query_positions[:, None] - key_positions[None, :]
    seen = ahead >= 0
    return seen if window is None else seen & (ahead < window)


def soft_capped(scores: Tensor, softcap: float | None) -> Tensor:
    """Return ``softcap * tanh(scores / softcap)``, or the scores themselves without a cap."""
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def masked_softmax(scores: Tensor, seen: Tensor) -> Tensor:
    """Softmax over the last axis of the seen scores; a row that sees nothing gives zeros.

    Args:
        scores: fp32 ``[..., R, T]``; unseen ones may be NaN.
        seen: bool, broadcastable to ``scores``.
    """
    probabilities = torch.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1)
    return probabilities.masked_fill(~seen, 0.0)

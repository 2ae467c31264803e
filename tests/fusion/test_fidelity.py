"""Measures of closeness against values worked out by hand."""

import math

import pytest
import torch

from chunkcache.fusion.fidelity import leading_agreement, mean_kl, num_agreeing


def test_mean_kl_of_known_distributions() -> None:
    def logits(*p: float) -> torch.Tensor:
        return torch.tensor(p).log()

    reference = torch.stack([logits(0.5, 0.5), logits(0.25, 0.75)])
    other = torch.stack([logits(0.25, 0.75), logits(0.25, 0.75)])
    first = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert mean_kl(reference, other) == pytest.approx(first / 2, rel=1e-6)
    assert mean_kl(reference, reference) == 0.0


def test_agreement_ends_at_the_first_other_token() -> None:
    assert num_agreeing([5, 6, 7, 8], [5, 6, 9, 8]) == 2
    assert num_agreeing([5, 6], [5, 6, 7]) == 2
    assert leading_agreement([5, 6], [5, 6, 7, 8]) == 0.5
    assert num_agreeing([], [1]) == 0

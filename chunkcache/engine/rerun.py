"""Running a prompt and the answer so far again, where the model's rotation changes.

A longrope model has short factors up to a length and long ones past it. Keys rotated by both do not
go together; a family that says so has its whole sequence run again at the first token past the
switch. It knows no request and no policy.
"""

from collections.abc import Generator, Sequence

import torch

from chunkcache.fusion.cost import CostMeter
from chunkcache.fusion.recompute import SequenceKV, only_rows_from, run_rows
from chunkcache.model.runner import ModelRunner
from chunkcache.model.spec import ModelSpec
from chunkcache.pages import PageLease, PagePool


def reruns_at(spec: ModelSpec, position: int) -> bool:
    """Whether the token at this position is the first one past a switch that reruns."""
    return spec.family.reruns_past_switch and position == spec.rope.switch_tokens


def may_rerun(spec: ModelSpec, num_tokens: int) -> bool:
    """Whether a sequence that grows to so many tokens may be run again on the way."""
    switch = spec.rope.switch_tokens
    return spec.family.reruns_past_switch and switch is not None and switch < num_tokens


def rerun_steps(
    runner: ModelRunner, pool: PagePool, pages: PageLease, token_ids: Sequence[int]
) -> Generator[None, None, torch.Tensor]:
    """Run every row, one layer a step; the pages' keys and values are replaced.

    Returns:
        fp32 logits ``[vocab]`` behind the last token.
    """
    num_tokens, num_layers = len(token_ids), runner.spec.num_layers
    sequence = SequenceKV.over(runner, pool.k, pool.v, pages.slots[:num_tokens])
    ids = torch.tensor(token_ids, dtype=torch.int64, device=runner.device)
    rows = torch.arange(num_tokens, device=runner.device)
    last = only_rows_from(num_layers, num_tokens - 1)
    result = None
    for result in run_rows(runner, sequence, ids, rows, cost=CostMeter(num_layers), hook=last):
        if result is None:
            yield
    assert result is not None
    return runner.logits(result.hidden)[0]

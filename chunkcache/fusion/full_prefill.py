"""A full prefill, in blocks of a fixed number of rows.

Every block begins at a multiple of its size, whatever was reused in front of it, and runs as a
product of one shape. So the keys and values of a whole block are a function of the tokens up to its
end and of nothing else: a prompt that starts from the blocks of another has the bits that it would
have had alone. Smaller blocks would share more and run slower (measured: ``docs/experiments.md``).
"""

from collections.abc import Generator

import torch

from chunkcache.fusion.cost import CostMeter
from chunkcache.fusion.recompute import MaskPositions, SequenceKV, only_rows_from, run_rows
from chunkcache.model.runner import ModelRunner

BLOCK_TOKENS = 1024
"""Rows of a block, as many as the products of a layer take at once. Bits depend on it."""


def full_prefill_steps(
    runner: ModelRunner,
    sequence: SequenceKV,
    token_ids: torch.Tensor,
    *,
    num_ready: int,
    first_wanted: int,
    cost: CostMeter,
    mask_positions: MaskPositions | None = None,
) -> Generator[None, None, torch.Tensor]:
    """Run every row behind those that are ready, one layer of one block per step.

    Args:
        runner: The model.
        sequence: Where keys and values are.
        token_ids: int64 ``[num_tokens]``.
        num_ready: Tokens at the front whose keys and values are there; whole blocks.
        first_wanted: Position from which on hidden states are wanted, not before ``num_ready``.
        cost: Charged with every row of every layer that is run.
        mask_positions: Another mask than the right one; everything runs in one block then, because
            such a mask may show a row what stands behind it.

    Returns:
        Hidden states behind the last layer ``[num_tokens - first_wanted, hidden]``.
    """
    num_tokens = len(token_ids)
    block_tokens = BLOCK_TOKENS if mask_positions is None else num_tokens
    assert num_ready % block_tokens == 0, (num_ready, block_tokens)
    assert num_ready <= first_wanted < num_tokens
    last = only_rows_from(runner.spec.num_layers, first_wanted)
    hidden = []
    for start in range(num_ready, num_tokens, block_tokens):
        if start > num_ready:
            yield
        rows = torch.arange(start, min(start + block_tokens, num_tokens), device=token_ids.device)
        result = None
        for result in run_rows(
            runner, sequence, token_ids, rows, cost=cost, hook=last, mask_positions=mask_positions
        ):
            if result is None:
                yield
        assert result is not None
        hidden.append(result.hidden)
    return torch.cat(hidden)

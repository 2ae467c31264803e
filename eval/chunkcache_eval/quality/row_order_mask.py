"""A causal mask by row order, as CacheBlend's published code has it, to measure what it costs.

That code gives its attention the rows that run and every key, with a causal mask aligned to the
bottom right: the last row sees all keys, the row before it all but the last, whatever the rows'
positions are. It is right for rows that are the prompt's end, and shows the future to all others.
"""

import torch


def bottom_right_positions(rows: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Where a mask by row order takes rows to stand: at the end of the sequence, side by side.

    Args:
        rows: Their true positions, ascending int64 ``[R]``.
        num_tokens: Tokens of the sequence, at least R.

    Returns:
        int64 ``[R]``, nowhere less than ``rows``.
    """
    return torch.arange(num_tokens - len(rows), num_tokens, device=rows.device)

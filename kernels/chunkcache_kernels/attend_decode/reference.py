"""The plain-torch definition of ``attend_decode``: each sequence gathered whole, in fp32."""

import torch
from torch import Tensor

from chunkcache_kernels.masks import soft_capped
from chunkcache_kernels.paged import DecodeBatch, flat_slots


def attend_decode_reference(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    batch: DecodeBatch,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """See ``chunkcache_kernels.attend_decode.op.attend_decode``."""
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for b, num_tokens in enumerate(batch.lengths_tokens):
        if num_tokens == 0:
            continue
        first = 0 if window is None else max(0, num_tokens - window)
        tokens = torch.arange(first, num_tokens, device=q.device)
        pages = batch.block_tables[b, tokens // batch.page_tokens].long()
        slots = pages * batch.page_tokens + tokens % batch.page_tokens
        k = flat_slots(k_pages)[slots].float().permute(1, 2, 0)
        v = flat_slots(v_pages)[slots].float().transpose(0, 1)
        queries = q[b].float().unflatten(0, (k.shape[0], -1))
        weights = torch.softmax(soft_capped((queries @ k) * scale, softcap), dim=-1)
        out[b] = (weights @ v).flatten(0, 1).to(q.dtype)
    return out

"""The plain-torch definitions of ``attend_rows`` and ``column_mass``, whole and in fp32."""

from torch import Tensor

from chunkcache_kernels.masks import masked_softmax, soft_capped, visible
from chunkcache_kernels.paged import KeySlots


def attend_rows_reference(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    keys: KeySlots,
    query_positions: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """See ``chunkcache_kernels.attend_rows.op.attend_rows``."""
    seen = visible(query_positions, keys.positions, window)
    probabilities = _probabilities(q, k_pages, keys, seen, scale, softcap)
    values = keys.read(v_pages).float().masked_fill(~seen.any(0)[:, None, None], 0.0)
    out = probabilities.unflatten(0, (values.shape[1], -1)) @ values.permute(1, 0, 2)[:, None]
    return out.flatten(0, 1).transpose(0, 1).contiguous().to(q.dtype)


def column_mass_reference(
    q: Tensor,
    k_pages: Tensor,
    keys: KeySlots,
    query_positions: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    reduce: str,
) -> Tensor:
    """See ``chunkcache_kernels.attend_rows.op.column_mass``."""
    seen = visible(query_positions, keys.positions, window)
    probabilities = _probabilities(q, k_pages, keys, seen, scale, softcap)
    if reduce == "sum":
        return probabilities.sum((0, 1))
    return probabilities.mean(0).square().sum(0).sqrt()


def _probabilities(
    q: Tensor,
    k_pages: Tensor,
    keys: KeySlots,
    seen: Tensor,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Attention of every head ``[Hq, R, T]``."""
    k = keys.read(k_pages).float().permute(1, 2, 0)
    queries = q.float().transpose(0, 1).unflatten(0, (k.shape[0], -1))
    scores = soft_capped((queries @ k[:, None]) * scale, softcap)
    return masked_softmax(scores.flatten(0, 1), seen)

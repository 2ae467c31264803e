"""The plain-torch definition of ``quantise``, which is the CPU path too: ingest is bound by prefill.

Whole-tensor reductions and casts; a token costs thousands of times less than its prefill.
"""

import torch
from torch import Tensor

from chunkcache_kernels.quantised import LARGEST, Scales, per_token


def quantise_reference(
    k: Tensor, v: Tensor, dtype: torch.dtype, group_tokens: int
) -> tuple[Tensor, Tensor, Scales]:
    """See ``chunkcache_kernels.quantise.op.quantise``."""
    k, v = k.float(), v.float()
    num_tokens = k.shape[1]
    largest = LARGEST[dtype]
    groups = k.abs().split(group_tokens, dim=1) if num_tokens else ()
    peaks = [group.amax(dim=1) for group in groups]
    k_peaks = torch.stack(peaks, dim=1) if peaks else k.new_zeros(k.shape[0], 0, *k.shape[2:])
    scales = Scales(k_peaks / largest, v.abs().amax(dim=-1) / largest, group_tokens)
    return (
        _round(k, per_token(scales.k, num_tokens, group_tokens), dtype),
        _round(v, scales.v[..., None], dtype),
        scales,
    )


def _round(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Divide, round and saturate; where the scale is 0 or not a number, zeros."""
    scaled = torch.where((scale > 0) & scale.isfinite(), x / scale, 0.0)
    scaled = scaled.clamp(-LARGEST[dtype], LARGEST[dtype])
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype).contiguous()

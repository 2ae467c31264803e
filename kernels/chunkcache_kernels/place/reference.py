"""The plain-torch definition of ``place``: one layer at a time, no tuning."""

from torch import Tensor

from chunkcache_kernels.paged import flat_slots
from chunkcache_kernels.quantised import Scales, dequantise
from chunkcache_kernels.rotate import rotate


def place_reference(
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    rope_table: tuple[int, ...],
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    interleaved: bool,
    scales: Scales | None,
) -> None:
    """See ``chunkcache_kernels.place.op.place``."""
    if scales is not None:
        k, v = dequantise(k, v, scales)
    k_slots, v_slots = flat_slots(k_pages), flat_slots(v_pages)
    for layer, row in enumerate(rope_table):
        keys = k[layer].float()
        if row >= 0:
            keys = rotate(keys, cos[row], sin[row], interleaved=interleaved)
        k_slots[layer][slots] = keys.to(k_pages.dtype)
        v_slots[layer][slots] = v[layer].to(v_pages.dtype)

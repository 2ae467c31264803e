"""Where the numbers of an entry lie in its payload: geometry alone, derived from codec and shape.

::

    layer 0 | layer 1 | ...     each: K, V, then for a quantised codec K's scales, V's scales

Every part begins at a multiple of 16 bytes, so that it can be read where it lies.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from chunkcache.codecs import Codec
from chunkcache.entry import Entry, EntryShape
from chunkcache.identity import EntryIdentity
from chunkcache_kernels.quantised import Scales, count_groups

PART_ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class Part:
    """One tensor of a layer.

    Attributes:
        start: First byte, from the start of the layer.
        end: One past its last byte.
        shape: Its axes within the layer.
        dtype: Its element type.
    """

    start: int
    end: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class PayloadLayout:
    """The parts of every layer of an entry.

    Attributes:
        num_layers: Layers, one behind the other.
        layer_bytes: Bytes from one to the next.
        group_tokens: Tokens whose keys share scales; None without scales.
        parts: K and V ``[T, Hkv, D]``; with scales also ``[G, Hkv, D]`` and ``[T, Hkv]``.
    """

    num_layers: int
    layer_bytes: int
    group_tokens: int | None
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, codec: Codec, shape: EntryShape) -> "PayloadLayout":
        """The layout of an entry of this codec and geometry."""
        num_layers, num_tokens, num_kv_heads, head_dim = shape.axes
        rows = (num_tokens, num_kv_heads, head_dim)
        wanted: list[tuple[tuple[int, ...], torch.dtype]] = [(rows, codec.dtype)] * 2
        if codec.group_tokens is not None:
            num_groups = count_groups(num_tokens, codec.group_tokens)
            wanted += [((num_groups, num_kv_heads, head_dim), torch.float32)]
            wanted += [((num_tokens, num_kv_heads), torch.float32)]
        parts: list[Part] = []
        start = 0
        for axes, dtype in wanted:
            end = start + math.prod(axes) * dtype.itemsize
            parts.append(Part(start, end, axes, dtype))
            start = -(-end // PART_ALIGNMENT_BYTES) * PART_ALIGNMENT_BYTES
        return cls(num_layers, start, codec.group_tokens, tuple(parts))

    @property
    def num_bytes(self) -> int:
        """Bytes of the payload."""
        return self.num_layers * self.layer_bytes

    def write(self, entry: Entry, payload: np.ndarray) -> None:
        """Copy an entry of this layout into a payload of zeros, uint8 ``[L, layer bytes]``."""
        for part, tensor in zip(self.parts, _tensors(entry), strict=True):
            payload[:, part.start : part.end] = _bytes_of(tensor.contiguous())

    def allocate(self) -> list[torch.Tensor]:
        """Host memory for the parts of all layers, each ``[L, *part.shape]``."""
        return [torch.empty(self.num_layers, *p.shape, dtype=p.dtype) for p in self.parts]

    def copiers(self, tensors: list[torch.Tensor]) -> list[tuple[Part, np.ndarray]]:
        """Each part with the bytes of its tensor, uint8 ``[L, part bytes]``, to copy layers into."""
        return [(p, _bytes_of(t)) for p, t in zip(self.parts, tensors, strict=True)]

    def views(self, payload: np.ndarray) -> list[torch.Tensor] | None:
        """The parts where they lie, none copied.

        The caller keeps the payload's memory alive, and nobody may write to the tensors: the memory
        may be read-only.

        Args:
            payload: uint8 ``[L, layer bytes]``, contiguous.

        Returns:
            Tensors as of :meth:`allocate`, strided; None where the memory is not aligned for them.
        """
        if payload.__array_interface__["data"][0] % PART_ALIGNMENT_BYTES:
            return None
        memory = torch.from_numpy(np.asarray(_Unowned(payload))).view(-1)
        views: list[torch.Tensor] = []
        for part in self.parts:
            item_bytes = part.dtype.itemsize
            strides = [math.prod(part.shape[axis + 1 :]) for axis in range(len(part.shape))]
            views.append(
                memory.view(part.dtype).as_strided(
                    (self.num_layers, *part.shape),
                    (self.layer_bytes // item_bytes, *strides),
                    part.start // item_bytes,
                )
            )
        return views

    def entry(self, identity: EntryIdentity, tensors: list[torch.Tensor]) -> Entry:
        """An entry of tensors as of :meth:`allocate`."""
        k, v, *rest = tensors
        scales = None
        if self.group_tokens is not None:
            scales = Scales(rest[0], rest[1], self.group_tokens)
        return Entry(identity, identity.key(), k, v, scales)


class _Unowned:
    """A numpy array's memory, said to be writable: torch takes no other without a warning."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def _tensors(entry: Entry) -> list[torch.Tensor]:
    scales = entry.scales
    return [entry.k, entry.v, *([] if scales is None else [scales.k, scales.v])]


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """The memory of a contiguous tensor of layers as uint8 ``[L, layer bytes]``."""
    return tensor.view(torch.uint8).reshape(tensor.shape[0], -1).numpy()

"""Owns the public ``attend_rows`` and ``column_mass``: contracts, checks, implementation choice.

Both are offered as ``reference`` and ``cpu`` only. Anything but the choice of ``cpu`` (a CUDA
device, or an override naming another implementation) runs the reference.
"""

from typing import Literal

import torch
from torch import Tensor

from chunkcache_kernels.attend_rows.cpu import attend_rows_cpu, column_mass_cpu
from chunkcache_kernels.attend_rows.reference import attend_rows_reference, column_mass_reference
from chunkcache_kernels.checks import require, require_dims, require_shape
from chunkcache_kernels.implementation import chosen
from chunkcache_kernels.paged import KeySlots

Reduce = Literal["sum", "l2"]


def attend_rows(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    keys: KeySlots,
    query_positions: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attend from any rows of a sequence to its keys in pages, masked by position.

    Row ``i`` sees key ``t`` iff ``positions[t] <= query_positions[i]`` and, with a window,
    ``positions[t] > query_positions[i] - window``. A row that sees no key gives zeros. Changes
    nothing. The result has the same bits whether the keys lie in one run of slots or scattered.

    Contract: every key at or before the largest query position has been written. Keys behind it,
    and slots that are not in ``keys``, may hold anything, NaN included.

    Args:
        q: Rotated query rows ``[R, Hq, D]`` (rows, query heads, head dim), the type of the pages.
            Query head ``h`` reads KV head ``h // (Hq / Hkv)``.
        k_pages: One layer's rotated keys ``[P, S, Hkv, D]``, contiguous.
        v_pages: One layer's values, like ``k_pages``.
        keys: Slots and positions of the keys, T of them.
        query_positions: Position of each row, int64 ``[R]``, ascending.
        scale: Factor of the scores, usually ``D ** -0.5``.
        window: Number of positions a row sees, itself included; ``None`` means all before it.
        softcap: Scores become ``softcap * tanh(score / softcap)`` before the mask.

    Returns:
        ``[R, Hq, D]``, contiguous, of the type of ``q``.

    Raises:
        KernelArgumentError: Shapes or types do not fit.
    """
    _check(q, k_pages, v_pages, query_positions, window, softcap)
    run = attend_rows_cpu if chosen(q.device) == "cpu" else attend_rows_reference
    return run(q, k_pages, v_pages, keys, query_positions, scale, window, softcap)


def column_mass(
    q: Tensor,
    k_pages: Tensor,
    keys: KeySlots,
    query_positions: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    reduce: Reduce,
) -> Tensor:
    """Return how much attention each key gets from the given rows.

    With the probabilities ``P[h, i, t]`` that ``attend_rows`` would use, ``sum`` is the sum over
    heads and rows; ``l2`` is the mean over heads, then the root of the sum of squares over rows.
    A row that sees no key adds nothing. Arguments and contract as in ``attend_rows``.

    Returns:
        fp32 ``[T]`` in the order of ``keys``.

    Raises:
        KernelArgumentError: Shapes, types or ``reduce`` do not fit.
    """
    _check(q, k_pages, k_pages, query_positions, window, softcap)
    require(reduce in ("sum", "l2"), f"reduce must be 'sum' or 'l2', got {reduce!r}")
    run = column_mass_cpu if chosen(q.device) == "cpu" else column_mass_reference
    return run(q, k_pages, keys, query_positions, scale, window, softcap, reduce)


def _check(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    query_positions: Tensor,
    window: int | None,
    softcap: float | None,
) -> None:
    require_dims("q", q, "R,Hq,D")
    require_dims("k_pages", k_pages, "P,S,Hkv,D")
    num_rows, num_query_heads, head_dim = q.shape
    num_kv_heads = k_pages.shape[2]
    require_shape("k_pages", k_pages, (*k_pages.shape[:3], head_dim))
    require_shape("v_pages", v_pages, tuple(k_pages.shape))
    require_shape("query_positions", query_positions, (num_rows,))
    require(
        query_positions.dtype == torch.int64,
        f"query_positions must be int64, got {query_positions.dtype}",
    )
    require(
        num_query_heads % num_kv_heads == 0,
        f"{num_query_heads} query heads are not a multiple of {num_kv_heads} KV heads",
    )
    require(
        q.dtype == k_pages.dtype == v_pages.dtype,
        f"q is {q.dtype} but the pages are {k_pages.dtype} and {v_pages.dtype}",
    )
    require(
        k_pages.is_contiguous() and v_pages.is_contiguous(),
        "k_pages and v_pages must be contiguous",
    )
    require(window is None or window > 0, f"window must be positive, got {window}")
    require(softcap is None or softcap > 0, f"softcap must be positive, got {softcap}")

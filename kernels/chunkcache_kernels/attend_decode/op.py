"""Owns the public ``attend_decode``: its contract, its checks and the choice of implementation."""

from torch import Tensor

from chunkcache_kernels.attend_decode.cpu import attend_decode_cpu
from chunkcache_kernels.attend_decode.reference import attend_decode_reference
from chunkcache_kernels.checks import require, require_dims, require_shape
from chunkcache_kernels.implementation import chosen
from chunkcache_kernels.paged import DecodeBatch


def attend_decode(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    batch: DecodeBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attend from the last token of each sequence to the whole of that sequence.

    Changes nothing. A row's result has the same bits whatever the other rows are, however many
    there are, and wherever its pages lie. Slots past a sequence's length may hold anything.

    Args:
        q: Rotated query of the token at position ``length - 1`` of each sequence ``[B, Hq, D]``
            (sequences, query heads, head dim), the type of the pages. Query head ``h`` reads KV
            head ``h // (Hq / Hkv)``.
        k_pages: One layer's rotated keys ``[P, S, Hkv, D]``, contiguous, the new token's included.
        v_pages: One layer's values, like ``k_pages``.
        batch: Block tables and lengths; rows of length 0 are padding.
        scale: Factor of the scores, usually ``D ** -0.5``.
        window: Number of positions a row sees, itself included; ``None`` means all.
        softcap: Scores become ``softcap * tanh(score / softcap)``.

    Returns:
        ``[B, Hq, D]``, contiguous, of the type of ``q``; zeros in padding rows.

    Raises:
        KernelArgumentError: Shapes or types do not fit.
    """
    _check(q, k_pages, v_pages, batch, window, softcap)
    match chosen(q.device):
        case "reference":
            run = attend_decode_reference
        case "cpu":
            run = attend_decode_cpu
        case "triton":
            from chunkcache_kernels.attend_decode.triton_kernel import attend_decode_triton

            run = attend_decode_triton
    return run(q, k_pages, v_pages, batch, scale, window, softcap)


def _check(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    batch: DecodeBatch,
    window: int | None,
    softcap: float | None,
) -> None:
    require_dims("q", q, "B,Hq,D")
    require_dims("k_pages", k_pages, "P,S,Hkv,D")
    require_shape("q", q, (batch.num_sequences, *q.shape[1:]))
    num_query_heads, head_dim = q.shape[1:]
    num_pages, _, num_kv_heads, _ = k_pages.shape
    require_shape("k_pages", k_pages, (num_pages, batch.page_tokens, num_kv_heads, head_dim))
    require_shape("v_pages", v_pages, tuple(k_pages.shape))
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

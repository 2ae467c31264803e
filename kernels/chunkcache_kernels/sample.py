"""Owns random inputs that several operator specs share; knows no operator."""

import torch
from torch import Tensor


def random_source(seed: int) -> torch.Generator:
    """Return a CPU generator with its own seed, so inputs do not depend on the global one."""
    return torch.Generator().manual_seed(seed)


def normal(source: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    """Return standard normal numbers drawn in fp32 and rounded to ``dtype``."""
    return torch.randn(*shape, generator=source).to(dtype)


def rotation_tables(
    source: torch.Generator, num_tables: int, num_tokens: int, rotary_dims: int
) -> tuple[Tensor, Tensor]:
    """Return fp32 cosines and sines ``[C, T, Drot]`` of random angles, their two halves equal."""
    half = torch.rand(num_tables, num_tokens, rotary_dims // 2, generator=source) * 6.28
    angles = torch.cat((half, half), dim=-1)
    return angles.cos(), angles.sin()


def page_slots(
    source: torch.Generator, num_tokens: int, num_pages: int, page_tokens: int, scattered: bool
) -> Tensor:
    """Return slots ``[T]`` of tokens that fill pages in order; the pages are shuffled or a run.

    A run begins in the middle of a page, scattered pages are filled from their first slot.
    """
    if not scattered:
        return torch.arange(num_tokens) + page_tokens // 2
    pages = torch.randperm(num_pages, generator=source)
    return (pages[:, None] * page_tokens + torch.arange(page_tokens)).flatten()[:num_tokens]


def filled_pages(
    source: torch.Generator, slots: Tensor, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> Tensor:
    """Return pages ``[P, S, Hkv, D]`` with random numbers in ``slots`` and NaN in all others."""
    num_pages, page_tokens, num_heads, head_dim = shape
    pages = torch.full((num_pages * page_tokens, num_heads, head_dim), float("nan"), dtype=dtype)
    pages[slots] = normal(source, slots.shape[0], num_heads, head_dim, dtype=dtype)
    return pages.view(shape)

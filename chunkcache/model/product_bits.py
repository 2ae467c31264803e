"""Whether a row of a matrix product has the same bits in any company, and on any number of threads.

An entry must not depend on what was computed beside it, nor on the number of threads of the job that
computed it. Libraries promise neither; both hold on the CPUs and libraries known here for products
of some rows, and are measured for each model before anything is built on them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from chunkcache.model.int8 import Int8Linear
from chunkcache.short_thread import on_short_thread

LEAST_ROWS: Final = 16
"""Products of fewer rows take other paths in the library (with MKL: fewer than 12)."""

_NUM_ROWS: Final = (LEAST_ROWS, 23, 61, 240, 509)
"""Numbers of rows that are compared; the last one is the largest."""


@dataclass(frozen=True)
class ProductBits:
    """What the bits of a row of a layer's products depend on, from :data:`LEAST_ROWS` rows on.

    Attributes:
        rows_are_independent: Not on how many rows there are.
        threads_are_independent: Not on the number of threads.
    """

    rows_are_independent: bool
    threads_are_independent: bool


_measured: dict[tuple[object, ...], ProductBits] = {}


def product_bits(layer: nn.Module, *, has_experts: bool) -> ProductBits:
    """Measure the products of a layer; the same shapes are measured once in a process.

    Args:
        layer: A decoder layer.
        has_experts: Whether it has a block of experts: it groups rows by expert, so that a row's
            product has as many rows as the company makes it, often few. Nothing is measured then.
    """
    if has_experts:
        return ProductBits(rows_are_independent=False, threads_are_independent=False)
    products = dict(_products(layer))
    key = (torch.get_num_threads(), *products)
    found = _measured.get(key)
    if found is None:
        # Not on this thread: see there. It sets the number of threads and sets it back.
        found = on_short_thread(lambda: _measure(list(products.values())))
        _measured[key] = found
    return found


def _products(layer: nn.Module) -> Iterator[tuple[tuple[object, ...], Any]]:
    """One product of each kind and shape."""
    for module in layer.modules():
        if isinstance(module, nn.Linear):
            weight = module.weight
            yield (weight.dtype, weight.device.type, *weight.shape), module
        elif isinstance(module, Int8Linear):
            yield (Int8Linear, *module.rows.shape, module.num_columns), module


@torch.inference_mode()
def _measure(products: list[Any]) -> ProductBits:
    generator = torch.Generator().manual_seed(0)
    num_threads = torch.get_num_threads()
    rows_are_independent = threads_are_independent = True
    for product in products:
        columns, dtype, device = _inputs_of(product)
        rows = torch.randn(_NUM_ROWS[-1], columns, generator=generator).to(device, dtype)
        on_all = [product(rows[:n]) for n in _NUM_ROWS]
        rows_are_independent &= all(torch.equal(on_all[-1][: len(x)], x) for x in on_all)
        if device.type == "cpu" and num_threads > 1:
            try:
                torch.set_num_threads(1)
                on_one = [product(rows[:n]) for n in _NUM_ROWS]
            finally:
                torch.set_num_threads(num_threads)
            threads_are_independent &= all(map(torch.equal, on_all, on_one))
    return ProductBits(rows_are_independent, threads_are_independent)


def _inputs_of(product: Any) -> tuple[int, torch.dtype, torch.device]:
    if isinstance(product, Int8Linear):
        return product.num_columns, torch.float32, product.rows.device
    return product.in_features, product.weight.dtype, product.weight.device

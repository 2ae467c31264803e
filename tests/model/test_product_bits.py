"""What a row's bits depend on is measured, not believed."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from chunkcache.model import product_bits
from chunkcache.model.int8 import Int8Linear
from chunkcache.model.product_bits import ProductBits


@pytest.fixture(autouse=True)
def _two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(product_bits, "_measured", {})
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class ByRows(nn.Linear):
    """As if the library added up in another order for some numbers of rows."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out = super().forward(input)
        return out * (1 + 1e-6) if len(input) == 61 else out


class ByThreads(nn.Linear):
    """As if it divided sums among threads."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out = super().forward(input)
        return out * (1 + 1e-6) if torch.get_num_threads() > 1 else out


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (nn.Linear, ProductBits(True, True)),
        (ByRows, ProductBits(False, True)),
        (ByThreads, ProductBits(True, False)),
    ],
)
def test_each_dependence_is_seen(kind: Callable[..., nn.Linear], expected: ProductBits) -> None:
    layer = nn.Sequential(nn.Linear(32, 48), nn.Sequential(kind(48, 32)))
    assert product_bits.product_bits(layer, has_experts=False) == expected
    assert torch.get_num_threads() == 2


def test_int8_products_are_measured_too() -> None:
    layer = nn.Sequential(Int8Linear(nn.Linear(40, 64)))
    assert product_bits.product_bits(layer, has_experts=False) == ProductBits(True, True)


def test_experts_depend_on_both() -> None:
    layer = nn.Sequential(nn.Linear(32, 48))
    assert product_bits.product_bits(layer, has_experts=True) == ProductBits(False, False)


def test_the_same_shapes_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Sequential(nn.Linear(32, 48))
    found = product_bits.product_bits(layer, has_experts=False)
    monkeypatch.setattr(product_bits, "_measure", lambda products: pytest.fail("again"))
    again = nn.Sequential(nn.Linear(32, 48), nn.Linear(32, 48))
    assert product_bits.product_bits(again, has_experts=False) == found

"""The switch between implementations of an operator."""

import contextvars

import pytest
import torch

from chunkcache_kernels.implementation import Implementation, chosen, use_implementation

CPU = torch.device("cpu")


def test_the_device_decides_without_an_override():
    assert chosen(CPU) == "cpu"
    assert chosen(torch.device("cuda")) == "triton"


@pytest.mark.parametrize("name", ["reference", "cpu", "triton"])
def test_an_override_wins_on_any_device(name: Implementation):
    with use_implementation(name):
        assert chosen(CPU) == name
        assert chosen(torch.device("cuda")) == name
    assert chosen(CPU) == "cpu"


def test_overrides_nest_and_are_restored_after_an_error():
    with use_implementation("reference"):
        with pytest.raises(RuntimeError, match="inside"), use_implementation("triton"):
            raise RuntimeError("inside")
        assert chosen(CPU) == "reference"
    assert chosen(CPU) == "cpu"


def test_an_override_stays_in_its_own_context():
    outside = contextvars.copy_context()
    with use_implementation("reference"):
        assert outside.run(chosen, CPU) == "cpu"


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="not 'fast'"), use_implementation("fast"):  # type: ignore[arg-type]
        pass

"""Putting a LoRA adapter into a model's weights, before anything is run.

The merged model is an ordinary one: nothing else in the package knows of adapters, apart from the
digest in the model's identity. Every tensor of the adapter finds its place or the adapter is refused.
"""

from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from chunkcache.errors import ModelFilesError, UnsupportedModelError
from chunkcache.model.adapter import Adapter

_PARTS: Final = {
    ".lora_A.weight": "a",
    ".lora_B.weight": "b",
    ".lora_embedding_A": "a",
    ".lora_embedding_B": "b",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
}
"""Ends of the tensors' names, and which part of an update each is."""
_INSIDE_PEFT: Final = ".base_layer."
"""What stands in the name of a module that an update goes with, as PEFT has it in memory."""
_SAME_WEIGHT_RATIO: Final = 2**-7
"""How far a weight of the base may be from its copy in an adapter: one rounding to bf16."""


@dataclass
class _Update:
    """An update of one module's weight.

    Attributes:
        parts: ``a [rank, in]``, ``b [out, rank]`` and perhaps ``magnitude [out]``.
        is_embedding: Whether it is one of an embedding, whose weight is ``[in, out]``.
    """

    parts: dict[str, torch.Tensor] = field(default_factory=dict)
    is_embedding: bool = False


@torch.no_grad()
def merge_adapter(model: Any, adapter: Adapter) -> None:
    """Change a model's weights by an adapter's updates, computed in fp32.

    Parameters are replaced, never written to: a head that is tied to the embedding keeps its own
    weights when the other's change, as it does beside an adapter that is not merged.

    Args:
        model: A Hugging Face model with its weights loaded.
        adapter: Of that model.

    Raises:
        ModelFilesError: A tensor has no place in the model, or another shape.
        UnsupportedModelError: An update is of a kind that is not merged.
    """
    updates, others = _sort(adapter)
    changed: dict[str, torch.Tensor] = {}
    for name, tensor in others.items():
        plain_name = name.replace(_INSIDE_PEFT, ".")
        old = _parameter(model, adapter, plain_name)
        _check_shape(adapter, plain_name, tensor, tuple(old.shape))
        if name.endswith(f"{_INSIDE_PEFT}weight"):
            _check_original(adapter, plain_name, tensor, old)
        else:
            changed[plain_name] = tensor.to(old.dtype)
    for module, update in updates.items():
        changed[f"{module}.weight"] = _merged(model, adapter, module, update)
    for name, tensor in changed.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, nn.Parameter(tensor, requires_grad=False))


def _sort(adapter: Adapter) -> tuple[dict[str, _Update], dict[str, torch.Tensor]]:
    """Updates by their module; and whole parameters: biases, modules saved beside the updates."""
    updates: dict[str, _Update] = {}
    others: dict[str, torch.Tensor] = {}
    for name, tensor in adapter.tensors.items():
        end = next((e for e in _PARTS if name.endswith(e)), None)
        if end is not None:
            update = updates.setdefault(name.removesuffix(end), _Update())
            update.parts[_PARTS[end]] = tensor
            update.is_embedding |= "embedding" in end
        elif ".lora_" in name:
            raise UnsupportedModelError(f"adapter {adapter.name!r}: {name} is not merged")
        else:
            others[name] = tensor
    wanted = {"a", "b"} | ({"magnitude"} if adapter.config.is_dora else set())
    for module, update in updates.items():
        if set(update.parts) != wanted or f"{module}.weight" in others:
            raise ModelFilesError(
                f"adapter {adapter.name!r}: the update of {module} is not complete, or is there twice"
            )
    return updates, others


def _merged(model: Any, adapter: Adapter, module: str, update: _Update) -> torch.Tensor:
    old = _parameter(model, adapter, f"{module}.weight")
    kind = nn.Embedding if update.is_embedding else nn.Linear
    if not isinstance(model.get_submodule(module), kind):
        raise UnsupportedModelError(
            f"adapter {adapter.name!r}: {module} is no {kind.__name__.lower()} layer"
        )
    config, weight = adapter.config, old.float()
    if update.is_embedding:
        if config.is_dora:
            raise UnsupportedModelError(f"adapter {adapter.name!r}: DoRA of an embedding")
        weight = weight.T
    rank, a, b = config.rank_of(module), update.parts["a"].float(), update.parts["b"].float()
    _check_shape(adapter, f"{module} lora_A", a, (rank, weight.shape[1]))
    _check_shape(adapter, f"{module} lora_B", b, (weight.shape[0], rank))
    weight = weight + config.scale_of(module) * (b @ a)
    if config.is_dora:
        weight = _scaled_rows(adapter, module, weight, update.parts["magnitude"].float())
    if update.is_embedding:
        weight = weight.T
    return weight.to(old.dtype).contiguous()


def _scaled_rows(
    adapter: Adapter, module: str, weight: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """DoRA: each row of the updated matrix, brought to its learned length."""
    _check_shape(adapter, f"{module} lora_magnitude_vector", lengths, (weight.shape[0],))
    return weight * (lengths / weight.norm(dim=1))[:, None]


def _check_original(adapter: Adapter, name: str, tensor: torch.Tensor, old: torch.Tensor) -> None:
    """PEFT saves the base's embedding beside an update of it: a base that can be compared."""
    if not torch.allclose(tensor.float(), old.float(), rtol=_SAME_WEIGHT_RATIO, atol=1e-6):
        raise ModelFilesError(
            f"adapter {adapter.name!r} holds {name} of its base, and the model's differs: it is for "
            "another base"
        )


def _parameter(model: Any, adapter: Adapter, name: str) -> torch.Tensor:
    try:
        return model.get_parameter(name)
    except AttributeError as error:
        raise ModelFilesError(
            f"adapter {adapter.name!r} changes {name}, which the model has not: it is for another "
            "base"
        ) from error


def _check_shape(
    adapter: Adapter, name: str, tensor: torch.Tensor, wanted: tuple[int, ...]
) -> None:
    if tuple(tensor.shape) != wanted:
        raise ModelFilesError(
            f"adapter {adapter.name!r}: {name} has the shape {list(tensor.shape)}, the model wants "
            f"{list(wanted)}: it is for another base"
        )

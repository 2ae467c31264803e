"""Case tests K01 to K03: what other weights or another adapter computed is never served."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chunkcache.planning import AskOptions
from chunkcache.testing import write_tiny_adapter

QUESTION = "Who keeps the key to the tower?"
Caches = Callable[..., Any]
Passages = dict[str, str]


def _perturb(model: Path, tensor: str, *, seed: int = 1) -> Path:
    """Add noise to one tensor of a model directory; the new file takes the old one's place."""
    path = model / "model.safetensors"
    tensors = load_file(path)
    noise = torch.randn(tensors[tensor].shape, generator=torch.Generator().manual_seed(seed))
    tensors[tensor] = tensors[tensor] + 0.01 * noise
    draft = path.with_suffix(".new")
    save_file(tensors, draft, metadata={"format": "pt"})
    os.replace(draft, path)
    return model


def _fill(cache: Any, passages: Passages) -> list[str]:
    for name, text in passages.items():
        cache.put(name, text)
    return list(passages)


def _sources(answer: Any) -> set[str]:
    return {d.source for d in answer.report.documents}


@pytest.mark.parametrize(
    "tensor",
    [
        "model.layers.0.self_attn.k_proj.weight",
        "lm_head.weight",
    ],
)
def test_K01_other_weights_under_one_name(
    open_cache: Caches, change_model: Any, passages: Passages, tensor: str
) -> None:
    """A model that differs in any tensor finds nothing of its namesake, and destroys nothing."""
    model = change_model("served")
    before = open_cache(model=model)
    names = _fill(before, passages)
    first = before.answer(QUESTION, names)
    before.close()
    kept = shutil.copytree(model, model.with_name("kept"))

    _perturb(model, tensor)
    swapped = open_cache(model=model)
    met = swapped.answer(QUESTION, names)
    assert _sources(met) == {"computed"}
    assert met.report.account.cached_tokens == 0
    assert sum(swapped.runtime.stack.stats().hits.values()) == 0
    swapped.close()
    cold = open_cache("empty-store", model=model)
    _fill(cold, passages)
    assert cold.answer(QUESTION, names).token_ids == met.token_ids

    back = open_cache(model=kept)
    again = back.answer(QUESTION, names)
    assert _sources(again) == {"disk"}
    assert again.token_ids == first.token_ids


@pytest.mark.parametrize("form", ["merged", "adapter"])
def test_K02_other_weights_swapped_in_under_one_name(
    open_cache: Caches, change_model: Any, passages: Passages, tmp_path: Path, form: str
) -> None:
    """In one process, weights merged anew or an adapter trained anew miss in every tier."""
    model = change_model("served")
    settings: dict[str, Any] = {}
    if form == "adapter":
        settings["adapter"] = str(write_tiny_adapter(tmp_path / "x", model, seed=0))
    cache = open_cache(model=model, **settings)
    names = _fill(cache, passages)
    first = cache.answer(QUESTION, names)
    old = cache.plan(QUESTION, names, AskOptions()).identities
    if form == "adapter":
        write_tiny_adapter(tmp_path / "x", model, seed=1)
    else:
        _perturb(model, "model.layers.1.self_attn.q_proj.weight", seed=2)
    name = cache.runtime.model.runner.name
    cache.reload_model()
    assert cache.runtime.model.runner.name == name
    new = cache.plan(QUESTION, names, AskOptions()).identities
    assert {i.key() for i in old}.isdisjoint(i.key() for i in new)
    stack = cache.runtime.stack
    assert stack.stats().entries["host"] == 0
    assert not any(stack.contains(i.key()) for i in new)
    met = cache.answer(QUESTION, names)
    assert _sources(met) == {"computed"}
    cold = open_cache("empty-store", model=model, **settings)
    _fill(cold, passages)
    assert cold.answer(QUESTION, names).token_ids == met.token_ids
    assert form == "merged" or met.token_ids != first.token_ids


def test_K02_adapters_of_one_base_share_nothing(
    open_cache: Caches, model_dir: Any, passages: Passages, tmp_path: Path
) -> None:
    """A base, and two adapters of one name on it, over one store: each finds its own alone."""
    base = model_dir()
    adapters = [write_tiny_adapter(tmp_path / str(i) / "x", base, seed=i) for i in (0, 1)]
    choices = [None, *map(str, adapters)]
    for adapter in choices:
        cache = open_cache(model=base, adapter=adapter)
        names = _fill(cache, passages)
        assert cache.runtime.stack.stats().prefills == len(
            cache.plan(QUESTION, names, AskOptions()).identities
        )
        cache.close()
    for adapter in choices:
        cache = open_cache(model=base, adapter=adapter)
        assert _sources(cache.answer(QUESTION, names)) == {"disk"}
        cache.close()


def test_K03_weights_replaced_while_serving(
    open_cache: Caches, change_model: Any, passages: Passages
) -> None:
    """A running process goes on with the weights it loaded, until it is told to reload them.

    From then on nothing of the old ones answers: neither what was stored before the file changed,
    nor what the old model stored afterwards.
    """
    model = change_model("served")
    cache = open_cache(model=model)
    names = _fill(cache, passages)
    before = cache.answer(QUESTION, names)
    _perturb(model, "model.layers.0.self_attn.v_proj.weight", seed=3)
    cache.put("late", "A note that came after the file had been replaced.")
    after = cache.answer(QUESTION, names)
    assert after.token_ids == before.token_ids
    assert _sources(after) == {"host"}
    cache.reload_model()
    renewed = cache.answer(QUESTION, [*names, "late"])
    assert _sources(renewed) == {"computed"}
    assert renewed.report.account.cached_tokens == 0

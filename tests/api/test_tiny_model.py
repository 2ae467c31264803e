"""The shipped tiny models: deterministic, loadable, past the gate, able to read any text."""

from pathlib import Path

import pytest
import torch

from chunkcache.model.families import FAMILIES
from chunkcache.model.gate import run_gate
from chunkcache.model.loading import load_model
from chunkcache.testing import SPECIAL_TOKENS, TINY_FAMILIES, write_tiny_model


def contents(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.iterdir()}


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_each_family_loads_and_passes_the_gate(tmp_path: Path, family: str) -> None:
    directory = write_tiny_model(tmp_path / family, family=family)
    loaded = load_model(str(directory), cache_dir=tmp_path / "cache")
    assert run_gate(loaded.runner).passed
    assert loaded.runner.spec.family is FAMILIES[family]
    assert loaded.runner.spec.max_positions == 512
    assert loaded.template.has_system


def test_the_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    first = contents(write_tiny_model(tmp_path / "a", seed=3))
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(99)
    assert contents(write_tiny_model(tmp_path / "b", seed=3)) == first
    other = contents(write_tiny_model(tmp_path / "c", seed=4))
    changed = {name for name in first if first[name] != other[name]}
    assert changed == {"model.safetensors"}


def test_the_configuration_can_be_overridden(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "m", num_hidden_layers=3, eos_token_id=[2, 7])
    runner = load_model(str(directory), cache_dir=tmp_path / "cache").runner
    assert runner.spec.num_layers == 3
    assert runner.eos_token_ids == {2, 7}


def test_an_unknown_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="gpt2"):
        write_tiny_model(tmp_path / "m", family="gpt2")


def test_its_tokenizer_reads_any_text_and_keeps_control_tokens_apart(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "m")
    tokenizer = load_model(str(directory), cache_dir=tmp_path / "cache").tokenizer
    text = "Příliš 日本 🙂\r\n\x00 <|im_end|> the harbour"
    ids = tokenizer.encode_content(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.control_ids == set(range(len(SPECIAL_TOKENS)))
    assert tokenizer.control_ids.isdisjoint(ids)
    assert len(tokenizer.encode_content(" the harbour")) < len(" the harbour") / 2

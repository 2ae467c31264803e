"""More faults of the same kinds; each of these was once found on this product."""

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chunkcache.documents import canonical_text
from chunkcache.errors import ChunkCacheError, InvalidValueError, ModelError
from chunkcache.identity import encode_token_ids
from chunkcache.model.loading import load_model
from chunkcache.planning import AskOptions
from chunkcache.results import ItemFailure
from chunkcache.text_files import TextFile, find_text_files

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
Caches = Callable[..., Any]


def _module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name[:-3], Path(__file__).with_name(name))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name[:-3]] = module
    spec.loader.exec_module(module)
    return module


def _gguf_writer() -> Any:
    return _module("test_gguf_cases.py")


def test_R04_the_base_does_not_depend_on_earlier_requests(make_bench: Any, load_tiny: Any) -> None:
    """With a length-dependent rotation a prompt's keys do not depend on what ran before it."""
    config = {"max_position_embeddings": 64, "rope_parameters": DYNAMIC}
    fresh, used = (make_bench(load_tiny(**config)) for _ in range(2))
    chunks = [fresh.draw(40, 1), fresh.draw(20, 2)]
    expected = fresh.run(fresh.plan(chunks, "none"))
    used.run(used.plan(chunks, "none"))  # entries are warm from here on
    used.run(used.plan([used.draw(200, 5)], "none"))
    again = used.run(used.plan(chunks, "none"))
    assert torch.equal(again.k[0], expected.k[0])
    assert torch.equal(again.outcome.logits, expected.outcome.logits)


def test_N01_company_does_not_change_a_length_dependent_rotation(
    model_dir: Any, tmp_path: Path
) -> None:
    """An answer under dynamic NTK is the same alone and beside a longer one."""
    config = {"max_position_embeddings": 64, "rope_parameters": DYNAMIC}
    runner = load_model(str(model_dir(**config)), cache_dir=tmp_path / "c").runner
    alone = runner.rotary.tables(90).cos.clone()
    runner.rotary.tables(200)
    beside = runner.rotary.tables(90).cos
    assert torch.equal(alone, beside)


def _other_weights(model: Path) -> bytes:
    path = model / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors[name] = tensors[name] + 0.01
    draft = model / "draft"
    save_file(tensors, draft, metadata={"format": "pt"})
    data = draft.read_bytes()
    draft.unlink()
    return data


def test_K01_weights_overwritten_in_place_with_an_old_time(
    open_cache: Caches, change_model: Any, passages: dict[str, str]
) -> None:
    """Same path, size, inode and modification time (rsync -t --inplace, fixed-time archives)."""
    model = change_model("served")
    path = model / "model.safetensors"
    os.utime(path, (1, 1))
    cache = open_cache(model=model)
    cache.put("tower", passages["tower"])
    cache.close()
    data = _other_weights(model)
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, (1, 1))
    cache = open_cache(model=model)
    answer = cache.answer("Who?", ["tower"])
    assert {d.source for d in answer.report.documents} == {"computed"}


def test_K02_an_adapter_in_the_directory_is_refused(open_cache: Caches, change_model: Any) -> None:
    """Adapters are not loaded: a directory that holds one is refused, not served without it."""
    model = change_model("adapted")
    (model / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(model), "r": 4})
    )
    save_file({"a": torch.zeros(1)}, model / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="adapter"):
        open_cache(model=model)


def test_K07_a_torch_boolean_is_no_token_id() -> None:
    with pytest.raises(InvalidValueError):
        encode_token_ids([torch.tensor(True), 1])  # type: ignore[list-item]


def test_R11_a_prefill_stays_within_the_context(
    open_cache: Caches, passages: dict[str, str]
) -> None:
    """Preamble and chunk together must fit the model's positions, or the start is refused."""
    try:
        cache = open_cache(preparation="preamble")
    except ChunkCacheError:
        return
    cache.put("tower", passages["tower"])
    (identity, *_) = cache.plan("", ["tower"], AskOptions()).identities
    num_tokens = len(identity.prefix_ids) + len(identity.token_ids)
    assert num_tokens <= cache.runtime.model.runner.spec.max_positions


def test_R15_an_unsupported_architecture_is_named(model_dir: Any, tmp_path: Path) -> None:
    cases = _gguf_writer()
    path = cases.write_gguf(tmp_path / "t.gguf", model_dir(), architecture="plamo")
    with pytest.raises(ModelError, match="plamo"):
        load_model(str(path), cache_dir=tmp_path / "cache")


def test_R15_an_unsupported_quant_type_is_named(model_dir: Any, tmp_path: Path) -> None:
    cases = _gguf_writer()
    path = cases.write_gguf(tmp_path / "t.gguf", model_dir(), quant=cases.QuantType.Q8_0)
    data = bytearray(path.read_bytes())
    name = b"blk.0.attn_q.weight"
    start = data.index(name) + len(name) + 4 + 8 * 2
    assert int.from_bytes(data[start : start + 4], "little") == cases.QuantType.Q8_0
    for quant in (cases.QuantType.I8, cases.QuantType.I32):
        changed = bytearray(data)
        changed[start : start + 4] = int(quant).to_bytes(4, "little")
        path.write_bytes(changed)
        with pytest.raises(ModelError, match=quant.name):
            load_model(str(path), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("kind", ["scaling", "factors"])
def test_R15_rope_scaling_is_not_dropped(model_dir: Any, tmp_path: Path, kind: str) -> None:
    """The converter drops rope scaling without a word; the model must be refused, or scaled."""
    import numpy as np

    cases = _gguf_writer()

    def scale(writer: Any) -> None:
        if kind == "scaling":
            writer.add_rope_scaling_type(cases.gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(4.0)
        else:
            writer.add_tensor("rope_freqs.weight", np.full(8, 4.0, dtype=np.float32))

    path = cases.write_gguf(tmp_path / "t.gguf", model_dir(), extra=scale)
    try:
        model = load_model(str(path), cache_dir=tmp_path / "cache")
    except ModelError:
        return
    plain = load_model(str(model_dir()), cache_dir=tmp_path / "cache")
    assert not torch.equal(model.runner.rotary.tables(50).cos, plain.runner.rotary.tables(50).cos)


def test_R15_a_model_larger_than_memory_is_refused(
    model_dir: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psutil

    cases = _gguf_writer()
    path = cases.write_gguf(tmp_path / "t.gguf", model_dir())
    memory = type("Memory", (), {"available": 1000, "total": 1000})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    with pytest.raises(ModelError, match="memory"):
        load_model(str(path), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("fstype", ["nfs4"])
def test_L16_a_network_filesystem_is_warned_about_at_start(
    open_cache: Caches, monkeypatch: pytest.MonkeyPatch, capsys: Any, fstype: str
) -> None:
    lines: list[str] = []
    monkeypatch.setattr("chunkcache.store.environment.network_filesystem", lambda _: fstype)
    open_cache(progress=lines.append)
    output = capsys.readouterr()
    assert fstype in "\n".join([*lines, output.out, output.err])


@pytest.mark.parametrize("unit", [" ", "\u0301", "\u3000", "\u200d"], ids=ascii)
def test_T03_work_grows_with_the_length(unit: str) -> None:
    """Add these units to the test of this name in test_splitting_cases.py."""
    cases = _module("test_splitting_cases.py")
    assert cases._work_per_char(unit, 8_000) < 1.6 * cases._work_per_char(unit, 2_000)


@pytest.mark.parametrize("text", ["Привет мир", "Žižka", "hello world"])
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_I04_utf16_without_a_mark_is_no_silent_mojibake(
    tmp_path: Path, text: str, encoding: str
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode(encoding))
    (found,) = find_text_files([path])
    assert isinstance(found, TextFile)
    read = found.read()
    assert isinstance(read, ItemFailure) or canonical_text(read.text) == text


@pytest.mark.parametrize("text", ["\ufeff\ufeffabc", "\x00\ufeffabc"])
def test_I06_the_text_rules_are_idempotent(text: str) -> None:
    once = canonical_text(text)
    assert canonical_text(once) == once


def test_K01_a_missing_tensor_is_refused(open_cache: Caches, change_model: Any) -> None:
    """Weights that lack a tensor would get random ones at each start, under one digest."""
    model = change_model("incomplete")
    path = model / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="k_proj"):
        open_cache(model=model)


def test_K01_a_gguf_that_lacks_a_tensor_is_refused(change_model: Any, tmp_path: Path) -> None:
    cases = _gguf_writer()
    model = change_model("incomplete")
    path = model / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    written = cases.write_gguf(tmp_path / "t.gguf", model)
    with pytest.raises(ModelError):
        load_model(str(written), cache_dir=tmp_path / "cache")


def test_K01_a_stale_index_beside_one_file(change_model: Any, tmp_path: Path) -> None:
    """What is digested is what is loaded, also where old shards lie beside a newer single file."""
    model = change_model("both")
    names = list(load_file(model / "model.safetensors"))
    shutil.copy(model / "model.safetensors", model / "model-00001-of-00001.safetensors")
    (model / "model.safetensors.index.json").write_text(
        json.dumps(
            {"metadata": {}, "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
        )
    )
    first = load_model(str(model), cache_dir=tmp_path / "c").runner
    data = _other_weights(model)
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").write_bytes(data)
    second = load_model(str(model), cache_dir=tmp_path / "c").runner
    weights = [r.hf_model.model.layers[0].self_attn.k_proj.weight for r in (first, second)]
    assert torch.equal(*weights) == (first.digest == second.digest)


def test_R15_a_truncated_weight_file_is_a_model_error(
    open_cache: Caches, change_model: Any
) -> None:
    model = change_model("cut")
    path = model / "model.safetensors"
    data = path.read_bytes()
    for num_bytes in (len(data) // 2, 5, 0):
        path.write_bytes(data[:num_bytes])
        with pytest.raises(ModelError):
            open_cache(model=model)


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
def test_R08_a_quantised_checkpoint_is_refused_by_name(
    open_cache: Caches, change_model: Any, method: str
) -> None:
    quantisation = {"quant_method": method, "bits": 4}
    model = change_model("quantised", config=lambda c: c.update(quantization_config=quantisation))
    with pytest.raises(ModelError, match=method):
        open_cache(model=model)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": 5}'])
def test_K06_a_broken_tokenizer_is_a_model_error(
    open_cache: Caches, change_model: Any, content: str
) -> None:
    model = change_model("broken")
    (model / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError):
        open_cache(model=model)


def test_K06_a_tokenizer_of_a_larger_model_is_refused(
    open_cache: Caches, change_model: Any
) -> None:
    """Ids that the embedding does not have are found at start, not in the middle of a request."""

    def enlarge(definition: dict[str, Any]) -> None:
        vocab = definition["model"]["vocab"]
        vocab["qz"] = len(vocab)
        definition["model"]["merges"].append(["q", "z"])

    model = change_model("larger", tokenizer=enlarge)
    with pytest.raises(ModelError, match="do not belong together"):
        open_cache(model=model)


def test_K04_a_damaged_gate_report_is_measured_again(open_cache: Caches) -> None:
    from chunkcache.store.transaction import Database

    cache = open_cache()

    def spoil(txn: Any) -> None:
        names = [k for k, _ in txn.scan(Database.MANIFEST, b"gate/")]
        assert names
        for name in names:
            txn.put(Database.MANIFEST, name, b"\x81\xa1x")

    cache.runtime.env.update(spoil)
    cache.close()
    assert open_cache().runtime.gate.passed


def test_K01_a_damaged_digest_memory_is_forgotten(
    change_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chunkcache.model.weights_digest._SETTLED_NS", -1)
    model = change_model("m")
    first = load_model(str(model), cache_dir=tmp_path / "c").runner.digest
    memory = tmp_path / "c" / "weights-digests.json"
    content = json.loads(memory.read_text())
    for value in content.values():
        value[-1] = "not hex"
    memory.write_text(json.dumps(content))
    assert load_model(str(model), cache_dir=tmp_path / "c").runner.digest == first


def test_D08_a_template_with_the_system_text_last_is_refused(
    open_cache: Caches, change_model: Any
) -> None:
    template = (
        "{{ messages[-1].content }}{% if messages|length > 1 %}{{ messages[0].content }}{% endif %}"
    )
    model = change_model("reversed", tokenizer_config=lambda c: c.update(chat_template=template))
    with pytest.raises(ModelError):
        open_cache(model=model)


def test_J01_the_last_of_two_items_with_one_id_stays(open_cache: Caches) -> None:
    from chunkcache.precache import TextItem

    cache = open_cache()
    for attempt in range(5):
        long = f"{attempt} " + " ".join(f"old-{n * 7919 % 100_003}" for n in range(400))
        cache.precache([TextItem("a", long), TextItem("a", f"new {attempt}")])
        assert cache.get("a").text == f"new {attempt}"


def test_D04_a_chunk_that_another_document_takes_over(
    open_cache: Caches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A put that returned keeps its entries, whatever another put of the same chunk does meanwhile."""
    cache = open_cache()
    cache.put("a", "The light goes on at dusk.")
    stack = cache.runtime.stack
    follow = stack.follow_removals

    def follow_late() -> None:
        if cache.get("a").text == "Another text.":
            monkeypatch.undo()
            cache.put("b", "The light goes on at dusk.")  # another thread, at the worst moment
        follow()

    monkeypatch.setattr(stack, "follow_removals", follow_late)
    cache.put("a", "Another text.")
    assert stack.follow_removals == follow, "the moment came"
    assert {d.source for d in cache.answer("?", ["b"]).report.documents} <= {"host", "disk"}


def test_A04_an_invalid_byte_behind_a_character(change_model: Any) -> None:
    """With a tokenizer that falls back to bytes, bytes that form no character do not end the answer."""
    module = _module("test_template_cases.py")
    from chunkcache.model.tokenising import TextTokenizer

    tokenizer = TextTokenizer(module._metaspace_tokenizer("always"))
    world = tokenizer.encode_template("世")
    letter = tokenizer.encode_template("T")[-1:]
    ids = [*world, 3 + 0xE7, *letter]
    decoder = tokenizer.stream()
    text = "".join(decoder.push(i) for i in ids) + decoder.finish()
    assert text.endswith("T")

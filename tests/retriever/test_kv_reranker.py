"""The served model as reranker: scores are a plain forward's, from entries that are kept."""

import pytest
import torch

from chunkcache.chunk_cache import ChunkCache
from chunkcache.errors import InvalidValueError, UnsupportedModelError
from chunkcache.planning import PromptPlanner
from chunkcache.query_likelihood import QueryLikelihood
from chunkcache_retriever.rerank.kv_reranker import KvReranker
from chunkcache_retriever.retriever import Retriever
from chunkcache_retriever.testing import FixedEmbedder

QUERY = "Who keeps the key to the tower?"


def chunks_of(cache: ChunkCache) -> list[tuple[int, ...]]:
    infos = cache.list()
    return [c.token_ids for i in infos for c in cache.get(i.document_id).chunks]


def plain_score(cache: ChunkCache, chunk: tuple[int, ...]) -> float:
    """The library's own forward over prefix, chunk, words before the question, and question."""
    runtime = cache.runtime
    model = runtime.model
    planner = PromptPlanner(runtime, cache.catalog)
    (identity,) = planner.names.identities([chunk], planner.system_ids(None))
    query_ids = model.tokenizer.encode_content(QUERY)
    ids = identity.prefix_ids + chunk + model.template.before_question + query_ids
    with torch.inference_mode():
        logits = model.runner.hf_model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    logprobs = torch.log_softmax(logits.float(), -1)[-len(query_ids) - 1 : -1]
    return float(logprobs.gather(1, torch.tensor(query_ids)[:, None]).mean())


@pytest.fixture
def filled(open_cache, model_dir, passages: dict[str, str]):
    def fill(**settings) -> ChunkCache:
        model = model_dir(max_position_embeddings=2048)  # the preamble is long
        cache = open_cache(model=model, **settings)
        for name, text in passages.items():
            cache.put(name, text)
        return cache

    return fill


@pytest.mark.parametrize("preparation", ["alone", "sink(2)", "system", "preamble"])
def test_scores_are_the_plain_forwards(filled, preparation: str) -> None:
    """Prefix and chunk have no stale row, so nothing but rounding may differ."""
    cache = filled(preparation=preparation, codec="raw")
    chunks = chunks_of(cache)
    scores = QueryLikelihood(cache.runtime, cache.catalog).scores(QUERY, chunks)
    assert scores == pytest.approx([plain_score(cache, c) for c in chunks], abs=1e-4)
    assert len({round(s, 6) for s in scores}) > 1


def test_a_score_does_not_depend_on_the_others(filled) -> None:
    cache = filled(preparation="preamble")
    chunks = chunks_of(cache)
    likelihood = QueryLikelihood(cache.runtime, cache.catalog)
    together = likelihood.scores(QUERY, chunks)
    assert likelihood.scores(QUERY, chunks[::-1]) == together[::-1]
    assert [likelihood.scores(QUERY, [c])[0] for c in chunks] == together
    assert likelihood.scores(QUERY, []) == []


def test_kept_entries_are_used(filled) -> None:
    cache = filled()
    num_prefills = cache.runtime.stack.stats().prefills
    likelihood = QueryLikelihood(cache.runtime, cache.catalog)
    likelihood.scores(QUERY, chunks_of(cache))
    assert cache.runtime.stack.stats().prefills == num_prefills
    assert cache.runtime.stack.stats().leases_open == 0
    likelihood.scores(QUERY, [cache.runtime.model.tokenizer.encode_content("A new text.")])
    assert cache.runtime.stack.stats().prefills > num_prefills


def test_a_search_in_the_models_order(filled) -> None:
    cache = filled()
    reranker = KvReranker(cache)
    hits = Retriever(cache, FixedEmbedder(), reranker=reranker).search(QUERY, 3)
    likelihood = QueryLikelihood(cache.runtime, cache.catalog)
    scores = dict(zip(chunks_of(cache), likelihood.scores(QUERY, chunks_of(cache)), strict=True))
    assert [h.score for h in hits] == sorted(scores.values(), reverse=True)[:3]


def test_queries_that_cannot_be_scored(filled) -> None:
    cache = filled()
    likelihood = QueryLikelihood(cache.runtime, cache.catalog)
    for query in ("", "word " * 20_000):
        with pytest.raises(InvalidValueError) as told:
            likelihood.scores(query, chunks_of(cache))
        assert told.value.param == "query"


def test_models_whose_rotation_depends_on_the_length_are_refused(open_cache, model_dir) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    cache = open_cache(model=model_dir(rope_parameters=rope, max_position_embeddings=512))
    with pytest.raises(UnsupportedModelError):
        KvReranker(cache)

"""The tour: the whole product in a few seconds, on a tiny model with random weights."""

from collections.abc import Callable
from typing import Any

import torch

from chunkcache import AskOptions, DocumentRef, SamplingParams, TextItem


def test_the_tour(
    open_cache: Callable[..., Any], model_dir: Callable[..., Any], passages: dict[str, str]
) -> None:
    cache = open_cache(preparation="preamble", model=model_dir(max_position_embeddings=2048))

    # Documents are run through the model once; putting them again costs a look-up.
    stored = cache.put("tower", passages["tower"])
    assert stored.status == "created"
    assert stored.prefilled_chunks == stored.num_chunks > 1
    again = cache.put("tower", passages["tower"])
    assert (again.status, again.prefilled_chunks) == ("unchanged", 0)
    summary = cache.precache(TextItem(n, t) for n, t in passages.items())
    assert (summary.created, summary.unchanged) == (2, 1)
    assert [d.document_id for d in cache.list()] == ["bridge", "harbour", "tower"]

    # A question over them reuses their keys and values, and says which.
    answer = cache.answer("Who keeps the key?", ["harbour", "tower"], compare=True, max_tokens=8)
    account = answer.report.account
    assert account.fused_tokens > account.recomputed_tokens > 0
    assert account.cached_tokens_by_source == {"host": account.fused_tokens}
    assert answer.verification is not None
    assert answer.verification.kl_first >= 0

    # Asked for exactness, it is exact.
    exact = cache.answer("Who keeps the key?", ["harbour", "tower"], policy="full", max_tokens=8)
    assert exact.report.exact
    assert exact.token_ids == answer.verification.full_token_ids

    # Streams join to the same answer; a seed fixes a sampled one.
    drawn = AskOptions(max_tokens=8, sampling=SamplingParams(temperature=0.7, seed=3))
    streams = [cache.stream("When?", [DocumentRef("bridge", (0,))], drawn) for _ in range(2)]
    texts = ["".join(stream) for stream in streams]
    assert texts[0] == texts[1] == streams[0].answer().text
    assert torch.equal(streams[0].finished().first_logits, streams[1].finished().first_logits)

    # Deleted is gone, from every tier.
    removed = cache.delete("tower")
    assert removed.removed_entries == stored.num_chunks
    assert cache.runtime.stack.stats().leases_open == 0
    cache.runtime.stack.check_integrity()

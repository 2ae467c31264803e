"""A search's passages in a reranker's order."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from chunkcache.catalog import Catalog
from chunkcache_retriever.rerank.reranker import Candidate, Reranker

if TYPE_CHECKING:
    from chunkcache_retriever.retriever import ChunkHit


def reranked(
    catalog: Catalog, reranker: Reranker, query: str, hits: "Sequence[ChunkHit]"
) -> "list[ChunkHit]":
    """The passages by the reranker's scores; of equal ones, the former order.

    What was deleted or replaced since the search is left out.

    Args:
        catalog: The passages' documents.
        reranker: Scores them.
        query: The question.
        hits: What a search found.

    Raises:
        ChunkCacheError: As ``Reranker.scores`` does.
    """
    documents = catalog.get_many({h.document_id for h in hits})
    kept: list[ChunkHit] = []
    candidates: list[Candidate] = []
    for hit in hits:
        document = documents.get(hit.document_id)
        chunks = document.chunks if document else ()
        if hit.chunk_index < len(chunks) and chunks[hit.chunk_index].chunk_id == hit.chunk_id:
            kept.append(hit)
            token_ids = chunks[hit.chunk_index].token_ids
            candidates.append(Candidate(hit.chunk_id, hit.text, token_ids))
    if not kept:
        return []
    scores = [float(s) for s in reranker.scores(query, candidates)]
    assert len(scores) == len(kept), "a reranker scores every candidate"
    scored = [replace(hit, score=s) for hit, s in zip(kept, scores, strict=True)]
    return sorted(scored, key=lambda hit: -hit.score)

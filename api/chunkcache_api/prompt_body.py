"""A prompt as it was run, piece by piece, with what became of each: for whoever asked to see it."""

from collections.abc import Iterator
from typing import Any

from chunkcache.fusion.prompt_use import PromptUse
from chunkcache.model.tokenising import TextTokenizer


def prompt_body(use: PromptUse, tokenizer: TextTokenizer) -> list[dict[str, Any]]:
    """The pieces, in order; their texts, joined, are the prompt's without its control tokens.

    A piece is a run of tokens of one segment that the same became of. A character whose bytes are
    in two pieces is in the later one's text.
    """
    return list(_pieces(use, tokenizer))


def _pieces(use: PromptUse, tokenizer: TextTokenizer) -> Iterator[dict[str, Any]]:
    decoder = tokenizer.stream()
    for span in use.spans():
        text = "".join([decoder.push(token_id) for token_id in span.token_ids])
        if span.end == use.layout.num_tokens:
            text += decoder.finish()
        chunk = span.segment.chunk
        yield {
            "kind": span.segment.kind,
            "use": span.use,
            "document_id": None if chunk is None else chunk.document_id,
            "chunk_index": None if chunk is None else chunk.chunk_index,
            "tokens": span.end - span.start,
            "text": text,
        }

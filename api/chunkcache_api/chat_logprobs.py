"""Log probabilities in OpenAI's form."""

from collections.abc import Sequence
from typing import Any

from chunkcache.model.tokenising import TextTokenizer
from chunkcache.results import TokenLogprob


def logprobs_body(tokenizer: TextTokenizer, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The block ``logprobs`` of a choice.

    ``bytes`` is null for a token that is no whole number of characters.
    """
    content = []
    for token in tokens:
        named = [_named(tokenizer, i, logprob) for i, logprob in token.top]
        content.append(_named(tokenizer, token.token_id, token.logprob) | {"top_logprobs": named})
    return {"content": content, "refusal": None}


def _named(tokenizer: TextTokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    (text,) = tokenizer.decode_each([token_id])
    is_whole = "\ufffd" not in text
    return {
        "token": text,
        "logprob": max(logprob, -9999.0),
        "bytes": list(text.encode()) if is_whole else None,
    }

"""Constrained decoding: which tokens may follow, so that an answer is JSON of a given schema.

The grammar work is llguidance's (the extra ``json``), which is loaded when it is first asked for.
Knows no request: a constraint is made for each answer, and only the engine's thread uses it.
"""

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Protocol

import numpy as np
import torch

from chunkcache.errors import EngineFailedError, InvalidValueError, UnsupportedParameterError
from chunkcache.model.tokenising import TextTokenizer

MAX_SCHEMA_CHARS: Final = 1 << 16
_WHITESPACE: Final = r"[ \n\t]{0,16}"
"""Between two JSON tokens; without a bound a small model may write white space until it is cut."""


class Constraint(Protocol):
    """What one growing answer may go on with."""

    def masked(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits ``[vocab]``, minus infinity where a token may not follow; a copy."""
        ...

    def advance(self, token_id: int) -> bool:
        """Take the token that was drawn; returns whether nothing can follow it."""
        ...


MakeConstraint = Callable[[], Constraint]


class JsonConstraints:
    """Makes constraints for one model's tokens. Safe to use from several threads.

    Args:
        tokenizer: The model's.
        vocab_size: Length of the model's logits.
        eos_token_ids: What ends an answer.
    """

    def __init__(
        self, tokenizer: TextTokenizer, vocab_size: int, eos_token_ids: Iterable[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._tokens: Any = None

    def compile(self, schema: Mapping[str, Any]) -> MakeConstraint:
        """Read a JSON schema.

        Returns:
            Makes constraints under which an answer is one JSON value of the schema.

        Raises:
            UnsupportedParameterError: The extra ``json`` is not installed, or the schema asks for
                what the grammar cannot hold.
            InvalidValueError: The schema is too long.
        """
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise UnsupportedParameterError(
                "answers in JSON need an extra: pip install 'chunkcache[json]'",
                param="response_format",
            ) from error
        text = json.dumps(schema)
        if len(text) > MAX_SCHEMA_CHARS:
            raise InvalidValueError(
                f"the schema has {len(text)} characters, over {MAX_SCHEMA_CHARS}",
                param="response_format",
            )
        tokens = self._token_trie()
        try:
            grammar = LLMatcher.grammar_from_json_schema(
                text, overrides={"whitespace_pattern": _WHITESPACE}
            )
            fault = LLMatcher.validate_grammar(grammar, tokens)
        except ValueError as error:
            grammar, fault = "", str(error)
        if fault:
            reason = fault.splitlines()[0][:200]
            raise UnsupportedParameterError(
                f"the schema cannot be used: {reason}", param="response_format"
            )
        return lambda: _JsonConstraint(LLMatcher(tokens, grammar, log_level=0))

    def _token_trie(self) -> Any:
        """The tokens as llguidance wants them; built once, in half a second for a large model."""
        from llguidance import LLTokenizer

        with self._lock:
            if self._tokens is None:
                self._tokens = LLTokenizer(
                    self._tokenizer.definition(),
                    n_vocab=self._vocab_size,
                    eos_token=self._eos_token_ids or None,
                )
            return self._tokens


class _JsonConstraint:
    """One answer's place in the grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def masked(self, logits: torch.Tensor) -> torch.Tensor:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        allowed = np.unpackbits(bits, bitorder="little", count=len(logits)).astype(bool)
        return logits.masked_fill(~torch.from_numpy(allowed).to(logits.device), float("-inf"))

    def advance(self, token_id: int) -> bool:
        self._matcher.consume_token(token_id)
        self._check()
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise EngineFailedError(f"the grammar failed: {self._matcher.get_error()[:200]}")

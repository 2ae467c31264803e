"""The text of one growing answer: decoded, cut at stop strings, with its log probabilities.

What it gives out is final. Log probabilities of tokens whose text is held back are held back with
it: they would show the beginning of a stop string.
"""

from collections.abc import Sequence

from chunkcache.engine.stopping import StopMatcher
from chunkcache.model.tokenising import IncrementalDecoder
from chunkcache.results import TokenLogprob


class AnswerText:
    """Turns tokens into text that is certain.

    Args:
        decoder: Decodes the answer's tokens.
        stop: Strings that end the answer.
    """

    def __init__(self, decoder: IncrementalDecoder, stop: Sequence[str]) -> None:
        self._decoder = decoder
        self._stop = StopMatcher(stop)
        self._pieces: list[str] = []
        self._num_decoded = self._num_certain = 0
        self._waiting: list[tuple[int, TokenLogprob]] = []
        self._logprobs: list[TokenLogprob] = []

    @property
    def text(self) -> str:
        """What was given out so far."""
        return "".join(self._pieces)

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """Of the tokens whose text was given out."""
        return tuple(self._logprobs)

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has come."""
        return self._stop.is_matched

    def push(
        self, token_id: int, logprob: TokenLogprob | None
    ) -> tuple[str, tuple[TokenLogprob, ...]]:
        """Add a token; returns what became certain (nothing, inside a character)."""
        if logprob is not None:
            self._waiting.append((self._num_decoded, logprob))
        return self._take(self._decoder.push(token_id))

    def finish(self) -> tuple[str, tuple[TokenLogprob, ...]]:
        """What was held back, once no token follows."""
        text, logprobs = self._take(self._decoder.finish())
        if self._stop.is_matched:
            return text, logprobs
        held = self._stop.finish()
        self._pieces.append(held)
        rest = tuple(logprob for _, logprob in self._waiting)
        self._waiting.clear()
        self._logprobs += rest
        return text + held, logprobs + rest

    def _take(self, decoded: str) -> tuple[str, tuple[TokenLogprob, ...]]:
        self._num_decoded += len(decoded)
        text = self._stop.push(decoded)
        self._pieces.append(text)
        self._num_certain += len(text)
        is_open = self._stop.is_matched or self._stop.is_holding
        num_free = sum(start < self._num_certain for start, _ in self._waiting)
        num_free = num_free if is_open else len(self._waiting)
        freed = tuple(logprob for _, logprob in self._waiting[:num_free])
        del self._waiting[:num_free]
        self._logprobs += freed
        return text, freed

"""Which questions of a set are measured, by the size that their context has for a model."""

from collections.abc import Sequence
from dataclasses import dataclass

from chunkcache.model.tokenising import TextTokenizer
from chunkcache_eval.datasets.records import Question


def num_context_tokens(question: Question, tokenizer: TextTokenizer) -> int:
    """Tokens of a question's passages, each read alone."""
    return sum(len(tokenizer.encode_content(p.text)) for p in question.passages)


@dataclass(frozen=True)
class QuestionChoice:
    """Which questions of a set to take.

    Attributes:
        limit: At most so many; None for all.
        near_tokens: Those whose context is nearest to this many tokens; None for the first ones.
    """

    limit: int | None = None
    near_tokens: int | None = None

    def of(self, questions: Sequence[Question], tokenizer: TextTokenizer) -> list[Question]:
        """The chosen ones of a set, nearest first where a size was asked for."""
        near = self.near_tokens
        if near is not None:
            questions = sorted(
                questions, key=lambda q: abs(num_context_tokens(q, tokenizer) - near)
            )
        return list(questions[: self.limit])

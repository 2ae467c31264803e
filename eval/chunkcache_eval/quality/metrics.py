"""Scores of one answer against gold answers.

Knows strings. Knows nothing of arms, data sets or runs.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class AnswerScore:
    """How well an answer matches the gold answers; each value is within 0 and 1.

    Attributes:
        f1: Token F1.
        exact_match: 1.0 or 0.0.
        contains: Whether, or what share of, the gold answers stand in the answer.
    """

    f1: float
    exact_match: float
    contains: float


def normalise(text: str) -> str:
    """SQuAD's normal form: lower case, no ASCII punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def token_f1(answer: str, gold: str) -> float:
    """F1 of two texts as bags of normalised words; two empty ones match."""
    words, wanted = normalise(answer).split(), normalise(gold).split()
    if not words or not wanted:
        return float(words == wanted)
    num_shared = (Counter(words) & Counter(wanted)).total()
    return 2 * num_shared / (len(words) + len(wanted))


def exact_match(answer: str, gold: str) -> bool:
    """Whether two texts have the same normal form."""
    return normalise(answer) == normalise(gold)


def contains(answer: str, gold: str) -> bool:
    """Whether the gold answer's words stand in the answer, whole and in a row."""
    words, wanted = normalise(answer), normalise(gold)
    return f" {wanted} " in f" {words} " if wanted else not words


def score_answer(
    answer: str, gold_answers: Sequence[str], *, needs_all: bool = False
) -> AnswerScore | None:
    """Score an answer.

    Where any gold answer will do, each score is the best over them. Where all are needed, `f1` is
    the mean over them, `contains` the share that stands in the answer, and `exact_match` is 1.0
    for an answer that consists of their words and no others, in any order.

    Args:
        answer: What was generated.
        gold_answers: The right ones; without any there is no score.
        needs_all: Whether all of them are needed.
    """
    if not gold_answers:
        return None
    f1s = [token_f1(answer, gold) for gold in gold_answers]
    contained = [contains(answer, gold) for gold in gold_answers]
    if needs_all:
        wanted = Counter(word for gold in gold_answers for word in normalise(gold).split())
        is_exact = Counter(normalise(answer).split()) == wanted
        return AnswerScore(sum(f1s) / len(f1s), float(is_exact), sum(contained) / len(gold_answers))
    is_exact = any(exact_match(answer, gold) for gold in gold_answers)
    return AnswerScore(max(f1s), float(is_exact), float(any(contained)))

"""Which words of a text count when it is searched by words.

Lower case, runs of letters and digits, without the most common English words, each cut to its stem
(Snowball's English stemmer). A word in a script that is written without spaces (Chinese, Japanese,
Thai and others) is cut into pairs of characters instead, since a run there is a whole sentence.
"""

import re

import Stemmer

WORDS_VERSION = 1
"""Raised when the same text would give other words."""

_WORD = re.compile(r"\w+")
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003134f]+"
)
_COMMON = frozenset(
    [
        "a",
        "an",
        "and",
        "are",
        "as",
        "at",
        "be",
        "but",
        "by",
        "for",
        "from",
        "had",
        "has",
        "have",
        "if",
        "in",
        "into",
        "is",
        "it",
        "its",
        "no",
        "not",
        "of",
        "on",
        "or",
        "such",
        "that",
        "the",
        "their",
        "then",
        "there",
        "these",
        "they",
        "this",
        "to",
        "was",
        "were",
        "will",
        "with",
    ]
)


def words_of(text: str) -> list[str]:
    """The words of a text or of a question, in order, with repeats."""
    spaced = _UNSPACED.sub(_in_pairs, text.lower())
    words = [word for word in _WORD.findall(spaced) if word not in _COMMON]
    # A stemmer holds state while it works, so each call has its own.
    return Stemmer.Stemmer("english").stemWords(words)


def _in_pairs(run: re.Match[str]) -> str:
    chars = run.group()
    pairs = [chars[i : i + 2] for i in range(max(len(chars) - 1, 1))]
    return f" {' '.join(pairs)} "

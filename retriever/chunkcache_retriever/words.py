"""Which words of a text count when it is searched by words.

Lower case, runs of letters and digits, without the most common English words. Words are not cut to
stems: over the evaluation's question sets that found no more (docs/retrieval.md). A run in a script
that is written without spaces (Chinese, Japanese, Thai and others) is a whole sentence, so it is cut
into pairs of characters instead.
"""

import re

_WORD = re.compile(r"\w+")
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003134f]+"
)
_COMMON = frozenset(
    [
        *(
            "a",
            "an",
            "and",
            "are",
            "as",
            "at",
            "be",
            "been",
            "but",
            "by",
            "did",
            "do",
            "does",
            "for",
        ),
        *(
            "from",
            "had",
            "has",
            "have",
            "how",
            "if",
            "in",
            "into",
            "is",
            "it",
            "no",
            "not",
            "of",
            "on",
        ),
        *(
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
        ),
        *("were", "what", "when", "where", "which", "who", "whom", "whose", "why", "will", "with"),
    ]
)


def words_of(text: str) -> list[str]:
    """The words of a text or of a question, in order, with repeats."""
    spaced = _UNSPACED.sub(_in_pairs, text.lower())
    return [word for word in _WORD.findall(spaced) if word not in _COMMON]


def _in_pairs(run: re.Match[str]) -> str:
    chars = run.group()
    pairs = [chars[i : i + 2] for i in range(max(len(chars) - 1, 1))]
    return f" {' '.join(pairs)} "

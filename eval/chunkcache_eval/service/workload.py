"""What is asked under load: documents made from a question set, and requests with popular ones.

Popularity follows Zipf's law: the document of rank r is drawn in proportion to 1/r. Everything is
drawn from a seed, so that both sides are asked the same. Knows no HTTP and no model.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from chunkcache.errors import InvalidValueError
from chunkcache_eval.datasets.records import Question

MIN_DOCUMENTS: Final = 3
MAX_DOCUMENTS: Final = 8
"""Documents of one request."""


@dataclass(frozen=True)
class WorkDocument:
    """A document to be stored.

    Attributes:
        document_id: Its id.
        text: Passages, joined.
    """

    document_id: str
    text: str


@dataclass(frozen=True)
class WorkRequest:
    """A question to be asked.

    Attributes:
        question: The question.
        document_ids: The documents, in prompt order, all different.
        is_repeated: Whether it is the one that is asked again and again, word for word.
    """

    question: str
    document_ids: tuple[str, ...]
    is_repeated: bool = False


@dataclass(frozen=True)
class Workload:
    """Documents, and requests over them.

    Attributes:
        documents: The documents, the most popular first.
        requests: The requests, in the order in which they are sent.
    """

    documents: tuple[WorkDocument, ...]
    requests: tuple[WorkRequest, ...]


def make_documents(
    questions: Sequence[Question], max_documents: int, min_chars: int
) -> tuple[WorkDocument, ...]:
    """Documents from a question set's distinct passages, in the set's order.

    Args:
        questions: The set.
        max_documents: At most so many.
        min_chars: Passages are joined until a document has so many characters.

    Raises:
        InvalidValueError: There is not enough text for one request.
    """
    passages = dict.fromkeys(p.text for q in questions for p in q.passages if p.text.strip())
    documents: list[WorkDocument] = []
    pending: list[str] = []
    for text in passages:
        pending.append(text)
        if sum(map(len, pending)) >= min_chars:
            name = f"document-{len(documents):03}"
            documents.append(WorkDocument(name, "\n\n".join(pending)))
            pending = []
            if len(documents) == max_documents:
                break
    if len(documents) < MIN_DOCUMENTS:
        raise InvalidValueError(
            f"the data make {len(documents)} documents of {min_chars} characters; a request needs "
            f"{MIN_DOCUMENTS}",
            param="data",
        )
    return tuple(documents)


def make_workload(
    questions: Sequence[Question],
    documents: Sequence[WorkDocument],
    *,
    num_requests: int,
    repeat_every: int,
    seed: int,
) -> Workload:
    """Requests over documents.

    Args:
        questions: Where the questions come from.
        documents: The documents, the most popular first.
        num_requests: How many requests.
        repeat_every: Every so manieth request is the same one.
        seed: Of the draws.
    """
    draw = random.Random(seed)

    def request(*, is_repeated: bool) -> WorkRequest:
        num = draw.randint(MIN_DOCUMENTS, min(MAX_DOCUMENTS, len(documents)))
        names = _popular(documents, num, draw)
        return WorkRequest(draw.choice(questions).question, names, is_repeated)

    repeated = request(is_repeated=True)
    requests = [
        repeated if index % repeat_every == 0 else request(is_repeated=False)
        for index in range(num_requests)
    ]
    return Workload(tuple(documents), tuple(requests))


def _popular(documents: Sequence[WorkDocument], num: int, draw: random.Random) -> tuple[str, ...]:
    """Different documents by Zipf's law, in the order drawn."""
    weights = [1 / rank for rank in range(1, len(documents) + 1)]
    names: dict[str, None] = {}
    while len(names) < num:
        (document,) = draw.choices(documents, weights)
        names.setdefault(document.document_id)
    return tuple(names)

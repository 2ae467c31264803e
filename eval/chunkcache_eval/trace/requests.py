"""Recorded traffic: requests as runs of segments, from two public forms of trace.

RAGPulse: ``{"t", "segments": [[kind, id, tokens], ...]}``, in prompt order. Mooncake: ``{"timestamp",
"input_length", "hash_ids": [...]}``, where each id stands for a block of 512 tokens and everything
before it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chunkcache.errors import InvalidValueError
from chunkcache_eval.datasets.records import parse_object, read_lines

_BLOCK_TOKENS = 512


@dataclass(frozen=True)
class TracedSegment:
    """A piece of a prompt; the same id is the same text.

    Attributes:
        segment_id: Unique in its trace.
        num_tokens: Its tokens.
    """

    segment_id: str
    num_tokens: int

    def __post_init__(self) -> None:
        """A segment holds something."""
        if self.num_tokens < 1:
            raise ValueError(f"a segment of {self.num_tokens} tokens")


TracedRequest = tuple[TracedSegment, ...]


def read_trace(path: Path) -> list[TracedRequest]:
    """Read a trace, in either form.

    Raises:
        InvalidValueError: The file cannot be read, is empty, or a line is no request.
    """
    requests: list[TracedRequest] = []
    for number, line in read_lines(path):
        try:
            requests.append(_parse(parse_object(line)))
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidValueError(
                f"{path.name}:{number} is not a request of a trace: {error}", param="file"
            ) from error
    if not requests:
        raise InvalidValueError(f"{path.name} holds no requests", param="file")
    return requests


def _parse(record: dict[str, Any]) -> TracedRequest:
    if "segments" in record:
        return tuple(
            TracedSegment(f"{kind}/{number}", int(num_tokens))
            for kind, number, num_tokens in record["segments"]
        )
    num_tokens = int(record["input_length"])
    return tuple(
        TracedSegment(str(block), max(1, min(_BLOCK_TOKENS, num_tokens - _BLOCK_TOKENS * i)))
        for i, block in enumerate(record["hash_ids"])
    )

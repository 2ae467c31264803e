"""The layout of one prompt: its segments and their absolute positions.

Positions have one owner, this module. A prompt's token ``t`` is at position ``t``::

    [ before_system | system | before_documents | chunk chunk | joint | chunk ... |
      before_question | question | after_question | answer )
      template        template  template          chunk         template
      template          query      template         answer

An answer is part of a layout only where a given one is scored.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from chunkcache.errors import InvalidValueError
from chunkcache.model.template import PromptTemplate

SegmentKind = Literal["template", "chunk", "query", "answer"]


@dataclass(frozen=True)
class ChunkRef:
    """A chunk in a prompt: which document's, which piece."""

    document_id: str
    chunk_index: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Segment:
    """A run of consecutive tokens of one kind.

    Attributes:
        kind: Template text, a chunk, the question, or an answer to be scored.
        start: Position of the first token.
        token_ids: The tokens.
        chunk: The chunk, for segments of that kind.
    """

    kind: SegmentKind
    start: int
    token_ids: tuple[int, ...]
    chunk: ChunkRef | None = None

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class Layout:
    """The segments of one prompt; together they cover positions ``0 .. num_tokens - 1``."""

    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        """Segments are non-empty, adjacent, and begin at 0."""
        position = 0
        for segment in self.segments:
            assert segment.token_ids, "an empty segment"
            assert segment.start == position, (segment.start, position)
            assert (segment.chunk is not None) == (segment.kind == "chunk")
            position = segment.end
        if position == 0:
            raise InvalidValueError("the prompt is empty")

    @cached_property
    def token_ids(self) -> tuple[int, ...]:
        """All token ids in order."""
        return tuple(t for s in self.segments for t in s.token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.segments[-1].end

    @cached_property
    def chunks(self) -> tuple[Segment, ...]:
        """The chunk segments, in order."""
        return tuple(s for s in self.segments if s.kind == "chunk")

    @property
    def num_context_tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(len(s.token_ids) for s in self.chunks)

    @cached_property
    def prefix_end(self) -> int:
        """Position of the first chunk's first token; without chunks, the prompt's end."""
        return self.chunks[0].start if self.chunks else self.prompt_end

    @cached_property
    def opening_end(self) -> int:
        """One past the template text at the front; 0 if there is none, or nothing behind it.

        Where the prompt has chunks this is :attr:`prefix_end`; a prompt whose chunks were all
        left out has an opening too.
        """
        first = self.segments[0]
        return first.end if first.kind == "template" and first.end < self.prompt_end else 0

    @property
    def prompt_end(self) -> int:
        """One past the last position of the prompt: where the answer begins."""
        last = self.segments[-1]
        return last.start if last.kind == "answer" else last.end

    @cached_property
    def query_positions(self) -> tuple[int, ...]:
        """Positions whose attention tells what the question looks for.

        The question's tokens; where it is empty, the template tokens behind the last chunk.
        """
        positions = [p for s in self.segments if s.kind == "query" for p in range(s.start, s.end)]
        if not positions and self.chunks:
            positions = list(range(self.chunks[-1].end, self.prompt_end))
        return tuple(positions)


def build_layout(
    template: PromptTemplate,
    system_ids: tuple[int, ...],
    documents: Sequence[Sequence[ChunkRef]],
    question_ids: tuple[int, ...],
    answer_ids: tuple[int, ...] = (),
) -> Layout:
    """Lay out a prompt.

    Args:
        template: The fixed segments.
        system_ids: The system prompt's tokens.
        documents: Per document its chunks, in order. Chunks of one document follow each other
            directly (cutting loses no character); between documents stands the joint.
        question_ids: The question's tokens, possibly none.
        answer_ids: An answer to be scored behind the prompt.
    """
    pieces: list[tuple[SegmentKind, tuple[int, ...], ChunkRef | None]] = [
        ("template", prompt_prefix_ids(template, system_ids), None)
    ]
    for index, chunks in enumerate(documents):
        if index:
            pieces.append(("template", template.joint, None))
        pieces.extend(("chunk", chunk.token_ids, chunk) for chunk in chunks)
    pieces.append(("template", template.before_question, None))
    pieces.append(("query", question_ids, None))
    pieces.append(("template", template.after_question, None))
    pieces.append(("answer", answer_ids, None))
    segments = []
    position = 0
    for kind, token_ids, chunk in pieces:
        if token_ids:
            segments.append(Segment(kind, position, token_ids, chunk))
            position += len(token_ids)
    return Layout(tuple(segments))


def prompt_prefix_ids(template: PromptTemplate, system_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Everything in front of the first document."""
    return template.before_system + system_ids + template.before_documents

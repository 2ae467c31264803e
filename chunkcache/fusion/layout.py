"""The layout of one prompt: its segments and their absolute positions.

Positions have one owner, this module. A prompt's token ``t`` is at position ``t``::

    [ before_system | system | before_documents | chunk chunk | joint | chunk ... |
      before_question | question | after_question | answer )
      template        template  template          chunk         template
      template          query      template         answer

In a conversation the part behind the opening stands once for each turn; an earlier message and
the reply to it are ``history``::

    [ opening | chunk ... | before_question | message | before_reply | reply |
      template  chunk       template          history   template       history
      before_text | message | after_text )
      template      query     template

An answer is part of a layout only where a given one is scored.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from chunkcache.errors import InvalidValueError, UnsupportedParameterError
from chunkcache.model.template import LaterTurns, PromptTemplate

SegmentKind = Literal["template", "chunk", "history", "query", "answer"]
PromptStyle = Literal["question", "chat"]
"""How a message is put: framed as a question to be answered in a sentence, or as it is."""


@dataclass(frozen=True)
class ChunkRef:
    """A chunk in a prompt: which document's, which piece.

    Attributes:
        document_id: The document; for text that came with the request, the caller's label of it.
        chunk_index: Which piece.
        token_ids: Its tokens.
        is_loose: Whether no document holds it: it came with the request.
    """

    document_id: str
    chunk_index: int
    token_ids: tuple[int, ...]
    is_loose: bool = False


@dataclass(frozen=True)
class Turn:
    """One message of a user, with the documents in front of it.

    Attributes:
        documents: Per document its chunks, in order. Chunks of one document follow each other
            directly (cutting loses no character); between documents stands the joint.
        text_ids: The message's tokens, possibly none.
        reply_ids: What was answered; None for the last turn, which is to be answered.
    """

    documents: tuple[tuple[ChunkRef, ...], ...]
    text_ids: tuple[int, ...]
    reply_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Segment:
    """A run of consecutive tokens of one kind.

    Attributes:
        kind: Template text, a chunk, an earlier message or reply, the question, or an answer to
            be scored.
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
    """The segments of one prompt; together they cover positions ``0 .. num_tokens - 1``.

    Attributes:
        segments: In order.
        cuts: Positions, ascending, where a turn's documents end or an earlier reply begins: up to
            there, another question or another turn may have the same prompt.
    """

    segments: tuple[Segment, ...]
    cuts: tuple[int, ...] = ()

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

        The question's tokens; where it is empty, the template tokens behind the last chunk and
        the last reply.
        """
        positions = [p for s in self.segments if s.kind == "query" for p in range(s.start, s.end)]
        if not positions and self.chunks:
            behind = max(s.end for s in self.segments if s.kind in ("chunk", "history"))
            positions = list(range(behind, self.prompt_end))
        return tuple(positions)


Piece = tuple[SegmentKind, tuple[int, ...], ChunkRef | None]


def build_layout(
    template: PromptTemplate,
    system_ids: tuple[int, ...],
    turns: Sequence[Turn],
    answer_ids: tuple[int, ...] = (),
    style: PromptStyle = "question",
) -> Layout:
    """Lay out a prompt.

    Args:
        template: The fixed segments.
        system_ids: The system prompt's tokens.
        turns: At least one; all but the last have a reply.
        answer_ids: An answer to be scored behind the prompt.
        style: How the messages are put.

    Raises:
        UnsupportedParameterError: There are several turns, and the template takes one.
    """
    assert [t.reply_ids is None for t in turns] == [False] * (len(turns) - 1) + [True]
    pieces: list[Piece] = []
    pieces_before_cuts: list[int] = []
    for turn in turns:
        has_frame = style == "question" or bool(turn.documents)
        if not pieces:
            opening = prompt_prefix_ids(template, system_ids, has_documents=has_frame)
        else:
            later = _later_turns(template)
            opening = later.before_documents if has_frame else later.before_text
        pieces.append(("template", opening, None))
        message = list(_message(template, turn, has_frame=has_frame))
        if turn.documents:
            last = max(i for i, (kind, _, _) in enumerate(message) if kind == "chunk")
            pieces_before_cuts.append(len(pieces) + last + 1)
        pieces += message
        if turn.reply_ids is not None:
            pieces.append(("template", _later_turns(template).before_reply, None))
            pieces_before_cuts.append(len(pieces))
            pieces.append(("history", turn.reply_ids, None))
    closing = template.after_question if style == "question" else template.after_text
    pieces.append(("template", closing, None))
    pieces.append(("answer", answer_ids, None))
    segments = []
    starts = []
    position = 0
    for kind, token_ids, chunk in pieces:
        starts.append(position)
        if token_ids:
            segments.append(Segment(kind, position, token_ids, chunk))
            position += len(token_ids)
    return Layout(tuple(segments), tuple(sorted({starts[i] for i in pieces_before_cuts})))


def prompt_prefix_ids(
    template: PromptTemplate, system_ids: tuple[int, ...], *, has_documents: bool = True
) -> tuple[int, ...]:
    """Everything in front of the first document, or of the first message where it has none."""
    before = template.before_documents if has_documents else template.before_text
    return template.before_system + system_ids + before


def _message(template: PromptTemplate, turn: Turn, *, has_frame: bool) -> Iterator[Piece]:
    for index, chunks in enumerate(turn.documents):
        if index:
            yield "template", template.joint, None
        for chunk in chunks:
            yield "chunk", chunk.token_ids, chunk
    if has_frame:
        yield "template", template.before_question, None
    yield "query" if turn.reply_ids is None else "history", turn.text_ids, None


def _later_turns(template: PromptTemplate) -> LaterTurns:
    if template.later_turns is None:
        raise UnsupportedParameterError(
            "this model's chat template does not put all turns alike: one user message is "
            "supported, with an optional system message",
            param="messages",
        )
    return template.later_turns

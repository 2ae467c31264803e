"""An answer that is still growing, as its reader sees it."""

import secrets
from collections.abc import Iterator

from chunkcache.engine.stream import AnswerStream, Finished
from chunkcache.fusion.plan import FusionPlan
from chunkcache.results import Answer, Citation


class StreamingAnswer:
    """An answer that is still growing. Leaving its context stops it.

    Attributes:
        id: Server-made id of the answer.
        plan: What was decided before any model work.
    """

    def __init__(self, stream: AnswerStream, plan: FusionPlan, model: str) -> None:
        self._stream = stream
        self._model = model
        self.id = f"ans_{secrets.token_hex(12)}"
        self.plan = plan

    def __iter__(self) -> Iterator[str]:
        """Text pieces; joined, they are the answer's text.

        Raises:
            ChunkCacheError: The request failed, or was cancelled.
        """
        return iter(self._stream)

    def __enter__(self) -> "StreamingAnswer":
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Stop; harmless after the end."""
        self._stream.cancel()

    def finished(self) -> Finished:
        """Wait for the end.

        Raises:
            ChunkCacheError: The request failed, or was cancelled.
        """
        return self._stream.result()

    def answer(self) -> Answer:
        """Wait for the end, as an :class:`~chunkcache.results.Answer`."""
        finished = self.finished()
        return Answer(
            id=self.id,
            model=self._model,
            text=finished.text,
            token_ids=finished.token_ids,
            finish_reason=finished.finish_reason,
            report=finished.report,
            citations=_citations(self.plan),
        )


def _citations(plan: FusionPlan) -> tuple[Citation, ...]:
    indexes: dict[str, list[int]] = {}
    for segment in plan.layout.chunks:
        assert segment.chunk is not None
        indexes.setdefault(segment.chunk.document_id, []).append(segment.chunk.chunk_index)
    return tuple(Citation(name, tuple(found)) for name, found in indexes.items())

"""Server-sent events: framing, order, and an end that says what happened.

Every event is one ``data:`` line of JSON, behind an ``event:`` line where it has a name. A stream
that succeeded ends with ``data: [DONE]``; one that failed ends with an error event and nothing behind
it. What the events say is an encoder's.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, Final, Protocol

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from chunkcache.errors import ChunkCacheError
from chunkcache.failure_logs import traceback_text
from chunkcache_api.answering import AnswerWork, Completed, Started, TextPiece
from chunkcache_api.disconnect import cancelled_on_disconnect
from chunkcache_api.error_responses import error_body, internal_error
from chunkcache_api.server_timing import HEADER, planning_value
from chunkcache_api.service import Service
from chunkcache_api.workers import Event, Worker

KEEP_ALIVE_SECONDS: Final = 15.0
"""A silent stream sends a comment this often: proxies cut silent connections."""

DONE: Final = b"data: [DONE]\n\n"
KEEP_ALIVE: Final = b": keep-alive\n\n"

_log = structlog.get_logger("chunkcache.api")


class EventEncoder(Protocol):
    """Frames the events of one stream."""

    def encode(self, event: Event) -> bytes:
        """An event of :meth:`AnswerWork.answer`; may be of no or several frames."""
        ...

    def encode_error(self, error: ChunkCacheError) -> bytes:
        """A failure."""
        ...


def frame(event: dict[str, Any]) -> bytes:
    """One event."""
    # ASCII only: some clients end lines at U+2028 or U+0085, which JSON leaves as they are.
    return f"data: {json.dumps(event, separators=(',', ':'))}\n\n".encode("ascii")


def named_frame(name: str, event: dict[str, Any]) -> bytes:
    """One event that also says its name outside of the JSON."""
    return f"event: {name}\n".encode("ascii") + frame(event)


class QueryEvents:
    """The events of ``/v1/query``, each with ``type`` and ``sequence_number``.

    Args:
        model_name: The served model's name, for the first event.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._num_events = 0

    def encode(self, event: Event) -> bytes:
        """An event, framed."""
        match event:
            case Started(id=name):
                response = {"id": name, "object": "chunkcache.answer", "model": self._model_name}
                return self._frame(
                    "response.created", response=response | {"status": "in_progress"}
                )
            case TextPiece(text=text):
                return self._frame("response.output_text.delta", delta=text)
            case Completed(body=body):
                return self._frame("response.completed", response=body)
        return b""

    def encode_error(self, error: ChunkCacheError) -> bytes:
        """A failure, framed."""
        return self._frame("error", **error_body(error))

    def _frame(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return frame(event)


class EventStreamResponse(Response):
    """Runs a request and streams its events.

    The worker starts when the response is sent, and has been cancelled when that returns, however
    it returns; it ends early where the client does not read. What fails before the first event is
    raised, and so becomes an ordinary error response.

    Args:
        service: Where the worker runs.
        work: The request.
        encoder: Frames its events.
    """

    media_type = "text/event-stream"

    def __init__(self, service: Service, work: AnswerWork, encoder: EventEncoder) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})
        self._service = service
        self._stall_seconds = service.cache.runtime.settings.stalled_stream_seconds
        self._work = work
        self._encoder = encoder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream.

        Raises:
            ChunkCacheError: The request was refused before anything was sent.
        """
        with (
            self._service.workers.start(self._work.answer, self._service.claims) as worker,
            cancelled_on_disconnect(worker, receive),
        ):
            started = await anext(worker)
            first = self._encoder.encode(started)
            timing = (HEADER, planning_value(started.plan_ms))
            headers = [*self.raw_headers, timing]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            try:
                await self._send_data(send, first)
                async for data in self._frames(worker):
                    await self._send_data(send, data)
            except _StalledError:
                # The connection ends without an end of the body, as a broken one does.
                _log.warning("stream_stalled", seconds=self._stall_seconds)
                return
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_data(self, send: Send, data: bytes) -> None:
        """Send, or give up a client that does not read.

        What waits for a slow one is bounded by the length of an answer, and its pages do not wait
        for it: the engine never waits for a reader.
        """
        try:
            async with asyncio.timeout(self._stall_seconds):
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except TimeoutError as error:
            raise _StalledError from error

    async def _frames(self, worker: Worker) -> AsyncIterator[bytes]:
        """What follows the first event, the end included; failures become the last event."""
        try:
            while True:
                event = await worker.next_within(KEEP_ALIVE_SECONDS)
                data = KEEP_ALIVE if event is None else self._encoder.encode(event)
                if data:
                    yield data
        except StopAsyncIteration:
            yield DONE
        except ChunkCacheError as error:
            _log.info("stream_failed", code=error.code, reason=error.message)
            yield self._encoder.encode_error(error)
        except Exception as error:  # the headers are out: the stream itself must say it
            _log.error("stream_failed", exception=traceback_text(error))
            yield self._encoder.encode_error(internal_error())


class _StalledError(Exception):
    """The client has read nothing for too long."""

"""The events of a streamed response, in the order that Open Responses gives.

``response.created``, ``response.in_progress``, the message and its text part announced, text in
deltas, both finished, and the whole response: ``response.completed``, or ``response.incomplete``
where the answer was cut at its limit. A failure is an ``error`` event, which names our code, and a
``response.failed``.
"""

from typing import Any, Final

from chunkcache.errors import ChunkCacheError
from chunkcache.results import TokenLogprob
from chunkcache_api.answering import Completed, Started, TextPiece
from chunkcache_api.error_responses import error_body
from chunkcache_api.responses_work import ResponsesWork, item_id
from chunkcache_api.sse import named_frame
from chunkcache_api.workers import Event

_FAILURE_CODES: Final = {429: "rate_limit_exceeded"}


class ResponsesEvents:
    """Frames the events of one stream.

    Args:
        work: The request's work.
    """

    def __init__(self, work: ResponsesWork) -> None:
        self._work = work
        self._name = ""
        self._num_events = 0
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    def encode(self, event: Event) -> bytes:
        """An event, framed."""
        match event:
            case Started(id=name):
                self._name = name
                return self._opening()
            case TextPiece(text=text, logprobs=tokens):
                self._text.append(text)
                self._logprobs += tokens
                return self._frame(
                    "response.output_text.delta",
                    **self._place(),
                    delta=text,
                    logprobs=self._work.logprobs(tokens),
                )
            case Completed(body=body):
                return self._end(body)
        return b""

    def encode_error(self, error: ChunkCacheError) -> bytes:
        """A failure, framed."""
        said = error_body(error)["error"]
        is_ours = error.status >= 500
        code = _FAILURE_CODES.get(error.status, "server_error" if is_ours else "invalid_prompt")
        failed = self._work.resource(
            self._name, "failed", error={"code": code, "message": said["message"]}
        )
        return self._frame(
            "error", code=said["code"], message=said["message"], param=said["param"]
        ) + self._frame("response.failed", response=failed)

    def _opening(self) -> bytes:
        resource = self._work.resource(self._name, "in_progress")
        message = self._work.message(self._name, "in_progress", [])
        return b"".join(
            (
                self._frame("response.created", response=resource),
                self._frame("response.in_progress", response=resource),
                self._frame("response.output_item.added", output_index=0, item=message),
                self._frame(
                    "response.content_part.added", **self._place(), part=self._work.part("", ())
                ),
            )
        )

    def _end(self, body: dict[str, Any]) -> bytes:
        text = "".join(self._text)
        message = body["output"][0]
        kind = f"response.{body['status']}"
        return b"".join(
            (
                self._frame(
                    "response.output_text.done",
                    **self._place(),
                    text=text,
                    logprobs=self._work.logprobs(self._logprobs),
                ),
                self._frame(
                    "response.content_part.done", **self._place(), part=message["content"][0]
                ),
                self._frame("response.output_item.done", output_index=0, item=message),
                self._frame(kind, response=body),
            )
        )

    def _place(self) -> dict[str, Any]:
        return {"item_id": item_id(self._name), "output_index": 0, "content_index": 0}

    def _frame(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return named_frame(kind, event)

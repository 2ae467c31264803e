"""The chunks of a streamed chat completion, in OpenAI's form.

The role comes first for every choice, then text, then each choice's end; where usage is asked for
it comes last, in a chunk without choices, with the block ``chunkcache`` beside it.
"""

from typing import Any

from chunkcache.errors import ChunkCacheError
from chunkcache_api.answering import AnswerEnded, Completed, Started, TextPiece
from chunkcache_api.chat_work import ChatWork
from chunkcache_api.error_responses import error_body
from chunkcache_api.schemas.chat import ChatRequest
from chunkcache_api.sse import frame
from chunkcache_api.workers import Event


class ChatEvents:
    """Frames the events of one stream.

    Args:
        work: The request's work.
        request: What is asked.
    """

    def __init__(self, work: ChatWork, request: ChatRequest) -> None:
        options = request.stream_options
        self._work = work
        self._num_choices = request.n or 1
        self._has_usage = options is not None and bool(options.include_usage)
        self._head: dict[str, Any] = {}

    def encode(self, event: Event) -> bytes:
        """An event, framed."""
        match event:
            case Started(id=name):
                self._head = self._work.head(name, "chat.completion.chunk")
                role = {"role": "assistant", "content": "", "refusal": None}
                return b"".join(self._chunk(i, role) for i in range(self._num_choices))
            case TextPiece(text=text, index=index, logprobs=tokens):
                return self._chunk(index, {"content": text}, logprobs=self._work.logprobs(tokens))
            case AnswerEnded(index=index, finish_reason=reason):
                return self._chunk(index, {}, finish_reason=reason)
            case Completed(body=body) if self._has_usage:
                last = {"choices": [], "usage": body["usage"], "chunkcache": body["chunkcache"]}
                return frame(self._head | last)
        return b""

    def encode_error(self, error: ChunkCacheError) -> bytes:
        """A failure, framed."""
        return frame(error_body(error))

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        usage = {"usage": None} if self._has_usage else {}
        return frame(self._head | {"choices": [choice]} | usage)

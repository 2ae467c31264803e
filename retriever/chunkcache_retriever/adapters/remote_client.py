"""A client over a server's REST API."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import quote

import httpx

from chunkcache.documents import Metadata
from chunkcache.errors import (
    ChunkCacheError,
    DocumentNotFoundError,
    InvalidValueError,
    RemoteServerError,
    ServerUnreachableError,
    error_of_code,
)
from chunkcache_retriever.adapters.client import (
    ChatOptions,
    ChatReply,
    ContextPart,
    ModelInfo,
    Passage,
    StoredDocument,
    TextFormat,
    Turn,
)

API_KEY_VARIABLE: Final = "CHUNKCACHE_API_KEY"
"""Environment variable of the key that is used where none is given."""

_CHAT_PATH = "/v1/chat/completions"
_PAGE_DOCUMENTS = 1_000
_CONNECT_RETRIES = 2


class RemoteClient:
    """Talks to a server; see :class:`~chunkcache_retriever.adapters.client.CacheClient`.

    Args:
        base_url: Where it is, for example ``http://localhost:8000``.
        api_key: A key of it; None takes ``CHUNKCACHE_API_KEY``, if that is set.
        timeout_seconds: Of each wait for the server; storing a long document takes one.

    Attributes:
        base_url: Where it is.
    """

    def __init__(
        self, base_url: str, api_key: str | None = None, *, timeout_seconds: float = 600.0
    ) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._model: ModelInfo | None = None
        key = api_key or os.environ.get(API_KEY_VARIABLE)
        self._http = httpx.Client(
            base_url=self.base_url,
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=timeout_seconds,
            transport=httpx.HTTPTransport(retries=_CONNECT_RETRIES),
        )

    def close(self) -> None:
        """Close the connections; idempotent."""
        self._http.close()

    def __enter__(self) -> "RemoteClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def model(self) -> ModelInfo:
        """See :class:`~chunkcache_retriever.adapters.client.CacheClient`; asked for once."""
        if self._model is None:
            served = self._json("GET", "/v1/models")["data"][0]
            self._model = ModelInfo(served["id"], served["max_positions"])
        return self._model

    def chat(self, turns: Sequence[Turn], options: ChatOptions) -> ChatReply:
        """See :class:`~chunkcache_retriever.adapters.client.CacheClient`."""
        body = self._json("POST", _CHAT_PATH, _chat_body(turns, options, self.model().name))
        choice = body["choices"][0]
        return _reply(body, choice["message"]["content"], choice["finish_reason"])

    def stream(self, turns: Sequence[Turn], options: ChatOptions) -> Iterator[str | ChatReply]:
        """See :class:`~chunkcache_retriever.adapters.client.CacheClient`."""
        body = _chat_body(turns, options, self.model().name) | {
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        text, finish_reason = "", None
        with self._reaching(), self._http.stream("POST", _CHAT_PATH, **_content(body)) as response:
            if response.is_error:
                response.read()
                raise _error(response.status_code, response.text)
            for event in _events(response):
                if "error" in event:
                    raise _error_of(event["error"], None)
                for choice in event["choices"]:
                    finish_reason = choice["finish_reason"] or finish_reason
                    piece = choice["delta"].get("content") or ""
                    text += piece
                    if piece:
                        yield piece
                if event.get("usage"):
                    yield _reply(event, text, finish_reason or "stop")
                    return
        raise RemoteServerError("the stream ended before the answer did")

    def search(
        self, query: str, top_k: int, filters: Mapping[str, Any] | None = None
    ) -> list[Passage]:
        """See :class:`~chunkcache_retriever.adapters.client.CacheClient`."""
        body = {"query": query, "top_k": top_k, "filters": filters}
        fields = Passage.__dataclass_fields__
        return [
            Passage(**{name: hit[name] for name in fields})
            for hit in self._json("POST", "/v1/search", body)["data"]
        ]

    def put(
        self,
        document_id: str,
        text: str,
        metadata: Metadata | None = None,
        text_format: TextFormat = "text",
    ) -> str:
        """See :class:`~chunkcache_retriever.adapters.client.CacheClient`."""
        body = {"text": text, "metadata": metadata or {}, "format": text_format}
        return self._json("PUT", _document_path(document_id), body)["status"]

    def get(self, document_id: str) -> StoredDocument | None:
        """See :class:`~chunkcache_retriever.adapters.client.CacheClient`."""
        try:
            body = self._json("GET", _document_path(document_id))
        except DocumentNotFoundError:
            return None
        chunks = tuple((c["start"], c["end"]) for c in body["chunks"])
        return StoredDocument(body["id"], body["text"], body["metadata"], chunks)

    def delete(self, document_id: str) -> bool:
        """See :class:`~chunkcache_retriever.adapters.client.CacheClient`."""
        try:
            self._json("DELETE", _document_path(document_id))
        except DocumentNotFoundError:
            return False
        return True

    def document_ids(self) -> Iterator[str]:
        """See :class:`~chunkcache_retriever.adapters.client.CacheClient`."""
        params = f"limit={_PAGE_DOCUMENTS}"
        after: str | None = ""
        while after is not None:
            start = f"&after={quote(after, safe='')}" if after else ""
            page = self._json("GET", f"/v1/documents?{params}{start}")
            yield from (info["id"] for info in page["data"])
            after = page["next_after"]

    def _json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        with self._reaching():
            response = self._http.request(method, path, **_content(body))
        if response.is_error:
            raise _error(response.status_code, response.text)
        try:
            return response.json()
        except ValueError as error:
            raise RemoteServerError(
                f"{self.base_url} answered what is not JSON: is it a chunkcache server?"
            ) from error

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise ServerUnreachableError(
                f"{self.base_url} cannot be reached: {type(error).__name__}: {error}"
            ) from error


def _content(body: Mapping[str, Any] | None) -> dict[str, Any]:
    """A body as the HTTP library takes it.

    Raises:
        InvalidValueError: It holds what JSON has no form for, or text that is not valid Unicode.
    """
    if body is None:
        return {}
    try:
        content = json.dumps(body, allow_nan=False, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InvalidValueError("the request holds text that is not valid Unicode") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidValueError(f"the request is not JSON: {error}") from error
    return {"content": content, "headers": {"content-type": "application/json"}}


def _document_path(document_id: str) -> str:
    try:
        return f"/v1/documents/{quote(document_id, safe='')}"
    except UnicodeEncodeError as error:
        raise InvalidValueError(
            "a document id is not valid Unicode", param="document_id"
        ) from error


def _chat_body(turns: Sequence[Turn], options: ChatOptions, model: str) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    if options.system is not None:
        messages.append({"role": "system", "content": options.system})
    for index, turn in enumerate(turns):
        # In front of the first message a text may have a name, which reports show.
        parts = [_part(p) for p in turn.context] if index else []
        content = [*parts, {"type": "text", "text": turn.text}]
        messages.append({"role": "user", "content": content})
        if turn.reply is not None:
            messages.append({"role": "assistant", "content": turn.reply})
    reuse = {
        "policy": options.policy,
        "recompute_ratio": options.recompute_ratio,
        "on_miss": options.on_miss,
        "verify": options.verify,
        "as_question": options.puts_question(turns),
    }
    body = {
        "model": model,
        "messages": messages,
        "documents": [_document(p) for p in turns[0].context] if turns else [],
        "max_completion_tokens": options.max_tokens,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "seed": options.seed,
        "stop": list(options.stop),
        "chunkcache": {name: value for name, value in reuse.items() if value is not None},
    }
    if options.json_schema is not None:
        schema = {"name": "answer", "schema": options.json_schema}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return {name: value for name, value in body.items() if value is not None}


def _document(part: ContextPart) -> dict[str, Any]:
    given: dict[str, Any] = {"id": part.document_id}
    if part.text is not None:
        given["text"] = part.text
    if part.chunk_indexes is not None:
        given["chunk_indexes"] = list(part.chunk_indexes)
    return given


def _part(part: ContextPart) -> dict[str, Any]:
    if part.text is not None:
        return {"type": "text", "text": part.text}
    file: dict[str, Any] = {"file_id": part.document_id}
    if part.chunk_indexes is not None:
        file["chunk_indexes"] = list(part.chunk_indexes)
    return {"type": "file", "file": file}


def _reply(body: Mapping[str, Any], text: str, finish_reason: str) -> ChatReply:
    return ChatReply(
        body["id"], body["model"], text, finish_reason, body["usage"], body["chunkcache"]
    )


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The data of server-sent events; every event of the server's is one line."""
    for line in response.iter_lines():
        if line.startswith("data:"):
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                return
            yield json.loads(data)


def _error(status: int, text: str) -> ChunkCacheError:
    try:
        return _error_of(json.loads(text)["error"], status)
    except (ValueError, KeyError, TypeError):
        return RemoteServerError(f"the server answered {status}: {text[:200]}")


def _error_of(fields: Mapping[str, Any], status: int | None) -> ChunkCacheError:
    """The error that a server tells of, as the same error here."""
    code, message = str(fields["code"]), str(fields["message"])
    kind = error_of_code(code)
    if kind is not None:
        return kind(message, param=fields.get("param"))
    shown = "" if status is None else f" ({status})"
    return RemoteServerError(f"{message} [{code}]{shown}", remote_code=code)

"""A LangChain chat model over a cache."""

from collections.abc import Iterator
from operator import itemgetter
from typing import Any

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models.base import LangSmithParams, LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import ConfigDict

from chunkcache.errors import UnsupportedParameterError
from chunkcache_retriever.adapters.client import (
    CALL_OPTIONS,
    CacheClient,
    ChatOptions,
    ChatReply,
    OnMiss,
)
from chunkcache_retriever.adapters.langchain.messages import read_messages, usage_metadata


class ChatChunkCache(BaseChatModel):
    """Answers over documents whose keys and values are cached.

    Documents stand in a message by their ids: see
    :func:`~chunkcache_retriever.adapters.langchain.messages.documents_message`. Token usage comes as
    ``usage_metadata`` with ``cache_read``; everything that the service says about an answer is in
    ``response_metadata``, under ``token_usage`` and ``chunkcache``. The options of a call
    (``max_tokens``, ``temperature``, ``top_p``, ``seed``, ``policy``, ``recompute_ratio``) may also
    be given to ``invoke`` or ``bind``.

    Attributes:
        client: The cache that is asked.
        max_tokens: Largest number of answer tokens.
        temperature: 0 is greedy.
        top_p: Keep the most likely tokens whose probabilities add up to this.
        seed: Seed of the draws.
        stop: Strings that end an answer.
        policy: Recompute policy.
        recompute_ratio: Share of the chunk tokens that run again.
        on_miss: What to do about a chunk that is not cached.
        json_schema: Answers are JSON of this schema; see also ``with_structured_output``.
        as_question: Put a single message with documents as ``ChunkCache.answer`` puts its question.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    client: CacheClient
    max_tokens: int | None = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: list[str] | None = None
    policy: str | None = None
    recompute_ratio: float | None = None
    on_miss: OnMiss = "prefill"
    json_schema: dict[str, Any] | None = None
    as_question: bool = True

    @property
    def _llm_type(self) -> str:
        return "chunkcache"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (*CALL_OPTIONS, "stop")}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        name = kwargs.get("model") or self.client.model().name
        params = LangSmithParams(ls_provider="chunkcache", ls_model_name=name, ls_model_type="chat")
        temperature = kwargs.get("temperature", self.temperature)
        max_tokens = kwargs.get("max_tokens", self.max_tokens)
        params["ls_temperature"] = temperature
        if max_tokens is not None:
            params["ls_max_tokens"] = max_tokens
        if stop or self.stop:
            params["ls_stop"] = stop or self.stop or []
        return params

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        system, turns = read_messages(messages)
        reply = self.client.chat(turns, self._options(system, stop, kwargs))
        message = AIMessage(
            reply.text,
            usage_metadata=usage_metadata(reply.usage),
            response_metadata=_metadata(reply),
        )
        return ChatResult(
            generations=[ChatGeneration(message=message)],
            llm_output={"token_usage": dict(reply.usage), "model_name": reply.model},
        )

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        system, turns = read_messages(messages)
        for piece in self.client.stream(turns, self._options(system, stop, kwargs)):
            if isinstance(piece, ChatReply):
                last = AIMessageChunk(
                    content="",
                    usage_metadata=usage_metadata(piece.usage),
                    response_metadata=_metadata(piece),
                    chunk_position="last",
                )
                yield ChatGenerationChunk(message=last)
                return
            chunk = ChatGenerationChunk(message=AIMessageChunk(content=piece))
            if run_manager is not None:
                run_manager.on_llm_new_token(piece, chunk=chunk)
            yield chunk

    def with_structured_output(
        self, schema: dict[str, Any] | type, *, include_raw: bool = False, **kwargs: Any
    ) -> Runnable[LanguageModelInput, Any]:
        """A model whose answers are values of a schema, by constrained decoding.

        Args:
            schema: A JSON schema, a typed dictionary or a pydantic model; the last gives its objects.
            include_raw: Give ``raw``, ``parsed`` and ``parsing_error`` instead of the value alone.
            **kwargs: ``method`` and ``strict`` are taken and change nothing: the schema always holds.

        Raises:
            UnsupportedParameterError: Another argument is given.
        """
        if unknown := sorted(kwargs.keys() - {"method", "strict"}):
            raise UnsupportedParameterError(f"{unknown[0]} is not implemented", param=unknown[0])
        model = self.bind(json_schema=convert_to_json_schema(schema))
        parser: Runnable[Any, Any] = JsonOutputParser()
        if isinstance(schema, type) and is_basemodel_subclass(schema):
            parser = PydanticOutputParser(pydantic_object=schema)
        if not include_raw:
            return model | parser
        failed = RunnablePassthrough.assign(parsed=lambda _: None)
        parsed = RunnablePassthrough.assign(
            parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
        )
        return RunnableMap(raw=model) | parsed.with_fallbacks(
            [failed], exception_key="parsing_error"
        )

    def _options(
        self, system: str | None, stop: list[str] | None, given: dict[str, Any]
    ) -> ChatOptions:
        if unknown := sorted(given.keys() - set(CALL_OPTIONS)):
            raise UnsupportedParameterError(f"{unknown[0]} is not implemented", param=unknown[0])
        own = {name: given.get(name, getattr(self, name)) for name in CALL_OPTIONS}
        stops = tuple(stop if stop is not None else self.stop or ())
        return ChatOptions(system=system, stop=stops, **own)


def _metadata(reply: ChatReply) -> dict[str, Any]:
    return {
        "id": reply.id,
        "model_name": reply.model,
        "model_provider": "chunkcache",
        "finish_reason": reply.finish_reason,
        "token_usage": dict(reply.usage),
        "chunkcache": dict(reply.reuse),
    }

"""``POST /v1/chat/completions`` as work: a conversation, and its answers in OpenAI's form."""

from collections.abc import Sequence
from typing import Any

from chunkcache.engine.sampling import SamplingParams
from chunkcache.planning import AskOptions
from chunkcache.results import Answer, usage_of
from chunkcache_api.chat_logprobs import logprobs_body
from chunkcache_api.chat_messages import chat_turns, num_system_messages, system_text
from chunkcache_api.conversation_work import ConversationWork
from chunkcache_api.schemas.chat import ChatRequest
from chunkcache_api.schemas.query import ReuseOptions
from chunkcache_api.service import Service, system_fingerprint


class ChatWork(ConversationWork):
    """Goes on with one conversation.

    Args:
        service: Where to ask.
        request: What is asked.

    Attributes:
        created: Unix seconds.

    Raises:
        ModelNotFoundError: The request names another model.
        InvalidValueError: The messages are no conversation.
    """

    endpoint = "/v1/chat/completions"
    id_prefix = "chatcmpl-"
    renamed_params = {  # noqa: RUF012
        **{name: f"chunkcache.{name}" for name in ReuseOptions.model_fields},
        "document_ids": "documents",
        "query": "messages",
    }

    def __init__(self, service: Service, request: ChatRequest) -> None:
        messages = request.messages
        turns = chat_turns(messages, request.documents or (), first=num_system_messages(messages))
        super().__init__(service, request, turns)
        self._request = request

    def labels(self) -> dict[str, Any]:
        """And how many answers were asked for."""
        return super().labels() | {"n": self._request.n or 1}

    def head(self, name: str, kind: str) -> dict[str, Any]:
        """What a response and the chunks of a stream begin with."""
        return {
            "id": name,
            "object": kind,
            "created": self.created,
            "model": self.service.model_name,
            "system_fingerprint": system_fingerprint(self.runtime),
        }

    def body(self, name: str, answers: Sequence[Answer]) -> dict[str, Any]:
        """A chat completion."""
        return self.head(name, "chat.completion") | {
            "choices": [
                {
                    "index": index,
                    "message": {"role": "assistant", "content": answer.text, "refusal": None},
                    "finish_reason": answer.finish_reason,
                    "logprobs": self.logprobs(answer.logprobs),
                }
                for index, answer in enumerate(answers)
            ],
            "usage": usage_of(answers),
            "chunkcache": answers[0].reuse() | {"seed": self.seed},
        }

    def logprobs(self, tokens: Sequence[Any]) -> dict[str, Any] | None:
        """Log probabilities in OpenAI's form; None where none were asked for."""
        if not self._request.logprobs:
            return None
        return logprobs_body(self.runtime.model.tokenizer, tokens)

    def options(self) -> AskOptions:
        """As the request says."""
        request, reuse = self._request, self._request.chunkcache
        settings = self.service.cache.runtime.settings
        given = request.max_completion_tokens or request.max_tokens
        response_format = request.response_format
        return AskOptions(
            policy=reuse.policy,
            policy_options=reuse.policy_options(),
            system=system_text(request.messages),
            max_tokens=settings.max_answer_tokens if given is None else given,
            sampling=SamplingParams(
                1.0 if request.temperature is None else request.temperature,
                1.0 if request.top_p is None else request.top_p,
                seed=self.seed,
            ),
            on_miss=reuse.on_miss,
            verify=reuse.verify,
            num_answers=request.n or 1,
            stop=tuple(request.stop or ()),
            top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            as_question=reuse.as_question,
            json_schema=None if response_format is None else response_format.schema_of_answers(),
        )

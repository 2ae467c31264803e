"""``POST /v1/responses`` as work: a conversation, and its answer in the form of Open Responses."""

import time
from collections.abc import Sequence
from typing import Any, Final, Literal

from chunkcache.engine.sampling import SamplingParams
from chunkcache.planning import AskOptions
from chunkcache.results import Answer, TokenLogprob, usage_of
from chunkcache_api.chat_logprobs import logprobs_body
from chunkcache_api.conversation_work import ConversationWork
from chunkcache_api.responses_input import response_system, response_turns
from chunkcache_api.schemas.query import ReuseOptions
from chunkcache_api.schemas.responses import ResponsesRequest, TextOptions
from chunkcache_api.service import Service

Status = Literal["in_progress", "completed", "incomplete", "failed"]

_UNUSED: Final[dict[str, Any]] = {
    "background": False,
    "error": None,
    "frequency_penalty": 0,
    "incomplete_details": None,
    "max_tool_calls": None,
    "output": [],
    "parallel_tool_calls": False,
    "presence_penalty": 0,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": None,
    "service_tier": "default",
    "store": False,
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
    "usage": None,
}
"""Fields that the specification wants in every response, at the values that nothing changes, or
nothing yet."""


class ResponsesWork(ConversationWork):
    """Answers one request.

    Args:
        service: Where to ask.
        request: What is asked.

    Raises:
        ModelNotFoundError: The request names another model.
        InvalidValueError: The input is no conversation.
    """

    endpoint = "/v1/responses"
    id_prefix = "resp_"
    renamed_params = {  # noqa: RUF012
        **{name: f"chunkcache.{name}" for name in ReuseOptions.model_fields},
        "document_ids": "input",
        "query": "input",
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
    }

    def __init__(self, service: Service, request: ResponsesRequest) -> None:
        super().__init__(service, request, response_turns(request))
        self._request = request

    def resource(self, name: str, status: Status, **fields: Any) -> dict[str, Any]:
        """A response object, at whatever point of its making."""
        request = self._request
        text = (request.text or TextOptions()).model_dump(by_alias=True, exclude_none=True)
        return {
            "id": name,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "model": self.service.model_name,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "safety_identifier": request.safety_identifier,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": text,
            "top_logprobs": request.top_logprobs or 0,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "user": request.user,
            **_UNUSED,
            **fields,
        }

    def message(self, name: str, status: Status, content: Sequence[Any]) -> dict[str, Any]:
        """The answer as an item of the output."""
        return {
            "type": "message",
            "id": item_id(name),
            "status": status,
            "role": "assistant",
            "content": list(content),
        }

    def part(self, text: str, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The answer's text as a part of its message."""
        return {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": self.logprobs(logprobs),
        }

    def logprobs(self, tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        """Log probabilities in OpenAI's form; none where none were asked for.

        The bytes of a token that is no whole number of characters are left empty.
        """
        if not self._request.wants_logprobs:
            return []
        found: list[dict[str, Any]] = logprobs_body(self.runtime.model.tokenizer, tokens)["content"]
        return [
            _with_bytes(token) | {"top_logprobs": [_with_bytes(t) for t in token["top_logprobs"]]}
            for token in found
        ]

    def body(self, name: str, answers: Sequence[Answer]) -> dict[str, Any]:
        """A response that has come to its end."""
        (answer,) = answers
        status: Status = "incomplete" if answer.finish_reason == "length" else "completed"
        usage = usage_of(answers)
        return self.resource(
            name,
            status,
            incomplete_details={"reason": "max_output_tokens"} if status == "incomplete" else None,
            output=[self.message(name, status, [self.part(answer.text, answer.logprobs)])],
            usage={
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
            chunkcache=answer.reuse() | {"seed": self.seed},
        )

    def options(self) -> AskOptions:
        """As the request says."""
        request, reuse = self._request, self._request.chunkcache
        settings = self.service.cache.runtime.settings
        given = request.max_output_tokens
        return AskOptions(
            policy=reuse.policy,
            policy_options=reuse.policy_options(),
            system=response_system(request),
            max_tokens=settings.max_answer_tokens if given is None else given,
            sampling=SamplingParams(
                1.0 if request.temperature is None else request.temperature,
                1.0 if request.top_p is None else request.top_p,
                seed=self.seed,
            ),
            on_miss=reuse.on_miss,
            verify=reuse.verify,
            top_logprobs=(request.top_logprobs or 0) if request.wants_logprobs else None,
            json_schema=None if request.text is None else request.text.format.schema_of_answers(),
        )


def item_id(name: str) -> str:
    """The id of a response's message."""
    return f"msg_{name.partition('_')[2]}"


def _with_bytes(token: dict[str, Any]) -> dict[str, Any]:
    return token | {"bytes": token["bytes"] or []}

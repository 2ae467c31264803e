"""``POST /v1/chat/completions`` as work: a conversation, and its answers in OpenAI's form."""

import secrets
from collections.abc import Sequence
from typing import Any

from chunkcache.engine.sampling import SamplingParams
from chunkcache.fusion.plan import FusionPlan
from chunkcache.planning import AskOptions
from chunkcache.results import Answer, usage_of
from chunkcache.streaming import StreamingAnswer
from chunkcache_api.answering import AnswerWork
from chunkcache_api.chat_logprobs import logprobs_body
from chunkcache_api.chat_messages import chat_turns, num_system_messages, system_text
from chunkcache_api.schemas.chat import ChatRequest
from chunkcache_api.schemas.query import ReuseOptions
from chunkcache_api.service import Service, system_fingerprint
from chunkcache_api.workers import WorkerScope


class ChatWork(AnswerWork):
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
        super().__init__(service, request.model, shows_prompt=request.chunkcache.show_prompt)
        self._request = request
        messages = request.messages
        self._turns = chat_turns(
            messages, request.documents or (), first=num_system_messages(messages)
        )
        self._runtime = service.cache.runtime
        self._seed = secrets.randbits(63) if request.seed is None else request.seed

    def begin(self, scope: WorkerScope) -> StreamingAnswer:
        """Ask."""
        scope.check()
        growing = self.service.cache.chat(self._turns, self._options())
        self._runtime = growing.runtime
        return growing

    def make_plan(self) -> tuple[FusionPlan, AskOptions]:
        """Plan."""
        options = self._options()
        return self.service.cache.plan_chat(self._turns, options), options

    def labels(self) -> dict[str, Any]:
        """Whose request it was, in the client's words, and the seed to draw the same again."""
        request = self._request
        return {
            "user": request.user,
            "safety_identifier": request.safety_identifier,
            "metadata": request.metadata,
            "seed": self._seed,
            "n": request.n or 1,
        }

    def head(self, name: str, kind: str) -> dict[str, Any]:
        """What a response and the chunks of a stream begin with."""
        return {
            "id": name,
            "object": kind,
            "created": self.created,
            "model": self.service.model_name,
            "system_fingerprint": system_fingerprint(self._runtime),
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
            "chunkcache": answers[0].reuse() | {"seed": self._seed},
        }

    def logprobs(self, tokens: Sequence[Any]) -> dict[str, Any] | None:
        """Log probabilities in OpenAI's form; None where none were asked for."""
        if not self._request.logprobs:
            return None
        return logprobs_body(self._runtime.model.tokenizer, tokens)

    def _options(self) -> AskOptions:
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
                seed=self._seed,
            ),
            on_miss=reuse.on_miss,
            verify=reuse.verify,
            num_answers=request.n or 1,
            stop=tuple(request.stop or ()),
            top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            as_question=reuse.as_question,
            json_schema=None if response_format is None else response_format.schema_of_answers(),
        )

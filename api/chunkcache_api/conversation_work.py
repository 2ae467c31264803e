"""A conversation as work: what OpenAI's two forms of it share."""

import secrets
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from chunkcache.fusion.plan import FusionPlan
from chunkcache.planning import AskOptions, ChatTurn
from chunkcache.streaming import StreamingAnswer
from chunkcache_api.answering import AnswerWork
from chunkcache_api.schemas.chat import ChatRequest
from chunkcache_api.schemas.responses import ResponsesRequest
from chunkcache_api.service import Service
from chunkcache_api.workers import WorkerScope


class ConversationWork(AnswerWork):
    """Goes on with one conversation.

    Args:
        service: Where to ask.
        request: What is asked.
        turns: What was said, documents included.

    Attributes:
        seed: The request's, or one that was drawn for it.
        runtime: What answers, once it has begun; what would answer, before.

    Raises:
        ModelNotFoundError: The request names another model.
    """

    def __init__(
        self, service: Service, request: ChatRequest | ResponsesRequest, turns: Sequence[ChatTurn]
    ) -> None:
        super().__init__(service, request.model, shows_prompt=request.chunkcache.show_prompt)
        self._asked = request
        self._turns = turns
        self.seed = secrets.randbits(63) if request.seed is None else request.seed
        self.runtime = service.cache.runtime

    @abstractmethod
    def options(self) -> AskOptions:
        """How it is to be answered."""

    def begin(self, scope: WorkerScope) -> StreamingAnswer:
        """Ask."""
        scope.check()
        growing = self.service.cache.chat(self._turns, self.options())
        self.runtime = growing.runtime
        return growing

    def make_plan(self) -> tuple[FusionPlan, AskOptions]:
        """Plan."""
        options = self.options()
        return self.service.cache.plan_chat(self._turns, options), options

    def labels(self) -> dict[str, Any]:
        """Whose request it was, in the client's words, and the seed to draw the same again."""
        return {
            "user": self._asked.user,
            "safety_identifier": self._asked.safety_identifier,
            "metadata": self._asked.metadata,
            "seed": self.seed,
        }

"""Clients that ask at once, each its next question behind the answer to its last.

Bounded in count and time. Beside them one more client asks again and again whether the server is
alive, on a connection of its own.
"""

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import httpx

from chunkcache_eval.service.workload import WorkRequest

HEALTH_PATH: Final = "/livez"
HEALTH_PAUSE_SECONDS: Final = 0.1
TOP_LOGPROBS: Final = 5

Side = Literal["fused", "full"]


@dataclass(frozen=True)
class Asking:
    """How it is asked.

    Attributes:
        base_url: The server's address.
        num_clients: Clients at once.
        max_tokens: Largest number of answer tokens.
        max_seconds: When to stop; what is under way then is given up and counts for nothing.
    """

    base_url: str
    num_clients: int
    max_tokens: int
    max_seconds: float


@dataclass
class LoadResult:
    """What came of a load.

    Attributes:
        seconds: How long it took.
        completed: Requests answered.
        failures: Of each failed request, why.
        cut_off: Requests given up when the time was over.
        ttft_ms: Of streamed answers, milliseconds to the first piece of text, seen by the client.
        engine_ttft_ms: Beside ``ttft_ms``, what the engine says of the same answer.
        health_ms: Milliseconds of each look at the server's health.
        repeated: Answers to the request that is asked again and again, logits included.
        prompt_tokens: Prompt tokens of all answers.
        cached_tokens: Of these, not run.
        fell_back: Answers for which a policy was replaced by another.
    """

    seconds: float = 0.0
    completed: int = 0
    failures: list[str] = field(default_factory=list)
    cut_off: int = 0
    ttft_ms: list[float] = field(default_factory=list)
    engine_ttft_ms: list[float] = field(default_factory=list)
    health_ms: list[float] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    fell_back: int = 0

    def add(self, other: "LoadResult") -> None:
        """Count another load's results too."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def run_load(asking: Asking, requests: Sequence[WorkRequest], side: Side) -> LoadResult:
    """Ask all requests, and wait for the answers.

    Args:
        asking: How.
        requests: What, in order; clients take them in turn.
        side: Fused by the server's policy, or in full.
    """
    return asyncio.run(_Load(asking, side).run(requests))


class _Load:
    def __init__(self, asking: Asking, side: Side) -> None:
        self._asking = asking
        self._reuse = {"policy": "full"} if side == "full" else {}
        self._result = LoadResult()

    async def run(self, requests: Sequence[WorkRequest]) -> LoadResult:
        asking, result, waiting = self._asking, self._result, iter(requests)
        limits = httpx.Limits(max_connections=asking.num_clients)
        async with (
            httpx.AsyncClient(
                base_url=asking.base_url, timeout=None, limits=limits, trust_env=False
            ) as client,
            httpx.AsyncClient(
                base_url=asking.base_url, timeout=asking.max_seconds, trust_env=False
            ) as health_client,
        ):
            model = (await client.get("/v1/models")).json()["data"][0]["id"]
            health = asyncio.create_task(self._watch_health(health_client))
            began = time.perf_counter()
            tasks = [
                asyncio.create_task(self._ask_in_turn(client, model, waiting))
                for _ in range(asking.num_clients)
            ]
            _, late = await asyncio.wait(tasks, timeout=asking.max_seconds)
            result.seconds = time.perf_counter() - began
            result.cut_off = len(late)
            for task in (*late, health):
                task.cancel()
            ends = await asyncio.gather(*tasks, health, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end
        return result

    async def _watch_health(self, client: httpx.AsyncClient) -> None:
        while True:
            began = time.perf_counter()
            try:
                (await client.get(HEALTH_PATH)).raise_for_status()
            except httpx.HTTPError as error:
                self._result.failures.append(f"{HEALTH_PATH}: {type(error).__name__}")
            self._result.health_ms.append((time.perf_counter() - began) * 1e3)
            await asyncio.sleep(HEALTH_PAUSE_SECONDS)

    async def _ask_in_turn(
        self, client: httpx.AsyncClient, model: str, waiting: Iterator[WorkRequest]
    ) -> None:
        for request in waiting:
            try:
                if request.is_repeated:
                    await self._ask_with_logits(client, model, request)
                else:
                    await self._ask_streamed(client, request)
            except (httpx.HTTPError, _RefusedError) as error:
                self._result.failures.append(str(error) or type(error).__name__)

    async def _ask_streamed(self, client: httpx.AsyncClient, request: WorkRequest) -> None:
        body = {
            "query": request.question,
            "document_ids": request.document_ids,
            "max_tokens": self._asking.max_tokens,
            "stream": True,
            "chunkcache": self._reuse,
        }
        began = time.perf_counter()
        first_ms: float | None = None
        async with client.stream("POST", "/v1/query", json=body) as response:
            if response.status_code != 200:
                raise _RefusedError((await response.aread()).decode(errors="replace"))
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event: dict[str, Any] = json.loads(line.removeprefix("data: "))
                if event["type"] == "response.output_text.delta" and first_ms is None:
                    first_ms = (time.perf_counter() - began) * 1e3
                elif event["type"] == "response.completed":
                    self._count(event["response"])
                    if first_ms is not None:
                        timings = event["response"]["chunkcache"]["timings"]
                        self._result.ttft_ms.append(first_ms)
                        self._result.engine_ttft_ms.append(timings["ttft_ms"])
                    return
                elif event["type"] == "error":
                    raise _RefusedError(str(event["error"]["code"]))
        raise _RefusedError("the stream ended without its report")

    async def _ask_with_logits(
        self, client: httpx.AsyncClient, model: str, request: WorkRequest
    ) -> None:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": request.question}],
            "documents": [{"id": name} for name in request.document_ids],
            "max_tokens": self._asking.max_tokens,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": TOP_LOGPROBS,
            "chunkcache": self._reuse,
        }
        response = await client.post("/v1/chat/completions", json=body)
        if response.status_code != 200:
            raise _RefusedError(response.text)
        answer = response.json()
        self._count(answer)
        (choice,) = answer["choices"]
        told = [choice["message"]["content"], choice["logprobs"], choice["finish_reason"]]
        self._result.repeated.append(json.dumps(told))

    def _count(self, answer: dict[str, Any]) -> None:
        result, usage, reuse = self._result, answer["usage"], answer["chunkcache"]
        result.completed += 1
        result.prompt_tokens += usage["prompt_tokens"]
        result.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
        result.fell_back += (
            reuse["policy"].partition("(")[0] != (reuse["requested_policy"].partition("(")[0])
        )


class _RefusedError(Exception):
    """The server did not answer a request."""

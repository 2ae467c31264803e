"""The OpenAI Python client, unmodified, in strict validation of responses."""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI

from chunkcache.chunk_cache import ChunkCache
from chunkcache.planning import AskOptions, ChatTurn
from chunkcache.runtime import Runtime

Serve = Callable[[FastAPI], AbstractContextManager[httpx.Client]]

QUESTION = "What is the code of door 3?"
ASK: dict[str, Any] = {
    "model": "tiny-llama",
    "messages": [{"role": "user", "content": QUESTION}],
    "max_completion_tokens": 8,
    "temperature": 0,
}
DOCUMENTS = {"documents": [{"id": "handbook"}]}

pytestmark = pytest.mark.usefixtures("handbook")


@pytest.fixture(scope="module")
def api(client: httpx.Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{client.base_url}/v1",
        api_key="none",
        max_retries=0,
        _strict_response_validation=True,
    ) as api:
        yield api


def check_usage(usage: Any) -> None:
    """Invariant 7, in the fields that a client sees."""
    details = usage.prompt_tokens_details.model_dump()
    counted = ("exact_prefix_tokens", "fused_tokens", "recomputed_tokens", "computed_tokens")
    assert sum(details[name] for name in counted) == usage.prompt_tokens
    assert details["cached_tokens"] == details["exact_prefix_tokens"] + details["fused_tokens"]
    assert details["cached_tokens"] == sum(details["cached_tokens_by_source"].values())
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_completion_over_documents(api: openai.OpenAI, runtime: Runtime) -> None:
    done = api.chat.completions.create(**ASK, extra_body=DOCUMENTS)
    turn = ChatTurn(QUESTION, ["handbook"])
    same = ChunkCache(runtime).chat([turn], AskOptions(max_tokens=8)).answer()
    (choice,) = done.choices
    assert (choice.message.role, choice.message.content) == ("assistant", same.text)
    assert (choice.finish_reason, choice.index, choice.logprobs) == ("length", 0, None)
    assert done.id.startswith("chatcmpl-")
    assert (done.object, done.model) == ("chat.completion", "tiny-llama")
    assert done.system_fingerprint is not None
    check_usage(done.usage)
    assert done.usage is not None
    assert done.usage.prompt_tokens_details is not None
    assert done.usage.prompt_tokens_details.cached_tokens
    reuse = done.to_dict()["chunkcache"]
    assert reuse["documents"][0]["id"] == "handbook"  # type: ignore[index]


def test_without_documents_nothing_is_added_to_the_text(
    api: openai.OpenAI, runtime: Runtime
) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *ASK["messages"]]
    done = api.chat.completions.create(**ASK | {"messages": messages})
    text = (
        f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{QUESTION}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    plan = ChunkCache(runtime).plan_chat([ChatTurn(QUESTION)], AskOptions(system="Be brief."))
    ids = plan.layout.token_ids
    assert "".join(runtime.model.tokenizer.decode_each(ids)) == text
    assert done.usage is not None
    assert done.usage.prompt_tokens == len(ids)


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_tells_the_same(api: openai.OpenAI, n: int) -> None:
    fields = ASK | {"temperature": 1.2, "seed": 5, "n": n}
    whole = api.chat.completions.create(**fields, extra_body=DOCUMENTS)
    chunks = list(
        api.chat.completions.create(
            **fields,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=DOCUMENTS,
        )
    )
    assert {c.object for c in chunks} == {"chat.completion.chunk"}
    assert len({(c.id, c.created, c.system_fingerprint) for c in chunks}) == 1
    assert [c.choices[0].delta.role for c in chunks[:n]] == ["assistant"] * n
    assert chunks[-1].choices == []
    check_usage(chunks[-1].usage)
    assert all(c.usage is None for c in chunks[:-1])
    for choice in whole.choices:
        mine = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == choice.index]
        assert "".join(c.delta.content or "" for c in mine) == choice.message.content
        assert [c.finish_reason for c in mine if c.finish_reason] == [choice.finish_reason]
        assert mine[-1].finish_reason
    assert len({c.message.content for c in whole.choices}) == n
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 8 * n


def test_a_stream_without_usage_has_none(api: openai.OpenAI) -> None:
    chunks = list(api.chat.completions.create(**ASK, stream=True))
    assert all(len(c.choices) == 1 and c.usage is None for c in chunks)


def test_the_stream_helper(api: openai.OpenAI) -> None:
    text = api.chat.completions.create(**ASK).choices[0].message.content
    assert text is not None
    fields = ASK | {"stop": [text[4:6]]}  # the helper takes an answer cut for its length as failed
    whole = api.chat.completions.create(**fields)
    with api.chat.completions.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert kinds[-1] == "content.done"
    assert final.choices[0].message.content == whole.choices[0].message.content


async def test_the_asynchronous_client(client: httpx.Client, api: openai.OpenAI) -> None:
    whole = api.chat.completions.create(**ASK)
    async with openai.AsyncOpenAI(
        base_url=f"{client.base_url}/v1", api_key="none", _strict_response_validation=True
    ) as asynchronous:
        stream = await asynchronous.chat.completions.create(**ASK, stream=True)
        text = "".join([c.choices[0].delta.content or "" async for c in stream])
    assert text == whole.choices[0].message.content


def test_log_probabilities(api: openai.OpenAI) -> None:
    fields = ASK | {"logprobs": True, "top_logprobs": 3}
    whole = api.chat.completions.create(**fields)
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 8
    for token in logprobs.content:
        assert token.top_logprobs[0].token == token.token
        assert token.top_logprobs[0].logprob == token.logprob <= 0
        assert len(token.top_logprobs) == 3
        assert token.bytes is None or bytes(token.bytes).decode() == token.token
    streamed = []
    for chunk in api.chat.completions.create(**fields, stream=True):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content or []
    assert streamed == logprobs.content


def test_stop_strings(api: openai.OpenAI) -> None:
    whole = api.chat.completions.create(**ASK | {"max_completion_tokens": 24})
    text = whole.choices[0].message.content
    assert text is not None
    stop = text[5:8]
    cut = text[: text.index(stop)]
    for given in (stop, ["\x00never", stop]):
        done = api.chat.completions.create(**ASK | {"max_completion_tokens": 24}, stop=given)
        assert (done.choices[0].message.content, done.choices[0].finish_reason) == (cut, "stop")
    chunks = list(
        api.chat.completions.create(
            **ASK | {"max_completion_tokens": 24}, stop=[stop], stream=True, logprobs=True
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == cut
    shown = [c.choices[0].logprobs for c in chunks]
    tokens = [t.token for s in shown if s is not None for t in s.content or []]
    assert len("".join(tokens)) < len(text)


def test_the_same_seed_draws_the_same(api: openai.OpenAI) -> None:
    def draw(**fields: Any) -> str | None:
        done = api.chat.completions.create(**ASK | {"temperature": 1.5} | fields)
        return done.choices[0].message.content

    assert draw(seed=1) == draw(seed=1) != draw(seed=2)
    assert draw() != draw()


def test_answers_in_json(api: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"code": {"type": "integer"}, "open": {"type": "boolean"}},
        "required": ["code", "open"],
        "additionalProperties": False,
    }
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "door", "schema": schema}}
    fields = ASK | {"max_completion_tokens": 400, "temperature": 1, "seed": 3}
    done = api.chat.completions.create(**fields, response_format=wanted, n=2)
    for choice in done.choices:
        assert choice.finish_reason == "stop"
        value = json.loads(choice.message.content or "")
        assert set(value) == {"code", "open"}
        assert isinstance(value["code"], int)
    free = api.chat.completions.create(**fields, response_format={"type": "json_object"})
    assert (free.choices[0].message.content or "").startswith("{")


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"extra_body": {"documents": [{"id": "no"}]}}, openai.NotFoundError, "documents"),
        ({"max_completion_tokens": 0}, openai.BadRequestError, "max_completion_tokens"),
        ({"tools": [{"type": "function"}]}, openai.BadRequestError, "tools"),
        ({"frequency_penalty": 0.5}, openai.BadRequestError, "frequency_penalty"),
    ],
)
def test_errors_are_the_client_s_own(
    api: openai.OpenAI, fields: dict[str, Any], kind: type[openai.APIStatusError], param: str
) -> None:
    with pytest.raises(kind) as caught:
        api.chat.completions.create(**ASK | fields)
    assert caught.value.param == param
    assert caught.value.code
    with pytest.raises(kind):
        api.chat.completions.create(**ASK | fields, stream=True)


def test_models(api: openai.OpenAI) -> None:
    (listed,) = api.models.list().data
    assert api.models.retrieve("tiny-llama") == listed
    with pytest.raises(openai.NotFoundError) as caught:
        api.models.retrieve("other/model")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_a_reply_can_be_sent_back_as_it_came(api: openai.OpenAI) -> None:
    first = api.chat.completions.create(**ASK, extra_body=DOCUMENTS)
    messages = [*ASK["messages"], first.choices[0].message, {"role": "user", "content": "Why?"}]
    done = api.chat.completions.create(**ASK | {"messages": messages}, extra_body=DOCUMENTS)
    again = api.chat.completions.create(**ASK | {"messages": messages}, extra_body=DOCUMENTS)
    assert done.choices[0].message == again.choices[0].message
    check_usage(again.usage)


def test_a_busy_server_is_asked_again(
    client: httpx.Client, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's retries, by the status and header that it looks for."""
    from chunkcache.engine.engine import Engine
    from chunkcache.errors import QueueFullError

    submit, refusals = Engine.submit, iter([True, True])

    def hesitant(self: Engine, *args: Any, **kwargs: Any) -> Any:
        if next(refusals, False):
            raise QueueFullError("full")
        return submit(self, *args, **kwargs)

    monkeypatch.setattr(Engine, "submit", hesitant)
    monkeypatch.setattr("chunkcache_api.error_responses.RETRY_AFTER_SECONDS", 0)
    monkeypatch.setattr(openai.OpenAI, "_calculate_retry_timeout", lambda *_: 0.0)
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="x", max_retries=2) as api:
        assert api.chat.completions.create(**ASK).choices
    with pytest.raises(StopIteration):
        next(refusals)

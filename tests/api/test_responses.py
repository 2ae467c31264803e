"""``/v1/responses`` through the OpenAI Python client, in strict validation, and as plain HTTP."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from structlog.testing import capture_logs

from chunkcache.chunk_cache import ChunkCache
from chunkcache.engine.decode import DecodeTile
from chunkcache.planning import AskOptions, ChatTurn
from chunkcache.runtime import Runtime

QUESTION = "What is the code of door 3?"
ASK: dict[str, Any] = {
    "model": "tiny-llama",
    "input": QUESTION,
    "max_output_tokens": 8,
    "temperature": 0,
}
FILE = {"type": "input_file", "file_id": "handbook"}
TEXT = {"type": "input_text", "text": QUESTION}
OVER_FILE: dict[str, Any] = ASK | {"input": [{"role": "user", "content": [FILE, TEXT]}]}
YES: dict[str, Any] = {
    "format": {"type": "json_schema", "name": "yes", "schema": {"const": "yes"}},
}
"""An answer that ends by itself, whatever the tiny model would say."""

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


def refusal(response: httpx.Response) -> tuple[int, str, str | None]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]


def test_a_response_over_a_file(api: openai.OpenAI, runtime: Runtime, client: httpx.Client) -> None:
    done = api.responses.create(**OVER_FILE, metadata={"shift": "night"}, user="ann")
    same = ChunkCache(runtime).chat([ChatTurn(QUESTION, ["handbook"])], AskOptions(max_tokens=8))
    assert done.output_text == same.answer().text
    assert done.id.startswith("resp_")
    assert (done.status, done.model, done.user) == ("incomplete", "tiny-llama", "ann")
    assert done.incomplete_details is not None
    assert done.incomplete_details.reason == "max_output_tokens"
    assert done.metadata == {"shift": "night"}
    assert done.usage is not None
    details = done.usage.input_tokens_details
    assert details.cached_tokens > 0
    counted = details.model_dump()
    names = ("exact_prefix_tokens", "fused_tokens", "recomputed_tokens", "computed_tokens")
    assert sum(counted[n] for n in names) == done.usage.input_tokens
    assert done.usage.output_tokens == 8
    account = client.get(f"/v1/requests/{done.id}").json()
    assert (account["endpoint"], account["metadata"]) == ("/v1/responses", {"shift": "night"})
    assert QUESTION not in json.dumps(account)


def test_a_stream_tells_the_same(api: openai.OpenAI) -> None:
    whole = api.responses.create(**OVER_FILE)
    events = list(api.responses.create(**OVER_FILE, stream=True))
    kinds = [e.type for e in events]
    num_deltas = kinds.count("response.output_text.delta")
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * num_deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [e.sequence_number for e in events] == list(range(len(events)))
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    first, last = events[0], events[-1]
    assert first.type == "response.created"
    assert last.type == "response.incomplete"
    assert first.response.id == last.response.id
    assert last.response.output[0] == last.response.output[0]
    assert last.response.output_text == whole.output_text
    assert last.response.usage == whole.usage


def test_the_stream_helper(api: openai.OpenAI) -> None:
    with api.responses.stream(**ASK | {"text": YES, "max_output_tokens": 64}) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[-1] == "response.completed"
    assert json.loads(final.output_text) == "yes"


def test_each_event_says_its_name_outside_of_the_json(client: httpx.Client) -> None:
    response = client.post("/v1/responses", json=ASK | {"stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *named, done = response.text.strip().split("\n\n")
    assert done == "data: [DONE]"
    for item in named:
        name, data = item.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


def test_log_probabilities(api: openai.OpenAI) -> None:
    fields: dict[str, Any] = ASK | {
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    done = api.responses.create(**fields)
    message = done.output[0]
    assert message.type == "message"
    part = message.content[0]
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert [len(t.top_logprobs) for t in part.logprobs] == [2] * 8
    events = list(api.responses.create(**fields, stream=True))
    streamed = [t for e in events if e.type == "response.output_text.delta" for t in e.logprobs]
    assert [t.logprob for t in streamed] == [t.logprob for t in part.logprobs]


def test_instructions_and_system_messages_are_the_system_prompt(
    api: openai.OpenAI, runtime: Runtime
) -> None:
    done = api.responses.create(
        **ASK
        | {
            "instructions": "Be brief.",
            "input": [
                {"role": "developer", "content": "Answer in Czech."},
                {"role": "user", "content": QUESTION},
            ],
        }
    )
    options = AskOptions(system="Be brief.\n\nAnswer in Czech.", max_tokens=8)
    same = ChunkCache(runtime).chat([ChatTurn(QUESTION)], options).answer()
    assert done.output_text == same.text
    assert done.instructions == "Be brief."


def test_a_reply_can_be_sent_back_as_it_came(api: openai.OpenAI, runtime: Runtime) -> None:
    first = api.responses.create(**OVER_FILE)
    again: Any = [
        *OVER_FILE["input"],
        *[item.model_dump() for item in first.output],
        {"role": "user", "content": "Why?"},
    ]
    done = api.responses.create(**ASK | {"input": again})
    turns = [ChatTurn(QUESTION, ["handbook"], first.output_text), ChatTurn("Why?")]
    same = ChunkCache(runtime).chat(turns, AskOptions(max_tokens=8)).answer()
    assert done.output_text == same.text


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"model": "other"}, 404, "model_not_found", "model"),
        ({"input": []}, 400, "invalid_value", "input"),
        ({"input": None}, 400, "invalid_value", "input"),
        ({"input": [{"role": "user", "content": [FILE | {"file_id": "no"}]}]}, 404, None, "input"),
        ({"previous_response_id": "resp_1"}, 400, "unsupported_parameter", "previous_response_id"),
        ({"store": True}, 400, "unsupported_parameter", "store"),
        ({"background": True}, 400, "unsupported_parameter", "background"),
        ({"conversation": "conv_1"}, 400, "unsupported_parameter", "conversation"),
        ({"truncation": "auto"}, 400, "unsupported_parameter", "truncation"),
        ({"tools": [{"type": "web_search"}]}, 400, "unsupported_parameter", "tools"),
        ({"include": ["web_search_call.results"]}, 400, "unsupported_parameter", "include[0]"),
        ({"top_logprobs": 2}, 400, "invalid_value", "top_logprobs"),
        ({"max_output_tokens": 0}, 400, "invalid_value", "max_output_tokens"),
        ({"max_output_tokens": 10**9}, 400, "invalid_value", "max_output_tokens"),
        ({"temperature": 3}, 400, "invalid_value", "temperature"),
        ({"text": {"format": {"type": "json_schema"}}}, 400, "invalid_value", "text.format"),
        ({"nonsense": 1}, 400, "unsupported_parameter", "nonsense"),
        ({"input": [{"role": "assistant", "content": "No."}]}, 400, None, "input[0].role"),
        ({"input": [{"role": "system", "content": "No."}]}, 400, None, "input[0].role"),
        ({"input": [{"role": "tool", "content": "No."}]}, 400, None, "input[0].role"),
        (
            {"input": [{"type": "item_reference", "id": "msg_1"}]},
            400,
            "unsupported_parameter",
            "input[0].type",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_data": "eA=="}]}]},
            400,
            "unsupported_parameter",
            "input[0].content[0].file_data",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
            400,
            "invalid_value",
            "input[0].content[0].file_id",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            400,
            "invalid_value",
            "input[0].content[0].text",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_done_is_refused(
    client: httpx.Client,
    fields: dict[str, Any],
    status: int,
    code: str | None,
    param: str,
    stream: bool,
) -> None:
    found = refusal(client.post("/v1/responses", json=ASK | {"stream": stream} | fields))
    assert (found[0], found[2]) == (status, param)
    assert code is None or found[1] == code


def test_options_of_streams(client: httpx.Client) -> None:
    options = {"stream_options": {"include_usage": True}}
    whole = client.post("/v1/responses", json=ASK | options)
    assert refusal(whole) == (400, "invalid_value", "stream_options")
    streamed = client.post("/v1/responses", json=ASK | options | {"stream": True})
    assert refusal(streamed) == (400, "unsupported_parameter", "stream_options.include_usage")


def test_a_failure_behind_the_headers_is_a_failed_response(
    client: httpx.Client, api: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, steps = DecodeTile.step, iter(range(3))

    def failing(self: DecodeTile, *args: Any, **kwargs: Any) -> Any:
        if next(steps, None) is None:
            raise RuntimeError("secret path /srv/x")
        return run(self, *args, **kwargs)

    monkeypatch.setattr(DecodeTile, "step", failing)
    with capture_logs():
        events = list(api.responses.create(**OVER_FILE, stream=True))
    error, failed = events[-2:]
    assert error.type == "error"
    assert error.code == "internal_error"
    assert failed.type == "response.failed"
    assert failed.response.status == "failed"
    assert failed.response.error is not None
    assert failed.response.error.code == "server_error"
    assert "secret" not in failed.response.error.message


def test_a_dry_run_says_what_would_run(client: httpx.Client) -> None:
    plan = client.post("/v1/responses", json=OVER_FILE | {"chunkcache": {"dry_run": True}}).json()
    assert plan["object"] == "chunkcache.plan"
    assert plan["documents"][0]["id"] == "handbook"


REQUIRED = [
    "background",
    "completed_at",
    "created_at",
    "error",
    "frequency_penalty",
    "id",
    "incomplete_details",
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "metadata",
    "model",
    "object",
    "output",
    "parallel_tool_calls",
    "presence_penalty",
    "previous_response_id",
    "prompt_cache_key",
    "reasoning",
    "safety_identifier",
    "service_tier",
    "status",
    "store",
    "temperature",
    "text",
    "tool_choice",
    "tools",
    "top_logprobs",
    "top_p",
    "truncation",
    "usage",
    "user",
]
"""What Open Responses (2026-04-24) wants in every response."""

WEATHER = {
    "type": "function",
    "name": "weather_at",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
}


def says(role: str, content: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content}


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param([says("user", "Greet me in a word or two.")], id="basic"),
        pytest.param(
            [says("system", "You talk like a sailor."), says("user", "Greet me.")], id="system"
        ),
        pytest.param(
            [
                says("user", "I am called Berta."),
                says("assistant", "Good day, Berta."),
                says("user", "What am I called?"),
            ],
            id="turns",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_compliance_with_open_responses(
    client: httpx.Client, messages: list[dict[str, Any]], stream: bool
) -> None:
    """Its cases of text: one message, a stream, a system message, several turns."""
    body = {"model": "tiny-llama", "input": messages, "text": YES, "stream": stream}
    response = client.post("/v1/responses", json=body)
    assert response.status_code == 200
    if stream:
        events = [
            json.loads(line.removeprefix("data: "))
            for line in response.text.splitlines()
            if line.startswith("data: {")
        ]
        assert all({"type", "sequence_number"} <= e.keys() for e in events)
        assert events[-1]["type"] == "response.completed"
        found = events[-1]["response"]
    else:
        found = response.json()
    assert set(REQUIRED) <= found.keys()
    assert (found["object"], found["status"], found["error"]) == ("response", "completed", None)
    assert found["completed_at"] >= found["created_at"]
    (message,) = found["output"]
    assert (message["type"], message["role"], message["status"]) == (
        "message",
        "assistant",
        "completed",
    )
    assert message["content"][0]["text"] == '"yes"'
    usage = found["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        pytest.param({"tools": [WEATHER]}, "tools", id="tools"),
        pytest.param({"tools": [WEATHER], "stream": True}, "tools", id="tools-streamed"),
        pytest.param(
            {
                "input": [
                    says(
                        "user",
                        [
                            {"type": "input_text", "text": "What is in the picture?"},
                            {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0K"},
                        ],
                    )
                ]
            },
            "input[0].content[1].type",
            id="picture",
        ),
    ],
)
def test_cases_of_open_responses_that_are_refused(
    client: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    """Calls of functions and pictures are not of this service: it says so, and runs nothing."""
    found = refusal(client.post("/v1/responses", json=ASK | fields))
    assert found == (400, "unsupported_parameter", param)

"""Server-sent events of ``/v1/query``: the same answer, well framed, with an honest end."""

import json
from collections.abc import Callable, Sequence

import httpx
import pytest
import torch

from chunkcache.chunk_cache import ChunkCache
from chunkcache.engine.decode import DecodeRow, DecodeTile
from chunkcache.engine.sampling import Sampler
from chunkcache.planning import AskOptions
from chunkcache.runtime import Runtime

BODY = {"query": "What is the code of door 3?", "document_ids": ["handbook"], "max_tokens": 12}

Script = Callable[[str], int]

pytestmark = pytest.mark.usefixtures("handbook")


def frames_of(response: httpx.Response) -> list[str]:
    """What stands between empty lines, by the standard's three line ends alone."""
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    text = response.read().decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    assert text.endswith("\n\n")
    # A slow machine may have had time for comments, which clients drop.
    return [frame for frame in text.split("\n\n")[:-1] if not frame.startswith(":")]


def stream(client: httpx.Client, **fields: object) -> tuple[list[dict], bool]:
    """Events in order, and whether the stream said that it was done."""
    response = client.post("/v1/query", json=BODY | {"stream": True} | fields)
    frames = frames_of(response)
    assert all(f.startswith("data: ") and len(f.splitlines()) == 1 for f in frames)
    data = [f.removeprefix("data: ") for f in frames]
    is_done = data[-1] == "[DONE]"
    events = [json.loads(d) for d in data if d != "[DONE]"]
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    return events, is_done


def text_of(events: list[dict]) -> str:
    return "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")


def test_a_stream_tells_the_same_answer(client: httpx.Client) -> None:
    client.post("/v1/query", json=BODY)  # from now on the prompt's opening is known
    whole = client.post("/v1/query", json=BODY).json()
    events, is_done = stream(client)
    assert is_done
    assert events[0]["type"] == "response.created"
    assert events[-1]["type"] == "response.completed"
    assert {e["type"] for e in events[1:-1]} == {"response.output_text.delta"}
    completed = events[-1]["response"]
    assert text_of(events) == completed["answer"] == whole["answer"]
    assert completed["usage"] == whole["usage"]
    assert events[0]["response"]["id"] == completed["id"]
    assert events[0]["response"]["model"] == completed["model"] == "tiny-llama"


def test_verify_comes_with_the_end(client: httpx.Client) -> None:
    events, is_done = stream(client, chunkcache={"verify": True})
    assert is_done
    verify = events[-1]["response"]["chunkcache"]["verify"]
    assert verify["kl_first"] >= 0
    exact = client.post("/v1/query", json=BODY | {"chunkcache": {"policy": "full"}}).json()
    assert verify["full_answer"] == exact["answer"]


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"document_ids": ["nowhere"]}, 404, "document_not_found"),
        ({"document_ids": ["handbook"] * 20}, 400, "context_length_exceeded"),
        ({"max_tokens": 10**6}, 400, "invalid_value"),
        ({"model": "other"}, 404, "model_not_found"),
    ],
)
def test_what_is_refused_at_once_is_no_stream(
    client: httpx.Client, fields: dict, status: int, code: str
) -> None:
    response = client.post("/v1/query", json=BODY | {"stream": True} | fields)
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"]["code"] == code


@pytest.fixture
def failing_fifth_step(monkeypatch: pytest.MonkeyPatch) -> None:
    step = DecodeTile.step
    calls = iter(range(10**9))

    def failing(self: DecodeTile, rows: Sequence[DecodeRow]) -> torch.Tensor:
        if next(calls) == 4:
            raise RuntimeError("broken at /secret/path")
        return step(self, rows)

    monkeypatch.setattr(DecodeTile, "step", failing)


@pytest.mark.usefixtures("failing_fifth_step")
def test_a_failure_behind_the_headers_is_an_error_event(
    client: httpx.Client, runtime: Runtime
) -> None:
    """A06: streaming."""
    events, is_done = stream(client)
    assert not is_done
    assert [e["type"] for e in events[:1]] == ["response.created"]
    assert [e["type"] for e in events].count("error") == 1
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["code"] == "internal_error"
    assert "secret" not in json.dumps(events)
    assert runtime.engine.num_open_requests == 0
    assert stream(client)[1]


@pytest.mark.usefixtures("failing_fifth_step")
def test_a_failure_of_an_answer_that_is_no_stream_is_a_500(client: httpx.Client) -> None:
    """A06: not streaming."""
    response = client.post("/v1/query", json=BODY)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text
    assert client.post("/v1/query", json=BODY).status_code == 200


def test_a_miss_behind_the_headers_is_an_error_event(
    client: httpx.Client, runtime: Runtime
) -> None:
    client.put("/v1/documents/gone", json={"text": "The mast is nine metres high."})
    plan = ChunkCache(runtime).plan("q", ["gone"], AskOptions())
    runtime.stack.drop([i.key() for i in plan.identities])
    events, is_done = stream(client, document_ids=["gone"], chunkcache={"on_miss": "error"})
    assert not is_done
    assert events[-1]["error"]["code"] == "cache_miss"


HOSTILE_TEXTS = [
    "🙂 日本語 Příliš žluťoučký kůň 👩‍👩‍👧‍👦 ḱ",
    "\n\n",
    "a\r\nb\rc\n\nd",
    "data: x\n\ndata: [DONE]\n\nevent: error",
    ": comment\nid: 1\nretry: 1",
    "\u2028\u2029\u0085\x0b\x0c\x1c\x00\ufeff",
    '"\\ <|im_end|> </script>',
]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch, runtime: Runtime) -> Script:
    """Have every answer be a given text, whatever the model thinks; gives its tokens' number."""

    def script(text: str) -> int:
        ids = runtime.model.tokenizer.encode_content(text)

        def draw(self: Sampler, logits: torch.Tensor) -> int:
            index = self.__dict__.setdefault("num_drawn", 0)
            self.__dict__["num_drawn"] += 1
            return ids[index % len(ids)]

        monkeypatch.setattr(Sampler, "draw", draw)
        return len(ids)

    return script


@pytest.mark.parametrize("text", HOSTILE_TEXTS)
def test_any_text_comes_through_a_stream(client: httpx.Client, scripted: Script, text: str) -> None:
    """A04 and A07: characters over token borders, line ends, framing words."""
    num_tokens = scripted(text)
    whole = client.post("/v1/query", json=BODY | {"max_tokens": num_tokens}).json()
    events, is_done = stream(client, max_tokens=num_tokens)
    assert is_done
    assert whole["answer"] == text
    assert text_of(events) == text
    assert "\ufffd" not in text_of(events)
    assert all("\ufffd" not in e.get("delta", "") for e in events)


@pytest.mark.parametrize("text", HOSTILE_TEXTS)
def test_any_text_comes_through_a_conversation(
    client: httpx.Client, scripted: Script, text: str
) -> None:
    """A04 and A07 in the chunks of a chat completion."""
    body = {
        "model": "tiny-llama",
        "messages": [{"role": "user", "content": "What?"}],
        "max_tokens": scripted(text),
        "stream": True,
        "stop": ["never \ue000", text[:1] + "\ue000"],
    }
    frames = frames_of(client.post("/v1/chat/completions", json=body))
    assert all(f.startswith("data: ") and len(f.splitlines()) == 1 for f in frames)
    assert frames[-1] == "data: [DONE]"
    chunks = [json.loads(f.removeprefix("data: ")) for f in frames[:-1]]
    deltas = [c["choices"][0]["delta"].get("content", "") for c in chunks]
    assert "".join(deltas) == text
    assert "\ufffd" not in "".join(deltas)


def test_a_stream_that_ends_inside_a_character_still_ends(
    client: httpx.Client, scripted: Script
) -> None:
    """A04."""
    num_tokens = scripted("ok 🙂")
    whole = client.post("/v1/query", json=BODY | {"max_tokens": num_tokens - 1}).json()
    events, is_done = stream(client, max_tokens=num_tokens - 1)
    assert is_done
    assert text_of(events) == whole["answer"] == events[-1]["response"]["answer"]
    assert text_of(events).startswith("ok ")
    assert text_of(events).rstrip("\ufffd") == "ok "

"""``/v1/files``: the OpenAI Python client uploads, asks by id, streams, and deletes."""

import io
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from chunkcache.runtime import Runtime

TEXT = "The harbour opens at seven.\r\n\r\nThe tower key is kept by the baker. Door code 4017."
READ = TEXT.replace("\r\n", "\n")
QUESTION: Any = {"type": "text", "text": "Who keeps the key?"}


@pytest.fixture(scope="module")
def api(client: httpx.Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{client.base_url}/v1",
        api_key="none",
        max_retries=0,
        _strict_response_validation=True,
    ) as api:
        yield api


@pytest.fixture
def no_files(client: httpx.Client) -> Iterator[None]:
    yield
    for file in client.get("/v1/files").json()["data"]:
        client.delete(f"/v1/files/{file['id']}").raise_for_status()


def refusal(response: httpx.Response) -> tuple[int, str, str | None]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]


def upload(client: httpx.Client, text: str | bytes = TEXT, name: str = "a.txt", **fields: Any):
    data = text.encode() if isinstance(text, str) else text
    form = {"purpose": "user_data"} | fields
    return client.post("/v1/files", files={"file": (name, data)}, data=form)


@pytest.mark.usefixtures("no_files")
def test_a_file_lives_from_upload_to_deletion(api: openai.OpenAI, client: httpx.Client) -> None:
    file = api.files.create(file=("harbour.txt", TEXT.encode()), purpose="user_data")
    assert file.id.startswith("file-")
    assert (file.filename, file.purpose, file.status) == ("harbour.txt", "user_data", "processed")
    assert file.bytes == len(READ.encode())
    assert api.files.retrieve(file.id) == file
    assert [f.id for f in api.files.list()] == [file.id]
    assert api.files.content(file.id).text == READ
    document = client.get(f"/v1/documents/{file.id}").json()
    assert document["text"] == READ
    assert document["file"] == {"filename": "harbour.txt", "purpose": "user_data"}

    messages: Any = [
        {"role": "user", "content": [{"type": "file", "file": {"file_id": file.id}}, QUESTION]}
    ]
    ask: Any = {"model": "tiny-llama", "messages": messages, "max_tokens": 4, "temperature": 0}
    whole = api.chat.completions.create(**ask)
    assert whole.usage is not None
    assert whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens
    chunks = api.chat.completions.create(**ask, stream=True)
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == whole.choices[0].message.content

    deleted = api.files.delete(file.id)
    assert (deleted.id, deleted.deleted) == (file.id, True)
    with pytest.raises(openai.NotFoundError) as caught:
        api.files.retrieve(file.id)
    assert caught.value.code == "document_not_found"
    assert client.get(f"/v1/documents/{file.id}").status_code == 404


@pytest.mark.usefixtures("no_files")
def test_every_document_is_a_file(api: openai.OpenAI, client: httpx.Client) -> None:
    client.put("/v1/documents/a%2Fcontent", json={"text": TEXT}).raise_for_status()
    (file,) = api.files.list().data
    assert (file.id, file.filename, file.purpose) == ("a/content", "a/content", "user_data")
    assert client.get("/v1/files/a%2Fcontent").json()["id"] == "a/content"
    assert client.get("/v1/files/a%2Fcontent/content").text == READ
    assert refusal(client.get("/v1/files/a/content")) == (
        404,
        "document_not_found",
        "document_id",
    )
    assert api.files.content("a/content").text == READ


@pytest.mark.usefixtures("no_files")
def test_a_new_version_is_still_the_file(client: httpx.Client) -> None:
    name = upload(client).json()["id"]
    client.put(f"/v1/documents/{name}", json={"text": "Other words."}).raise_for_status()
    file = client.get(f"/v1/files/{name}").json()
    assert (file["filename"], file["bytes"]) == ("a.txt", len("Other words."))
    assert client.get("/v1/files").json()["data"] == [file]


@pytest.mark.usefixtures("no_files")
def test_pages_of_files(api: openai.OpenAI, client: httpx.Client) -> None:
    ids = {upload(client, f"Note {n}.", f"{n}.txt").json()["id"] for n in range(5)}
    upload(client, "Another.", purpose="assistants").raise_for_status()
    assert {f.id for f in api.files.list(purpose="user_data", limit=2)} == ids
    first = client.get("/v1/files", params={"limit": 2, "purpose": "user_data"}).json()
    assert (len(first["data"]), first["has_more"]) == (2, True)
    assert first["last_id"] == first["data"][-1]["id"]
    newest = [f["id"] for f in client.get("/v1/files").json()["data"]]
    oldest = [f["id"] for f in client.get("/v1/files", params={"order": "asc"}).json()["data"]]
    assert newest == oldest[::-1]
    for params in ({"after": "gone"}, {"limit": 0}, {"order": "up"}, {"nonsense": 1}):
        assert refusal(client.get("/v1/files", params=params))[::2] == (400, next(iter(params)))


@pytest.mark.usefixtures("no_files")
def test_a_lifetime(client: httpx.Client, api: openai.OpenAI) -> None:
    file = api.files.create(
        file=("a.txt", TEXT.encode()),
        purpose="assistants",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert file.expires_at is not None
    assert 3599 <= file.expires_at - file.created_at <= 3601
    assert client.get(f"/v1/documents/{file.id}").json()["expires_at"] is not None


@pytest.mark.usefixtures("no_files")
def test_a_name_is_a_name_alone(client: httpx.Client, runtime: Runtime) -> None:
    """A10: no name of a client's becomes one on this machine."""
    for name in ("../../etc/passwd", "/etc/passwd", "C:\\x.txt", "..%2f..%2fx", "a" * 512):
        file = upload(client, name=name).json()
        assert file["filename"] == name.removeprefix("C:\\")  # a form's parser takes it off
        assert file["id"].startswith("file-")
        assert client.get(f"/v1/files/{file['id']}/content").text == READ


@pytest.mark.usefixtures("no_files")
def test_formats_are_read_by_the_name(client: httpx.Client) -> None:
    html = "<html><head><title>T</title></head><body><p>Key at the baker&#39;s.</p></body></html>"
    name = upload(client, html, "page.HTML").json()["id"]
    assert client.get(f"/v1/files/{name}/content").text.strip() == "Key at the baker's."
    rows = '{"id": 1, "text": "one"}\n{"id": 2, "text": "two"}\n'
    name = upload(client, rows, "rows.jsonl").json()["id"]
    assert client.get(f"/v1/files/{name}/content").text == rows


@pytest.mark.parametrize(
    ("data", "name", "fields", "code", "param"),
    [
        (b"", "a.txt", {}, "empty_document", "text"),
        (b" \n ", "a.txt", {}, "empty_document", "text"),
        (b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "a.png", {}, "invalid_value", "file"),
        (b"%PDF-1.4 nonsense", "a.pdf", {}, "invalid_value", "file"),
        (b"x", "a.txt", {"purpose": "fine-tune"}, "unsupported_parameter", "purpose"),
        (b"x", "a.txt", {"purpose": "nonsense"}, "invalid_value", "purpose"),
        (b"x", "a.txt", {"nonsense": "1"}, "unsupported_parameter", "nonsense"),
        (b"x", "a" * 513, {}, "invalid_value", "file"),
        (b"x", "a.txt", {"expires_after[seconds]": "3600"}, "invalid_value", None),
        (b"x", "a.txt", {"expires_after[anchor]": "created_at"}, "invalid_value", None),
        (
            b"x",
            "a.txt",
            {"expires_after[anchor]": "created_at", "expires_after[seconds]": "60"},
            "invalid_value",
            "expires_after[seconds]",
        ),
        (
            b"x",
            "a.txt",
            {"expires_after[anchor]": "created_at", "expires_after[seconds]": "1e4"},
            "invalid_value",
            "expires_after[seconds]",
        ),
    ],
)
def test_what_cannot_be_taken(
    client: httpx.Client,
    data: bytes,
    name: str,
    fields: dict[str, str],
    code: str,
    param: str | None,
) -> None:
    found = refusal(upload(client, data, name, **fields))
    assert found[:2] == (400, code)
    assert param is None or found[2] == param
    assert client.get("/v1/files").json()["data"] == []


def test_bodies_that_are_no_upload(client: httpx.Client) -> None:
    assert refusal(client.post("/v1/files", json={"purpose": "user_data"}))[:2] == (
        415,
        "unsupported_media_type",
    )
    form = {"content-type": "multipart/form-data; boundary=x"}
    for body in (b"", b"--x\r\nnonsense", b"--x--\r\n"):
        assert refusal(client.post("/v1/files", content=body, headers=form))[:2] == (
            400,
            "invalid_value",
        )
    no_boundary = {"content-type": "multipart/form-data"}
    assert client.post("/v1/files", content=b"x", headers=no_boundary).status_code == 400
    no_file = client.post("/v1/files", files={"purpose": (None, "user_data")})
    assert refusal(no_file) == (400, "invalid_value", "file")
    text = client.post("/v1/files", files={"purpose": (None, "user_data"), "file": (None, "x")})
    assert refusal(text) == (400, "invalid_value", "file")
    twice = [("file", ("a.txt", b"x")), ("file", ("b.txt", b"y"))]
    assert client.post("/v1/files", files=twice, data={"purpose": "user_data"}).status_code == 400
    large = upload(client, b"x" * (1 << 20))
    assert refusal(large)[:2] == (413, "body_too_large")
    assert client.get("/v1/files").json()["data"] == []


def test_a_large_field_is_refused(client: httpx.Client) -> None:
    files = {"file": ("a.txt", io.BytesIO(b"x"))}
    response = client.post("/v1/files", files=files, data={"purpose": "x" * 100_000})
    assert refusal(response)[:2] == (400, "invalid_value")

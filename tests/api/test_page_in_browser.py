"""The web page in a real headless Chromium: what a person does with it.

Skipped where there is no browser: ``apt-get install chromium`` brings one.
"""

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from fastapi import FastAPI

from chunkcache.chunk_cache import ChunkCache
from chunkcache.runtime import Runtime
from chunkcache_api.app import create_app
from chunkcache_api.auth.api_key import make_key
from chunkcache_api.auth.key_ring import KeyRing
from chunkcache_api.auth.keys_file import change_keys
from chunkcache_retriever.retriever import Retriever
from chunkcache_retriever.testing import FixedEmbedder

playwright = pytest.importorskip(
    "playwright.sync_api", reason="the package playwright, which drives a browser, is not there"
)
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no browser: neither chromium nor google-chrome is on the path"
)

Serve = Callable[[FastAPI], AbstractContextManager[httpx.Client]]
BusyEngine = Callable[[Runtime], AbstractContextManager[None]]

HANDBOOK = " ".join(f"The code of door {n} is {n * 37 % 1000}." for n in range(12))
PHONE = {"width": 360, "height": 740}
SECONDS = 30_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        # The tests may run as root, whom Chromium's sandbox refuses.
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(runtime: Runtime, serve: Serve) -> Iterator[httpx.Client]:
    def retriever(cache: ChunkCache) -> Retriever:
        return Retriever(cache, FixedEmbedder())

    with serve(create_app(runtime, retriever_factory=retriever)) as client:
        yield client


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens the page of a server; fails on errors of its scripts and on requests elsewhere."""
    faults: list[str] = []
    contexts: list[Any] = []

    def open_it(client: httpx.Client, tab: str = "ask", **options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(SECONDS)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on(
            "console",
            lambda m: m.type == "error" and "status of 4" not in m.text and faults.append(m.text),
        )
        origin = str(client.base_url).rstrip("/")
        page.on("request", lambda r: r.url.startswith(origin) or faults.append(r.url))
        page.goto(f"{origin}/#{tab}")
        return page

    yield open_it
    for context in contexts:
        context.close()
    assert faults == []


@pytest.fixture(autouse=True)
def nothing_stored(server: httpx.Client) -> Iterator[None]:
    """Each test begins and ends with an empty store."""
    yield
    for document in server.get("/v1/documents").json()["data"]:
        server.delete(f"/v1/documents/{quote(document['id'], safe='')}").raise_for_status()


@pytest.fixture
def handbook(server: httpx.Client) -> str:
    server.put("/v1/documents/handbook", json={"text": HANDBOOK}).raise_for_status()
    return "handbook"


def pick_and_ask(page: Any, name: str, question: str = "What is the code of door 3?") -> Any:
    """Asks over one document; gives the finished answer's card."""
    page.get_by_label("Let me pick").check()
    page.get_by_role("checkbox", name=name).check()
    page.get_by_label("Question", exact=True).fill(question)
    page.get_by_text("Options").click()
    page.get_by_label("Answer tokens").fill("6")
    page.get_by_role("button", name="Ask", exact=True).click()
    card = page.locator("article").first
    card.get_by_text(re.compile("tokens, ended by")).wait_for()
    return card


def test_a_question_its_prompt_in_colours_and_the_full_prefill_beside_it(
    server: httpx.Client, handbook: str, open_page: Callable[..., Any]
) -> None:
    page = open_page(server)
    card = pick_and_ask(page, handbook)
    prompt = card.get_by_role("region", name="The prompt")
    pieces = prompt.locator("span").evaluate_all(
        "all => all.map(x => [x.className, x.textContent, getComputedStyle(x).backgroundColor])"
    )
    assert HANDBOOK in "".join(text for _, text, _ in pieces)
    colours = {use: colour for use, _, colour in pieces}
    assert {"fused", "recomputed", "computed"} <= colours.keys()
    assert len(set(colours.values())) == len(colours)

    body = {"query": "What is the code of door 3?", "document_ids": [handbook], "max_tokens": 6}
    answer = server.post("/v1/query", json=body).json()
    assert card.locator(".answer-text").text_content() == answer["answer"]
    details = answer["usage"]["prompt_tokens_details"]
    legend = card.get_by_role("list", name="Prompt tokens").inner_text()
    assert f"recomputed {details['recomputed_tokens']}" in legend
    assert f"reused {details['fused_tokens']}" in legend

    page.get_by_role("button", name="Compare with a full prefill").click()
    full = page.locator("article").nth(1)
    full.get_by_text(re.compile("tokens, ended by")).wait_for()
    exact = server.post("/v1/query", json=body | {"chunkcache": {"policy": "full"}}).json()
    assert full.locator(".answer-text").text_content() == exact["answer"]
    for each in (card, full):
        shown = each.locator("dl.facts").inner_text()
        assert re.search(r"First token\s+[\d.,]+ m?s", shown), shown
        assert re.search(r"Seen here after\s+[\d.,]+ m?s", shown), shown
    assert page.get_by_role("button", name="Compare with a full prefill").is_hidden()


def test_an_answer_is_measured_against_the_full_prefill_where_that_is_asked_for(
    server: httpx.Client, handbook: str, open_page: Callable[..., Any]
) -> None:
    page = open_page(server)
    page.get_by_text("Options").click()
    page.get_by_label("Measure how close").check()
    page.get_by_text("Options").click()
    card = pick_and_ask(page, handbook)
    assert card.get_by_role("heading", name="Beside the full prefill").is_visible()
    assert re.search(r"\d\.\d{4} nats", card.inner_text())


def test_passages_are_found_for_a_question(
    server: httpx.Client, handbook: str, open_page: Callable[..., Any]
) -> None:
    page = open_page(server)
    page.get_by_label("Question", exact=True).fill("code of door 3")
    page.get_by_label("Passages", exact=True).fill("2")
    page.get_by_role("button", name="Ask", exact=True).click()
    page.locator("article").get_by_text(re.compile("tokens, ended by")).wait_for()
    assert page.locator("article table tbody tr").all_inner_texts()[0].startswith(handbook)


def test_what_documents_say_is_shown_and_never_run(
    server: httpx.Client, open_page: Callable[..., Any]
) -> None:
    name = "<img src=x onerror=document.title='run'>"
    text = "<script>document.title='run'</script> <b>bold</b> The door code is 4017."
    page = open_page(server, "documents")
    page.get_by_label("or an id").fill(name)
    page.get_by_label("with its text").fill(text)
    page.get_by_role("button", name="Store").click()
    page.locator("td.id").get_by_text(name).wait_for()
    page.get_by_role("button", name=f"Show {name}").click()
    playwright.expect(page.locator("#viewer-text")).to_have_text(text)
    page.get_by_role("button", name="Close").click()
    page.get_by_role("tab", name="Ask").click()
    card = pick_and_ask(page, name)
    assert text in card.get_by_role("region", name="The prompt").text_content()
    assert page.title() == "chunkcache"
    page.get_by_role("tab", name="Documents").click()
    page.get_by_role("button", name=f"Delete {name}").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    page.get_by_text("nothing is stored yet").wait_for()
    assert server.get("/v1/documents").json()["data"] == []


def test_files_are_stored_listed_by_pages_and_kept_when_deleting_is_declined(
    server: httpx.Client, open_page: Callable[..., Any], tmp_path: Path
) -> None:
    files = [tmp_path / f"note-{n:02}.txt" for n in range(27)]
    for file in files:
        file.write_text(f"The number of {file.stem} is {len(file.stem)}.")
    page = open_page(server, "documents")
    page.get_by_label("Text files").set_input_files(files)
    page.get_by_role("button", name="Store").click()
    page.get_by_text("27 stored").wait_for()
    rows = page.locator("#documents-table tbody tr")
    playwright.expect(rows).to_have_count(25)
    assert re.search(r"RAM 1|disk 1", rows.first.inner_text())
    page.get_by_role("button", name="Next").click()
    playwright.expect(rows).to_have_count(2)
    assert page.get_by_role("button", name="Next").is_disabled()
    page.get_by_role("button", name="Delete note-26.txt").click()
    page.get_by_role("dialog").get_by_role("button", name="Keep it").click()
    page.get_by_role("button", name="Back").click()
    playwright.expect(rows).to_have_count(25)
    stored = [d["id"] for d in server.get("/v1/documents").json()["data"]]
    assert stored == [file.name for file in files]


def test_a_file_that_is_no_text_is_refused_with_a_reason(
    server: httpx.Client, open_page: Callable[..., Any], tmp_path: Path
) -> None:
    file = tmp_path / "picture.txt"
    file.write_bytes(b"\x89PNG\xff\xfe")
    page = open_page(server, "documents")
    page.get_by_label("Text files").set_input_files(file)
    page.get_by_role("button", name="Store").click()
    page.get_by_role("alert").get_by_text("picture.txt is not UTF-8 text").wait_for()
    assert server.get("/v1/documents").json()["data"] == []


def test_the_cache_shows_what_was_spared(
    server: httpx.Client, handbook: str, open_page: Callable[..., Any]
) -> None:
    page = open_page(server)
    pick_and_ask(page, handbook)
    page.get_by_role("tab", name="Cache").click()
    stats = server.get("/v1/cache/stats").json()
    page.get_by_text(f"{stats['saved_tokens']:,}", exact=True).wait_for()
    text = page.locator("#cache-cards").inner_text()
    assert f"{stats['hit_ratio'] * 100:.1f} %" in text
    assert "Not measured with these settings" in text
    assert page.get_by_role("meter", name="RAM").is_visible()


def test_stopping_an_answer_ends_its_work(
    server: httpx.Client,
    runtime: Runtime,
    handbook: str,
    busy_engine: BusyEngine,
    wait_until: Callable[[Callable[[], bool]], None],
    open_page: Callable[..., Any],
) -> None:
    page = open_page(server)
    page.get_by_label("Let me pick").check()
    page.get_by_role("checkbox", name=handbook).check()
    page.get_by_label("Question", exact=True).fill("What is the code?")
    with busy_engine(runtime):
        page.get_by_role("button", name="Ask", exact=True).click()
        page.get_by_text("waiting for the first token").wait_for()
        page.get_by_role("button", name="Stop").click()
        page.locator("article").get_by_text("stopped").wait_for()
    assert page.get_by_role("alert").is_hidden()
    wait_until(lambda: runtime.engine.num_open_requests == 0)


@pytest.fixture
def locked(runtime: Runtime, serve: Serve, tmp_path: Path) -> Iterator[tuple[httpx.Client, str]]:
    """A server that wants keys, and one of scope query."""
    path = tmp_path / "keys" / "keys.json"
    text, key = make_key("acme", frozenset({"query"}))
    change_keys(path, lambda keys: keys.update({key.key_id: key}))
    with serve(create_app(runtime, keys=KeyRing(path))) as client:
        yield client, text


def test_a_key_is_asked_for_and_stays_in_the_tab(
    locked: tuple[httpx.Client, str], open_page: Callable[..., Any]
) -> None:
    client, key = locked
    page = open_page(client)
    page.get_by_label("Key", exact=True).fill("no such key")
    page.get_by_role("button", name="Use this key").click()
    page.get_by_role("alert").get_by_text("invalid_api_key").wait_for()
    page.get_by_label("Key", exact=True).fill(key)
    page.get_by_role("button", name="Use this key").click()
    page.get_by_text("tiny-llama").wait_for()
    assert page.locator("#key-form").is_hidden()
    assert page.get_by_role("alert").is_hidden()
    page.reload()
    page.get_by_text("tiny-llama").wait_for()
    assert page.evaluate("[Object.keys(localStorage).length, document.cookie]") == [0, ""]
    page.get_by_role("tab", name="Cache").click()
    page.get_by_role("alert").get_by_text("insufficient_scope").wait_for()
    page.get_by_role("button", name="Change key").click()
    page.get_by_label("Key", exact=True).wait_for()
    assert page.evaluate("sessionStorage.length") == 0


def test_tabs_work_by_keyboard(server: httpx.Client, open_page: Callable[..., Any]) -> None:
    page = open_page(server)
    page.get_by_role("tab", name="Ask").focus()
    page.keyboard.press("ArrowRight")
    tab = page.get_by_role("tab", name="Documents")
    assert tab.get_attribute("aria-selected") == "true"
    assert page.evaluate("document.activeElement.id") == "tab-documents"
    assert page.get_by_role("tabpanel", name="Documents").is_visible()
    assert page.get_by_role("tabpanel", name="Ask").is_hidden()
    page.keyboard.press("End")
    assert page.get_by_role("tabpanel", name="Jobs").is_visible()
    page.keyboard.press("ArrowRight")
    assert page.get_by_role("tabpanel", name="Ask").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_all_of_it_by_day_and_by_night(
    server: httpx.Client, handbook: str, open_page: Callable[..., Any], scheme: str
) -> None:
    page = open_page(server, viewport=PHONE, color_scheme=scheme)
    card = pick_and_ask(page, handbook)
    for tab in ("Ask", "Documents", "Cache", "Jobs"):
        page.get_by_role("tab", name=tab).click()
        page.wait_for_load_state("networkidle")
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], tab
    page.get_by_role("tab", name="Ask").click()
    red, green, blue = map(
        int,
        re.findall(r"\d+", card.evaluate("x => getComputedStyle(x).backgroundColor"))[:3],
    )
    assert (red + green + blue > 382) == (scheme == "light")


def test_a_job_runs_to_its_end_before_ones_eyes(
    server: httpx.Client, handbook: str, open_page: Callable[..., Any]
) -> None:
    server.post("/v1/cache/clear", json={"tiers": ["host", "disk"]}).raise_for_status()
    page = open_page(server, "jobs", viewport=PHONE)
    page.get_by_text(re.compile("no job since|none under way")).wait_for()
    page.get_by_role("button", name="Start a job").click()
    card = page.locator("#jobs article").first
    playwright.expect(card).to_contain_text("completed")
    playwright.expect(card.get_by_role("progressbar")).to_have_attribute("value", "1")
    playwright.expect(card).to_contain_text("1 of 1")
    assert not card.get_by_role("button").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    (document,) = server.get("/v1/documents", params={"include": "tiers"}).json()["data"]
    assert "none" not in document["tiers"]


def test_a_job_is_cancelled(
    server: httpx.Client,
    runtime: Runtime,
    busy_engine: BusyEngine,
    handbook: str,
    open_page: Callable[..., Any],
) -> None:
    server.post("/v1/cache/clear", json={"tiers": ["host", "disk"]}).raise_for_status()
    page = open_page(server, "jobs")
    with busy_engine(runtime):
        page.get_by_role("button", name="Start a job").click()
        card = page.locator("#jobs article").first
        playwright.expect(card).to_contain_text("running")
        card.get_by_role("button", name="Cancel").click()
    playwright.expect(card).to_contain_text("cancelled")
    assert not card.get_by_role("button").is_visible()

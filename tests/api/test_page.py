"""The web page without a browser: what is served, under which rules, and whether its parts fit."""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from html.parser import HTMLParser
from importlib.resources import files

import httpx
import pytest
from fastapi import FastAPI

from chunkcache.runtime import Runtime
from chunkcache_api.app import create_app
from chunkcache_api.auth.key_ring import KeyRing

Serve = Callable[[FastAPI], AbstractContextManager[httpx.Client]]

WEB = files("chunkcache_api").joinpath("web")
NAMES = sorted(file.name for file in WEB.iterdir())
SCRIPTS = [name for name in NAMES if name.endswith(".js")]
LIGHT_AND_DARK = 2


def text_of(name: str) -> str:
    return WEB.joinpath(name).read_text(encoding="utf-8")


class _Page(HTMLParser):
    """Collects what the page is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inline: list[str] = []
        self._within: list[str] = []
        self.feed(text_of("index.html"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._within.append(tag)

    def handle_data(self, data: str) -> None:
        if self._within and self._within[-1] in ("script", "style") and data.strip():
            self.inline.append(data)

    def all_of(self, *tags: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.elements if tag in tags]


@pytest.fixture(scope="module")
def html() -> _Page:
    return _Page()


@pytest.fixture
def locked(runtime: Runtime, serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """A server that wants keys, and has given out none."""
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    path.write_text('{"version": 1, "keys": []}')
    path.chmod(0o600)
    with serve(create_app(runtime, keys=KeyRing(path, is_required=True))) as client:
        yield client


def test_the_page_needs_no_key_and_is_held_to_strict_rules(locked: httpx.Client) -> None:
    assert locked.get("/v1/models").status_code == 401
    page = locked.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(
        part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in page.headers["content-security-policy"]
    assert policy["frame-ancestors"] == "'none'"
    assert page.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", NAMES)
def test_every_file_is_served_as_it_is(client: httpx.Client, name: str) -> None:
    response = client.get(f"/web/{name}")
    assert response.content == WEB.joinpath(name).read_bytes()
    assert "content-security-policy" in response.headers
    again = client.get(f"/web/{name}", headers={"if-none-match": response.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "path", ["/web/nothing.js", "/web/..%2fapp.py", "/web/%2e%2e%2fapp.py", "/web/", "/web"]
)
def test_nothing_else_is_served(client: httpx.Client, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"


def test_the_page_is_no_part_of_the_schema(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    assert "/" not in paths
    assert not [path for path in paths if path.startswith("/web")]


def test_nothing_is_inline_and_nothing_comes_from_elsewhere(html: _Page) -> None:
    assert html.inline == []
    for _, attributes in html.elements:
        assert not [name for name in attributes if name.startswith("on") or name == "style"]
    loaded = [a.get("src") for a in html.all_of("script", "img")]
    loaded += [a.get("href") for a in html.all_of("link")]
    assert loaded
    assert {str(url).removeprefix("web/") for url in loaded} <= set(NAMES)
    for name in NAMES:
        urls = re.findall(r"https?://[^\s\"')]+", text_of(name))
        assert set(urls) <= {"http://www.w3.org/2000/svg"}, name
        assert "url(" not in text_of(name)


@pytest.mark.parametrize("name", SCRIPTS)
def test_text_becomes_markup_nowhere(name: str) -> None:
    banned = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\b|"
        r"new Function|createContextualFragment|srcdoc|localStorage|document\.cookie"
    )
    assert not banned.search(text_of(name))


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_a_script_imports_is_exported(name: str) -> None:
    for names, module in re.findall(r"import \{([^}]+)\} from \"\./([\w.]+)\"", text_of(name)):
        for imported in (n.strip() for n in names.split(",")):
            exported = rf"export (?:async )?(?:const|class|function\*?) {imported}\b"
            assert re.search(exported, text_of(module)), (name, imported)


def test_what_the_scripts_look_for_is_there_and_named_once(html: _Page) -> None:
    ids = [a["id"] for _, a in html.elements if "id" in a]
    assert len(ids) == len(set(ids))
    wanted = {i for name in SCRIPTS for i in re.findall(r"byId\(\"([\w-]+)\"\)", text_of(name))}
    assert wanted
    assert wanted <= set(ids)


def test_every_field_has_a_label(html: _Page) -> None:
    labelled = {a.get("for") for a in html.all_of("label")}
    for field in html.all_of("input", "select", "textarea"):
        is_wrapped = field.get("type") in ("radio", "checkbox")
        assert is_wrapped or field["id"] in labelled, field


def test_tabs_name_their_panels(html: _Page) -> None:
    tabs = [a for _, a in html.elements if a.get("role") == "tab"]
    panels = {a["id"]: a for _, a in html.elements if a.get("role") == "tabpanel"}
    assert len(tabs) == len(panels) == 4
    for tab in tabs:
        assert panels[str(tab["aria-controls"])]["aria-labelledby"] == tab["id"]
    assert [tab["aria-selected"] for tab in tabs] == ["true", "false", "false", "false"]


@pytest.mark.parametrize(
    ("text", "ground"),
    [
        *((text, ground) for text in ("ink", "soft", "accent") for ground in ("card", "ground")),
        ("on-accent", "accent"),
        ("on-danger", "danger"),
        ("ink", "bad-ground"),
        *(("on-use", use) for use in ("exact", "fused", "recomputed", "computed")),
    ],
)
def test_text_stands_out_from_its_ground_by_day_and_by_night(text: str, ground: str) -> None:
    schemes = re.findall(r":root \{(.*?)\}", text_of("style.css"), re.DOTALL)
    assert len(schemes) == LIGHT_AND_DARK
    for scheme in schemes:
        colours = dict(re.findall(r"--([\w-]+): #([0-9a-f]{6})", scheme))
        assert contrast(colours[text], colours[ground]) >= 4.5


def contrast(a: str, b: str) -> float:
    """Of two colours, as the web's guidelines for accessible content define it."""

    def luminance(colour: str) -> float:
        parts = (int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4))
        linear = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    darker, lighter = sorted((luminance(a), luminance(b)))
    return (lighter + 0.05) / (darker + 0.05)

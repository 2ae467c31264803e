"""What the tests of ``deploy/`` share: the chart, rendered.

Helm itself is not needed. This renders the part of its language that the chart keeps to, and
refuses the rest.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "chunkcache"
RELEASE = {"Name": "docs", "Namespace": "team"}

Node = tuple[str, Any, list[Any]]
RenderChart = Callable[..., list[dict[str, Any]]]


class ChartError(Exception):
    """The chart refuses its values, or says what this renderer does not know."""


def _truth(value: Any) -> bool:
    return value not in (None, False, 0, "", [], {})


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass
class Renderer:
    """Renders templates.

    Attributes:
        values: The chart's values.
        helpers: Named templates, filled as they are met.
    """

    values: dict[str, Any]
    helpers: dict[str, list[Any]] = field(default_factory=dict)

    def render(self, text: str) -> str:
        nodes = self._parse(iter(re.split(r"(\s*\{\{-.*?\}\}|\{\{.*?\}\})", text)))
        root = {"Values": self.values, "Release": RELEASE}
        return self._run(nodes, root, {"$": root})

    def _parse(self, pieces: Any) -> list[Any]:
        nodes: list[Any] = []
        for piece in pieces:
            if not (action := re.fullmatch(r"\s*\{\{-?\s*(.*?)\s*\}\}", piece)):
                nodes.append(piece)
                continue
            word, _, rest = action[1].partition(" ")
            if word == "end":
                return nodes
            if word in ("if", "with", "range"):
                nodes.append((word, rest, self._parse(pieces)))
            elif word == "define":
                self.helpers[rest.strip('" -')] = self._parse(pieces)
            elif word in ("else", "block", "template"):
                raise ChartError(f"{word} is not known here")
            else:
                nodes.append(("print", action[1], []))
        return nodes

    def _run(self, nodes: list[Any], dot: Any, names: dict[str, Any]) -> str:
        shown = ""
        for node in nodes:
            if isinstance(node, str):
                shown += node
                continue
            word, rest, body = node
            if word == "print":
                shown += _text(self._pipe(rest, dot, names))
            elif word == "range":
                key, value, source = re.fullmatch(r"(\$\w+), (\$\w+) := (.*)", rest).groups()  # pyright: ignore
                for k, v in sorted(self._pipe(source, dot, names).items()):
                    shown += self._run(body, dot, names | {key: k, value: v})
            else:
                found = self._pipe(rest, dot, names)
                if _truth(found):
                    shown += self._run(body, found if word == "with" else dot, names)
        return shown

    def _pipe(self, expression: str, dot: Any, names: dict[str, Any]) -> Any:
        first, *others = expression.split(" | ")
        value = self._call(first, [], dot, names)
        for step in others:
            value = self._call(step, [value], dot, names)
        return value

    def _call(self, step: str, piped: list[Any], dot: Any, names: dict[str, Any]) -> Any:
        name, *given = re.findall(r'"[^"]*"|\S+', step)
        if name.startswith((".", "$")) and name != ".Files.Get":
            return self._look_up(name, dot, names)
        arguments = [self._look_up(g, dot, names) for g in given] + piped
        match name, arguments:
            case "include", [str(helper), scope]:
                return self._run(self.helpers[helper], scope, names).strip("\n")
            case "toYaml", [value]:
                return yaml.safe_dump(value, default_flow_style=False).rstrip("\n")
            case "nindent", [int(width), value]:
                return "\n" + "\n".join(" " * width + line for line in _text(value).splitlines())
            case "quote", [value]:
                return '"' + _text(value).replace('"', '\\"') + '"'
            case "upper", [str(value)]:
                return value.upper()
            case "required", [str(message), value]:
                if not _truth(value):
                    raise ChartError(message)
                return value
            case ".Files.Get", [str(path)]:
                return (CHART / path).read_text(encoding="utf-8")
        raise ChartError(f"{step!r} is not known here")

    def _look_up(self, name: str, dot: Any, names: dict[str, Any]) -> Any:
        if name.startswith('"'):
            return name.strip('"')
        if name.isdigit():
            return int(name)
        start, *path = name.split(".")
        value = names[start] if start else dot
        for part in filter(None, path):
            value = value[part]
        return value


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    both = {k: _merged(old[k], v) if isinstance(v, dict) else v for k, v in new.items() if k in old}
    return old | new | both


@pytest.fixture(scope="session")
def render_chart() -> RenderChart:
    """Renders the chart with values of the caller's over its own; gives its objects."""

    def render(**values: Any) -> list[dict[str, Any]]:
        own = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
        renderer = Renderer(_merged(own, values))
        renderer.render((CHART / "templates" / "_helpers.tpl").read_text(encoding="utf-8"))
        found: list[dict[str, Any]] = []
        for path in sorted((CHART / "templates").glob("*.yaml")):
            text = renderer.render(path.read_text(encoding="utf-8"))
            found += [document for document in yaml.safe_load_all(text) if document]
        renderer.render((CHART / "templates" / "NOTES.txt").read_text(encoding="utf-8"))
        return found

    return render

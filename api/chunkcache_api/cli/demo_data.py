"""The demo's handbook and questions, as shipped in ``chunkcache_api/demo_corpus``."""

import json
from dataclasses import dataclass
from importlib.resources import files

from chunkcache_api.cli.precache_meter import SizedItem


@dataclass(frozen=True)
class DemoQuestion:
    """A question with what it is asked over.

    Attributes:
        question: The question.
        document_ids: Documents in prompt order, distractors among them.
        gold: The answer that the handbook gives.
    """

    question: str
    document_ids: tuple[str, ...]
    gold: str


def demo_items() -> list[SizedItem]:
    """The handbook's documents; their ids are their names without the suffix."""
    from chunkcache.precache import TextItem

    items = []
    for file in sorted(_corpus().iterdir(), key=lambda f: f.name):
        if file.name.endswith(".md"):
            text = file.read_text(encoding="utf-8")
            item = TextItem(file.name.removesuffix(".md"), text, text_format="markdown")
            items.append(SizedItem(item, len(text.encode())))
    return items


def demo_questions() -> list[DemoQuestion]:
    """The questions, in order."""
    data = json.loads((_corpus() / "questions.json").read_text(encoding="utf-8"))
    return [
        DemoQuestion(q["question"], tuple(q["document_ids"]), " or ".join(q["answers"]))
        for q in data["questions"]
    ]


def _corpus():
    return files("chunkcache_api") / "demo_corpus"

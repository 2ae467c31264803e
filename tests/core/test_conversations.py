"""Conversations: turns of one layout, exact in full, the same bits whatever is still in memory."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from chunkcache.errors import InvalidValueError, UnsupportedParameterError
from chunkcache.loose_text import TextRef
from chunkcache.model.chat_template import ChatTemplate
from chunkcache.planning import AskOptions, ChatTurn
from chunkcache.testing import CHAT_TEMPLATE

Caches = Callable[..., Any]


@pytest.fixture
def turns(passages: dict[str, str]) -> list[ChatTurn]:
    return [
        ChatTurn("Hello.", (), "Good day."),
        ChatTurn(
            "When does it open?", ["harbour", TextRef("note", passages["tower"])], "At seven."
        ),
        ChatTurn("And who keeps the key?", ["bridge", "harbour"]),
    ]


@pytest.fixture
def filled(open_cache: Caches, passages: dict[str, str]) -> Any:
    cache = open_cache()
    for name in ("harbour", "bridge"):
        cache.put(name, passages[name])
    return cache


def test_the_pieces_join_to_the_rendered_conversation(
    filled: Any, passages: dict[str, str], turns: list[ChatTurn]
) -> None:
    """1. What the template prints of whole messages. 2. The pieces of the layout, joined."""
    p = passages
    contents = [
        ("system", "Be brief."),
        ("user", "Hello."),
        ("assistant", "Good day."),
        (
            "user",
            f"Documents:\n\n{p['harbour']}\n\n{p['tower']}\n\nQuestion: When does it open?",
        ),
        ("assistant", "At seven."),
        (
            "user",
            f"Documents:\n\n{p['bridge']}\n\n{p['harbour']}\n\nQuestion: And who keeps the key?",
        ),
    ]
    expected = ChatTemplate(CHAT_TEMPLATE).render([{"role": r, "content": c} for r, c in contents])
    layout = filled.plan_chat(turns, AskOptions(system="Be brief.")).layout
    assert "".join(filled.runtime.model.tokenizer.decode_each(layout.token_ids)) == expected
    kinds = [s.kind for s in layout.segments]
    assert kinds.count("history") == 4
    assert kinds.count("query") == 1


def test_a_conversation_in_full_is_a_plain_forward(filled: Any, turns: list[ChatTurn]) -> None:
    """Invariant 1 over several turns."""
    stream = filled.chat(turns, AskOptions(policy="full", max_tokens=8))
    finished = stream.finished()
    ids = torch.tensor([stream.plan.layout.token_ids])
    with torch.inference_mode():
        plain = filled.runtime.model.runner.hf_model(input_ids=ids, use_cache=False).logits
    assert (finished.first_logits - plain[0, -1]).abs().max() <= 1e-4
    assert finished.report.exact


@pytest.mark.parametrize("policy", ["none", "hybrid", "full", "deviation"])
def test_every_row_but_chunks_is_run_and_counted(
    filled: Any, turns: list[ChatTurn], policy: str
) -> None:
    """Replies are run again as rows: what is cached is at most the opening and the chunks."""
    for _ in range(2):
        report = filled.chat(turns, AskOptions(policy=policy, max_tokens=2)).finished().report
    layout = filled.plan_chat(turns, AskOptions()).layout
    others = layout.num_tokens - layout.num_context_tokens - layout.opening_end
    assert report.account.computed_tokens >= others
    if policy == "none":
        assert report.account.computed_tokens == others


@pytest.mark.parametrize("policy", ["none", "hybrid", "shift"])
def test_a_turn_has_the_same_bits_whatever_is_in_memory(
    filled: Any, open_cache: Caches, passages: dict[str, str], turns: list[ChatTurn], policy: str
) -> None:
    """Invariant 4 across turns, loose texts included."""
    options = AskOptions(policy=policy, max_tokens=10)
    for number in range(1, len(turns)):
        filled.chat(
            [*turns[: number - 1], replace(turns[number - 1], reply=None)], options
        ).answer()
    warm = filled.chat(turns, options).finished()
    again = filled.chat(turns, options).finished()
    filled.close()
    cold_cache = open_cache(host_tier_bytes=0)
    cold = cold_cache.chat(turns, options).finished()
    for other in (again, cold):
        assert torch.equal(other.first_logits, warm.first_logits)
        assert other.token_ids == warm.token_ids
    loose = [d for d in warm.report.documents if d.id == "note"]
    assert [d.source for d in loose] == ["host"]


def test_a_question_is_one_turn(filled: Any) -> None:
    """The question's frame stands in a conversation too, without the words that cut it short."""
    question = filled.plan("When?", ["harbour"], AskOptions()).layout
    chat = filled.plan_chat([ChatTurn("When?", ["harbour"])], AskOptions()).layout
    decode = filled.runtime.model.tokenizer.decode_each
    texts = ["".join(decode(layout.token_ids)) for layout in (question, chat)]
    assert texts[0].replace("\nAnswer in one short sentence.", "") == texts[1]
    assert question.token_ids[: question.prefix_end] == chat.token_ids[: chat.prefix_end]


def test_chunks_of_the_first_turn_can_be_exact(open_cache: Caches, passages: Any) -> None:
    cache = open_cache(codec="raw", preparation="system")
    cache.put("tower", passages["tower"])
    turns = [ChatTurn("Who?", ["tower"], "The baker."), ChatTurn("Why?")]
    report = cache.chat(turns, AskOptions(policy="none", max_tokens=1)).finished().report
    first = cache.get("tower").chunks[0]
    assert report.account.exact_prefix_tokens >= len(first.token_ids)


@pytest.mark.parametrize(
    "turns",
    [
        [],
        [ChatTurn("a", (), "b")],
        [ChatTurn("a"), ChatTurn("b")],
    ],
)
def test_replies_stand_behind_every_turn_but_the_last(filled: Any, turns: Any) -> None:
    with pytest.raises(InvalidValueError):
        filled.chat(turns)


LAST_TURN_IS_ODD = (
    "{% for m in messages %}{% if loop.last %}!{% endif %}[{{ m['role'] }}]{{ m['content'] }}"
    "{% endfor %}[assistant]"
)
DROPS_REPLIES = (
    "{% for m in messages %}{% if m['role'] != 'assistant' %}[{{ m['role'] }}]{{ m['content'] }}"
    "{% endif %}{% endfor %}[assistant]"
)


@pytest.mark.parametrize("template", [LAST_TURN_IS_ODD, DROPS_REPLIES])
def test_a_template_of_one_turn_takes_one(
    open_cache: Caches, model_dir: Callable[..., Any], tmp_path: Any, template: str
) -> None:
    """One turn works; a conversation is refused before any work."""
    import shutil

    model = tmp_path / "odd"
    shutil.copytree(model_dir(), model)
    (model / "chat_template.jinja").write_text(template, encoding="utf-8")
    cache = open_cache(model=model)
    assert cache.chat([ChatTurn("Who?")], AskOptions(max_tokens=2)).answer().text
    with pytest.raises(UnsupportedParameterError, match="template"):
        cache.chat([ChatTurn("Who?", (), "I."), ChatTurn("Why?")])

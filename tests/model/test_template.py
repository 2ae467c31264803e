"""Chat templates: split once around place-holders; odd ones are refused or handled by name."""

from typing import Any

import pytest

from chunkcache.errors import UnsupportedModelError
from chunkcache.fusion.layout import ChunkRef, Turn, build_layout
from chunkcache.model.chat_template import PLAIN_TEMPLATE, ChatTemplate
from chunkcache.model.template import PromptTemplate, split_template
from chunkcache.model.tokenising import TextTokenizer
from chunkcache.testing import CHAT_TEMPLATE, tiny_tokenizer_json

TOKENIZER = TextTokenizer(tiny_tokenizer_json())
NO_SYSTEM = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}"
    "{{ raise_exception('no system role') }}{% endif %}"
    "[{{ m['role'] }}]{{ m['content'] }}[end]{% endfor %}"
)
DATED = "{{ strftime_now('%d %b %Y') }}{{ date_string }}" + CHAT_TEMPLATE


def _split(template: str | None, **special: str) -> PromptTemplate:
    return split_template(ChatTemplate(template or PLAIN_TEMPLATE, special), TOKENIZER)


def _text(template: PromptTemplate) -> str:
    parts = (
        template.before_system,
        TOKENIZER.encode_content("SYS"),
        template.before_documents,
        TOKENIZER.encode_content("DOC"),
        template.before_question,
        TOKENIZER.encode_content("Q"),
        template.after_question,
    )
    return "".join(TOKENIZER.decode_each(sum(parts, ())))


def test_the_pieces_join_to_the_rendered_prompt() -> None:
    expected = ChatTemplate(CHAT_TEMPLATE).render(
        [
            {"role": "system", "content": "SYS"},
            {
                "role": "user",
                "content": "Documents:\n\nDOC\n\nQuestion: Q\nAnswer in one short sentence.",
            },
        ]
    )
    assert _text(_split(CHAT_TEMPLATE)) == expected


def test_a_template_without_a_system_role_gets_it_in_the_user_turn() -> None:
    template = _split(NO_SYSTEM, bos_token="<|im_start|>")
    assert not template.has_system
    assert _text(template).startswith("<|im_start|>[user]SYS\n\nDocuments:")


def test_bos_stands_once_at_the_start() -> None:
    for given in (NO_SYSTEM, None):
        template = _split(given, bos_token="<|endoftext|>")
        documents = tuple((ChunkRef("d", i, (40 + i,)),) for i in range(3))
        layout = build_layout(template, (9,), [Turn(documents, (5,))])
        assert [i for i, t in enumerate(layout.token_ids) if t == 0] == [0]


def test_the_clock_is_pinned() -> None:
    assert _split(DATED).before_system == _split(DATED).before_system
    assert "26 Jul 2024" in _text(_split(DATED))


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% endfor %}",
        "{{ messages[-1]['content'] }}{{ messages[-1]['content'] }}",
        "{{ messages[0].__class__.__mro__ }}",
        "{{ nothing.there() }}",
        "{% if %}",
        "{{ raise_exception('never') }}",
    ],
)
def test_templates_that_cannot_be_used_are_refused(template: str) -> None:
    with pytest.raises(UnsupportedModelError):
        _split(template)


def test_the_demo_model_has_a_system_turn(demo_model: Any) -> None:
    assert demo_model.template.has_system
    control = demo_model.tokenizer.control_ids
    fixed = demo_model.template.before_system + demo_model.template.after_question
    assert sum(t in control for t in fixed) == 3


@pytest.mark.parametrize(
    "template",
    [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{{ 'a' * 10**14 }}",
    ],
)
def test_templates_that_exhaust_python_are_refused(template: str) -> None:
    with pytest.raises(UnsupportedModelError, match="the chat template fails: "):
        _split(template)

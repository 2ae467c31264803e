"""Templates with the properties of every family's own: split right, or refused with the reason.

The templates are written for these tests; what they share with a family's is what it does to roles,
to white space and to the date, and which control tokens it writes.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from chunkcache.model.chat_template import PINNED_DATE, PLAIN_TEMPLATE, ChatTemplate
from chunkcache.model.families import FAMILIES
from chunkcache.model.template import split_template, user_text
from chunkcache.model.template_check import check_template
from chunkcache.model.tokenising import TextTokenizer

ALTERNATION = (
    "{% for m in turns %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant must take turns') }}{% endif %}{% endfor %}"
)
SYSTEM_APART = (
    "{% if messages[0].role == 'system' %}{% set sys = messages[0].content %}"
    "{% set turns = messages[1:] %}{% else %}{% set sys = '' %}{% set turns = messages %}{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
    "{% set turns = messages %}"
)


@dataclass(frozen=True)
class Case:
    """One family's kind of template.

    Attributes:
        model_type: A family of the table that has it.
        tokenizer: Kind of tokenizer the family has.
        source: The template.
        system: Where the system text goes.
        special: Special tokens by name.
        opening: What the prompt begins with.
        closing: What it ends with.
        strips: Ends of the system text that the template strips.
        thinking: What the template is told about thinking.
    """

    model_type: str
    tokenizer: str
    source: str
    opening: str
    closing: str
    system: str = "turn"
    special: dict[str, str] = field(default_factory=lambda: {"bos_token": "<s>"})
    strips: str = ""
    thinking: bool = False


LLAMA_2 = (
    SYSTEM_APART + ALTERNATION + "{% for m in turns %}"
    "{% if loop.first and sys %}{% set text = '<<SYS>>\n' + sys + '\n<</SYS>>\n\n' + m.content %}"
    "{% else %}{% set text = m.content %}{% endif %}"
    "{% if m.role == 'user' %}{{ bos_token + '[INST] ' + text.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + text.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA_3 = (
    SYSTEM_APART + "{% if date_string is not defined %}"
    "{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "{{ bos_token }}<|start_header_id|>system<|end_header_id|>\n\n"
    "Cutting Knowledge Date: December 2023\nToday Date: {{ date_string }}\n\n"
    "{{ sys | trim }}<|eot_id|>"
    "{%- for m in turns %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL_1 = (
    NO_SYSTEM + ALTERNATION + "{{ bos_token }}{% for m in turns %}{% if m.role == 'user' %}"
    "{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}{{ m.content + eos_token }}"
    "{% endif %}{% endfor %}"
)
MISTRAL_3 = (
    SYSTEM_APART + ALTERNATION + "{{ bos_token }}{% for m in turns %}{% if m.role == 'user' %}"
    "{% if loop.last and sys %}{{ '[INST] ' + sys + '\n\n' + m.content + '[/INST]' }}"
    "{% else %}{{ '[INST] ' + m.content + '[/INST]' }}{% endif %}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL_7 = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}"
    "{% elif m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
    "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
)
CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN_3 = (
    "{%- if tools %}{{ tools | tojson }}{% endif %}"
    "{%- set ns = namespace(last=messages | length - 1) %}"
    "{%- for m in messages[::-1] %}{% if m.role == 'user' and m.content is string %}"
    "{% set ns.last = messages | length - 1 - loop.index0 %}{% break %}{% endif %}{% endfor %}"
    "{%- for m in messages %}{% set content = m.content if m.content is string else '' %}"
    "{{ '<|im_start|>' + m.role + '\n' + content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
PHI = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
GEMMA_2 = (
    "{{ bos_token }}" + NO_SYSTEM + ALTERNATION + "{% for m in turns %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' "
    "+ m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
GEMMA_3 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% if messages[0].content is string %}"
    "{% set first = messages[0].content + '\n\n' %}{% else %}"
    "{% set first = messages[0].content[0].text + '\n\n' %}{% endif %}"
    "{% set turns = messages[1:] %}{% else %}{% set first = '' %}{% set turns = messages %}{% endif %}"
    + ALTERNATION + "{% for m in turns %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' "
    "+ (first if loop.first else '') }}"
    "{% if m.content is string %}{{ m.content | trim }}{% else %}{% for part in m.content %}"
    "{{ part.text | trim }}{% endfor %}{% endif %}{{ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)  # fmt: skip
GRANITE = (
    SYSTEM_APART + "{% if not sys %}{% set sys = 'Today is ' + strftime_now('%B %d, %Y') + '.' %}"
    "{% endif %}{% if documents %}{% set sys = sys + ' Use the documents.' %}{% endif %}"
    "{{ '<|start_of_role|>system<|end_of_role|>' + sys + '<|endoftext|>\n' }}{% for m in turns %}"
    "{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + '<|endoftext|>\n' }}"
    "{% if loop.last and add_generation_prompt %}{{ '<|start_of_role|>assistant' }}"
    "{% if controls %}{{ ' ' + controls | tojson }}{% endif %}{{ '<|end_of_role|>' }}{% endif %}"
    "{% endfor %}"
)
OLMO_2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% generation %}{{ '<|assistant|>\n' + m.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ '<|' + m.role + '|>\n' + m.content + '\n' }}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
)
MIXTRAL = (
    NO_SYSTEM + ALTERNATION + "{{ bos_token }}{% for m in turns %}{% if m.role == 'user' %}"
    "{{ ' [INST] ' + m.content + ' [/INST]' }}{% else %}{{ ' ' + m.content + eos_token }}"
    "{% endif %}{% endfor %}"
)
SMOLLM_3 = (
    SYSTEM_APART + "{% if enable_thinking is not defined %}{% set enable_thinking = true %}"
    "{% endif %}{% set mode = '/think' if enable_thinking else '/no_think' %}"
    "{{ '<|im_start|>system\n## Metadata\n\nKnowledge Cutoff Date: June 2025\nToday Date: ' "
    "+ strftime_now('%d %B %Y') + '\nReasoning Mode: ' + mode + '\n\n## Custom Instructions\n\n' "
    "+ sys.replace('/no_think', '').rstrip() + '\n\n<|im_end|>\n' }}"
    "{% for m in turns %}{% set content = m.content if m.content is string else '' %}"
    "{{ '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if not enable_thinking %}{{ '<think>\n\n</think>\n' }}{% endif %}{% endif %}"
)
LISTS_ALONE = (
    "{{ bos_token }}{% for m in messages %}{{ '[' + m.role + ']' }}{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{{ '\n' }}{% endfor %}"
)

BOTH = {"bos_token": "<s>", "eos_token": "</s>"}
TURN = "<|start_header_id|>assistant<|end_header_id|>\n\n"
CASES = {
    "llama 2": Case(
        "llama", "llama-2", LLAMA_2, "<s>[INST] <<SYS>>\nSYS\n<</SYS>>\n\nDoc", " [/INST]",
        special=BOTH,
    ),
    "llama 3": Case(
        "llama", "split-bytes", LLAMA_3, "<|begin_of_text|><|start_header_id|>system", TURN,
        special={"bos_token": "<|begin_of_text|>"}, strips="lr",
    ),
    "mistral 1": Case(
        "mistral", "mistral", MISTRAL_1, "<s>[INST] SYS\n\nDoc", "sentence. [/INST]", "user", BOTH
    ),
    "mistral 3": Case(
        "mistral", "mistral", MISTRAL_3, "<s>[INST] SYS\n\nDoc", "sentence.[/INST]", special=BOTH
    ),
    "mistral 7": Case(
        "mistral", "split-bytes", MISTRAL_7, "<s>[SYSTEM_PROMPT]SYS[/SYSTEM_PROMPT][INST]Doc",
        "sentence.[/INST]", special=BOTH,
    ),
    "qwen 2": Case(
        "qwen2", "split-bytes", CHATML, "<|im_start|>system\nSYS<|im_end|>",
        "<|im_start|>assistant\n", special={},
    ),
    "smollm 2": Case(
        "llama", "byte-level", CHATML, "<|im_start|>system\nSYS<|im_end|>",
        "<|im_start|>assistant\n", special={"bos_token": "<|im_start|>"},
    ),
    "qwen 3": Case(
        "qwen3", "split-bytes", QWEN_3, "<|im_start|>system\nSYS<|im_end|>",
        "<think>\n\n</think>\n\n", special={},
    ),
    "qwen 3 thinking": Case(
        "qwen3_moe", "split-bytes", QWEN_3, "<|im_start|>system\nSYS<|im_end|>",
        "<|im_start|>assistant\n", special={}, thinking=True,
    ),
    "phi 3": Case(
        "phi3", "llama-2", PHI, "<|system|>\nSYS<|end|>\n<|user|>\nDoc", "<|assistant|>\n",
        special=BOTH,
    ),
    "phi 4": Case("phi3", "split-bytes", PHI, "<|system|>\nSYS<|end|>", "<|assistant|>\n"),
    "gemma 2": Case(
        "gemma2", "gemma", GEMMA_2, "<s><start_of_turn>user\nSYS\n\nDoc",
        "<end_of_turn>\n<start_of_turn>model\n", "user", strips="l",
    ),
    "gemma 3": Case(
        "gemma3_text", "gemma", GEMMA_3, "<s><start_of_turn>user\nSYS\n\nDoc",
        "<end_of_turn>\n<start_of_turn>model\n",
    ),
    "granite": Case(
        "granite", "byte-level", GRANITE, "<|start_of_role|>system<|end_of_role|>SYS<|endoftext|>",
        "<|start_of_role|>assistant<|end_of_role|>", special={},
    ),
    "olmo 2": Case(
        "olmo2", "split-bytes", OLMO_2, "<|endoftext|><|system|>\nSYS\n<|user|>\nDoc",
        "<|assistant|>\n", special={"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
    ),
    "mixtral": Case(
        "mixtral", "llama-2", MIXTRAL, "<s> [INST] SYS\n\nDoc", "sentence. [/INST]", "user", BOTH
    ),
    "smollm 3": Case(
        "smollm3", "split-bytes", SMOLLM_3, "<|im_start|>system\n## Metadata",
        "<think>\n\n</think>\n", special={}, strips="r",
    ),
    "lists alone": Case("llama", "gemma", LISTS_ALONE, "<s>[system]SYS\n[user]Doc", "sentence.\n"),
    "none": Case("llama", "mistral", PLAIN_TEMPLATE, "<s>SYS\n\nDoc", "sentence.\n"),
}  # fmt: skip


_DATE = re.compile(r"strftime_now\('(.*?)'\)")


@pytest.fixture(params=CASES)
def case(request: Any) -> Case:
    return CASES[request.param]


@pytest.fixture
def tokenizer(case: Case, definition_of: Callable[[str], str]) -> TextTokenizer:
    return TextTokenizer(definition_of(case.tokenizer))


def _chat(case: Case) -> ChatTemplate:
    return ChatTemplate(case.source, case.special, case.thinking)


def test_every_family_has_a_template() -> None:
    assert {case.model_type for case in CASES.values()} == set(FAMILIES)


def test_the_assembled_ids_are_the_template_s_but_for_joints(
    case: Case, tokenizer: TextTokenizer
) -> None:
    template = split_template(_chat(case), tokenizer)
    report = check_template(_chat(case), template, tokenizer)
    assert report.right, report
    assert report.system == case.system
    assert report.form == ("plain" if case.source == PLAIN_TEMPLATE else "chat")
    assert report.content == ("parts" if case.source == LISTS_ALONE else "text")
    assert report.num_joints >= 8
    assert report.num_changed <= report.num_joints
    assert set(report.changed_joints) <= {
        "before a system", "behind a system", "before a document", "within a document",
        "behind a document", "before a question", "behind a question",
    }  # fmt: skip


def test_the_text_is_the_template_s(
    case: Case, tokenizer: TextTokenizer, definition_of: Callable[[str], str]
) -> None:
    """The pieces, joined as text, are what the template prints; and what it should print."""
    chat = _chat(case)
    template = split_template(chat, tokenizer)
    text = chat.render(template.messages("SYS", user_text("DOC", "Q?")))
    assert text.startswith(case.opening), text
    assert text.endswith(case.closing), text
    pieces = (
        template.before_system,
        tokenizer.encode_template("SYS", at_start=False),
        template.before_documents,
        tokenizer.encode_template("DOC", at_start=False),
        template.before_question,
        tokenizer.encode_template("Q?", at_start=False),
        template.after_question,
    )
    whole = tokenizer.encode_template(text)
    library = Tokenizer.from_str(definition_of(case.tokenizer))
    joined, at_once = (
        library.decode(list(ids), skip_special_tokens=False) for ids in (sum(pieces, ()), whole)
    )
    assert joined == at_once


def test_white_space_around_the_system_text(case: Case, tokenizer: TextTokenizer) -> None:
    template = split_template(_chat(case), tokenizer)
    assert template.trims_system_start == ("l" in case.strips)
    assert template.trims_system_end == ("r" in case.strips)


def test_the_library_prints_the_same(
    case: Case, tokenizer: TextTokenizer, definition_of: Callable[[str], str]
) -> None:
    """Rendered by ``transformers``; the date apart, which it takes from the clock."""
    dated = ChatTemplate(case.source, case.special, case.thinking)
    template = split_template(dated, tokenizer)
    messages = template.messages("SYS", user_text("DOC", "Q?"))
    library = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(definition_of(case.tokenizer)), **case.special
    )
    theirs = library.apply_chat_template(
        [dict(m) for m in messages],
        chat_template=_DATE.sub(lambda m: f"'{PINNED_DATE:{m[1]}}'", case.source),
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=case.thinking,
        date_string=f"{PINNED_DATE:%d %b %Y}",
    )
    assert dated.render(messages) == theirs

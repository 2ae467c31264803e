"""Does the assembled prompt hold the ids that the model's own chat template would give?

Everywhere but where two separately tokenised pieces meet it must: a tokenizer that sees both may
merge across the joint. The joints that differ are counted and named, on a sample prompt.
"""

from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import accumulate, pairwise
from typing import Literal

import msgspec

from chunkcache.model.chat_template import ChatTemplate
from chunkcache.model.template import DOCUMENT_JOINT, PromptTemplate, user_text
from chunkcache.model.tokenising import TextTokenizer

_SYSTEM = " Answer from the documents, in one sentence.\n"
_DOCUMENTS = (
    (
        "The harbour opens at seven in the morning, and the ferry leaves from the northern pier",
        " at nine. Tickets cost 4.50 in the hut.",
    ),
    ("Who keeps the key?\nThe baker; the code of the door is 4017.\n",),
)
"""Per document its chunks."""
_QUESTION = "When does the ferry leave?"

_Kind = Literal["fixed", "system", "document", "question"]


class TemplateReport(msgspec.Struct, frozen=True):
    """How a model's chat template is used.

    Attributes:
        form: ``chat``, or ``plain`` for a model without a chat template.
        system: Where the system text goes: into a ``turn`` that the template makes of it, or into
            the ``user`` turn, in front of the documents, where the template takes none.
        content: How the template wants content: ``text`` or ``parts``.
        right: Whether the assembled ids are the template's own, joints apart.
        num_joints: Joints of the sample prompt.
        changed_joints: Kinds of joint where the template's own ids differ, with how many do.
    """

    form: str
    system: str
    content: str
    right: bool
    num_joints: int
    changed_joints: dict[str, int]

    @property
    def num_changed(self) -> int:
        """Joints that differ."""
        return sum(self.changed_joints.values())


def check_template(
    chat: ChatTemplate, template: PromptTemplate, tokenizer: TextTokenizer
) -> TemplateReport:
    """Compare, on a sample prompt of two documents in three chunks.

    Args:
        chat: The model's template.
        template: What was made of it.
        tokenizer: The model's.
    """
    pieces = [p for p in _pieces(template, tokenizer) if p[1]]
    assembled = [t for _, ids in pieces for t in ids]
    user = user_text(DOCUMENT_JOINT.join("".join(chunks) for chunks in _DOCUMENTS), _QUESTION)
    own = tokenizer.encode_template(chat.render(template.messages(_SYSTEM, user)))
    joints = {
        end: _name(left[0], right[0])
        for end, (left, right) in zip(
            accumulate(len(ids) for _, ids in pieces), pairwise(pieces), strict=False
        )
    }
    changed: set[int] = set()
    right = True
    for tag, start, end, own_start, own_end in SequenceMatcher(
        None, assembled, own, False
    ).get_opcodes():
        if tag != "equal":
            before, behind = (
                _slack(own, own_start, own_end)
                if tag == "insert"
                else _slack(assembled, start, end if tag == "delete" else start)
            )
            touched = {j for j in joints if start - before <= j <= end + behind}
            changed |= touched
            right = right and bool(touched)
    return TemplateReport(
        form="plain" if chat.is_plain else "chat",
        system="turn" if template.has_system else "user",
        content="parts" if template.parts_as_lists else "text",
        right=right,
        num_joints=len(joints),
        changed_joints=dict(Counter(joints[j] for j in sorted(changed))),
    )


def _pieces(
    template: PromptTemplate, tokenizer: TextTokenizer
) -> list[tuple[_Kind, tuple[int, ...]]]:
    """The sample prompt as a layout assembles it, the system text apart from what is around it."""
    encode = tokenizer.encode_content
    pieces: list[tuple[_Kind, tuple[int, ...]]] = [
        ("fixed", template.before_system),
        ("system", encode(template.system_text(_SYSTEM))),
        ("fixed", template.before_documents),
    ]
    for index, chunks in enumerate(_DOCUMENTS):
        if index:
            pieces.append(("fixed", template.joint))
        for text in chunks:
            pieces.append(("document", encode(text)))
    return [
        *pieces,
        ("fixed", template.before_question),
        ("question", encode(_QUESTION)),
        ("fixed", template.after_question),
    ]


def _slack(ids: Sequence[int], start: int, end: int) -> tuple[int, int]:
    """How far the run ``start .. end`` can be moved to either side with the same ids left out.

    Which of several equal tokens in a row is the one too many is not for a comparison to know.
    """
    if start == end:
        return 0, 0
    before = behind = 0
    while start - before > 0 and ids[start - before - 1] == ids[end - before - 1]:
        before += 1
    while end + behind < len(ids) and ids[end + behind] == ids[start + behind]:
        behind += 1
    return before, behind


def _name(left: _Kind, right: _Kind) -> str:
    if left == right:
        return f"within a {left}"
    return f"behind a {left}" if right == "fixed" else f"before a {right}"

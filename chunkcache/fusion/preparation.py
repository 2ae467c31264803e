"""Preparations: what a chunk reads before itself when it is prefilled, dropped afterwards.

Measured on the demo model, what stands in front of a chunk matters more for the fused answer than
which of its tokens are recomputed later; see ``docs/fidelity.md``.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from chunkcache.errors import InvalidValueError
from chunkcache.model.template import PromptTemplate
from chunkcache.model.tokenising import TextTokenizer

PreparationKind = Literal["alone", "sink", "system", "preamble", "neighbours"]

MAX_NEIGHBOURS = 16

PREAMBLE_TEXT = """\
Tide tables for a small harbour

The harbour office prints its tide table once a year. Each page covers one month and lists, for \
every day, two high waters and two low waters with their times and heights in metres. Times are \
given in local winter time, so that an hour must be added while summer time is in force. Heights \
are measured from the chart datum, the level below which the sea rarely falls. A strong wind from \
the west can raise the water by thirty centimetres, and high air pressure can hold it down by as \
much.

How the village library sorts its shelves

The library keeps its novels by the name of the author and its other books by subject. A coloured \
label on the spine shows the room: green for the garden room, blue for the reading room, and red \
for the cellar, where the older volumes stand. Books may be kept for four weeks and renewed twice \
unless somebody has asked for them. New members fill in a short form at the desk and receive a \
card the same day; children need the signature of a parent.

"""
"""Two passages about nothing that a corpus is likely to be about, written for this purpose.

The text is in every key: with another one, nothing that is stored is found.
"""


@dataclass(frozen=True)
class Preparation:
    """What a chunk is prefilled behind.

    Attributes:
        kind: ``alone``: nothing. ``sink``: BOS and neutral tokens. ``system``: the prompt's own
            opening with the system text, so that the first chunk of a prompt with the same opening
            is exact. ``preamble``: a fixed neutral text. ``neighbours``: the prompt's own opening,
            and the chunk's nearest chunks as if they were the prompt's first documents: the
            offline step of FusionRAG (arXiv:2601.12904).
        num_sink_tokens: For ``sink``, how many tokens stand in front.
        num_neighbours: For ``neighbours``, how many chunks stand in front, where there are so many.
    """

    kind: PreparationKind
    num_sink_tokens: int = 0
    num_neighbours: int = 0

    def __post_init__(self) -> None:
        """A sink has tokens, and neighbours are some; nothing else has either."""
        if (self.kind == "sink") != (self.num_sink_tokens > 0):
            raise InvalidValueError(
                "sink needs a number of tokens of at least 1, as in sink(4)", param="preparation"
            )
        least = 1 if self.kind == "neighbours" else 0
        most = MAX_NEIGHBOURS if self.kind == "neighbours" else 0
        if not least <= self.num_neighbours <= most:
            raise InvalidValueError(
                f"neighbours needs a number of chunks from 1 to {MAX_NEIGHBOURS}, as in "
                "neighbours(2)",
                param="preparation",
            )

    @classmethod
    def parse(cls, text: str) -> "Preparation":
        """Read ``alone``, ``sink(k)``, ``system``, ``preamble`` or ``neighbours(n)``.

        Raises:
            InvalidValueError: Anything else.
        """
        if text == "alone":
            return cls("alone")
        if text == "system":
            return cls("system")
        if text == "preamble":
            return cls("preamble")
        counted = re.fullmatch(r"(sink|neighbours)(?:\((\d{1,4})\))?", text)
        if counted and counted[1] == "sink":
            return cls("sink", num_sink_tokens=int(counted[2] or 4))
        if counted:
            return cls("neighbours", num_neighbours=int(counted[2] or 2))
        raise InvalidValueError(
            f"unknown preparation {text!r}; known: alone, sink(k), system, preamble, neighbours(n)",
            param="preparation",
        )

    def __str__(self) -> str:
        if self.kind == "sink":
            return f"sink({self.num_sink_tokens})"
        return f"neighbours({self.num_neighbours})" if self.kind == "neighbours" else self.kind

    @property
    def without_neighbours(self) -> "Preparation":
        """How a chunk is prefilled of which no neighbours are recorded."""
        return Preparation("preamble") if self.kind == "neighbours" else self

    def prefix_ids(
        self,
        template: PromptTemplate,
        tokenizer: TextTokenizer,
        bos_token_id: int | None,
        opening_ids: tuple[int, ...],
        neighbours: Sequence[tuple[int, ...]] = (),
    ) -> tuple[int, ...]:
        """Token ids a chunk is prefilled behind.

        Args:
            template: The model's prompt template.
            tokenizer: The model's tokenizer.
            bos_token_id: BOS, or None for a model without one.
            opening_ids: The prompt's opening up to the first document (for ``system`` and
                ``neighbours``).
            neighbours: Token ids of the chunk's neighbours, the nearest last; for ``neighbours``
                at least one, else none.
        """
        assert bool(neighbours) == (self.kind == "neighbours")
        if self.kind == "alone":
            return ()
        if self.kind == "system":
            return opening_ids
        if self.kind == "neighbours":
            return opening_ids + tuple(t for ids in neighbours for t in ids + template.joint)
        if self.kind == "sink":
            bos = () if bos_token_id is None else (bos_token_id,)
            neutral = tokenizer.encode_template("\n") * self.num_sink_tokens
            return (bos + neutral)[: self.num_sink_tokens]
        bos = tuple(t for t in template.before_system[:1] if t == bos_token_id)
        return bos + tokenizer.encode_template(PREAMBLE_TEXT)

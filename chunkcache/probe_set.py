"""A few questions over invented passages, shipped with the package, to measure fidelity with.

The text is about nothing that a model can know, so an answer has to come from the passages. Knows
neither models nor stores.
"""

from importlib.resources import files

import msgspec
from blake3 import blake3


class ProbeSet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Questions, each asked over all passages.

    Attributes:
        passages: Text by name, in order.
        questions: The questions.
    """

    passages: dict[str, str]
    questions: tuple[str, ...]

    def digest(self) -> bytes:
        """Names the content: figures of another set do not compare."""
        return blake3(msgspec.json.encode(self)).digest()

    def passages_for(self, index: int) -> tuple[tuple[str, str], ...]:
        """Names and texts in the order of one question's prompt: each question turns them on.

        So what a question asks for stands early in one prompt and late in another.
        """
        items = tuple(self.passages.items())
        start = 2 * index % len(items)
        return items[start:] + items[:start]


def built_in_probe_set() -> ProbeSet:
    """The set that is shipped."""
    data = files("chunkcache").joinpath("probe_set.json").read_bytes()
    return msgspec.json.decode(data, type=ProbeSet)

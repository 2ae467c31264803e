"""Template text, kept as entries of its own.

The opening of a prompt (everything in front of the first chunk) stands at position 0 behind
nothing, so an entry of it is exact wherever it is placed: its rows never run again. The template
text further in (joints, the words before the question) runs in every fusion; until it does, an
entry prefilled behind the opening alone stands in its place, so that the question can be probed
without running it twice.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from chunkcache.codecs import Codec
from chunkcache.fusion.layout import Layout
from chunkcache.fusion.place import place_entry
from chunkcache.fusion.recompute import SequenceKV
from chunkcache.identity import EntryIdentity
from chunkcache.model.prefill import IsolatedPrefill
from chunkcache.store.eviction.lru import LruPolicy
from chunkcache.store.host import HostTier
from chunkcache.store.lease import Lease, Source

LoadTemplate = Callable[[EntryIdentity], Lease | None]
"""Finds the entry of a stretch of template text, or computes it; None if it is not finite."""


class TemplateEntries:
    """Entries of template text, in memory alone. Only for the thread that owns the model.

    Args:
        prefill: Computes them.
        codec: A codec that loses nothing, or the opening would not be exact.
        capacity_bytes: Budget; least recently used entries go first.
    """

    def __init__(self, prefill: IsolatedPrefill, codec: Codec, capacity_bytes: int) -> None:
        self._prefill = prefill
        self._codec = codec
        self._tier = HostTier(capacity_bytes, LruPolicy())

    def get(self, identity: EntryIdentity) -> Lease | None:
        """The entry that ``identity`` names, apart from its codec, which is always ours.

        None if it holds values that are not finite: they are not kept, the rows have to run.
        """
        identity = replace(identity, codec=self._codec.name)
        lease = self._tier.get(identity.key())
        if lease is not None:
            assert lease.entry.identity == identity
            return lease
        entry = self._prefill.compute(identity, self._codec)
        return self._tier.put(entry) if entry.is_finite() else None


@dataclass(frozen=True)
class PlacedTemplate:
    """What was placed.

    Attributes:
        opening: Where the opening's entry came from; None if its rows have to run.
        stale: Positions of template text that stands in until its rows run.
        num_computed: Entries that had to be computed.
    """

    opening: Source | None
    stale: frozenset[int]
    num_computed: int


NOTHING_PLACED = PlacedTemplate(None, frozenset(), 0)


def place_template(
    layout: Layout,
    sequence: SequenceKV,
    load: LoadTemplate,
    like: EntryIdentity,
    *,
    opening_is_exact: bool,
    num_ready: int = 0,
) -> PlacedTemplate:
    """Place the template text in front of the question.

    Args:
        layout: The prompt.
        sequence: Its pages.
        load: Finds or computes entries.
        like: Names the model and the namespace.
        opening_is_exact: Whether the opening is placed at all: no where the rotation depends on
            the prompt's length, because its entry was computed at another.
        num_ready: Tokens at the front that are there already.
    """
    opening_ids = layout.token_ids[: layout.opening_end]
    question_start = min(layout.query_positions, default=layout.num_tokens)
    source: Source | None = None
    stale: set[int] = set()
    num_computed = 0
    for segment in layout.segments:
        if segment.kind != "template" or segment.end > question_start or segment.end <= num_ready:
            continue
        is_opening = segment.start == 0
        if is_opening and not (opening_is_exact and layout.opening_end):
            continue
        identity = replace(
            like,
            preparation="alone" if is_opening else "system",
            prefix_ids=() if is_opening else opening_ids,
            token_ids=segment.token_ids,
            behind=(),
        )
        lease = load(identity)
        if lease is None:
            continue
        with lease:
            place_entry(sequence, lease.entry, segment.start)
        num_computed += lease.source == "computed"
        if is_opening:
            source = lease.source
        else:
            stale.update(range(segment.start, segment.end))
    return PlacedTemplate(source, frozenset(stale), num_computed)

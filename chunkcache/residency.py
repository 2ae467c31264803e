"""Where the entries of documents are now: in which tier, or in none."""

from collections import Counter
from collections.abc import Iterable, Mapping

from chunkcache.catalog import Catalog
from chunkcache.planning import PromptPlanner
from chunkcache.runtime import Runtime


def document_tiers(
    runtime: Runtime, catalog: Catalog, document_ids: Iterable[str]
) -> dict[str, Mapping[str, int]]:
    """Per document, how many of its chunks each tier holds under the default system prompt.

    No entry is read. Every chunk counts once, in the quickest tier that has its entry; ``none``
    counts those that are computed when they are asked for. Documents that are not there are left
    out.

    Raises:
        StoreError: The store cannot be read.
    """
    planner = PromptPlanner(runtime, catalog)
    found = catalog.get_many(document_ids)
    chunks = list(dict.fromkeys(c.token_ids for d in found.values() for c in d.chunks))
    identities = planner.names.identities(chunks, planner.system_ids(None))
    tier_of = {
        chunk: runtime.stack.tier_of(identity.key()) or "none"
        for chunk, identity in zip(chunks, identities, strict=True)
    }
    return {
        document_id: Counter(tier_of[c.token_ids] for c in document.chunks)
        for document_id, document in found.items()
    }

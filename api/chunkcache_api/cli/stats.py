"""``chunkcache stats``."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from chunkcache_api.cli.console import print_json, reporting_errors, results
from chunkcache_api.cli.help_text import help_text
from chunkcache_api.cli.options import JsonOption, StoreOption
from chunkcache_api.cli.render import stats_table

if TYPE_CHECKING:
    from chunkcache.store.environment import StoreEnvironment

HELP = help_text(
    """Show what a store holds.

    The store is opened for reading alone, and no model is loaded.""",
    "chunkcache stats",
    "chunkcache stats --store team.store --json",
)

_PAGE_DOCUMENTS = 1_000


def stats(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Show a store's contents."""
    with reporting_errors(as_json=as_json):
        found = store_stats(store)
    if as_json:
        print_json(found)
    else:
        results.print(stats_table(found))


def store_stats(store: Path | None) -> dict[str, Any]:
    """What a store that is not open holds; see :func:`open_store_stats`.

    Args:
        store: Its directory; None is the settings'.

    Raises:
        StoreError: There is no store, or it cannot be read.
    """
    from chunkcache.settings import load_settings
    from chunkcache.store.environment import StoreEnvironment

    settings = load_settings(store=store)
    path = Path(settings.store).expanduser()
    with StoreEnvironment.open(path, max_bytes=settings.store_max_bytes, read_only=True) as env:
        return open_store_stats(env)


def open_store_stats(env: "StoreEnvironment") -> dict[str, Any]:
    """What an open store holds, for the default tenant and as a whole.

    Returns:
        ``documents``, ``chunks`` and ``tokens`` are the default tenant's; ``entries``, ``bytes``
        and ``quarantined`` are of all tenants. RAM holds entries in a running process alone.

    Raises:
        StoreError: It cannot be read.
    """
    import msgspec

    from chunkcache.catalog import Catalog
    from chunkcache.chunk_cache import DEFAULT_TENANT
    from chunkcache.identity import tenant_namespace
    from chunkcache.model.gate import GateReport
    from chunkcache.store.reports import load_reports
    from chunkcache.store.transaction import Database

    catalog = Catalog(env, tenant_namespace(env.secret, DEFAULT_TENANT))
    num_documents = num_chunks = num_tokens = 0
    page = catalog.list(limit=_PAGE_DOCUMENTS)
    while page:
        num_documents += len(page)
        num_chunks += sum(d.num_chunks for d in page)
        num_tokens += sum(d.num_tokens for d in page)
        page = catalog.list(after=page[-1].document_id, limit=_PAGE_DOCUMENTS)
    reports = load_reports(env, "gate", GateReport)
    with env.read() as txn:
        return {
            "store": str(env.path),
            "created_at": env.manifest.created_at,
            "documents": num_documents,
            "chunks": num_chunks,
            "tokens": num_tokens,
            "entries": {"disk": txn.num_entries(Database.ENTRIES)},
            "bytes": {"disk": txn.num_bytes(Database.ENTRIES)},
            "quarantined": txn.num_entries(Database.QUARANTINE),
            "file_bytes": env.file_bytes,
            "live_bytes": txn.live_bytes(),
            "max_bytes": env.max_bytes,
            "gate_reports": [msgspec.to_builtins(report) for report in reports],
        }

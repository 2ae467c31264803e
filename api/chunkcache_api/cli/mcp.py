"""``chunkcache mcp``."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from chunkcache_api.cli.console import print_json, reporting_errors, say
from chunkcache_api.cli.help_text import help_text
from chunkcache_api.cli.opening import open_cache
from chunkcache_api.cli.options import (
    JsonOption,
    ModelOption,
    PolicyOption,
    PreparationOption,
    ReadOnlyOption,
    StoreOption,
)

if TYPE_CHECKING:
    from chunkcache.settings import Settings
    from chunkcache_retriever.adapters.client import CacheClient

HELP = help_text(
    """Offer the store to agents as tools of the Model Context Protocol, over stdin and stdout.

    The tools are search, ask and add_document. An agent's host starts this command; its
    configuration names it with its arguments. With --url the tools ask a running server, whose key
    is CHUNKCACHE_API_KEY and decides on tenant and scopes; else the store is opened here.

    --access query leaves out add_document, --access ingest all others. --json prints the tools and
    ends, without opening anything. Needs the extra: pip install 'chunkcache[mcp]'.""",
    "chunkcache mcp --store my.store",
    "chunkcache mcp --url http://localhost:8000 --access query",
    "chunkcache mcp --json",
)


def mcp(
    url: Annotated[
        str | None,
        typer.Option("--url", help="A running server to ask, instead of opening the store."),
    ] = None,
    access: Annotated[
        str | None,
        typer.Option(
            "--access",
            envvar="CHUNKCACHE_MCP_ACCESS",
            metavar="KIND",
            help="Which tools there are: query, ingest or all.",
            show_default="all",
        ),
    ] = None,
    tenant: Annotated[
        str | None,
        typer.Option(
            "--tenant",
            envvar="CHUNKCACHE_MCP_TENANT",
            help="Whose documents, of the store that is opened here.",
            show_default="default",
        ),
    ] = None,
    store: StoreOption = None,
    model: ModelOption = None,
    preparation: PreparationOption = None,
    policy: PolicyOption = None,
    read_only: ReadOnlyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Serve the tools until stdin ends."""
    with reporting_errors(as_json=as_json):
        from chunkcache.errors import MissingExtraError
        from chunkcache.settings import load_settings

        if find_spec("mcp") is None:
            raise MissingExtraError("this needs another package: pip install 'chunkcache[mcp]'")
        given = {
            "store": store,
            "model": model,
            "preparation": preparation,
            "policy": policy,
            "read_only": read_only,
            "mcp_access": access,
            "mcp_tenant": tenant,
        }
        settings = load_settings(**given)
        if as_json:
            print_json(_tools(settings))
            return
        from chunkcache_api.mcp_server import make_server

        with _client(settings, url, **given) as client:
            say("ready; the protocol is on stdin and stdout")
            make_server(client, settings.mcp_access).run("stdio")


@contextmanager
def _client(settings: "Settings", url: str | None, **given: object) -> "Iterator[CacheClient]":
    if url is not None:
        from chunkcache_retriever.adapters.remote_client import RemoteClient

        with RemoteClient(url) as remote:
            yield remote
        return
    from chunkcache.chunk_cache import ChunkCache
    from chunkcache_api.cli.retrieval import RetrieverFactory
    from chunkcache_retriever.adapters.local_client import LocalClient

    with open_cache(**given) as opened:
        cache = ChunkCache(opened.cache.runtime, settings.mcp_tenant)
        yield LocalClient(cache, RetrieverFactory()(cache))


def _tools(settings: "Settings") -> dict[str, object]:
    """What would be offered, in the protocol's words."""
    import asyncio

    from chunkcache_api.mcp_server import make_server
    from chunkcache_retriever.adapters.remote_client import RemoteClient

    with RemoteClient("http://localhost") as nobody:  # listing asks nobody
        listed = asyncio.run(make_server(nobody, settings.mcp_access).list_tools())
    tools = [t.model_dump(mode="json", by_alias=True, exclude_none=True) for t in listed]
    return {"access": settings.mcp_access, "tenant": settings.mcp_tenant, "tools": tools}

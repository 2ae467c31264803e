"""``chunkcache serve``: the REST API, until a signal comes; without keys on loopback alone."""

import ipaddress
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chunkcache_api.cli.console import ExitCode, fail, print_json, reporting_errors, results, say
from chunkcache_api.cli.help_text import help_text
from chunkcache_api.cli.opening import log_to_stderr
from chunkcache_api.cli.options import (
    AdapterOption,
    ChunkTokensOption,
    CodecOption,
    HostTierBytesOption,
    JsonOption,
    KeysFileOption,
    ModelOption,
    PolicyOption,
    PreparationOption,
    QuantisationOption,
    RatioOption,
    ReadOnlyOption,
    RemoteOption,
    StoreMaxBytesOption,
    StoreOption,
    TargetOption,
)
from chunkcache_api.cli.retrieval import RetrieverFactory, make_neighbours, why_no_retriever

if TYPE_CHECKING:
    from chunkcache.chunk_cache import ChunkCache
    from chunkcache.settings import Settings
    from chunkcache_api.auth.key_ring import KeyRing
    from chunkcache_api.service import ServiceState
    from chunkcache_retriever.retriever import Retriever

HELP = help_text(
    """Serve the REST API on this machine.

    One process serves one model. Once there are API keys (chunkcache keys create), every request
    needs one. Without keys it listens on loopback addresses alone: whoever reaches it may read and
    delete every document. /readyz says when the model is loaded; /openapi.json describes the routes;
    /metrics is for Prometheus. A hangup signal (unless it is a terminal's), or
    POST /v1/models/reload, loads a model again whose files have changed.""",
    "chunkcache serve",
    "chunkcache serve --port 9000 --store team.store",
    "chunkcache serve --verify-rate 0.01",
    "chunkcache serve --host 0.0.0.0 --keys-file keys.json",
)

DRAIN_SECONDS = 30
"""How long open responses may go on after the first signal."""


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port; 0 takes a free one.")] = 8000,
    has_retriever: Annotated[
        bool,
        typer.Option(
            "--retriever/--no-retriever", help="Load the embedder that finds documents for top_k."
        ),
    ] = True,
    verify_rate: Annotated[
        float | None,
        typer.Option(
            "--verify-rate",
            envvar="CHUNKCACHE_VERIFY_RATE",
            help="Share of the answers that are compared with the full prefill while nobody "
            "waits, 0 to 1; /metrics shows how close they are.",
            show_default="0",
        ),
    ] = None,
    keys_file: KeysFileOption = None,
    store: StoreOption = None,
    model: ModelOption = None,
    adapter: AdapterOption = None,
    quantisation: QuantisationOption = None,
    policy: PolicyOption = None,
    ratio: RatioOption = None,
    target: TargetOption = None,
    preparation: PreparationOption = None,
    codec: CodecOption = None,
    chunk_tokens: ChunkTokensOption = None,
    host_tier_bytes: HostTierBytesOption = None,
    store_max_bytes: StoreMaxBytesOption = None,
    remote: RemoteOption = None,
    read_only: ReadOnlyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Listen, say where, serve."""
    with reporting_errors(as_json=as_json):
        from chunkcache.settings import load_settings

        settings = load_settings(
            store=store,
            model=model,
            adapter=adapter,
            quantisation=quantisation,
            policy=policy,
            recompute_ratio=ratio,
            target_kl=target,
            preparation=preparation,
            codec=codec,
            chunk_tokens=chunk_tokens,
            host_tier_bytes=host_tier_bytes,
            store_max_bytes=store_max_bytes,
            remote=remote,
            read_only=read_only,
            verify_rate=verify_rate,
            keys_file=keys_file,
        )
        keys = _keys_of(settings)
        if keys.is_open and not is_loopback(host):
            fail(
                f"{host!r} is not a loopback address, and without API keys everybody who reaches "
                "it could read and delete every document; make keys with 'chunkcache keys create', "
                "or listen on 127.0.0.1 or ::1",
                "not_loopback",
                as_json=as_json,
            )
        with _listening(host, port, as_json=as_json) as listener:
            url = _url(listener)
            if not as_json:
                _explain(url, settings.model, keys, is_local=is_loopback(host))
            body = {
                "url": url,
                "model": settings.model,
                "store": str(settings.store),
                "requires_api_key": not keys.is_open,
            }
            _run(
                listener,
                settings,
                keys,
                has_retriever=has_retriever,
                on_ready=lambda: print_json(body) if as_json else say("ready"),
            )


def is_loopback(host: str) -> bool:
    """Whether an address is one that this machine alone can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextmanager
def _listening(host: str, port: int, *, as_json: bool) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        fail(f"cannot listen on {host} port {port}: {reason}", "address", as_json=as_json)
    with listener:
        yield listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _keys_of(settings: "Settings") -> "KeyRing":
    """The keys of a store.

    Raises:
        KeysFileError: The file cannot be read, or it is set and not there.
    """
    from chunkcache_api.auth.key_ring import KeyRing
    from chunkcache_api.auth.keys_file import keys_path

    return KeyRing(keys_path(settings), is_required=settings.keys_file is not None)


def _explain(url: str, model: str, keys: "KeyRing", *, is_local: bool) -> None:
    results.print(f"chunkcache serves {model} on {url} (interrupt to stop)", markup=False)
    if keys.is_open:
        say("no API keys: reachable from this machine alone, for every user and program on it")
    else:
        say(f"API keys in force: {keys.stats().num_keys}")
    if not is_local:
        say("keys and texts travel as they are: put a proxy that speaks TLS in front")
    header = "" if keys.is_open else ' -H "authorization: Bearer $KEY"'
    say("try, once it is ready:")
    say(f"""  curl {url}/v1/documents/note -X PUT{header} -H 'content-type: application/json' \\
    -d '{{"text": "The PIN is 4017."}}'""")
    say(f"""  curl {url}/v1/query{header} -H 'content-type: application/json' \\
    -d '{{"query": "What is the PIN?", "document_ids": ["note"]}}'""")


def _run(
    listener: socket.socket,
    settings: "Settings",
    keys: "KeyRing",
    *,
    has_retriever: bool,
    on_ready: Callable[[], None],
) -> None:
    """Serve until a signal comes, or until loading fails.

    Raises:
        ChunkCacheError: Loading failed.
        KeyboardInterrupt: It was interrupted before it was ready.
        typer.Exit: It was interrupted.
    """
    import uvicorn

    from chunkcache.runtime import Runtime
    from chunkcache_api.app import create_app
    from chunkcache_api.span_export import exported_spans

    log_to_stderr()
    failures: list[BaseException] = []
    is_ready = threading.Event()
    retrievers = RetrieverFactory()

    def note_ready() -> None:
        is_ready.set()
        on_ready()

    def open_runtime() -> Runtime:
        runtime = Runtime.open(settings, say)
        if not has_retriever:
            note_ready()
        return runtime

    def open_retriever(cache: "ChunkCache") -> "Retriever":
        retriever = retrievers(cache)
        if not is_ready.is_set():
            note_ready()
        return retriever

    def give_up(error: BaseException) -> None:
        failures.append(error)
        server.should_exit = True

    if has_retriever and (reason := why_no_retriever(settings)):
        say(f"top_k is refused: {reason}")
        has_retriever = False
    with exported_spans() if settings.tracing else nullcontext() as tracer_provider:
        app = create_app(
            open_runtime,
            retriever_factory=open_retriever if has_retriever else None,
            neighbours_factory=lambda cache: make_neighbours(cache, say),
            keys=keys,
            metrics_are_open=settings.metrics_access == "open",
            on_load_failure=give_up,
            tracer_provider=tracer_provider,
        )
        config = uvicorn.Config(
            app, log_config=_log_config(), ws="none", timeout_graceful_shutdown=DRAIN_SECONDS
        )
        server = uvicorn.Server(config)
        with _signals_end_quietly() as seen, _hangups_reload(app.state.service):
            server.run(sockets=[listener])
    if failures:
        raise failures[0]
    if signal.SIGINT in seen:
        raise typer.Exit(ExitCode.INTERRUPTED) if is_ready.is_set() else KeyboardInterrupt


@contextmanager
def _signals_end_quietly() -> Iterator[set[int]]:
    """Collects the signals that the server raises again once it has shut down."""
    seen: set[int] = set()
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = {n: signal.signal(n, lambda number, frame: seen.add(number)) for n in numbers}
    try:
        yield seen
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _hangups_reload(state: "ServiceState") -> Iterator[None]:
    """Has SIGHUP load the model again; not at a terminal, whose closing should end the command."""
    if not hasattr(signal, "SIGHUP") or (sys.stdin is not None and sys.stdin.isatty()):
        yield
        return

    def reload() -> None:
        try:
            state.reload()
        except ChunkCacheError as error:
            say(f"not reloaded: {error.message} ({error.code})")

    def handle(number: int, frame: object) -> None:
        threading.Thread(target=reload, name="chunkcache-reload", daemon=True).start()

    from chunkcache.errors import ChunkCacheError

    previous = signal.signal(signal.SIGHUP, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, previous)


def _log_config() -> dict[str, Any]:
    """The server's own logging, its access log on stderr too."""
    from uvicorn.config import LOGGING_CONFIG

    handlers = {
        name: handler | {"stream": "ext://sys.stderr"}
        for name, handler in LOGGING_CONFIG["handlers"].items()
    }
    return LOGGING_CONFIG | {"handlers": handlers}

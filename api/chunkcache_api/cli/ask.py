"""``chunkcache ask``."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from chunkcache_api.cli.console import messages, print_json, printable, reporting_errors, say
from chunkcache_api.cli.help_text import help_text
from chunkcache_api.cli.opening import open_cache
from chunkcache_api.cli.options import (
    AdapterOption,
    CodecOption,
    JsonOption,
    ModelOption,
    PolicyOption,
    PreparationOption,
    QuantisationOption,
    RatioOption,
    ReadOnlyOption,
    StoreOption,
    SystemOption,
    TargetOption,
)
from chunkcache_api.cli.process_clock import seconds_since_process_start
from chunkcache_api.cli.render import (
    answer_table,
    documents_table,
    verification_line,
    verification_table,
    warning_lines,
)
from chunkcache_api.cli.retrieval import RetrieverFactory

if TYPE_CHECKING:
    from chunkcache.chunk_cache import ChunkCache
    from chunkcache.planning import DocumentRef
    from chunkcache.results import Answer
    from chunkcache.streaming import StreamingAnswer
    from chunkcache_retriever.metadata_filter import MetadataFilter

HELP = help_text(
    """Ask a question over documents of the store.

    The answer grows on stdout; what was reused and how long it took follows on stderr. Documents
    stand in the prompt in the order given.""",
    'chunkcache ask "What is the PIN?" --doc handbook.md',
    'chunkcache ask "Which port is open?" --doc network.md --doc api.md --compare',
    'chunkcache ask "What is the PIN?" --top-k 4',
    'chunkcache ask "New?" -k 4 --filter \'{"type":"gt","key":"year","value":9}\'',
    'chunkcache ask "What is the PIN?" --doc handbook.md --policy full --json',
)


@dataclass(frozen=True)
class ProcessTimes:
    """What a user waits for beside the answer itself.

    Attributes:
        model_load_seconds: Loading the model, opening the store and passing the gate.
        start_to_first_token_seconds: From the start of the process.
    """

    model_load_seconds: float
    start_to_first_token_seconds: float


def ask(
    question: Annotated[str, typer.Argument(help="The question.", show_default=False)],
    document_ids: Annotated[
        list[str] | None,
        typer.Option("--doc", "-d", metavar="ID", help="A document; repeat for more."),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option("--top-k", "-k", min=1, help="Look up so many chunks instead of --doc."),
    ] = None,
    filter_json: Annotated[
        str | None,
        typer.Option(
            "--filter",
            metavar="JSON",
            help="With --top-k: only documents whose metadata match, for example "
            '{"type": "eq", "key": "title", "value": "Handbook"}.',
        ),
    ] = None,
    policy: PolicyOption = None,
    ratio: RatioOption = None,
    target: TargetOption = None,
    max_tokens: Annotated[int, typer.Option(help="Largest number of answer tokens.")] = 64,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Also run the full prefill, and say how close it is."),
    ] = False,
    temperature: Annotated[float, typer.Option(help="0 is greedy; up to 2.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    system: SystemOption = None,
    store: StoreOption = None,
    model: ModelOption = None,
    adapter: AdapterOption = None,
    quantisation: QuantisationOption = None,
    preparation: PreparationOption = None,
    codec: CodecOption = None,
    read_only: ReadOnlyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Ask, print the answer, and say what it took."""
    if bool(document_ids) == (top_k is not None):
        raise typer.BadParameter("name documents with --doc, or have them looked up with --top-k")
    if filter_json is not None and top_k is None:
        raise typer.BadParameter("--filter is of a search: give --top-k with it")
    with reporting_errors(as_json=as_json):
        from chunkcache.engine.sampling import SamplingParams
        from chunkcache.fusion.policies.registry import PolicyOptions
        from chunkcache.planning import AskOptions

        filters = _read_filter(filter_json)
        options = AskOptions(
            policy=policy,
            policy_options=PolicyOptions(recompute_ratio=ratio, target_kl=target),
            max_tokens=max_tokens,
            sampling=SamplingParams(temperature=temperature, seed=seed),
            verify=compare,
        )
        with open_cache(
            store=store,
            model=model,
            adapter=adapter,
            quantisation=quantisation,
            preparation=preparation,
            codec=codec,
            system=system,
            read_only=read_only,
        ) as opened:
            cache = opened.cache
            documents = document_ids or _retrieve(cache, question, top_k or 0, filters)
            with cache.stream(question, documents, options) as growing:
                first_token_seconds = _write(growing, is_shown=not as_json)
                answer = _verified(growing) if compare else growing.answer()
    process = ProcessTimes(opened.load_seconds, first_token_seconds)
    if as_json:
        print_json(answer.to_dict() | {"process": asdict(process)})
    else:
        _explain(answer, process)


def _retrieve(
    cache: "ChunkCache", question: str, top_k: int, filters: "MetadataFilter | None"
) -> "Sequence[DocumentRef]":
    with messages.status("looking up documents"):
        return RetrieverFactory()(cache).retrieve(question, top_k, filters)


def _read_filter(text: str | None) -> "MetadataFilter | None":
    if text is None:
        return None
    from chunkcache.errors import InvalidValueError
    from chunkcache_retriever.metadata_filter import parse_filter

    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidValueError(f"--filter is not JSON: {error}", param="filter") from error
    return parse_filter(value, param="filter")


def _verified(growing: "StreamingAnswer") -> "Answer":
    with messages.status("running the full prefill for comparison"):
        return growing.answer()


def _write(growing: "StreamingAnswer", *, is_shown: bool) -> float:
    """Print an answer as it grows.

    Returns:
        Seconds from the start of the process to its first text (to its end, if it has none).
    """
    is_terminal = sys.stdout.isatty()
    first_token_seconds = None
    for piece in growing:
        if first_token_seconds is None:
            first_token_seconds = seconds_since_process_start()
        if is_shown:
            typer.echo(printable(piece) if is_terminal else piece, nl=False)
    if is_shown:
        typer.echo()
    return first_token_seconds or seconds_since_process_start()


def _explain(answer: "Answer", process: ProcessTimes) -> None:
    messages.print()
    messages.print(answer_table(answer))
    say(
        f"model loaded in {process.model_load_seconds:.1f} s; first token "
        f"{process.start_to_first_token_seconds:.1f} s after the process started"
    )
    if answer.report.documents:
        messages.print()
        messages.print(documents_table(answer))
    for line in warning_lines(answer):
        say(line)
    if answer.verification is not None:
        messages.print()
        messages.print(verification_table(answer))
        say(verification_line(answer))

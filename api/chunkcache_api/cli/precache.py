"""``chunkcache precache``."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chunkcache_api.cli.console import (
    ExitCode,
    error_body,
    print_json,
    reporting_errors,
    results,
    say,
)
from chunkcache_api.cli.help_text import help_text
from chunkcache_api.cli.opening import open_cache
from chunkcache_api.cli.options import (
    AdapterOption,
    ChunkTokensOption,
    CodecOption,
    JsonOption,
    ModelOption,
    PreparationOption,
    QuantisationOption,
    StoreMaxBytesOption,
    StoreOption,
)
from chunkcache_api.cli.precache_run import find_items, run_precache
from chunkcache_api.cli.render import failure_lines, precache_table
from chunkcache_api.cli.stopping import StopRequest

if TYPE_CHECKING:
    from chunkcache.results import PrecacheSummary

HELP = help_text(
    """Run documents through the model once, so that questions over them start at once.

    PATHS are files, or folders that are searched for .txt, .rst, .md and .markdown files. A
    document's id is its path below the folder. A document that is cached already costs a look-up:
    stop the job at any moment and run it again. One interrupt ends it behind the documents at
    hand, a second one at once.

    With neighbours(n), all documents are stored first; then every chunk in the store that has no
    neighbours yet gets some. They stay the same when the job runs again; a chunk whose neighbour
    was deleted or replaced gets new ones.""",
    "chunkcache precache docs/",
    "chunkcache precache handbook.md faq.txt --store team.store",
    "chunkcache precache docs/ --preparation 'neighbours(2)'",
    "chunkcache precache docs/ --json > summary.json",
    notes="Exit codes: 0 all cached; 1 nothing cached; 2 wrong usage; 3 some documents failed; "
    "130 interrupted.",
)


def precache(
    paths: Annotated[list[Path], typer.Argument(help="Files and folders.", show_default=False)],
    store: StoreOption = None,
    model: ModelOption = None,
    adapter: AdapterOption = None,
    quantisation: QuantisationOption = None,
    preparation: PreparationOption = None,
    codec: CodecOption = None,
    chunk_tokens: ChunkTokensOption = None,
    store_max_bytes: StoreMaxBytesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Cache files and folders."""
    on_abort = json.dumps(error_body("interrupted", "aborted")) + "\n" if as_json else ""
    with (
        reporting_errors(as_json=as_json),
        open_cache(
            store=store,
            model=model,
            adapter=adapter,
            quantisation=quantisation,
            preparation=preparation,
            codec=codec,
            chunk_tokens=chunk_tokens,
            store_max_bytes=store_max_bytes,
        ) as opened,
        StopRequest(on_abort) as stop,
    ):
        items = find_items(paths)
        if not items:
            say("no text files found")
        summary = run_precache(opened.cache, items, stop)
    if as_json:
        print_json(asdict(summary))
    else:
        for line in failure_lines(summary):
            say(line)
        results.print(precache_table(summary))
    raise typer.Exit(exit_code_of(summary))


def exit_code_of(summary: "PrecacheSummary") -> ExitCode:
    """How a run ended."""
    if summary.interrupted:
        return ExitCode.INTERRUPTED
    if not summary.failures:
        return ExitCode.OK
    return ExitCode.PARTIAL if summary.documents else ExitCode.FAILED

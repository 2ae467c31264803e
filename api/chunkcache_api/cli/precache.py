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
from chunkcache_api.cli.corpus import Shard, find_corpus
from chunkcache_api.cli.corpus import prune as prune_corpus
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
    RemoteOption,
    StoreMaxBytesOption,
    StoreOption,
)
from chunkcache_api.cli.precache_run import run_estimate, run_precache
from chunkcache_api.cli.precache_watch import CorpusWatch
from chunkcache_api.cli.render import estimate_table, failure_lines, precache_table
from chunkcache_api.cli.stopping import StopRequest

if TYPE_CHECKING:
    from chunkcache.precache_estimate import PrecacheEstimate
    from chunkcache.results import PrecacheSummary

HELP = help_text(
    """Run documents through the model once, so that questions over them start at once.

    PATHS are files, or folders that are searched for text (.txt, .rst, .md, .markdown), .html,
    .pdf and .docx files, and for .csv and .jsonl files with a document in each row. A document's id
    is its path below the folder, or the row's id. A document that is cached already costs a
    look-up: stop the job at any moment and run it again. One interrupt or SIGTERM ends it behind
    the documents at hand, a second one at once.

    --dry-run reads and cuts everything, and says how large it would be and how long it would take.
    --prune deletes the documents that came from these PATHS and whose files or rows are gone; where
    nothing is found under a path, it deletes nothing of it.
    --watch goes on behind the first run: what changes below the folders is cached as it changes,
    until an interrupt or SIGTERM ends it. With --prune, what is removed there is deleted.
    --shard 2/4 takes the second of four parts, for as many machines or runs.

    With neighbours(n), all documents are stored first; then every chunk in the store that has no
    neighbours yet gets some. They stay the same when the job runs again; a chunk whose neighbour
    was deleted or replaced gets new ones.""",
    "chunkcache precache docs/",
    "chunkcache precache handbook.md faq.txt --store team.store",
    "chunkcache precache docs/ --dry-run",
    "chunkcache precache docs/ --prune",
    "chunkcache precache docs/ --watch --prune",
    "chunkcache precache tickets.csv --id-column number --text-column description",
    "chunkcache precache docs/ --preparation 'neighbours(2)'",
    "chunkcache precache docs/ --json > summary.json",
    notes="Exit codes: 0 all cached; 1 nothing cached; 2 wrong usage; 3 some documents failed; "
    "130 interrupted (not for --watch between two runs). A run that --max-bytes ended has not cached all: 3.",
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
    remote: RemoteOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what it would take; store nothing.")
    ] = False,
    prune: Annotated[
        bool, typer.Option("--prune", help="Delete documents of these paths whose file is gone.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Go on with what changes below the folders.")
    ] = False,
    shard: Annotated[
        str | None, typer.Option("--shard", metavar="I/N", help="Take one part of N, from 1/N.")
    ] = None,
    max_bytes: Annotated[
        int | None,
        typer.Option("--max-bytes", min=1, help="End once so many bytes of entries are written."),
    ] = None,
    id_column: Annotated[
        str, typer.Option("--id-column", help="Column of rows that holds the document's id.")
    ] = "id",
    text_column: Annotated[
        str, typer.Option("--text-column", help="Column of rows that holds the text.")
    ] = "text",
    metadata_column: Annotated[
        list[str] | None,
        typer.Option(
            "--metadata-column", help="Column to keep as metadata; all, if none is named."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Cache files and folders."""
    part = Shard.parse(shard)
    if dry_run and prune:
        raise typer.BadParameter("--prune deletes, and --dry-run changes nothing: give one of them")
    if watch and (dry_run or max_bytes is not None):
        raise typer.BadParameter("--watch goes on for ever: give neither --dry-run nor --max-bytes")
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
            remote=remote,
        ) as opened,
        StopRequest(on_abort) as stop,
    ):
        from chunkcache_retriever.row_readers import RowColumns

        kept = None if metadata_column is None else tuple(metadata_column)
        columns = RowColumns(id_column, text_column, kept)
        if watch:
            watched = CorpusWatch(opened.cache, paths, part, columns, stop, prunes=prune)
            summary, pruned = watched.run()
            reached_max_bytes = False
        else:
            corpus = find_corpus(paths, part, columns)
            if not corpus.items:
                say("no files to cache found")
            if dry_run:
                _show_estimate(run_estimate(opened.cache, corpus.items, stop), as_json=as_json)
                raise typer.Exit(ExitCode.INTERRUPTED if stop.is_set() else ExitCode.OK)
            summary = run_precache(opened.cache, corpus.items, stop, max_bytes)
            reached_max_bytes = summary.interrupted and not stop.is_set()
            pruned = []
            if prune and not summary.interrupted:
                pruned = prune_corpus(opened.cache, corpus)
    if as_json:
        ended = {"pruned": len(pruned), "reached_max_bytes": reached_max_bytes}
        print_json(asdict(summary) | ended)
    else:
        for line in failure_lines(summary):
            say(line)
        results.print(precache_table(summary))
        if pruned:
            say(f"deleted {len(pruned):,} documents whose files are gone")
        if reached_max_bytes:
            say("ended at --max-bytes: run it again to go on")
    if reached_max_bytes:
        raise typer.Exit(ExitCode.PARTIAL)
    raise typer.Exit(exit_code_of(summary))


def _show_estimate(estimate: "PrecacheEstimate", *, as_json: bool) -> None:
    if as_json:
        print_json(asdict(estimate))
        return
    for line in failure_lines(estimate):
        say(line)
    results.print(estimate_table(estimate))


def exit_code_of(summary: "PrecacheSummary") -> ExitCode:
    """How a run ended."""
    if summary.interrupted:
        return ExitCode.INTERRUPTED
    if not summary.failures:
        return ExitCode.OK
    return ExitCode.PARTIAL if summary.documents else ExitCode.FAILED

"""One fusion: load entries, place them, select rows, recompute them.

A fusion is a generator of steps with fixed boundaries (one layer, one entry), so that an engine
can do other work in between without changing a bit of the result.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import torch

from chunkcache.errors import CacheMissError
from chunkcache.estimate import EstimateReport
from chunkcache.fusion.cost import CostMeter
from chunkcache.fusion.full_prefill import full_prefill_steps
from chunkcache.fusion.layout import Layout, Segment
from chunkcache.fusion.mean_offset import MeanOffset
from chunkcache.fusion.place import place_entry
from chunkcache.fusion.plan import FusionPlan, PromptParts
from chunkcache.fusion.policy import Candidates, RowSelection
from chunkcache.fusion.ready import NOTHING_READY, ReadyTokens
from chunkcache.fusion.recompute import LayerRows, SequenceKV, only_rows_from, run_rows
from chunkcache.fusion.reuse import LoadedChunk, count_reuse
from chunkcache.fusion.rows import PromptRows, rows_by_role
from chunkcache.fusion.signals import QueryProbe, value_deviation
from chunkcache.fusion.stopwatch import Stopwatch
from chunkcache.fusion.template_entries import (
    NOTHING_PLACED,
    LoadTemplate,
    PlacedTemplate,
    place_template,
)
from chunkcache.identity import EntryIdentity
from chunkcache.model.runner import ModelRunner
from chunkcache.pages import PageLease, PagePool
from chunkcache.results import FusionReport, ReuseWarning, Timings
from chunkcache.store.lease import Lease
from chunkcache.store.tier import MissReason, NotStored

LoadEntry = Callable[[EntryIdentity, bool], Lease | MissReason]
"""Finds an entry; with True, computes it where it is missing."""


@dataclass(frozen=True)
class FusionOutcome:
    """What a fusion leaves behind.

    Attributes:
        logits: fp32 ``[vocab]`` of the prompt's last token.
        answer_logits: fp32 ``[A, vocab]`` of the tokens of the answer that rode along, if any.
        parts: The prompt that was run (chunks left out by ``on_miss: skip`` are not in it).
        layout: Its layout.
        report: What was reused and what was run; timings without queue and decode.
        is_repeatable: Whether the prompt is the plan's, and every chunk that was wanted had an entry:
            what came out is a function of the plan then.
    """

    logits: torch.Tensor
    answer_logits: torch.Tensor
    parts: PromptParts
    layout: Layout
    report: FusionReport
    is_repeatable: bool


class Fusion:
    """Runs one :class:`FusionPlan` on pages of its own.

    Args:
        runner: The model.
        pool: Where the pages are.
        pages: Slots for at least the plan's prompt.
        plan: What to do.
        load_entry: Finds or computes entries of chunks.
        load_template: Finds or computes entries of template text.
        ready: Tokens at the front whose keys and values are in the pages: whole blocks of a full
            prefill, or up to a cut of the layout.
    """

    def __init__(
        self,
        runner: ModelRunner,
        pool: PagePool,
        pages: PageLease,
        plan: FusionPlan,
        load_entry: LoadEntry,
        load_template: LoadTemplate,
        *,
        ready: ReadyTokens = NOTHING_READY,
    ) -> None:
        self._runner = runner
        self._pool = pool
        self._pages = pages
        self._plan = plan
        self._load_entry = load_entry
        self._load_template = load_template
        self._ready = ready
        self._watch = Stopwatch()
        self._cost = CostMeter(runner.spec.num_layers)
        self._warnings: list[ReuseWarning] = list(plan.warnings)

    def steps(self) -> Generator[None, None, FusionOutcome]:
        """Run; yields between steps, returns the outcome. Closing it early releases every lease.

        Raises:
            CacheMissError: A chunk is missing and the plan says ``on_miss: error``.
        """
        self._watch.restart()
        loaded: list[LoadedChunk] = []
        try:
            parts, layout = self._plan.parts, self._plan.layout
            sequence = self._sequence(layout)
            if self._plan.on_miss != "skip":
                # Each entry is given back as soon as it is placed: a prompt's entries need not
                # fit in memory beside its pages.
                yield from self._load(loaded, lambda c: self._place(c, c.segment, layout, sequence))
            else:
                yield from self._load(loaded, lambda c: None)
                parts = self._final_parts(loaded)
                layout = parts.layout()
                sequence = self._sequence(layout)
                found = [c for c in loaded if c.source != "skipped"]
                for chunk, segment in zip(found, layout.chunks, strict=True):
                    self._place(chunk, segment, layout, sequence)
        finally:
            for chunk in loaded:
                if chunk.lease is not None:
                    chunk.lease.release()
        yield
        self._watch.restart()
        device = self._runner.device
        token_ids = torch.tensor(layout.token_ids, dtype=torch.int64, device=device)
        if not self._plan.policy.places_entries:
            logits = yield from self._run_all(layout, sequence, token_ids)
            report = self._report(layout, loaded, NOTHING_PLACED, set(), None)
            return FusionOutcome(logits[0], logits[1:], parts, layout, report, True)
        kept = [c for c in loaded if c.source != "skipped"]
        template = self._place_template(layout, sequence)
        rows = rows_by_role(
            layout,
            [c.has_entry for c in kept],
            [c.is_exact for c in kept],
            opening_is_placed=template.opening is not None,
            device=device,
        )
        selection = self._select(layout, sequence, token_ids, rows, template)
        yield
        self._watch.restart()
        logits, recomputed = yield from self._recompute(
            layout, sequence, token_ids, rows, selection
        )
        report = self._report(
            layout, loaded, template, set(recomputed.tolist()), selection.estimate
        )
        is_repeatable = all(c.has_entry for c in loaded)
        return FusionOutcome(logits[0], logits[1:], parts, layout, report, is_repeatable)

    def _sequence(self, layout: Layout) -> SequenceKV:
        slots = self._pages.slots[: layout.num_tokens]
        return SequenceKV.over(self._runner, self._pool.k, self._pool.v, slots)

    def _place(
        self, chunk: LoadedChunk, segment: Segment, layout: Layout, sequence: SequenceKV
    ) -> None:
        """Place a chunk's entry, if it has one, where ``segment`` stands, and give it back."""
        if chunk.lease is not None:
            place_entry(sequence, chunk.lease.entry, segment.start)
            chunk.is_exact = self._plan.is_exact_at(segment.start, layout)
            chunk.lease.release()
            chunk.lease = None
        self._watch.lap("place")

    def _load(
        self, loaded: list[LoadedChunk], on_loaded: Callable[[LoadedChunk], None]
    ) -> Generator[None, None, None]:
        plan = self._plan
        for segment, identity in zip(plan.layout.chunks, plan.identities, strict=True):
            if not plan.policy.places_entries:
                loaded.append(LoadedChunk(segment, "not_loaded", 0.0))
                continue
            if segment.end <= len(self._ready):
                is_exact = plan.is_exact_at(segment.start, plan.layout)
                loaded.append(
                    LoadedChunk(segment, "device", 0.0, has_entry=True, is_exact=is_exact)
                )
                continue
            assert segment.chunk is not None
            found = self._load_entry(identity, plan.on_miss == "prefill")
            if isinstance(found, Lease) and found.warning == NotStored.NON_FINITE:
                found.release()
                loaded.append(LoadedChunk(segment, "computed", self._watch.lap("prefill")))
                self._warn("entry_non_finite", "has no finite entry: ran in place", segment)
            elif isinstance(found, Lease):
                stage = "prefill" if found.source == "computed" else "load"
                chunk = LoadedChunk(segment, found.source, self._watch.lap(stage), found)
                chunk.has_entry, chunk.is_stored = True, found.warning is None
                loaded.append(chunk)
                self._note_load(segment, found)
            elif plan.on_miss == "error":
                raise CacheMissError(
                    f"chunk {segment.chunk.chunk_index} of document "
                    f"{segment.chunk.document_id!r} is not cached ({found})",
                    param="document_ids",
                )
            else:
                loaded.append(LoadedChunk(segment, "skipped", self._watch.lap("load")))
                self._warn("chunk_skipped", f"left out: not cached ({found})", segment)
            on_loaded(loaded[-1])
            yield
            self._watch.restart()

    def _note_load(self, segment: Segment, lease: Lease) -> None:
        if lease.miss == MissReason.SLOWER_THAN_PREFILL:
            self._warn(f"miss_{lease.miss}", "was computed: reading it would take longer", segment)
        elif lease.miss == MissReason.REMOTE_UNAVAILABLE:
            self._warn(f"miss_{lease.miss}", "was computed: the remote did not answer", segment)
        elif lease.miss is not None and lease.miss != MissReason.ABSENT:
            self._warn(
                f"miss_{lease.miss}", "the stored entry was unusable: computed anew", segment
            )
        if lease.warning is not None:
            self._warn(f"not_stored_{lease.warning}", "could not be kept", segment)

    def _warn(self, code: str, message: str, segment: Segment) -> None:
        assert segment.chunk is not None
        chunk = segment.chunk
        self._warnings.append(
            ReuseWarning(code, f"chunk {chunk.chunk_index} {message}", chunk.document_id)
        )

    def _final_parts(self, loaded: Sequence[LoadedChunk]) -> PromptParts:
        skipped = {i for i, c in enumerate(loaded) if c.source == "skipped"}
        return self._plan.parts.without(skipped) if skipped else self._plan.parts

    def _place_template(self, layout: Layout, sequence: SequenceKV) -> PlacedTemplate:
        if not self._plan.identities:
            return NOTHING_PLACED
        placed = place_template(
            layout,
            sequence,
            self._load_template,
            self._plan.identities[0],
            opening_is_exact=not self._runner.spec.rope.is_length_dependent,
            num_ready=len(self._ready),
        )
        self._watch.lap("prefill" if placed.num_computed else "load")
        return placed

    def _select(
        self,
        layout: Layout,
        sequence: SequenceKV,
        token_ids: torch.Tensor,
        rows: PromptRows,
        template: PlacedTemplate,
    ) -> RowSelection:
        # The probe leaves out rows that the question cannot see, and rows with a stand-in.
        last = max(layout.query_positions, default=-1)
        probed = [p for p in rows.fixed.tolist() if p <= last and p not in template.stale]
        probe = QueryProbe(
            self._runner,
            sequence,
            token_ids,
            torch.tensor(probed, dtype=torch.int64, device=self._runner.device),
            layout.query_positions,
            self._cost,
        )
        candidates = Candidates(
            positions=rows.candidates,
            chunk_of=rows.chunk_of,
            offset_in_chunk=rows.offset_in_chunk,
            num_layers=self._runner.spec.num_layers,
            query_attention=lambda layers, how: probe.attention(layers, how)[rows.candidates],
        )
        selection = self._plan.policy.select(candidates)
        assert selection.chosen.shape == rows.candidates.shape
        self._watch.lap("probe")
        return selection

    def _run_all(
        self, layout: Layout, sequence: SequenceKV, token_ids: torch.Tensor
    ) -> Generator[None, None, torch.Tensor]:
        """Run every row that is not ready; returns the last logits."""
        steps = full_prefill_steps(
            self._runner,
            sequence,
            token_ids,
            num_ready=len(self._ready),
            first_wanted=layout.prompt_end - 1,
            cost=self._cost,
            mask_positions=self._plan.mask_positions,
        )
        while True:
            try:
                next(steps)
            except StopIteration as stop:
                logits = self._runner.logits(stop.value)
                self._watch.lap("recompute")
                return logits
            self._watch.lap("recompute")
            yield
            self._watch.restart()

    def _recompute(
        self,
        layout: Layout,
        sequence: SequenceKV,
        token_ids: torch.Tensor,
        rows: PromptRows,
        selection: RowSelection,
    ) -> Generator[None, None, tuple[torch.Tensor, torch.Tensor]]:
        """Run fixed and chosen rows; returns last logits and the recomputed candidates' positions."""
        num_ready = len(self._ready)
        recomputed = rows.candidates[selection.chosen]
        recomputed = recomputed[recomputed >= num_ready]
        running = torch.cat([rows.fixed[rows.fixed >= num_ready], recomputed]).sort().values
        last = only_rows_from(self._runner.spec.num_layers, layout.prompt_end - 1)
        narrowing = selection.narrowing
        offset: MeanOffset | None = None

        def hook(layer_rows: LayerRows) -> torch.Tensor | None:
            nonlocal recomputed, offset
            if offset is not None:
                offset.apply(layer_rows)
            if narrowing is None or layer_rows.layer != narrowing.layer:
                return last(layer_rows)
            is_candidate = torch.isin(layer_rows.rows, recomputed)
            index = torch.nonzero(is_candidate).flatten()
            scores = value_deviation(layer_rows, sequence, index)
            order = torch.sort(scores, descending=True, stable=True).indices
            kept = index[order[: narrowing.num_rows]]
            recomputed = layer_rows.rows[kept].sort().values
            if narrowing.shift is not None:
                offset = MeanOffset(sequence, rows, recomputed, narrowing.shift)
            go_on = torch.cat([torch.nonzero(~is_candidate).flatten(), kept]).sort().values
            stops_here = last(layer_rows)
            return go_on if stops_here is None else stops_here

        result = None
        for stage in self._stages(layout, running):
            for result in run_rows(
                self._runner,
                sequence,
                token_ids,
                stage,
                cost=self._cost,
                hook=hook,
                mask_positions=self._plan.mask_positions,
            ):
                if result is None:
                    self._watch.lap("recompute")
                    yield
                    self._watch.restart()
        assert result is not None
        assert result.rows.tolist() == list(range(layout.prompt_end - 1, layout.num_tokens))
        logits = self._runner.logits(result.hidden)
        self._watch.lap("recompute")
        return logits, recomputed

    def _stages(self, layout: Layout, running: torch.Tensor) -> Iterator[torch.Tensor]:
        """The rows in the portions that they run in: their number is part of their bits."""
        start = 0
        cuts = layout.cuts if self._plan.policy.is_question_blind else ()
        for end in (*cuts, layout.num_tokens):
            stage = running[(running >= start) & (running < end)]
            start = end
            if len(stage):
                yield stage

    def _report(
        self,
        layout: Layout,
        loaded: Sequence[LoadedChunk],
        template: PlacedTemplate,
        recomputed: set[int],
        estimate: EstimateReport | None,
    ) -> FusionReport:
        plan = self._plan
        spent = self._watch.spent_ms
        reuse = count_reuse(layout, loaded, template.opening, recomputed, self._ready)
        return FusionReport(
            policy=str(plan.policy),
            requested_policy=str(plan.requested_policy),
            preparation=plan.preparation,
            exact=reuse.num_inexact == 0,
            nominal_ratio=plan.policy.nominal_ratio,
            charged_ratio=self._cost.charged_ratio(layout.num_context_tokens),
            account=reuse.account,
            use=reuse.use,
            documents=reuse.documents,
            warnings=tuple(self._warnings),
            estimate=estimate,
            timings=Timings(
                load_ms=spent["load"] + spent["prefill"],
                prefill_ms=spent["prefill"],
                place_ms=spent["place"],
                probe_ms=spent["probe"],
                recompute_ms=spent["recompute"],
            ),
        )

"""How likely the model holds a question to be behind each of some chunks, from kept keys and values.

The chunk stands as it was prefilled: behind its own prefix, at its own positions, and the question
as a suffix. No row of the prefix or the chunk is stale then, so the figure is that of a plain forward
over the same tokens, up to the codec's rounding; and only the question's rows run. Ranking by the
likelihood of the question: D. Sachan et al., arXiv:2204.07496. Reusing kept chunks for it: Y. An et
al. (HyperRAG), arXiv:2504.02921. Knows no index and no text of documents.
"""

from collections.abc import Sequence
from itertools import groupby

import torch

from chunkcache.catalog import Catalog
from chunkcache.entry import Entry
from chunkcache.errors import InvalidValueError, UnsupportedModelError
from chunkcache.fusion.cost import CostMeter
from chunkcache.fusion.place import place_entry
from chunkcache.fusion.recompute import SequenceKV, finish_rows, run_rows
from chunkcache.identity import EntryIdentity
from chunkcache.planning import PromptPlanner
from chunkcache.runtime import Runtime


class QueryLikelihood:
    """Scores chunks of one tenant. Safe to use from several threads.

    Args:
        runtime: Model, store and engine.
        catalog: The tenant's documents.

    Raises:
        UnsupportedModelError: The model's rotation depends on the prompt's length, so that what
            stands in front of the question would have to run again.
    """

    def __init__(self, runtime: Runtime, catalog: Catalog) -> None:
        if runtime.model.runner.spec.rope.is_length_dependent:
            raise UnsupportedModelError(
                "chunks cannot be scored with this model: its rotation depends on the prompt's length"
            )
        self._runtime = runtime
        self._planner = PromptPlanner(runtime, catalog)

    def scores(self, query: str, chunks: Sequence[tuple[int, ...]]) -> list[float]:
        """The mean log probability of a query's tokens behind each chunk, in nats; 0 is certain.

        Chunks without an entry are prefilled first, as for an answer. The engine goes on with its
        answers between two chunks.

        Args:
            query: The question.
            chunks: Token ids of each.

        Raises:
            InvalidValueError: The query holds no token, or does not fit the model behind a chunk.
            StoreError: The store cannot be read.
            DrainingError: The runtime is closed, or another has taken its place.
        """
        runtime = self._runtime
        tokenizer, template = runtime.model.tokenizer, runtime.model.template
        query_ids = tokenizer.encode_content(query)
        if not query_ids:
            raise InvalidValueError("the query holds no token", param="query")
        suffix = template.before_question + query_ids
        system_ids = self._planner.system_ids(None)
        identities = self._planner.names.identities(chunks, system_ids)
        longest = max((len(i.prefix_ids) + len(i.token_ids) for i in identities), default=0)
        limit = runtime.model.runner.spec.max_positions
        if longest + len(suffix) > limit:
            raise InvalidValueError(
                f"a query of {len(query_ids)} tokens does not fit {limit} positions behind a chunk",
                param="query",
            )
        scores: dict[int, float] = {}
        order = sorted(range(len(identities)), key=lambda i: identities[i].prefix_ids)
        for _, group in groupby(order, key=lambda i: identities[i].prefix_ids):
            numbers = list(group)
            members = [identities[i] for i in numbers]
            suffixes = _Suffixes(runtime, members, suffix, len(query_ids))
            scores |= dict(zip(numbers, suffixes.scores(), strict=True))
        return [scores[i] for i in range(len(identities))]


class _Suffixes:
    """Runs one suffix behind chunks that share a prefix, over memory of its own.

    One sequence serves all: the prefix's rows run once and stay; each chunk and suffix are written
    over the last. What an earlier, longer one left behind lies beyond every running row's position.
    """

    def __init__(
        self,
        runtime: Runtime,
        identities: Sequence[EntryIdentity],
        suffix: tuple[int, ...],
        num_scored: int,
    ) -> None:
        self._runtime = runtime
        self._identities = identities
        self._prefix = identities[0].prefix_ids
        self._suffix = suffix
        self._num_scored = num_scored
        self._sequence: SequenceKV | None = None

    def scores(self) -> list[float]:
        found = []
        for identity in self._identities:
            with self._runtime.ensure_entry(identity) as lease:
                entry = lease.entry
                found.append(
                    self._runtime.engine.call(lambda entry=entry: self._score(entry)).result()
                )
        return found

    @torch.inference_mode()
    def _score(self, entry: Entry) -> float:
        """The mean log probability of the suffix's scored tokens; on the engine's thread."""
        runner = self._runtime.model.runner
        sequence = self._prepared()
        place_entry(sequence, entry, len(self._prefix))
        token_ids = self._prefix + entry.identity.token_ids + self._suffix
        ids = torch.tensor(token_ids, dtype=torch.int64, device=runner.device)
        # The last token is predicted, and predicts nothing that counts.
        rows = torch.arange(
            len(token_ids) - len(self._suffix), len(token_ids) - 1, device=runner.device
        )
        first = len(token_ids) - self._num_scored
        if not len(rows) or first - 1 < rows[0]:
            # Without words before it, the query's first token is predicted by the chunk's last.
            rows = torch.arange(first - 1, len(token_ids) - 1, device=runner.device)
        cost = CostMeter(runner.spec.num_layers)
        result = finish_rows(run_rows(runner, sequence, ids, rows, cost=cost))
        hidden = result.hidden[-self._num_scored :]
        logprobs = torch.log_softmax(runner.logits(hidden), dim=-1)
        return float(logprobs.gather(1, ids[first:, None]).mean())

    def _prepared(self) -> SequenceKV:
        """The memory, with the prefix in front."""
        if self._sequence is not None:
            return self._sequence
        runner = self._runtime.model.runner
        longest = max(len(i.token_ids) for i in self._identities)
        self._sequence = SequenceKV.alone(runner, len(self._prefix) + longest + len(self._suffix))
        self._sequence.k_pages.zero_()
        self._sequence.v_pages.zero_()
        if self._prefix:
            ids = torch.tensor(self._prefix, dtype=torch.int64, device=runner.device)
            rows = torch.arange(len(self._prefix), device=runner.device)
            cost = CostMeter(runner.spec.num_layers)
            finish_rows(run_rows(runner, self._sequence, ids, rows, cost=cost))
        return self._sequence

"""Which kept pages a prompt may begin with, and under which digests its own are kept.

A full prefill's pages are a tree of blocks: a block's key is the digest of the block before it and
of its own tokens, its root the tenant's. A fused prompt's pages are kept whole, under a digest of
the whole composition, with what it came to: repeated, nothing runs. Under a policy that does not
look at the question they are kept at each cut of the layout too. The two never mix: a fused page is
not a function of the tokens alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from chunkcache.engine.kept_pages import KeptEnd, KeptPages, KeptPiece
from chunkcache.fusion.full_prefill import BLOCK_TOKENS
from chunkcache.fusion.fuse import FusionOutcome
from chunkcache.fusion.plan import FusionPlan
from chunkcache.fusion.ready import NOTHING_READY, ReadyTokens
from chunkcache.identity import (
    ChunkId,
    TenantNamespace,
    TokenizerDigest,
    chunk_id,
    digest_fields,
    encode_token_ids,
)
from chunkcache.pages import PageLease


@dataclass(frozen=True)
class PromptStart:
    """What a prompt begins with.

    Attributes:
        lease: Its pages, of as many tokens as are ready.
        ready: The tokens.
        end: What the prompt came to before, where all of it is ready.
    """

    lease: PageLease
    ready: ReadyTokens
    end: KeptEnd | None


@dataclass(frozen=True)
class _Path:
    """Kept pieces that are a prompt's beginning together, in order."""

    keys: tuple[bytes, ...]
    pieces: tuple[KeptPiece, ...]
    ready: ReadyTokens


class KeptPrompts:
    """Finished prompts of one model's pool.

    Args:
        kept: Their pages.
        page_tokens: Slots per page.
        tokenizer: Digest of the model's tokenizer, which chunks are named under.
    """

    def __init__(self, kept: KeptPages, page_tokens: int, tokenizer: TokenizerDigest) -> None:
        self._kept = kept
        self._page_tokens = page_tokens
        self._tokenizer = tokenizer

    def ready(self, plan: FusionPlan, namespace: TenantNamespace) -> ReadyTokens:
        """What a prompt would begin with now."""
        with self._kept.lock:
            path = self._path(plan, namespace)
            return path.ready if path else NOTHING_READY

    def find(self, plan: FusionPlan, namespace: TenantNamespace) -> PromptStart | None:
        """The longest beginning of a prompt that is kept; a full prefill's last row always runs."""
        with self._kept.lock:
            path = self._path(plan, namespace)
            if path is None:
                return None
            self._kept.touch(path.keys)
            num_tokens = len(path.ready)
            pages = [-1] * -(-num_tokens // self._page_tokens)
            for index, piece in enumerate(path.pieces):
                # A page of two blocks: the later one's holds both.
                first = index * BLOCK_TOKENS // self._page_tokens
                pages[first : first + len(piece.pages)] = piece.pages
            lease = self._kept.share(pages, num_tokens)
            is_whole = num_tokens == plan.layout.num_tokens
            return PromptStart(lease, path.ready, path.pieces[-1].end if is_whole else None)

    def keep(
        self,
        plan: FusionPlan,
        namespace: TenantNamespace,
        lease: PageLease,
        outcome: FusionOutcome,
    ) -> None:
        """Keep a prompt that has run. Only for the thread that owns its pages.

        Args:
            plan: What ran.
            namespace: Whose it is.
            lease: Its pages; the sequence may go on in them behind the prompt.
            outcome: What it came to.
        """
        if not self._may_keep(plan) or not outcome.is_repeatable:
            return
        with self._kept.lock:
            if plan.policy.places_entries:
                keys = self._keep_fused(plan, namespace, lease, outcome)
            else:
                keys = self._keep_blocks(plan, namespace, lease)
            self._kept.touch(keys)
            self._kept.trim()
        # Behind their entry: a document that goes meanwhile is seen here, or sees them.
        self._kept.drop_gone()

    def _keep_blocks(
        self, plan: FusionPlan, namespace: TenantNamespace, lease: PageLease
    ) -> list[bytes]:
        keys = self._block_keys(plan, namespace, plan.layout.prompt_end)
        starts = self._chunk_starts(plan)
        for index, key in enumerate(keys):
            if self._kept.get(key) is None:
                start, end = index * BLOCK_TOKENS, (index + 1) * BLOCK_TOKENS
                pages = lease.pages[start // self._page_tokens : -(-end // self._page_tokens)]
                self._kept.add(key, KeptPiece(namespace, pages, _before(starts, end)))
        return keys

    def _keep_fused(
        self,
        plan: FusionPlan,
        namespace: TenantNamespace,
        lease: PageLease,
        outcome: FusionOutcome,
    ) -> list[bytes]:
        report, keys = outcome.report, []
        starts = self._chunk_starts(plan)
        for end in self._ends(plan):
            key = self._fused_key(plan, namespace, end)
            keys.append(key)
            is_whole = end == plan.layout.num_tokens
            before = self._kept.get(key)
            if before is not None and (before.end is not None or not is_whole):
                continue
            piece = KeptPiece(
                namespace,
                lease.pages[: -(-end // self._page_tokens)],
                _before(starts, end),
                ReadyTokens.of(report.use, end, is_exact=report.exact).uses,
                KeptEnd(outcome.logits, report) if is_whole else None,
            )
            self._kept.add(key, piece)
        return keys

    def _may_keep(self, plan: FusionPlan) -> bool:
        """Not where what runs depends on more than the plan: on what is in the store."""
        return (
            self._kept.max_pages > 0
            and plan.mask_positions is None
            and plan.on_miss != "skip"
            and not plan.parts.answer_ids
        )

    def _path(self, plan: FusionPlan, namespace: TenantNamespace) -> _Path | None:
        if not self._may_keep(plan):
            return None
        if plan.policy.places_entries:
            return self._fused_path(plan, namespace)
        keys, pieces = [], []
        for key in self._block_keys(plan, namespace, plan.layout.prompt_end - 1):
            piece = self._kept.get(key)
            if piece is None:
                break
            keys.append(key)
            pieces.append(piece)
        ready = ReadyTokens.exact(len(keys) * BLOCK_TOKENS)
        return _Path(tuple(keys), tuple(pieces), ready) if keys else None

    def _fused_path(self, plan: FusionPlan, namespace: TenantNamespace) -> _Path | None:
        for end in self._ends(plan)[::-1]:
            key = self._fused_key(plan, namespace, end)
            piece = self._kept.get(key)
            if piece is not None and (end < plan.layout.num_tokens or piece.end is not None):
                return _Path((key,), (piece,), ReadyTokens(piece.uses))
        return None

    def _ends(self, plan: FusionPlan) -> tuple[int, ...]:
        """Up to where a fused prompt's pages are a function of what stands there."""
        layout = plan.layout
        cuts = layout.cuts if plan.policy.is_question_blind else ()
        return (*(c for c in cuts if 0 < c < layout.num_tokens), layout.num_tokens)

    def _block_keys(self, plan: FusionPlan, namespace: TenantNamespace, end: int) -> list[bytes]:
        """Keys of the whole blocks of a prompt's first tokens."""
        token_ids = plan.layout.token_ids
        key = digest_fields("full prompts", [("namespace", namespace)])
        keys = []
        for start in range(0, end - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            tokens = encode_token_ids(token_ids[start : start + BLOCK_TOKENS])
            key = digest_fields("full block", [("before", key), ("token_ids", tokens)])
            keys.append(key)
        return keys

    def _fused_key(self, plan: FusionPlan, namespace: TenantNamespace, end: int) -> bytes:
        """Key of a composition's first tokens: all that their keys and values depend on."""
        layout = plan.layout
        fields = [
            ("namespace", namespace),
            ("policy", repr(plan.policy)),
            ("preparation", plan.preparation),
            ("is_lossless", int(plan.reuse_is_lossless)),
            ("token_ids", encode_token_ids(layout.token_ids[:end])),
            ("stages", encode_token_ids([e for e in self._ends(plan) if e < end])),
        ]
        for segment, identity in zip(layout.chunks, plan.identities, strict=True):
            if segment.start < end:
                fields += [("start", segment.start), ("entry", identity.key())]
        if not plan.policy.is_question_blind:
            fields.append(("question", encode_token_ids(layout.query_positions)))
        return digest_fields("fused prompt", fields)

    def _chunk_starts(self, plan: FusionPlan) -> list[tuple[int, ChunkId]]:
        """Chunks of documents, and those that they were prepared behind, with first positions."""
        starts = []
        for segment, identity in zip(plan.layout.chunks, plan.identities, strict=True):
            if not identity.is_loose:
                own = chunk_id(identity.namespace, self._tokenizer, identity.token_ids)
                starts.append((segment.start, own))
            if plan.policy.places_entries:
                starts += [(segment.start, behind) for behind in identity.behind]
        return starts


def _before(starts: Iterable[tuple[int, ChunkId]], end: int) -> frozenset[ChunkId]:
    return frozenset(c for start, c in starts if start < end)

"""Fixtures shared by all tests: tiny models, a bench for fusions, open caches."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton

import pytest
import torch

from chunkcache.chunk_cache import ChunkCache
from chunkcache.codecs import codec_by_name
from chunkcache.fusion.cost import CostMeter
from chunkcache.fusion.fuse import Fusion, FusionOutcome
from chunkcache.fusion.layout import ChunkRef, Layout, Turn, prompt_prefix_ids
from chunkcache.fusion.plan import FusionLimits, FusionPlan, PromptParts, plan_fusion
from chunkcache.fusion.policies.registry import PolicyOptions, make_policy
from chunkcache.fusion.policy import Policy
from chunkcache.fusion.preparation import Preparation
from chunkcache.fusion.recompute import SequenceKV, finish_rows, run_rows
from chunkcache.fusion.template_entries import TemplateEntries
from chunkcache.identity import EntryIdentity, TenantNamespace
from chunkcache.model.loading import LoadedModel, load_model
from chunkcache.model.prefill import IsolatedPrefill
from chunkcache.pages import PageLease, PagePool
from chunkcache.store.host import HostTier
from chunkcache.store.stack import TierStack
from chunkcache.testing import write_tiny_model

if TYPE_CHECKING:
    import httpx
    from fastapi import FastAPI

torch.set_num_threads(1)  # tiny models: a second thread only waits, above all on a busy machine

NAMESPACE = TenantNamespace(b"n" * 32)
NO_LIMITS = FusionLimits(min_context_tokens=0, min_mean_chunk_tokens=0, max_ratio=2.0)
SMALL_SETTINGS: dict[str, Any] = {
    "chunk_tokens": 24,
    "preparation": "alone",
    "min_fused_context_tokens": 0,
    "min_mean_chunk_tokens": 0,
    "max_fused_ratio": 1.0,
    "pool_tokens": 4096,
    "kept_prompts_ratio": 0.0,  # most tests ask the same twice to see a tier
    "store_max_bytes": 1 << 30,
}

ModelDirs = Callable[..., Path]
OpenCache = Callable[..., ChunkCache]
WaitUntil = Callable[[Callable[[], bool]], None]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> ModelDirs:
    """Directories of tiny models, each written once."""
    made: dict[str, Path] = {}

    def make(family: str = "llama", seed: int = 0, **config: Any) -> Path:
        name = repr((family, seed, sorted(config.items(), key=str)))
        if name not in made:
            folder = tmp_path_factory.mktemp(f"tiny-{family}")
            made[name] = write_tiny_model(folder, family=family, seed=seed, **config)
        return made[name]

    return make


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where tests remember digests and keep converted models."""
    return tmp_path_factory.mktemp("cache")


@dataclass
class Bench:
    """Runs fusions of given token ids on one model, without store or engine.

    Attributes:
        model: The model.
        page_tokens: Slots per page.
        scatter_pages: Hand pages out in an order that leaves no two adjacent.
    """

    model: LoadedModel
    page_tokens: int = 16
    scatter_pages: bool = False
    num_pool_tokens: int = 2048
    stack: TierStack = field(default_factory=lambda: TierStack(HostTier(1 << 28), None))

    def __post_init__(self) -> None:
        runner = self.model.runner
        self.runner = runner
        self.prefill = IsolatedPrefill(runner)
        self.templates = TemplateEntries(self.prefill, codec_by_name("raw", runner.dtype), 1 << 26)
        self.pool = PagePool(
            runner.spec,
            num_tokens=self.num_pool_tokens,
            page_tokens=self.page_tokens,
            dtype=runner.dtype,
            device=runner.device,
        )
        self.pool.k.fill_(float("nan"))
        self.pool.v.fill_(float("nan"))
        if self.scatter_pages:
            holders = [self.pool.allocate(self.page_tokens) for _ in range(self.pool.num_pages)]
            for holder in holders[::2]:
                assert holder is not None
                holder.release()

    def draw(self, num_tokens: int, seed: int) -> tuple[int, ...]:
        """Random token ids, control tokens left out."""
        generator = torch.Generator().manual_seed(seed)
        vocab = self.runner.spec.vocab_size
        return tuple(torch.randint(17, vocab, (num_tokens,), generator=generator).tolist())

    def plan(
        self,
        chunks: Sequence[tuple[int, ...]],
        policy: Policy | str = "none",
        *,
        question: tuple[int, ...] = (30, 31, 32, 33, 34, 35, 36),
        preparation: str = "alone",
        codec: str = "raw",
        limits: FusionLimits = NO_LIMITS,
        **options: Any,
    ) -> FusionPlan:
        """A plan over chunks, each a document of its own."""
        model = self.model
        if isinstance(policy, str):
            policy = make_policy(policy, PolicyOptions(**options), 0.25)
        system_ids = model.tokenizer.encode_content("Be brief.")
        documents = tuple((ChunkRef(f"doc-{i}", 0, ids),) for i, ids in enumerate(chunks))
        parts = PromptParts(model.template, system_ids, (Turn(documents, question),))
        prepared = Preparation.parse(preparation)
        prefix_ids = prepared.prefix_ids(
            model.template,
            model.tokenizer,
            model.bos_token_id,
            prompt_prefix_ids(model.template, system_ids),
        )
        chosen = codec_by_name(codec, self.runner.dtype)
        identities = [
            EntryIdentity(
                self.runner.digest, NAMESPACE, str(prepared), prefix_ids, chosen.name, ids
            )
            for ids in chunks
        ]
        return plan_fusion(
            parts,
            identities,
            policy,
            preparation=preparation,
            reuse_is_lossless=chosen.dtype == self.runner.dtype
            and not self.runner.spec.rope.is_length_dependent,
            on_miss="prefill",
            limits=limits,
        )

    @torch.inference_mode()
    def run(self, plan: FusionPlan) -> "BenchRun":
        """Run a plan on fresh pages; the pages' contents are copied out."""
        codec = codec_by_name(plan.identities[0].codec if plan.identities else "raw", torch.float32)
        pages = self.pool.allocate(plan.layout.num_tokens)
        assert pages is not None
        with pages:
            steps = Fusion(
                self.runner,
                self.pool,
                pages,
                plan,
                lambda identity, may_prefill: (
                    self.stack.load_or_prefill(
                        identity, lambda: self.prefill.compute(identity, codec)
                    )
                    if may_prefill
                    else self.stack.load(identity)
                ),
                self.templates.get,
            ).steps()
            while True:
                try:
                    next(steps)
                except StopIteration as stop:
                    outcome = stop.value
                    break
            slots = pages.slots[: outcome.layout.num_tokens]
            k, v = (p.flatten(1, 2)[:, slots].clone() for p in (self.pool.k, self.pool.v))
        return BenchRun(outcome, outcome.layout, k, v)

    @torch.inference_mode()
    def plain_logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits ``[num_tokens, vocab]`` of the library's own forward."""
        ids = torch.tensor([list(token_ids)])
        return self.runner.hf_model(input_ids=ids, use_cache=False).logits[0].float()

    @torch.inference_mode()
    def fill(self, pages: PageLease, token_ids: Sequence[int]) -> None:
        """Run a prompt in full over pages of the pool."""
        slots = pages.slots[: len(token_ids)]
        sequence = SequenceKV.over(self.runner, self.pool.k, self.pool.v, slots)
        rows, cost = torch.arange(len(token_ids)), CostMeter(self.runner.spec.num_layers)
        finish_rows(run_rows(self.runner, sequence, torch.tensor(token_ids), rows, cost=cost))

    @torch.inference_mode()
    def plain_kv(
        self, token_ids: Sequence[int], *, first_position: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys and values ``[layers, tokens, kv heads, dim]`` of the library's forward."""
        from transformers import DynamicCache

        cache = DynamicCache()  # of no configuration: it keeps what is behind a window too
        ids = torch.tensor([list(token_ids)])
        positions = torch.arange(len(token_ids))[None] + first_position
        self.runner.hf_model.model(
            input_ids=ids, position_ids=positions, cache=cache, use_cache=True
        )
        k = torch.stack([layer.keys[0].transpose(0, 1) for layer in cache.layers])
        v = torch.stack([layer.values[0].transpose(0, 1) for layer in cache.layers])
        return k, v


@dataclass(frozen=True)
class BenchRun:
    """What one fusion left: its outcome, and the keys and values of its pages."""

    outcome: FusionOutcome
    layout: Layout
    k: torch.Tensor
    v: torch.Tensor


@pytest.fixture(scope="session")
def load_tiny(model_dir: ModelDirs, cache_dir: Path) -> Callable[..., LoadedModel]:
    """Loads tiny models by family and configuration."""

    def load(family: str = "llama", seed: int = 0, **config: Any) -> LoadedModel:
        return load_model(str(model_dir(family, seed, **config)), cache_dir=cache_dir)

    return load


@pytest.fixture(scope="session")
def bench_of(load_tiny: Callable[..., LoadedModel]) -> Callable[..., Bench]:
    """Benches over tiny models."""

    def make(family: str = "llama", *, page_tokens: int = 16, **config: Any) -> Bench:
        return Bench(load_tiny(family, **config), page_tokens=page_tokens)

    return make


@pytest.fixture(scope="session")
def make_bench() -> Callable[..., Bench]:
    """Benches over models that a test has loaded itself."""
    return Bench


@pytest.fixture(scope="session")
def demo_cache_dir() -> Path:
    """The user's own cache: the demo model is converted once, not once a run."""
    from chunkcache.settings import default_cache_dir

    return default_cache_dir()


@pytest.fixture(scope="session")
def demo_model(demo_cache_dir: Path) -> LoadedModel:
    """The demo model."""
    return load_model("demo", cache_dir=demo_cache_dir)


@pytest.fixture
def open_cache(model_dir: ModelDirs, cache_dir: Path, tmp_path: Path) -> Iterator[OpenCache]:
    """Opens caches over a tiny model; what is still open at the end is closed."""
    opened: list[ChunkCache] = []

    def make(
        store: str | Path = "store", model: str | Path | None = None, **settings: Any
    ) -> ChunkCache:
        cache = ChunkCache.open(
            tmp_path / store,
            str(model or model_dir()),
            **({"cache_dir": cache_dir} | SMALL_SETTINGS | settings),
        )
        opened.append(cache)
        return cache

    yield make
    for cache in opened:
        cache.close()


@pytest.fixture(scope="session")
def serve() -> "Callable[[FastAPI], AbstractContextManager[httpx.Client]]":
    """Run an application on a loopback port; gives a client for it."""
    import httpx
    import uvicorn

    @contextmanager
    def run(app: "FastAPI") -> "Iterator[httpx.Client]":
        config = uvicorn.Config(app, port=0, log_level="error", ws="none", lifespan="on")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                thread.join(0.01)
            port = server.servers[0].sockets[0].getsockname()[1]
            base_url = f"http://127.0.0.1:{port}"
            with httpx.Client(base_url=base_url, timeout=60, trust_env=False) as client:
                yield client
        finally:
            server.should_exit = True
            thread.join()

    return run


PASSAGES = {
    "harbour": "The harbour opens at seven in the morning. The ferry to the island leaves from the "
    "northern pier at nine and comes back at five. Tickets are sold in the hut beside the crane.",
    "tower": "Who keeps the key to the tower? The key is kept by the baker. The door code is 4017, "
    "and the light goes on at dusk. Visitors may climb the stairs on Sundays only.",
    "bridge": "The bridge was built in 1902 over the river Alm. It carries two tracks and a path. "
    "In winter the path is closed when ice covers the planks.",
}
"""Short texts about nothing, for tests that need documents."""


@pytest.fixture
def passages() -> dict[str, str]:
    """The short texts."""
    return dict(PASSAGES)


@pytest.fixture(scope="session")
def wait_until() -> WaitUntil:
    """Wait for what another thread brings about; fails after half a minute."""

    def wait(condition: Callable[[], bool]) -> None:
        pause = threading.Event()
        for _ in range(3_000):
            if condition():
                return
            pause.wait(0.01)
        raise AssertionError("it did not come to pass")

    return wait

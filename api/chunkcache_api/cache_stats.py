"""What the cache holds and has spared, as JSON: the same counts as the metrics', for people."""

from dataclasses import asdict
from typing import Any

import msgspec

from chunkcache.background_verification import VerifierStats
from chunkcache.chunk_cache import ChunkCache
from chunkcache.probing import stored_fidelity
from chunkcache.serving_meter import HistogramCounts
from chunkcache.store.environment import StoreEnvironment
from chunkcache_api.service import Service


def cache_stats_body(service: Service) -> dict[str, Any]:
    """Figures of all tenants since the start, and the service's tenant's documents of now."""
    runtime = service.cache.runtime
    tiers, served = runtime.stack.stats(), runtime.meter.stats()
    budget = runtime.disk.budget
    capacity = {
        "host": runtime.settings.host_tier_bytes,
        "disk": budget.max_bytes if budget else runtime.env.max_bytes,
    }
    prompt_tokens = sum(served.prompt_tokens.values())
    saved_tokens = served.exact_prefix_tokens + served.fused_tokens
    fidelity = stored_fidelity(runtime)
    return {
        "object": "chunkcache.cache_stats",
        "model": service.model_name,
        "lookups": tiers.lookups,
        "hits": dict(tiers.hits),
        "misses": {str(reason): n for reason, n in tiers.misses.items()},
        "hit_ratio": _ratio(sum(tiers.hits.values()), tiers.lookups),
        "tiers": {
            name: {
                "bytes": num_bytes,
                "max_bytes": capacity.get(name),
                "entries": tiers.entries[name],
            }
            for name, num_bytes in tiers.bytes.items()
        },
        "remote": None if tiers.remote is None else asdict(tiers.remote),
        "kept_prompts": asdict(runtime.kept.stats()),
        "pinned_bytes": tiers.pinned_bytes,
        "prefills": tiers.prefills,
        "evictions": tiers.evictions,
        "disk_evictions": tiers.disk_evictions,
        "quarantined": tiers.quarantined,
        "requests": dict(served.outcomes),
        "fallbacks": dict(served.fallbacks),
        "prompt_tokens": prompt_tokens,
        "prompt_tokens_by_source": dict(served.prompt_tokens),
        "exact_prefix_tokens": served.exact_prefix_tokens,
        "fused_tokens": served.fused_tokens,
        "saved_tokens": saved_tokens,
        "saved_ratio": _ratio(saved_tokens, prompt_tokens),
        "answer_tokens": served.answer_tokens,
        "mean_ttft_ms": _mean(served.seconds["first_token"], 1e3),
        "verification": _verification(runtime.verifier.stats()),
        "fidelity": None
        if fidelity is None
        else msgspec.to_builtins(fidelity) | {"closeness": fidelity.closeness},
        "store": _store(runtime.env),
        "tenant": _tenant(service.cache),
    }


def _store(env: StoreEnvironment) -> dict[str, Any]:
    with env.read() as txn:
        live_bytes = txn.live_bytes()
    return {
        "file_bytes": env.file_bytes,
        "live_bytes": live_bytes,
        "max_bytes": env.max_bytes,
    }


def _tenant(cache: ChunkCache) -> dict[str, Any]:
    size, quota = cache.catalog.size(), cache.runtime.quota
    return {
        "documents": cache.catalog.count(),
        "tokens": size.num_tokens,
        "record_bytes": size.record_bytes,
        "quota": None
        if quota is None
        else {"used_bytes": quota.bytes_of(size), "max_bytes": quota.max_bytes},
    }


def _verification(stats: VerifierStats) -> dict[str, Any]:
    return {
        "sampled": stats.sampled,
        "verified": stats.verified,
        "dropped": stats.dropped,
        "failed": stats.failed,
        "mean_kl": _mean(stats.mean_kl),
        "mean_agreement": _mean(stats.agreement),
    }


def _ratio(part: int, whole: int) -> float | None:
    return round(part / whole, 6) if whole else None


def _mean(counts: HistogramCounts, scale: float = 1.0) -> float | None:
    num_values = counts.num_values
    return round(counts.total * scale / num_values, 6) if num_values else None

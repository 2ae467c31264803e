"""What a plan says, as JSON: for dry runs, and for the account of a request. Holds no text."""

from dataclasses import asdict
from typing import Any

from chunkcache.fusion.plan import FusionPlan
from chunkcache.planning import AskOptions
from chunkcache_api.service import Service


def plan_body(plan: FusionPlan) -> dict[str, Any]:
    """What was decided before any model work."""
    documents: dict[str, dict[str, Any]] = {}
    for segment in plan.layout.chunks:
        assert segment.chunk is not None
        name = segment.chunk.document_id
        entry = documents.setdefault(name, {"id": name, "tokens": 0, "chunks": 0})
        entry["tokens"] += len(segment.token_ids)
        entry["chunks"] += 1
    return {
        "turns": len(plan.parts.turns),
        "prompt_tokens": plan.layout.num_tokens,
        "context_tokens": plan.layout.num_context_tokens,
        "policy": str(plan.policy),
        "requested_policy": str(plan.requested_policy),
        "preparation": plan.preparation,
        "on_miss": plan.on_miss,
        "documents": list(documents.values()),
        "warnings": [asdict(w) for w in plan.warnings],
    }


def dry_run_body(service: Service, plan: FusionPlan, options: AskOptions) -> dict[str, Any]:
    """The response to a dry run: the plan, and how much of it is cached now."""
    runtime = service.cache.runtime
    body = plan_body(plan)
    documents = {d["id"]: d | {"cached_chunks": 0} for d in body["documents"]}
    for segment, identity in zip(plan.layout.chunks, plan.identities, strict=True):
        assert segment.chunk is not None
        is_cached = runtime.stack.tier_of(identity.key()) is not None
        documents[segment.chunk.document_id]["cached_chunks"] += is_cached
    ready = runtime.kept_prompts.ready(plan, service.cache.catalog.namespace)
    room = runtime.engine.check_fits(plan.layout.num_tokens)
    return {
        "object": "chunkcache.plan",
        "model": service.model_name,
        "max_tokens": min(options.max_tokens, room),
        **body,
        "kept_prompt_tokens": len(ready),
        "exact_prefix_tokens": ready.num_exact,
        "documents": list(documents.values()),
    }

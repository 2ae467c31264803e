"""chunkcache: answers over retrieved documents from position-independent KV, with fidelity measured.

The names below are the public ones; everything else may change between releases. They are
imported when they are first used, so that a tool which only reads a store does not load a model's
libraries.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chunkcache.chunk_cache import ChunkCache
    from chunkcache.engine.sampling import SamplingParams
    from chunkcache.errors import ChunkCacheError
    from chunkcache.fusion.policies.registry import PolicyOptions
    from chunkcache.loose_text import TextRef
    from chunkcache.planning import AskOptions, ChatTurn, DocumentRef
    from chunkcache.precache import TextItem
    from chunkcache.results import (
        Answer,
        FusionReport,
        IngestResult,
        PrecacheSummary,
        ReloadResult,
        Verification,
    )
    from chunkcache.settings import Settings
    from chunkcache.streaming import StreamingAnswer

_HOMES = {
    "Answer": "results",
    "AskOptions": "planning",
    "ChatTurn": "planning",
    "ChunkCache": "chunk_cache",
    "ChunkCacheError": "errors",
    "DocumentRef": "planning",
    "FusionReport": "results",
    "IngestResult": "results",
    "PolicyOptions": "fusion.policies.registry",
    "PrecacheSummary": "results",
    "ReloadResult": "results",
    "SamplingParams": "engine.sampling",
    "Settings": "settings",
    "StreamingAnswer": "streaming",
    "TextItem": "precache",
    "TextRef": "loose_text",
    "Verification": "results",
}

__all__ = [
    "Answer",
    "AskOptions",
    "ChatTurn",
    "ChunkCache",
    "ChunkCacheError",
    "DocumentRef",
    "FusionReport",
    "IngestResult",
    "PolicyOptions",
    "PrecacheSummary",
    "ReloadResult",
    "SamplingParams",
    "Settings",
    "StreamingAnswer",
    "TextItem",
    "TextRef",
    "Verification",
]


def __getattr__(name: str) -> Any:
    """Import a public name from where it is defined.

    Raises:
        AttributeError: It is not a public name.
    """
    if name not in _HOMES:
        raise AttributeError(f"module 'chunkcache' has no attribute {name!r}")
    return getattr(import_module(f"chunkcache.{_HOMES[name]}"), name)

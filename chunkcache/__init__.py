"""chunkcache: answers over retrieved documents from position-independent KV, with fidelity measured.

The names below are the public ones; everything else may change between releases.
"""

from chunkcache.chunk_cache import ChunkCache
from chunkcache.engine.sampling import SamplingParams
from chunkcache.errors import ChunkCacheError
from chunkcache.fusion.policies.registry import PolicyOptions
from chunkcache.planning import AskOptions, DocumentRef
from chunkcache.precache import TextItem
from chunkcache.results import Answer, Comparison, FusionReport, IngestResult, PrecacheSummary
from chunkcache.settings import Settings
from chunkcache.streaming import StreamingAnswer

__all__ = [
    "Answer",
    "AskOptions",
    "ChunkCache",
    "ChunkCacheError",
    "Comparison",
    "DocumentRef",
    "FusionReport",
    "IngestResult",
    "PolicyOptions",
    "PrecacheSummary",
    "SamplingParams",
    "Settings",
    "StreamingAnswer",
    "TextItem",
]

"""LlamaIndex's retriever and node parser over a cache."""

from collections.abc import Sequence
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.bridge.pydantic import Field
from llama_index.core.callbacks.base import CallbackManager
from llama_index.core.node_parser.interface import NodeParser
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore, QueryBundle

from chunkcache.errors import DocumentNotFoundError
from chunkcache_retriever.adapters.client import (
    DEFAULT_TOP_K,
    CacheClient,
    Passage,
    TextFormat,
)
from chunkcache_retriever.adapters.llama_index.nodes import passage_node


class ChunkCacheRetriever(BaseRetriever):
    """Finds passages of the stored documents by meaning and words.

    Args:
        client: The cache that is searched.
        similarity_top_k: At most so many passages.
        filters: Only passages of documents whose metadata match (docs/retrieval.md).
        callback_manager: LlamaIndex's.
    """

    def __init__(
        self,
        client: CacheClient,
        similarity_top_k: int = DEFAULT_TOP_K,
        filters: dict[str, Any] | None = None,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        super().__init__(callback_manager=callback_manager)
        self._client = client
        self._top_k = similarity_top_k
        self._filters = filters

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        found = self._client.search(query_bundle.query_str, self._top_k, self._filters)
        return [NodeWithScore(node=passage_node(p), score=p.score) for p in found]


class ChunkCacheNodeParser(NodeParser):
    """Stores documents in a cache, and gives nodes that are its chunks.

    Each document is prefilled when this returns. A node is exactly what has keys and values, so
    whatever index finds it, its id is a hit. A document's id is its id in the store: parsing it
    again replaces it, and ``client.delete(node.ref_doc_id)`` removes it.
    """

    client: CacheClient = Field(exclude=True, description="Where documents are stored.")
    text_format: TextFormat = Field(default="text", description="How documents are cut.")

    @classmethod
    def class_name(cls) -> str:
        """The class's name in serialised form."""
        return "ChunkCacheNodeParser"

    def _parse_nodes(
        self, nodes: Sequence[BaseNode], show_progress: bool = False, **kwargs: Any
    ) -> list[BaseNode]:
        return [node for document in nodes for node in self._chunks(document)]

    def _chunks(self, document: BaseNode) -> list[BaseNode]:
        """A document's chunks as nodes.

        Raises:
            ChunkCacheError: It cannot be stored, or was deleted meanwhile.
        """
        name = document.ref_doc_id or document.node_id
        text = document.get_content(metadata_mode=MetadataMode.NONE)
        self.client.put(name, text, document.metadata, self.text_format)
        stored = self.client.get(name)
        if stored is None:
            raise DocumentNotFoundError(
                f"document {name!r} was deleted meanwhile", param="document_id"
            )
        return [
            passage_node(
                Passage(name, index, 0.0, stored.text[start:end], start, end, stored.metadata)
            )
            for index, (start, end) in enumerate(stored.chunks)
        ]

    def _postprocess_parsed_nodes(
        self, nodes: list[BaseNode], parent_doc_map: dict[str, Any]
    ) -> list[BaseNode]:
        # LlamaIndex would look for each node's text and may find an earlier place of the same words.
        places = [(n.start_char_idx, n.end_char_idx) for n in nodes]  # type: ignore[attr-defined]
        done = super()._postprocess_parsed_nodes(nodes, parent_doc_map)
        for node, (start, end) in zip(done, places, strict=True):
            node.start_char_idx, node.end_char_idx = start, end  # type: ignore[attr-defined]
        return done

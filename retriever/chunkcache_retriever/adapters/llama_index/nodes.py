"""Chunks as LlamaIndex's nodes, and nodes as what stands in a prompt.

A node's ``ref_doc_id`` is the document's id in the store, its id names the chunk, and its metadata
hold its place, which is shown to no model.
"""

from collections.abc import Iterable

from llama_index.core.base.llms.types import ChatMessage, MessageRole, TextBlock
from llama_index.core.schema import (
    BaseNode,
    MetadataMode,
    NodeRelationship,
    NodeWithScore,
    RelatedNodeInfo,
    TextNode,
)

from chunkcache.errors import UnsupportedParameterError
from chunkcache_retriever.adapters.client import ContextPart, Passage, Turn
from chunkcache_retriever.adapters.conversation import Said, read_conversation
from chunkcache_retriever.adapters.passages import (
    CONTEXT_KEY,
    PLACE_KEY,
    Place,
    context_fields,
    context_of,
    place_metadata,
    place_of,
    read_context,
)


def passage_node(passage: Passage) -> TextNode:
    """A passage as a node."""
    return TextNode(
        id_=f"{passage.document_id}#{passage.chunk_index}",
        text=passage.text,
        metadata=place_metadata(passage),
        start_char_idx=passage.start,
        end_char_idx=passage.end,
        excluded_llm_metadata_keys=[PLACE_KEY],
        excluded_embed_metadata_keys=[PLACE_KEY],
        relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id=passage.document_id)},
    )


def node_context(nodes: Iterable[NodeWithScore | BaseNode | str]) -> tuple[ContextPart, ...]:
    """What stands in a prompt for nodes: chunks by their ids, other nodes' texts by content.

    Args:
        nodes: Nodes, or ids of stored documents.
    """
    return context_of(_found(n) for n in nodes)


def documents_message(
    question: str, nodes: Iterable[NodeWithScore | BaseNode | str]
) -> ChatMessage:
    """A question with nodes in front of it, by their ids; nodes as in :func:`node_context`."""
    return context_message(question, node_context(nodes))


def context_message(question: str, context: Iterable[ContextPart]) -> ChatMessage:
    """A question with parts of documents in front of it."""
    return ChatMessage(
        question, role=MessageRole.USER, additional_kwargs={CONTEXT_KEY: context_fields(context)}
    )


def read_messages(messages: Iterable[ChatMessage]) -> tuple[str | None, list[Turn]]:
    """System prompt and turns of a conversation.

    Raises:
        InvalidValueError: It does not end with a user's message, or begins with an answer.
        UnsupportedParameterError: A message has another role, or holds anything but text.
    """
    return read_conversation(_said(m) for m in messages)


def _said(message: ChatMessage) -> Said:
    if any(not isinstance(block, TextBlock) for block in message.blocks):
        raise UnsupportedParameterError("messages hold texts alone", param="messages")
    text = message.content or ""
    if message.role == MessageRole.USER:
        return Said("user", text, read_context(message.additional_kwargs.get(CONTEXT_KEY, ())))
    if message.role in (MessageRole.SYSTEM, MessageRole.DEVELOPER):
        return Said("system", text)
    if message.role in (MessageRole.ASSISTANT, MessageRole.CHATBOT):
        return Said("assistant", text)
    raise UnsupportedParameterError(
        f"messages of the role {message.role.value!r} are not supported", param="messages"
    )


def _found(item: NodeWithScore | BaseNode | str) -> Place | ContextPart:
    if isinstance(item, str):
        return ContextPart(item)
    node = item.node if isinstance(item, NodeWithScore) else item
    place = place_of(node.metadata)
    if place is not None:
        return place
    return ContextPart(node.node_id, text=node.get_content(metadata_mode=MetadataMode.NONE))

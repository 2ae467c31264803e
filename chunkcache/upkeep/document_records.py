"""Whether a document's two records belong together, and what one says about the other."""

import time
from collections.abc import Iterable

import msgspec

from chunkcache.catalog_records import InfoRecord, TextRecord
from chunkcache.documents import text_digest
from chunkcache.errors import InvalidValueError
from chunkcache.identity import TenantNamespace, TokenizerDigest, chunk_id, decode_token_ids

RESTORED_CHUNKING = "restored/text"
"""Of a document whose splitter's settings are lost: it is cut again when it is put again."""


def disagreement(namespace: TenantNamespace, info: InfoRecord, text: TextRecord) -> str | None:
    """What a document's two records, each sound for itself, do not agree on."""
    if text_digest(text.text) != info.digest or len(text.text) != info.num_chars:
        return "its text is another version's"
    if len(text.chunks) != info.num_chunks:
        return "its chunks are another version's"
    if sum(len(c.token_ids) for c in text.chunks) != 4 * info.num_tokens:
        return "its chunks hold another number of tokens"
    if any(not 0 <= c.start < c.end <= len(text.text) for c in text.chunks):
        return "a chunk lies outside its text"
    if not _is_cut_by(namespace, TokenizerDigest(info.tokenizer), text):
        return "a chunk's id is not that of its tokens"
    try:
        is_object = isinstance(msgspec.json.decode(info.metadata), dict)
    except msgspec.DecodeError:
        is_object = False
    return None if is_object else "its metadata is no JSON object"


def _is_cut_by(namespace: TenantNamespace, tokenizer: TokenizerDigest, text: TextRecord) -> bool:
    try:
        return bool(text.chunks) and all(
            chunk_id(namespace, tokenizer, decode_token_ids(c.token_ids)) == c.chunk_id
            for c in text.chunks
        )
    except InvalidValueError:
        return False


def restored_record(
    namespace: TenantNamespace,
    document_id: str,
    text: TextRecord,
    tokenizers: Iterable[TokenizerDigest],
) -> InfoRecord | None:
    """A document's record made anew from its sound text, if one of some tokenizers cut that."""
    for tokenizer in sorted(tokenizers):
        if _is_cut_by(namespace, tokenizer, text):
            now = time.time()
            return InfoRecord(
                document_id=document_id,
                version=1,
                digest=text_digest(text.text),
                num_tokens=sum(len(c.token_ids) for c in text.chunks) // 4,
                num_chunks=len(text.chunks),
                num_chars=len(text.text),
                num_bytes=len(text.text.encode("utf-8")),
                metadata=b"{}",
                tokenizer=tokenizer,
                chunking=RESTORED_CHUNKING,
                created_at=now,
                updated_at=now,
            )
    return None

"""Texts that come with a request, cut as the stored documents are, so that equal content is reused.

How a text is cut depends on the tenant's documents and on nothing that comes and goes: an answer
must not depend on which entries happen to be there.
"""

from dataclasses import dataclass
from typing import get_args

from chunkcache.catalog import Catalog
from chunkcache.documents import canonical_text
from chunkcache.errors import EmptyDocumentError
from chunkcache.fusion.layout import ChunkRef
from chunkcache.identity import chunk_id
from chunkcache.runtime import Runtime
from chunkcache.splitting import TextFormat


@dataclass(frozen=True)
class TextRef:
    """A text in front of a message, matched by its content.

    Attributes:
        label: What reports call it.
        text: The text.
        param: The request field that holds it.
    """

    label: str
    text: str
    param: str = "documents"


class LooseTexts:
    """Cuts loose texts of one tenant's requests.

    Args:
        runtime: Tokenizer and splitter.
        catalog: The tenant's documents.
    """

    def __init__(self, runtime: Runtime, catalog: Catalog) -> None:
        self._runtime = runtime
        self._catalog = catalog

    def chunks(self, ref: TextRef) -> tuple[ChunkRef, ...]:
        """The text as chunks: one, where it fits one or is one of a document.

        A text that is a whole document is cut as that document is. Chunks that no document holds
        are loose.

        Raises:
            InvalidValueError: The text is not valid Unicode.
            EmptyDocumentError: There is nothing in it.
        """
        text = canonical_text(ref.text, param=ref.param)
        whole = self._runtime.model.tokenizer.encode_content(text)
        if not whole:
            raise EmptyDocumentError("the text holds no token", param=ref.param)
        fits = len(whole) <= self._runtime.settings.chunk_tokens
        pieces, held = [whole], self._held([whole])
        if not held:
            cuts = [self._cut(text, text_format) for text_format in get_args(TextFormat)]
            known = [c for c in cuts if len(self._held(c)) == len(set(c))]
            pieces = known[0] if known else [whole] if fits else cuts[0]
            held = self._held(pieces)
        return tuple(
            ChunkRef(ref.label, index, ids, is_loose=ids not in held)
            for index, ids in enumerate(pieces)
        )

    def _cut(self, text: str, text_format: TextFormat) -> list[tuple[int, ...]]:
        chunks = self._runtime.splitter.split(text, self._catalog.namespace, text_format)
        return [c.token_ids for c in chunks]

    def _held(self, pieces: list[tuple[int, ...]]) -> set[tuple[int, ...]]:
        """Those of the pieces that a document holds."""
        namespace, tokenizer = self._catalog.namespace, self._runtime.model.tokenizer.digest
        ids = {chunk_id(namespace, tokenizer, p): p for p in pieces}
        return {ids[c] for c in self._catalog.held_chunks(ids)}

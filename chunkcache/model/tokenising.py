"""Text to token ids and back, with untrusted text kept apart from control tokens.

Two encoders are built from one tokenizer definition: one reads control tokens (for the template's
own text), one treats every character as plain text (for documents and questions).
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blake3 import blake3
from tokenizers import Tokenizer

from chunkcache.errors import InvalidValueError
from chunkcache.identity import TokenizerDigest

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_MARKUP = re.compile(r"<.*>|\[.*\]", re.DOTALL)


@dataclass(frozen=True)
class _Pieces:
    """Ids of a text, and from where to where in it each stands."""

    ids: list[int]
    spans: list[tuple[int, int]]


class TextTokenizer:
    """A tokenizer whose ids for untrusted text never include a control token.

    Args:
        definition: The ``tokenizer.json`` text.

    Attributes:
        digest: Digest of the definition.
        max_token_id: The largest id there is.
        control_ids: Ids of every added token that is special or looks like markup.
    """

    def __init__(self, definition: str) -> None:
        self.digest = TokenizerDigest(blake3(definition.encode("utf-8")).digest())
        parsed = json.loads(definition)
        parsed["truncation"] = parsed["padding"] = None
        added = parsed.get("added_tokens") or []
        self.control_ids = frozenset(
            t["id"] for t in added if t["special"] or _MARKUP.fullmatch(t["content"].strip())
        )
        self._unprinted_ids = frozenset(t["id"] for t in added if t["special"])
        self._template = Tokenizer.from_str(json.dumps(parsed))
        parsed["added_tokens"] = [t for t in added if t["id"] not in self.control_ids]
        parsed["post_processor"] = None
        self._content = Tokenizer.from_str(json.dumps(parsed))
        vocab = self._template.get_vocab(with_added_tokens=True)
        self.max_token_id = max(vocab.values())
        self._byte_ids = frozenset(i for t, i in vocab.items() if _BYTE_TOKEN.fullmatch(t))
        first = self._template.encode("a", add_special_tokens=False).tokens[:1]
        self._has_dummy_space = bool(first) and first[0].startswith("\u2581")

    def definition(self) -> str:
        """The ``tokenizer.json`` text, without cutting or padding."""
        return self._template.to_str()

    def encode_template(self, text: str, *, at_start: bool = True) -> tuple[int, ...]:
        """Encode text of our own or of the model's template; control tokens are read as such.

        Args:
            text: The text.
            at_start: Whether it begins the prompt. Tokenizers in the manner of SentencePiece put a
                dummy space in front of a text; inside a prompt there is none.
        """
        return tuple(self._encode(self._template, text, at_start=at_start).ids)

    def encode_content(self, text: str) -> tuple[int, ...]:
        """Encode untrusted text alone; no BOS, no EOS, no control token, whatever it says.

        Vocabularies of the unigram kind hold control tokens as ordinary pieces, so a match is
        still possible without the added-token table; such a piece is cut after its first
        character and both parts are encoded again.
        """
        return self._encode_content(text, at_start=True)

    def _encode_content(self, text: str, *, at_start: bool) -> tuple[int, ...]:
        pieces = self._encode(self._content, text, at_start=at_start)
        first = next((i for i, t in enumerate(pieces.ids) if t in self.control_ids), None)
        if first is None:
            return tuple(pieces.ids)
        start, end = pieces.spans[first]
        if end - start < 2:
            raise InvalidValueError(
                f"the tokenizer maps the plain character {text[start:end]!r} to a control token",
                param="text",
            )
        head, tail = text[: start + 1], text[start + 1 :]
        return self._encode_content(head, at_start=at_start) + self._encode_content(
            tail, at_start=False
        )

    def _encode(self, encoder: Tokenizer, text: str, *, at_start: bool) -> "_Pieces":
        if not at_start and self._has_dummy_space:
            # Behind a newline there is no dummy space, and the newline merges with nothing.
            behind = encoder.encode("\n", add_special_tokens=False).ids
            found = encoder.encode("\n" + text, add_special_tokens=False)
            skipped = len(behind)
            if found.ids[:skipped] == behind:
                spans = [(max(0, a - 1), b - 1) for a, b in found.offsets[skipped:]]
                return _Pieces(found.ids[skipped:], spans)
        found = encoder.encode(text, add_special_tokens=False)
        return _Pieces(found.ids, found.offsets)

    def count_content(self, text: str) -> int:
        """Number of tokens of :meth:`encode_content`."""
        return len(self.encode_content(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of some ids, control tokens left out."""
        return self._template.decode(list(token_ids), skip_special_tokens=True)

    def decode_each(self, token_ids: Sequence[int]) -> list[str]:
        """Each id's own text, control tokens included (for display beside a position)."""
        return [self._template.decode([t], skip_special_tokens=False) for t in token_ids]

    def stream(self) -> "IncrementalDecoder":
        """A decoder for one answer."""
        return IncrementalDecoder(self.decode, self._byte_ids, self._unprinted_ids)


class IncrementalDecoder:
    """Turns a growing list of ids into text pieces that never end inside a character.

    The pieces, joined, equal the text of all the ids at once. Text is held back while its end may
    still change: a replacement character (bytes that are not a character yet), and the text of
    the newest tokens where what was certain before is no longer a prefix. A run of byte tokens is
    held until it ends: one stray byte turns all of the run into replacement characters. Control
    tokens are left out before anything is decoded, so that none stands where decoding starts.
    Decoding starts a few tokens back (for tokenizers that treat a text's start in a special way), so a step costs the
    same however long the answer is.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        byte_ids: frozenset[int] = frozenset(),
        unprinted_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._decode = decode
        self._byte_ids = byte_ids
        self._unprinted_ids = unprinted_ids
        self._ids: list[int] = []
        self._emitted = ""
        self._window_start = 0
        self._num_certain = 0

    def push(self, token_id: int) -> str:
        """Add one id; returns the text that became certain (may be empty)."""
        if token_id in self._unprinted_ids:
            return ""
        self._ids.append(token_id)
        if token_id in self._byte_ids:
            return ""
        before = self._decode(self._ids[self._window_start : self._num_certain])
        now = self._decode(self._ids[self._window_start :])
        if not now.startswith(before) or now.endswith("\ufffd"):
            return ""
        piece = now[len(before) :]
        self._emitted += piece
        self._window_start = max(0, self._num_certain - 1)
        self._num_certain = len(self._ids)
        return piece

    def finish(self) -> str:
        """The rest: text held back because its last character is incomplete."""
        whole = self._decode(self._ids)
        assert whole.startswith(self._emitted), "decoded text changed behind what was sent"
        rest = whole[len(self._emitted) :]
        self._emitted = whole
        return rest

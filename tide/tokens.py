r"""The one place that turns a token id into text to show.

A token is a piece of bytes, not a word: it may begin with a space, be a newline, or be part of a character. What
`Vocabulary.show` returns makes all of that visible, and what `as_html` and `as_markdown` return is never read as
markup. Shown forms:

    " three" -> ␣three      "\n" -> ⏎      "\t" -> ⇥      byte E4 alone -> ⟨E4⟩      BOS -> [<|endoftext|>]
"""

import html
import re
import unicodedata
from collections.abc import Sequence
from functools import cached_property

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

_MARKS = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"}
_MARK_CHARACTERS = frozenset("␣⏎⇥␍⟨⟩◌")  # literal ones are shown by code point, so that a mark is never ambiguous
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # byte fallback of SentencePiece vocabularies
_NOT_ALPHANUMERIC = re.compile(r"[^0-9A-Za-z\x80-\U0010ffff]")


class Vocabulary:
    """All token ids of a tokenizer as bytes, text and shown form.

    Args:
        tokenizer: any fast transformers tokenizer; byte-level (GPT-2, Llama 3) or SentencePiece-like pieces.
        size: V of the model where it has more ids than the tokenizer; ids beyond the tokenizer are shown as
            unused. Default: the tokenizer's own.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, size: int | None = None):
        self.tokenizer = tokenizer
        self._size = size or len(tokenizer)
        known = min(len(tokenizer), self._size)
        self._pieces: list[str | None] = [*tokenizer.convert_ids_to_tokens(list(range(known)))]
        self._pieces += [None] * (self._size - known)
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.special_ids = frozenset(i for i, token in added.items() if token.special and i < self._size)
        self._added_ids = frozenset(added)
        self._byte_of = {char: byte for byte, char in bytes_to_unicode().items()}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._byte_level = backend is not None and "ByteLevel" in repr(backend.decoder)

    def __len__(self) -> int:
        return self._size

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; of a special token, its name.

        Raises:
            IndexError: one sentence, for an id outside 0..V-1.
        """
        if not 0 <= token_id < self._size:
            raise IndexError(f"Token id {token_id} is outside the vocabulary, 0..{self._size - 1}.")
        piece = self._pieces[token_id]
        if piece is None:
            return b""
        if token_id in self._added_ids:
            return piece.encode()
        if self._byte_level and all(char in self._byte_of for char in piece):
            return bytes(self._byte_of[char] for char in piece)
        if match := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return piece.replace("▁", " ").encode()

    def text(self, token_id: int) -> str:
        """Decoded text; bytes that are no whole character become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def show(self, token_id: int) -> str:
        """Visible form of a token, plain text: see the module's table. Escape it before it goes into markup."""
        raw = self.token_bytes(token_id)
        if self._pieces[token_id] is None:
            return f"[unused {token_id}]"
        if token_id in self.special_ids:
            return f"[{raw.decode()}]"
        return show_bytes(raw)

    def show_all(self, token_ids: Sequence[int]) -> list[str]:
        """`show` of each id."""
        return [self.show(int(token_id)) for token_id in token_ids]

    @cached_property
    def shown(self) -> list[str]:
        """Visible form of every token id, [V]."""
        return self.show_all(range(self._size))

    @cached_property
    def texts(self) -> list[str]:
        """Decoded text of every token id, [V]."""
        return [self.text(token_id) for token_id in range(self._size)]


def show_bytes(raw: bytes) -> str:
    """Visible form of bytes: whole characters as themselves, the rest by code."""
    out = []
    while raw:
        try:
            text, bad, raw = raw.decode("utf-8"), b"", b""
        except UnicodeDecodeError as error:
            text, bad, raw = raw[: error.start].decode("utf-8"), raw[error.start : error.end], raw[error.end :]
        out += [_show_character(char) for char in text]
        out += [f"⟨{byte:02X}⟩" for byte in bad]
    shown = "".join(out)
    # A combining mark alone would sit on whatever stands before the token on the page.
    return "◌" + shown if shown and unicodedata.combining(shown[0]) else shown


def _show_character(char: str) -> str:
    if char in _MARKS:
        return _MARKS[char]
    if char in _MARK_CHARACTERS or unicodedata.category(char)[0] in "CZ":  # controls, bidi marks, odd spaces
        return f"⟨U+{ord(char):04X}⟩"
    return char


def shorten(shown: str, width: int = 24) -> str:
    """Cuts the middle out of a shown token that is wider than `width` characters."""
    if len(shown) <= width:
        return shown
    head = (width - 1) // 2
    return shown[:head] + "…" + shown[len(shown) - (width - 1 - head) :]


def as_html(shown: str) -> str:
    """For HTML and for plotly's texts: never read as a tag or an entity."""
    return html.escape(shown).replace("&quot;", "&#34;")  # of names, plotly knows only a few


def as_markdown(shown: str) -> str:
    """For Markdown: every ASCII character that could be syntax (also Streamlit's `:icon:` and `$`) as an entity."""
    return _NOT_ALPHANUMERIC.sub(lambda match: f"&#{ord(match[0])};", shown)

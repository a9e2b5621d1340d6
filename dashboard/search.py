"""Token search over the whole vocabulary, on the server."""

import re
from dataclasses import dataclass

import numpy as np

_ID = re.compile(r"#\s*[0-9]{1,18}\s*")
_UNMARK = str.maketrans({"␣": " ", "⏎": "\n", "⇥": "\t", "␍": "\r"})


@dataclass(frozen=True)
class Hit:
    """One token that a search found.

    Attributes:
        token_id: its id.
        kind: "id", "exact", "prefix" or "substring".
    """

    token_id: int
    kind: str


class TokenSearch:
    """Finds tokens by text or id: exact matches first, then prefixes, then substrings, each by falling count.

    A leading space does not keep a token from matching "three"; typed as a space or as ␣ it is required. Case is
    ignored, but an exact match of the same case comes first.

    Args:
        texts: decoded text of every token id, [V].
        counts: how often each occurs, [V].
    """

    def __init__(self, texts: list[str], counts: np.ndarray):
        self._texts = np.array(texts, dtype=object)
        self._counts = np.asarray(counts)
        self._lower = [text.lower() for text in texts]

    def search(self, query: str, limit: int = 30) -> list[Hit]:
        """At most `limit` hits; none for an empty query.

        Args:
            query: text, in which ␣ ⏎ ⇥ stand for white space, or `#` and a token id.
            limit: number of hits.
        """
        if _ID.fullmatch(query):
            token_id = int(query[1:])
            return [Hit(token_id, "id")] if token_id < len(self._lower) else []
        query = query.translate(_UNMARK)
        needle = query.lower()
        if not needle:
            return []
        found = [(i, text) for i, text in enumerate(self._lower) if needle in text]
        ranked = sorted(found, key=lambda item: self._rank(item[0], item[1], query, needle))
        return [Hit(i, _kind(text, needle)) for i, text in ranked[:limit]]

    def _rank(self, token_id: int, lower: str, query: str, needle: str) -> tuple[int, bool, int]:
        tier = ("exact", "prefix", "substring").index(_kind(lower, needle))
        other_case = query not in self._texts[token_id]
        return tier, other_case, -int(self._counts[token_id])


def _kind(text: str, needle: str) -> str:
    bare = text if needle[:1].isspace() else text.lstrip(" ▁")
    if bare == needle:
        return "exact"
    return "prefix" if bare.startswith(needle) else "substring"

"""The one selection that all pages share (token, layer, bank), and its form in the URL."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

NULL_NAME = "null"
PARAMETERS = ("token", "layer", "bank", "pin")  # of the URL
_MOST_DIGITS = 20  # longer numbers are no ids, and Python refuses to read very long ones
PREFERRED_TOKENS = (" three", "▁three", "three")  # a first view whose neighbours a person can judge at a glance


@dataclass(frozen=True)
class Space:
    """What there is to select from in one checkpoint.

    Attributes:
        vocab_size: V.
        num_layers: L.
        num_banks: K.
        default_token: token id of the first view.
    """

    vocab_size: int
    num_layers: int
    num_banks: int
    default_token: int


@dataclass(frozen=True)
class Selection:
    """Token, layer and bank that every page looks at; all 0-based.

    Attributes:
        token_id: the token.
        layer: 0..L-1.
        bank: 0..K-1, or K for the null bank.
        pinned: token ids kept for comparison, oldest first.
    """

    token_id: int
    layer: int = 0
    bank: int = 0
    pinned: tuple[int, ...] = ()

    @classmethod
    def default(cls, space: Space) -> "Selection":
        """The first view of a checkpoint."""
        return cls(token_id=space.default_token)

    @classmethod
    def from_params(cls, params: Mapping[str, str], space: Space) -> tuple["Selection", list[str]]:
        """Reads a selection from URL parameters.

        Args:
            params: `token`, `layer`, `bank` (a number or "null"), `pin` (ids joined by commas); any may be missing.
            space: what this checkpoint has.

        Returns:
            The selection, with the default wherever a parameter is missing or wrong, and one sentence for each
            wrong one.
        """
        problems: list[str] = []

        def number(name: str, text: str, size: int, fallback: int) -> int:
            if text.isascii() and text.isdigit() and len(text) < _MOST_DIGITS and int(text) < size:
                return int(text)
            problems.append(f"The link names {name} {text[:40]}, but this checkpoint has {name}s 0..{size - 1}.")
            return fallback

        result = cls.default(space)
        if "token" in params:
            token = number("token", params["token"], space.vocab_size, result.token_id)
            result = replace(result, token_id=token)
        if "layer" in params:
            result = replace(result, layer=number("layer", params["layer"], space.num_layers, 0))
        if params.get("bank") == NULL_NAME:
            result = replace(result, bank=space.num_banks)
        elif "bank" in params:
            result = replace(result, bank=number("bank", params["bank"], max(1, space.num_banks), 0))
        if params.get("pin"):
            pins = [number("token", part, space.vocab_size, -1) for part in params["pin"].split(",")]
            result = replace(result, pinned=tuple(dict.fromkeys(pin for pin in pins if pin >= 0)))
        return result, problems

    def to_params(self, space: Space) -> dict[str, str]:
        """The URL parameters that restore this selection."""
        params = {"token": str(self.token_id), "layer": str(self.layer), "bank": bank_name(self.bank, space.num_banks)}
        if self.pinned:
            params["pin"] = ",".join(map(str, self.pinned))
        return params

    def change(self, **changes: Any) -> "Selection":
        """A copy with some fields changed."""
        return replace(self, **changes)


def bank_name(bank: int, num_banks: int) -> str:
    """A number below K as itself, and "null" for K."""
    return NULL_NAME if bank == num_banks else str(bank)


def default_token(texts: list[str], counts: Any) -> int:
    """Token id of the first view: a number word where the vocabulary has one, else the most frequent letter token."""
    for text in PREFERRED_TOKENS:
        if text in texts:
            return texts.index(text)
    with_letters = [i for i, text in enumerate(texts) if any(char.isalpha() for char in text)]
    return max(with_letters, key=lambda i: counts[i], default=0)

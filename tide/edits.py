"""The edits that an `Intervention` is made of: `Off`, `Rule`, `Swap`. Frozen values, each with a text form."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from operator import index
from typing import Literal

Replacement = Literal["zero", "mean", "random"]
RuleKind = Literal["uniform", "null", "only", "temperature"]
Positions = frozenset[int] | None

REPLACEMENTS: tuple[Replacement, ...] = ("zero", "mean", "random")
RULES: tuple[RuleKind, ...] = ("uniform", "null", "only", "temperature")
NUM_SEEDS = 2**32


@dataclass(frozen=True)
class Off:
    """Switches banks off.

    A bank that is off hands its routing weight to the null bank; the weights of the others stay.

    Attributes:
        layer: 0-based; None is every layer.
        bank: 0-based; None is every bank.
        positions: of the text, 0-based, at which it is off; None is everywhere.
        replacement: what is injected instead of alpha_k M_k(v). "zero": nothing. "mean": what this (layer, bank)
            injects on average over a corpus. "random": a random direction, fixed for (seed, layer, bank), as long
            as what it replaces: the control.
        seed: of the random direction, below 2**32; 0 for the other replacements.
        renormalize: the weight goes to the remaining banks and null in proportion, not to null alone; all to null
            where nothing remains.

    Raises:
        ValueError: for another replacement or seed.
        TypeError: where a layer, bank, position or seed is not a whole number.
    """

    layer: int | None = None
    bank: int | None = None
    positions: Positions = None
    replacement: Replacement = "zero"
    seed: int = 0
    renormalize: bool = False

    def __post_init__(self) -> None:
        if self.replacement not in REPLACEMENTS:
            raise ValueError(f"There is no replacement {self.replacement!r}; it is {', '.join(REPLACEMENTS)}.")
        _set(self, seed=index(self.seed) if self.replacement == "random" else 0)  # one value for one meaning
        if not 0 <= self.seed < NUM_SEEDS:
            raise ValueError(f"The seed is {self.seed}; it must be 0..{NUM_SEEDS - 1}.")
        _set(self, layer=_index(self.layer), bank=_index(self.bank), positions=_positions(self.positions))
        _set(self, renormalize=bool(self.renormalize))

    @property
    def place(self) -> tuple:
        """Where it acts; two edits of a kind in one place are one edit."""
        return (self.layer, self.bank, self.positions)

    @property
    def rank(self) -> tuple:
        """How specific it is, ascending."""
        return (
            self.positions is not None,
            self.layer is not None,
            self.bank is not None,
            *_positions_rank(self.positions),
        )

    def everywhere(self) -> "Off":
        """The same change in every layer, bank and position."""
        return replace(self, layer=None, bank=None, positions=None)

    def text(self) -> str:
        """Its part of the text form."""
        target = "*" if self.layer is None and self.bank is None else "" if self.layer is None else f"{self.layer}"
        target += "" if self.bank is None else f".{self.bank}"
        kind = {"zero": "", "mean": "~mean", "random": f"~random{self.seed}"}[self.replacement]
        return target + kind + ("!" if self.renormalize else "") + _positions_text(self.positions)


@dataclass(frozen=True)
class Rule:
    """Takes the routing weights from a rule instead of the router.

    Attributes:
        kind: "uniform": 1/(K+1) for every bank and null. "null": all on null. "only": all on one bank.
            "temperature": softmax(logits / value); below 1 sharpens, above 1 flattens.
        value: the bank of "only", the temperature of "temperature"; 0 for the others.
        layer: 0-based; None is every layer.
        positions: of the text, 0-based; None is everywhere.

    Raises:
        ValueError: for another kind, a temperature that is not above 0, a bank that is not a whole number.
        TypeError: where a layer or position is not a whole number.
    """

    kind: RuleKind
    value: float = 0
    layer: int | None = None
    positions: Positions = None

    def __post_init__(self) -> None:
        if self.kind not in RULES:
            raise ValueError(f"There is no router rule {self.kind!r}; it is {', '.join(RULES)}.")
        if self.kind == "temperature" and not 0 < self.value < math.inf:
            raise ValueError(f"The router's temperature is {self.value}; it must be a finite number above 0.")
        if self.kind == "only" and not float(self.value).is_integer():
            raise ValueError(f"The router rule names bank {self.value}, which is not a whole number.")
        number = {"only": int, "temperature": float}.get(self.kind)
        _set(self, value=number(self.value) if number else 0)  # one value for one meaning
        _set(self, layer=_index(self.layer), positions=_positions(self.positions))

    @property
    def place(self) -> tuple:
        """Where it acts; two edits of a kind in one place are one edit."""
        return (self.layer, self.positions)

    @property
    def rank(self) -> tuple:
        """How specific it is, ascending."""
        return (self.positions is not None, self.layer is not None, *_positions_rank(self.positions))

    def everywhere(self) -> "Rule":
        """The same change in every layer and position."""
        return replace(self, layer=None, positions=None)

    def text(self) -> str:
        """Its part of the text form."""
        value = str(self.value).removesuffix(".0").replace("+", "") if self.kind in ("only", "temperature") else ""
        where = "" if self.layer is None else f":{self.layer}"
        return f"{self.kind}{value}{where}{_positions_text(self.positions)}"


@dataclass(frozen=True)
class Swap:
    """Makes a token read another token's rows in all memory tables: "what if it had that token's memory".

    Attributes:
        token: token id in the text.
        reads: token id whose rows it reads.
        positions: of the text, 0-based; None is everywhere.

    Raises:
        TypeError: where a token id or position is not a whole number.
    """

    token: int
    reads: int
    positions: Positions = None

    def __post_init__(self) -> None:
        _set(self, token=index(self.token), reads=index(self.reads), positions=_positions(self.positions))

    @property
    def place(self) -> tuple:
        """Where it acts; two edits of a kind in one place are one edit."""
        return (self.token, self.positions)

    @property
    def rank(self) -> tuple:
        """How specific it is, ascending."""
        return (self.positions is not None, *_positions_rank(self.positions))

    def text(self) -> str:
        """Its part of the text form."""
        return f"swap{self.token}.{self.reads}" + _positions_text(self.positions)


Edit = Off | Rule | Swap


def _set(edit: Edit, **fields) -> None:
    """Writes fields of a frozen edit while it is made."""
    for name, value in fields.items():
        object.__setattr__(edit, name, value)


def _index(number: int | None) -> int | None:
    return None if number is None else index(number)


def _positions(positions: Iterable[int] | None) -> Positions:
    return None if positions is None else frozenset(map(index, positions))


def _positions_rank(positions: Positions) -> tuple[int, list[int]]:
    """Fewer positions are more specific; of as many, later ones: no two edits that can meet are of one rank."""
    return (-len(positions or ()), sorted(positions or ()))


def _positions_text(positions: Positions) -> str:
    if positions is None:
        return ""
    spans: list[list[int]] = []
    for position in sorted(positions):
        if spans and spans[-1][1] == position - 1:
            spans[-1][1] = position
        else:
            spans.append([position, position])
    return "@" + ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)

"""`Intervention`: a frozen value that says what one forward does differently.

It is a set of edits of three kinds, applied in this order whatever the order in which they were given:

1. `Swap`: token a reads token b's rows of the memory tables.
2. `Rule`: in some layers the routing weights come from a rule instead of the router.
3. `Off`: a bank injects nothing in some layer, or something else in the place of what it would have injected.

Where two edits of a kind meet, the more specific one wins: one with positions over one without; then a pair (layer,
bank) over a layer, a layer over a bank, a bank over everything. Of two that are equally specific and overlap, which
takes positions that differ, the one that comes last in the text form wins. Two that differ in what they do alone are
one edit: `a | b` keeps b's.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from tide.config import TideConfig

Replacement = Literal["zero", "mean", "random"]
RuleKind = Literal["uniform", "null", "only", "temperature"]
Positions = frozenset[int] | None

REPLACEMENTS: tuple[Replacement, ...] = ("zero", "mean", "random")
RULES: tuple[RuleKind, ...] = ("uniform", "null", "only", "temperature")


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
        seed: of the random direction.
        renormalize: the weight goes to the remaining banks and null in proportion, not to null alone.
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
        if self.replacement != "random":
            object.__setattr__(self, "seed", 0)  # means nothing then: equal edits are equal

    @property
    def place(self) -> tuple:
        """Where it acts; two edits of one place are one edit."""
        return (self.layer, self.bank, _sorted(self.positions))

    @property
    def rank(self) -> tuple:
        """How specific it is, ascending."""
        return (self.positions is not None, self.layer is not None, self.bank is not None, self.text())

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
        value: the bank of "only", the temperature of "temperature"; else 0.
        layer: 0-based; None is every layer.
        positions: of the text, 0-based; None is everywhere.
    """

    kind: RuleKind
    value: float = 0
    layer: int | None = None
    positions: Positions = None

    def __post_init__(self) -> None:
        if self.kind not in RULES:
            raise ValueError(f"There is no router rule {self.kind!r}; it is {', '.join(RULES)}.")
        if self.kind == "temperature" and not 0 < self.value < math.inf:
            raise ValueError(f"The router's temperature is {self.value}; it must be a number above 0.")

    @property
    def place(self) -> tuple:
        """Where it acts."""
        return (self.layer, _sorted(self.positions))

    @property
    def rank(self) -> tuple:
        """How specific it is, ascending."""
        return (self.positions is not None, self.layer is not None, self.text())

    def text(self) -> str:
        """Its part of the text form."""
        value = {"only": f"{int(self.value)}", "temperature": f"{self.value:g}"}.get(self.kind, "")
        return f"{self.kind}{value}" + ("" if self.layer is None else f":{self.layer}") + _positions_text(self.positions)


@dataclass(frozen=True)
class Swap:
    """Makes a token read another token's rows in all memory tables: "what if it had that token's memory".

    Attributes:
        token: token id in the text.
        reads: token id whose rows it reads.
        positions: of the text, 0-based; None is everywhere.
    """

    token: int
    reads: int
    positions: Positions = None

    @property
    def place(self) -> tuple:
        """Where it acts."""
        return (self.token, _sorted(self.positions))

    @property
    def rank(self) -> tuple:
        """How specific it is, ascending."""
        return (self.positions is not None, self.text())

    def text(self) -> str:
        """Its part of the text form."""
        return f"swap{self.token}.{self.reads}" + _positions_text(self.positions)


Edit = Off | Rule | Swap


@dataclass(frozen=True)
class Intervention:
    """What one forward does differently. `Intervention()` changes nothing and costs nothing.

    It is a value, handed to `forward(..., intervention=...)`, `generate` and `trace`; the model itself never
    changes, so that any number of sessions can share one model. Two interventions combine with `|`; what wins where
    they meet is said at the top of this file.

    Attributes:
        edits: the edits, one a place, in the order of their text; made so whatever was given.
    """

    edits: tuple[Edit, ...] = ()

    def __post_init__(self) -> None:
        acting = (edit for edit in self.edits if edit.positions != frozenset())
        by_place = {(type(edit), edit.place): edit for edit in acting}
        object.__setattr__(self, "edits", tuple(sorted(by_place.values(), key=lambda edit: _natural(edit.text()))))

    @classmethod
    def off(cls, pairs: Iterable[tuple[int, int]], **how) -> "Intervention":
        """Switches single banks off, each in one layer: `Intervention.off([(3, 0), (3, 5)])`.

        Args:
            pairs: (layer, bank), 0-based.
            **how: other fields of `Off`.
        """
        return cls(tuple(Off(int(layer), int(bank), **_how(how)) for layer, bank in pairs))

    @classmethod
    def layers_off(cls, layers: Iterable[int], **how) -> "Intervention":
        """Switches the whole memory injection of some layers off: `Intervention.layers_off([3])`."""
        return cls(tuple(Off(int(layer), None, **_how(how)) for layer in layers))

    @classmethod
    def banks_off(cls, banks: Iterable[int], **how) -> "Intervention":
        """Switches some banks off in every layer."""
        return cls(tuple(Off(None, int(bank), **_how(how)) for bank in banks))

    @classmethod
    def all_off(cls, **how) -> "Intervention":
        """Switches every bank off in every layer."""
        return cls((Off(**_how(how)),))

    @classmethod
    def route(
        cls,
        kind: RuleKind,
        value: float = 0,
        layers: Iterable[int] | None = None,
        positions: Iterable[int] | None = None,
    ) -> "Intervention":
        """Replaces the router by a rule (`Rule`), in some layers or all."""
        where = None if positions is None else frozenset(int(p) for p in positions)
        chosen = (None,) if layers is None else tuple(int(layer) for layer in layers)
        return cls(tuple(Rule(kind, value, layer, where) for layer in chosen))

    @classmethod
    def swap(cls, token: int, reads: int, positions: Iterable[int] | None = None) -> "Intervention":
        """Makes `token` read the memory of `reads`."""
        return cls((Swap(int(token), int(reads), None if positions is None else frozenset(map(int, positions))),))

    def __or__(self, other: "Intervention") -> "Intervention":
        """All edits of both; of two in one place the other's."""
        return Intervention(self.edits + other.edits)

    def __bool__(self) -> bool:
        """Whether anything is changed."""
        return bool(self.edits)

    def __str__(self) -> str:
        """The text form."""
        return self.to_text()

    @property
    def offs(self) -> tuple[Off, ...]:
        """The switches, the least specific first."""
        return tuple(sorted((e for e in self.edits if isinstance(e, Off)), key=lambda e: e.rank))

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The router rules, the least specific first."""
        return tuple(sorted((e for e in self.edits if isinstance(e, Rule)), key=lambda e: e.rank))

    @property
    def swaps(self) -> tuple[Swap, ...]:
        """The row swaps, the least specific first."""
        return tuple(sorted((e for e in self.edits if isinstance(e, Swap)), key=lambda e: e.rank))

    @property
    def needs_mean(self) -> bool:
        """Whether the forward needs the mean injections, `mean_injection` [L, K, d]."""
        return any(off.replacement == "mean" for off in self.offs)

    def off_in(self, layer: int, num_banks: int) -> list[int]:
        """The banks that are off in `layer` at every position, in ascending order."""
        hit = [off for off in self.offs if off.layer in (None, layer) and off.positions is None]
        return [bank for bank in range(num_banks) if any(off.bank in (None, bank) for off in hit)]

    def first_layer(self, num_layers: int) -> int:
        """The first layer that the intervention touches; `num_layers` when it touches none.

        Below that layer a forward is what it is without the intervention.
        """
        if self.swaps:
            return 0
        return min((edit.layer or 0 for edit in self.edits if not isinstance(edit, Swap)), default=num_layers)

    def validate(self, config: TideConfig) -> None:
        """Checks that every layer, bank, token and position exists in the model.

        Raises:
            ValueError: one sentence that names the first one that does not.
        """
        num_layers, num_banks = config.num_hidden_layers, config.num_memory_blocks
        has = f"banks 0..{num_banks - 1}" if num_banks else "no memory banks"
        for edit in self.edits:
            layer = None if isinstance(edit, Swap) else edit.layer
            if layer is not None and not 0 <= layer < num_layers:
                raise ValueError(f"The intervention names layer {layer}, but the model has layers 0..{num_layers - 1}.")
            bank = edit.bank if isinstance(edit, Off) else None
            if bank is not None and not 0 <= bank < num_banks:
                where = "" if layer is None else f" in layer {layer}"
                raise ValueError(f"The intervention names bank {bank}{where}, but the model has {has}.")
            if isinstance(edit, Rule) and edit.kind == "only" and not (
                0 <= edit.value < num_banks and edit.value == int(edit.value)
            ):
                raise ValueError(f"The router rule names bank {edit.value:g}, but the model has {has}.")
            for token in (edit.token, edit.reads) if isinstance(edit, Swap) else ():
                if not 0 <= token < config.vocab_size:
                    raise ValueError(f"The row swap names token {token}, but the ids are 0..{config.vocab_size - 1}.")
            limit = config.max_position_embeddings
            if edit.positions is not None and not all(0 <= p < limit for p in edit.positions):
                wrong = next(p for p in sorted(edit.positions) if not 0 <= p < limit)
                raise ValueError(f"The intervention names position {wrong}, but a text has positions 0..{limit - 1}.")

    def to_text(self) -> str:
        """A short form for a URL: the edits' texts, joined by "_".

        Off: "3" is layer 3, "3.5" bank 5 in layer 3, ".5" bank 5 in every layer, "*" everything; then "~mean" or
        "~random7" (seed 7) for the replacement, "!" to renormalise. Rule: "uniform", "null", "only5",
        "temperature0.5", then ":3" for layer 3 alone. Swap: "swap120.88". Each ends in "@0,4-6" where only some
        positions are meant.
        """
        return "_".join(edit.text() for edit in self.edits)

    @classmethod
    def from_text(cls, text: str) -> "Intervention":
        """Reads what `to_text` wrote.

        Raises:
            ValueError: one sentence, for a text of another form.
        """
        return cls(tuple(_read_edit(part) for part in text.split("_") if part))


_PARTS = {
    Off: r"(?P<target>\*|(?P<layer>\d+)?(?:\.(?P<bank>\d+))?)(?:~(?P<kind>mean|random(?P<seed>\d+)))?(?P<renorm>!)?",
    Rule: r"(?P<kind>uniform|null|only(?P<bank>\d+)|temperature(?P<value>[\d.e+-]+))(?::(?P<layer>\d+))?",
    Swap: r"swap(?P<token>\d+)\.(?P<reads>\d+)",
}
_POSITIONS = r"(?:@(?P<positions>\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*))?"
_MOST_POSITIONS = 1_000_000  # of a range in a text: a typing error must not fill the memory


def _read_edit(part: str) -> Edit:
    for kind, pattern in _PARTS.items():
        match = re.fullmatch(pattern + _POSITIONS, part, flags=re.ASCII)
        if match is None or match.groupdict().get("target") == "":
            continue
        found = match.groupdict()
        positions = _read_positions(found["positions"])
        number = {name: int(found[name]) if found.get(name) else None for name in ("layer", "bank", "seed")}
        if kind is Off:
            replacement: Replacement = "random" if number["seed"] is not None else found["kind"] or "zero"
            return Off(
                number["layer"], number["bank"], positions, replacement, number["seed"] or 0, bool(found["renorm"])
            )
        if kind is Swap:
            return Swap(int(found["token"]), int(found["reads"]), positions)
        name: RuleKind = next(rule for rule in RULES if found["kind"].startswith(rule))
        try:
            value = float(found["value"]) if found["value"] else number["bank"] or 0
        except ValueError:
            break
        return Rule(name, value, number["layer"], positions)
    raise ValueError(
        f"{part[:40]!r} is no switch; write 3 for layer 3, 3.5 for bank 5 in layer 3, .5 for bank 5 in all layers."
    )


def _read_positions(text: str | None) -> Positions:
    if text is None:
        return None
    chosen: set[int] = set()
    for span in text.split(","):
        first, _, last = span.partition("-")
        stop = int(last or first) + 1
        if stop - int(first) > _MOST_POSITIONS:
            raise ValueError(f"The positions {span} are too many.")
        chosen.update(range(int(first), stop))
    return frozenset(chosen)


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


def _sorted(positions: Positions) -> tuple[int, ...] | None:
    return None if positions is None else tuple(sorted(positions))


def _natural(text: str) -> list:
    """A sorting key under which 9 comes before 10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", text) if part]


def _how(how: dict) -> dict:
    """The fields of `Off` beside layer and bank, positions as a frozenset."""
    if how.get("positions") is not None:
        how = {**how, "positions": frozenset(int(p) for p in how["positions"])}
    return how

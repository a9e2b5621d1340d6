"""`Intervention`: a frozen value that says what one forward does differently.

It is a set of edits (`tide.edits`) of three kinds, applied in this order whatever the order in which they were given:

1. `Swap`: token a reads token b's rows of the memory tables.
2. `Rule`: in some layers the routing weights come from a rule instead of the router.
3. `Off`: a bank injects nothing in some layer, or something else in the place of what it would have injected.

Where two edits of a kind meet, the more specific one wins, and the other does nothing there: one with positions over
one without; then a pair (layer, bank) over a layer, a layer over a bank, a bank over everything; then one with fewer
positions over one with more; of two with as many, the one whose positions come later. Two in the same place are one
edit: `a | b` keeps b's. Swaps do not chain: b's rows are read whatever b itself is to read.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from tide.config import TideConfig
from tide.edit_text import read_edits
from tide.edits import REPLACEMENTS, RULES, Edit, Off, Positions, Rule, RuleKind, Swap

__all__ = ["REPLACEMENTS", "RULES", "Edit", "Intervention", "Off", "Positions", "Rule", "Swap"]

EditT = TypeVar("EditT", Off, Rule, Swap)


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
        return cls(tuple(Off(layer, bank, **how) for layer, bank in pairs))

    @classmethod
    def layers_off(cls, layers: Iterable[int], **how) -> "Intervention":
        """Switches the whole memory injection of some layers off: `Intervention.layers_off([3])`."""
        return cls(tuple(Off(layer, None, **how) for layer in layers))

    @classmethod
    def banks_off(cls, banks: Iterable[int], **how) -> "Intervention":
        """Switches some banks off in every layer."""
        return cls(tuple(Off(None, bank, **how) for bank in banks))

    @classmethod
    def all_off(cls, **how) -> "Intervention":
        """Switches every bank off in every layer."""
        return cls((Off(**how),))

    @classmethod
    def route(
        cls,
        kind: RuleKind,
        value: float = 0,
        layers: Iterable[int] | None = None,
        positions: Iterable[int] | None = None,
    ) -> "Intervention":
        """Replaces the router by a rule (`Rule`), in some layers or all."""
        where = None if positions is None else frozenset(positions)  # an iterator would be spent at the first layer
        return cls(tuple(Rule(kind, value, layer, where) for layer in ((None,) if layers is None else layers)))

    @classmethod
    def swap(cls, token: int, reads: int, positions: Iterable[int] | None = None) -> "Intervention":
        """Makes `token` read the memory of `reads`."""
        return cls((Swap(token, reads, None if positions is None else frozenset(positions)),))

    def __or__(self, other: "Intervention") -> "Intervention":
        """All edits of both; of two in one place the other's."""
        return Intervention(self.edits + other.edits)

    def __bool__(self) -> bool:
        """Whether anything is changed."""
        return bool(self.edits)

    def __str__(self) -> str:
        """The text form."""
        return self.to_text()

    @cached_property
    def offs(self) -> tuple[Off, ...]:
        """The switches, the least specific first."""
        return self._ranked(Off)

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        """The router rules, the least specific first."""
        return self._ranked(Rule)

    @cached_property
    def swaps(self) -> tuple[Swap, ...]:
        """The row swaps, the least specific first."""
        return self._ranked(Swap)

    def _ranked(self, kind: type[EditT]) -> tuple[EditT, ...]:
        """The edits of a kind, the least specific first."""
        return tuple(sorted((edit for edit in self.edits if isinstance(edit, kind)), key=lambda edit: edit.rank))

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
        for edit in self.edits:
            if edit.positions and not 0 <= min(edit.positions) <= max(edit.positions) < config.max_position_embeddings:
                last = config.max_position_embeddings - 1
                wrong = min(p for p in edit.positions if not 0 <= p <= last)
                raise ValueError(f"The intervention names position {wrong}, but a text has positions 0..{last}.")
            if isinstance(edit, Swap):
                for token in (edit.token, edit.reads):
                    if not 0 <= token < config.vocab_size:
                        raise ValueError(
                            f"The row swap names token {token}, but the ids are 0..{config.vocab_size - 1}."
                        )
                continue
            if edit.layer is not None and not 0 <= edit.layer < config.num_hidden_layers:
                has = f"layers 0..{config.num_hidden_layers - 1}"
                raise ValueError(f"The intervention names layer {edit.layer}, but the model has {has}.")
            bank = edit.bank if isinstance(edit, Off) else edit.value if edit.kind == "only" else None
            if bank is not None and not 0 <= bank < config.num_memory_blocks:
                has = f"banks 0..{config.num_memory_blocks - 1}" if config.num_memory_blocks else "no memory banks"
                what = "intervention" if isinstance(edit, Off) else "router rule"
                where = "" if edit.layer is None else f" in layer {edit.layer}"
                raise ValueError(f"The {what} names bank {bank}{where}, but the model has {has}.")

    def to_text(self) -> str:
        """A short form for a URL: the edits' texts, joined by "_".

        Off: "3" is layer 3, "3.5" bank 5 in layer 3, ".5" bank 5 in every layer, "*" everything; then "~mean" or
        "~random7" (seed 7) for the replacement, "!" to renormalise. Rule: "uniform", "null", "only5",
        "temperature0.5", then ":3" for layer 3 alone. Swap: "swap120.88". Each ends in "@0,4-6" where only some
        positions are meant. `from_text` reads it; it refuses more than 65,536 characters or a million positions.
        """
        return "_".join(edit.text() for edit in self.edits)

    @classmethod
    def from_text(cls, text: str) -> "Intervention":
        """Reads what `to_text` wrote.

        Raises:
            ValueError: one sentence, for a text of another form.
        """
        return cls(read_edits(text))


def _natural(text: str) -> list[tuple[int, int, str]]:
    """A sorting key under which 9 comes before 10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", text) if part]

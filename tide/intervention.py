"""`Intervention`: a frozen value that says what one forward does differently."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tide.config import TideConfig


@dataclass(frozen=True)
class Intervention:
    """What is switched off while a forward runs. `Intervention()` changes nothing and costs nothing.

    It is a value, handed to `forward(..., intervention=...)`, `generate` and `trace`; the model itself never
    changes, so that any number of sessions can share one model. Two interventions combine with `|`.

    A bank that is off hands its routing weight to the null bank: what it would have injected becomes zero, and
    the weights of the other banks stay as they were.

    Attributes:
        pairs: (layer, bank) pairs whose bank is off in that layer; both 0-based.
        layers: layers in which every bank is off; 0-based.
    """

    pairs: frozenset[tuple[int, int]] = frozenset()
    layers: frozenset[int] = frozenset()

    @classmethod
    def off(cls, pairs: Iterable[tuple[int, int]]) -> "Intervention":
        """Switches single banks off, each in one layer: `Intervention.off([(3, 0), (3, 5)])`."""
        return cls(pairs=frozenset((int(layer), int(bank)) for layer, bank in pairs))

    @classmethod
    def layers_off(cls, layers: Iterable[int]) -> "Intervention":
        """Switches the whole memory injection of some layers off: `Intervention.layers_off([3])`."""
        return cls(layers=frozenset(int(layer) for layer in layers))

    def __or__(self, other: "Intervention") -> "Intervention":
        """Everything that either of the two switches off."""
        return Intervention(self.pairs | other.pairs, self.layers | other.layers)

    def __bool__(self) -> bool:
        """Whether anything is switched off."""
        return bool(self.pairs or self.layers)

    def banks_off(self, layer: int, num_banks: int) -> list[int]:
        """The banks that are off in `layer`, in ascending order."""
        if layer in self.layers:
            return list(range(num_banks))
        return sorted(bank for pair_layer, bank in self.pairs if pair_layer == layer)

    def validate(self, config: TideConfig) -> None:
        """Checks that every layer and bank exists in the model.

        Raises:
            ValueError: one sentence that names the first layer or bank that the model does not have.
        """
        num_layers, num_banks = config.num_hidden_layers, config.num_memory_blocks
        for layer in sorted(self.layers | {layer for layer, _ in self.pairs}):
            if not 0 <= layer < num_layers:
                raise ValueError(f"The intervention names layer {layer}, but the model has layers 0..{num_layers - 1}.")
        for layer, bank in sorted(self.pairs):
            if not 0 <= bank < num_banks:
                has = f"banks 0..{num_banks - 1}" if num_banks else "no memory banks"
                raise ValueError(f"The intervention names bank {bank} in layer {layer}, but the model has {has}.")

    def apply(self, layer: int, routing: torch.Tensor) -> torch.Tensor:
        """The routing weights that take effect in `layer`.

        Args:
            layer: 0-based.
            routing: [B, T, K+1], the router's own weights; null last.

        Returns:
            [B, T, K+1], rows still summing to one; `routing` itself where nothing is off in this layer.
        """
        off = self.banks_off(layer, routing.shape[-1] - 1)
        if not off:
            return routing
        routing = routing.clone()
        routing[..., -1] += routing[..., off].sum(dim=-1)
        routing[..., off] = 0.0
        return routing

    def to_text(self) -> str:
        """A short form for a URL: "3" is layer 3, "3.5" bank 5 in layer 3; ascending, joined by "_"."""
        parts = [(layer, -1) for layer in self.layers] + list(self.pairs)
        return "_".join(f"{layer}" if bank < 0 else f"{layer}.{bank}" for layer, bank in sorted(parts))

    @classmethod
    def from_text(cls, text: str) -> "Intervention":
        """Reads what `to_text` wrote.

        Raises:
            ValueError: one sentence, for a text of another form.
        """
        result = cls()
        for part in filter(None, text.split("_")):
            numbers = part.split(".")
            if len(numbers) > 2 or not all(n.isascii() and n.isdigit() for n in numbers):
                raise ValueError(f"{part[:40]!r} is no switch; write 3 for layer 3, or 3.5 for bank 5 in layer 3.")
            layer, *bank = (int(n) for n in numbers)
            result |= cls.off([(layer, bank[0])]) if bank else cls.layers_off([layer])
        return result

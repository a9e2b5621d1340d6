"""What an `Intervention` does to the tensors of a forward: to token ids before the lookup, to routing in each layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from tide.config import TideConfig
from tide.intervention import Intervention, Off, Positions, Rule


@dataclass
class Effect:
    """An intervention at work in one forward; with several, one for each row of the batch.

    Attributes:
        rows: one intervention for all rows of the batch, or as many as there are rows.
        position_ids: [1 or B, T], where the forward's tokens stand in their text.
        mean_injection: [L, K, d], what every (layer, bank) injects on average; None where nothing asks for it.
    """

    rows: tuple[Intervention, ...]
    position_ids: torch.Tensor
    mean_injection: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        intervention: "Intervention | Sequence[Intervention] | None",
        config: TideConfig,
        position_ids: torch.Tensor,
        batch_size: int,
        mean_injection: torch.Tensor | None = None,
    ) -> "Effect | None":
        """Checks an intervention against the model and the batch; None when it changes nothing.

        Raises:
            ValueError: one sentence, when it names what the model does not have, when its number is not the batch's,
                or when it needs mean injections that are not given or of another shape.
        """
        rows = (intervention,) if isinstance(intervention, Intervention) else tuple(intervention or ())
        if not any(rows):
            return None
        if len(rows) not in (1, batch_size):
            raise ValueError(f"There are {len(rows)} interventions for {batch_size} rows; give one, or one a row.")
        for row in rows:
            row.validate(config)
        if any(row.needs_mean for row in rows):
            shape = (config.num_hidden_layers, config.num_memory_blocks, config.hidden_size)
            if mean_injection is None:
                raise ValueError("A replacement by the mean needs mean_injection [L, K, d], which the artifacts hold.")
            if tuple(mean_injection.shape) != shape:
                raise ValueError(f"mean_injection has shape {list(mean_injection.shape)}, the model needs {list(shape)}.")
        return cls(rows, position_ids, mean_injection)

    def lookup_ids(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The token ids whose memory rows are read: [B, T], after the swaps."""
        if not any(row.swaps for row in self.rows):
            return token_ids
        read = token_ids.clone()
        for index, row in self._by_row(len(token_ids)):
            for swap in row.swaps:
                hit = (token_ids[index] == swap.token) & self._where(swap.positions, index)
                read[index] = torch.where(hit, swap.reads, read[index])
        return read

    def route(
        self, layer: int, routing: torch.Tensor, memory: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The routing weights that take effect in a layer, and what is injected in the place of banks that are off.

        Args:
            layer: 0-based.
            routing: [B, T, K+1] float32, the router's own weights; null last.
            memory: [B, T, K, d], M.

        Returns:
            The weights [B, T, K+1], rows still summing to one, `routing` itself where nothing is changed in this
            layer; and the replacement [B, T, d] in the dtype of `memory`, None where there is none.
        """
        changed, replaced = routing, None
        for index, row in self._by_row(len(routing)):
            rules, offs = edits_in(row, layer, routing.shape[-1] - 1)
            if not rules and not offs:
                continue
            if changed is routing:
                changed = routing.clone()
            weights, replacement = self._change(layer, changed[index], memory[index], rules, offs, index)
            changed[index] = weights
            if replacement is not None:
                if replaced is None:
                    replaced = memory.new_zeros(*memory.shape[:2], memory.shape[-1])
                replaced[index] = replacement
        return changed, replaced

    def _by_row(self, batch_size: int) -> list[tuple[slice, Intervention]]:
        """The part of the batch that each intervention is for."""
        if len(self.rows) == 1:
            return [(slice(0, batch_size), self.rows[0])]
        return [(slice(i, i + 1), row) for i, row in enumerate(self.rows)]

    def _where(self, positions: Positions, index: slice) -> torch.Tensor:
        """Whether an edit acts at each place: a bool that broadcasts to [B, T]."""
        ids = self.position_ids if len(self.position_ids) == 1 else self.position_ids[index]
        if positions is None:
            return torch.ones((1, 1), dtype=torch.bool, device=ids.device)
        return torch.isin(ids, torch.tensor(sorted(positions), device=ids.device))

    def _change(
        self,
        layer: int,
        routing: torch.Tensor,
        memory: torch.Tensor,
        rules: tuple[Rule, ...],
        offs: tuple[tuple[int, Off], ...],
        index: slice,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rules, then switches, on rows that share an intervention; the more specific come later and win."""
        for rule in rules:
            here = self._where(rule.positions, index).unsqueeze(-1)
            routing = torch.where(here, ruled(rule, routing), routing)
        if not offs:
            return routing, None

        batch, length, num_slots = routing.shape
        shape = (batch, length, num_slots - 1)
        is_off, spreads = (torch.zeros(shape, dtype=torch.bool, device=routing.device) for _ in range(2))
        stands_in: torch.Tensor | None = None  # (B, T, K, d), made only where something is to be replaced
        if any(off.replacement != "zero" for _, off in offs):
            stands_in = torch.zeros_like(memory)
        for bank, off in offs:
            here = self._where(off.positions, index).expand(batch, length)
            is_off[..., bank] |= here
            spreads[..., bank] = torch.where(here, off.renormalize, spreads[..., bank])
            if stands_in is not None:
                value = self._replacement(layer, bank, off, routing[..., bank], memory[..., bank, :])
                stands_in[..., bank, :] = torch.where(here.unsqueeze(-1), value, stands_in[..., bank, :])

        taken = torch.where(is_off, routing[..., :-1], 0.0)  # (B, T, K), the weights of what is off
        kept = torch.where(is_off, 0.0, routing[..., :-1])
        null = routing[..., -1] + torch.where(spreads, 0.0, taken).sum(dim=-1)
        left = torch.cat([kept, null.unsqueeze(-1)], dim=-1)
        total = left.sum(dim=-1, keepdim=True)
        none_left = torch.zeros_like(left)
        none_left[..., -1] = 1.0
        normalised = torch.where(total > 0, left / total.clamp_min(torch.finfo(left.dtype).tiny), none_left)
        weights = torch.where(spreads.any(dim=-1, keepdim=True), normalised, left)
        return weights, None if stands_in is None else stands_in.sum(dim=-2)

    def _replacement(
        self, layer: int, bank: int, off: Off, weight: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """What stands in for a bank: broadcasts to [B, T, d].

        Args:
            layer: 0-based.
            bank: 0-based.
            off: the switch.
            weight: [B, T], the bank's routing weight before it was switched off.
            rows: [B, T, d], M_k(v).
        """
        if off.replacement == "zero":
            return torch.zeros_like(rows)
        if off.replacement == "mean":
            assert self.mean_injection is not None  # `of` has checked it
            return self.mean_injection[layer, bank].to(rows)
        size = (weight.to(rows.dtype).unsqueeze(-1) * rows).norm(dim=-1, keepdim=True)
        return size * random_direction(off.seed, layer, bank, rows.shape[-1]).to(rows)


@lru_cache(maxsize=4096)
def edits_in(
    intervention: Intervention, layer: int, num_banks: int
) -> tuple[tuple[Rule, ...], tuple[tuple[int, Off], ...]]:
    """The rules and the switches, one a bank, that act in a layer; the least specific first."""
    rules = tuple(rule for rule in intervention.rules if rule.layer in (None, layer))
    offs = tuple(
        (bank, off)
        for off in intervention.offs
        if off.layer in (None, layer)
        for bank in (range(num_banks) if off.bank is None else (off.bank,))
    )
    return rules, offs


def ruled(rule: Rule, routing: torch.Tensor) -> torch.Tensor:
    """The routing weights [..., K+1] that a rule makes of the router's own."""
    if rule.kind == "temperature":
        return (routing.log() / rule.value).softmax(dim=-1)  # the logits up to a constant, which softmax ignores
    if rule.kind == "uniform":
        return torch.full_like(routing, 1 / routing.shape[-1])
    weights = torch.zeros_like(routing)
    weights[..., -1 if rule.kind == "null" else int(rule.value)] = 1.0
    return weights


@lru_cache(maxsize=1024)
def random_direction(seed: int, layer: int, bank: int, size: int) -> torch.Tensor:
    """A unit vector [size] float32 on the CPU, the same on every machine for the same (seed, layer, bank)."""
    generator = torch.Generator().manual_seed(((seed * 1009 + layer) * 1009 + bank) % 2**63)
    vector = torch.randn(size, generator=generator)
    return vector / vector.norm()

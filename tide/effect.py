"""What an `Intervention` does to the tensors of a forward: to token ids before the lookup, to routing in each layer.

Where edits act is worked out once a forward (`Winners`); a layer then costs a few operations, however many edits there
are, because those that do the same in different places are done together.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Generic, TypeVar

import numpy as np
import torch

from tide.config import TideConfig
from tide.intervention import Intervention, Off, Rule

EditT = TypeVar("EditT", Off, Rule)


@dataclass
class Effect:
    """An intervention at work in one forward; with several, one for each row of the batch.

    Attributes:
        rows: one intervention for all rows of the batch, or as many as there are rows.
        position_ids: [1 or B, T], where the forward's tokens stand in their text.
        config: of the model.
        mean_injection: [L, K, d], what every (layer, bank) injects on average; None where nothing asks for it.
    """

    rows: tuple[Intervention, ...]
    position_ids: torch.Tensor
    config: TideConfig
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
        if not config.num_memory_blocks:
            return None  # the Base model: there is nothing to change
        if any(row.needs_mean for row in rows):
            shape = (config.num_hidden_layers, config.num_memory_blocks, config.hidden_size)
            if mean_injection is None:
                raise ValueError("A replacement by the mean needs mean_injection [L, K, d], which the artifacts hold.")
            if tuple(mean_injection.shape) != shape:
                raise ValueError(f"mean_injection is {list(mean_injection.shape)}, but the model needs {list(shape)}.")
        return cls(rows, position_ids, config, mean_injection)

    @cached_property
    def offs(self) -> "Winners[Off]":
        """Which switch acts where, by bank: [..., K]."""
        shape = (self.config.num_hidden_layers, self.config.num_memory_blocks)
        return Winners([row.offs for row in self.rows], shape, self.position_ids)

    @cached_property
    def rules(self) -> "Winners[Rule]":
        """Which router rule acts where: [..., 1]."""
        return Winners([row.rules for row in self.rows], (self.config.num_hidden_layers, 1), self.position_ids)

    def lookup_ids(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The token ids whose memory rows are read: [B, T], after the swaps."""
        if not any(row.swaps for row in self.rows):
            return token_ids
        read = token_ids.clone()
        for index, row in enumerate(self.rows):
            part = slice(None) if len(self.rows) == 1 else slice(index, index + 1)
            for swap in row.swaps:
                hit = token_ids[part] == swap.token
                if swap.positions is not None:
                    hit = hit & among(rows_of(self.position_ids, part), swap.positions)
                read[part] = read[part].masked_fill(hit, swap.reads)
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
        weights, rules, offs = routing, self.rules.kinds_in(layer), self.offs.kinds_in(layer)
        if rules:
            winner = self.rules.at(layer, routing.device)
            for number, rule in rules.items():
                weights = torch.where(winner == number, ruled(rule, routing), weights)
        if not offs:
            return weights, None
        winner = self.offs.at(layer, routing.device)  # (1 or B, 1 or T, K)
        replaced = self._replacement(layer, weights, memory, winner)
        renormalize = [number for number, off in offs.items() if off.renormalize]
        return switched_off(weights, winner > 0, among(winner, renormalize) if renormalize else None), replaced

    def _replacement(
        self, layer: int, weights: torch.Tensor, memory: torch.Tensor, winner: torch.Tensor
    ) -> torch.Tensor | None:
        """What stands in for the banks that are off: [B, T, d], summed in float32."""
        parts = []
        for number, off in self.offs.kinds_in(layer).items():
            if off.replacement == "zero":
                continue
            here = (winner == number).float()  # (1 or B, 1 or T, K)
            if off.replacement == "mean":
                assert self.mean_injection is not None  # `of` has checked it
                parts.append(here @ self.mean_injection[layer].to(here))
            else:
                length = weights[..., :-1] * memory.float().norm(dim=-1)  # |alpha_k M_k(v)| (B, T, K)
                num_banks, size = memory.shape[-2:]
                directions = torch.stack([random_direction(off.seed, layer, bank, size) for bank in range(num_banks)])
                parts.append((here * length) @ directions.to(here))
        if not parts:
            return None
        total = parts[0] if len(parts) == 1 else torch.stack(torch.broadcast_tensors(*parts)).sum(dim=0)
        return total.to(memory.dtype).expand(*memory.shape[:2], -1)


class Winners(Generic[EditT]):
    """Which edit acts where, of those of a kind: the most specific one.

    Edits are numbered from 1, the more specific the higher, and written into tables [L, K]; where tables meet, the
    highest number wins. The caller gets numbers of what the edits do, the same for edits that do the same.
    """

    def __init__(self, edits_by_row: list[tuple[EditT, ...]], shape: tuple[int, int], position_ids: torch.Tensor):
        """Numbers the edits.

        Args:
            edits_by_row: for every row of the batch, or once for all, its edits, the least specific first.
            shape: (L, K); K is 1 for edits that name no bank.
            position_ids: [1 or B, T].
        """
        everywhere = np.zeros((len(edits_by_row), *shape), dtype=np.int64)
        somewhere: dict[tuple[int, frozenset[int]], np.ndarray] = defaultdict(lambda: np.zeros(shape, dtype=np.int64))
        kinds: dict[EditT, int] = {}
        kind_of = [0]  # by number of the edit
        self._kinds: list[dict[int, EditT]] = [{} for _ in range(shape[0])]
        for row, edits in enumerate(edits_by_row):
            for number, edit in enumerate(edits, start=len(kind_of)):
                what = edit.everywhere()
                kind_of.append(kinds.setdefault(what, len(kinds) + 1))
                bank = edit.bank if isinstance(edit, Off) else None
                table = everywhere[row] if edit.positions is None else somewhere[row, edit.positions]
                table[_index(edit.layer), _index(bank)] = number
                for layer in range(shape[0]) if edit.layer is None else (edit.layer,):
                    self._kinds[layer][kind_of[number]] = what

        device = position_ids.device
        self._kind_of = torch.tensor(kind_of, device=device)
        self._everywhere = torch.from_numpy(everywhere).to(device)  # (1 or B, L, K)
        self._kind_everywhere = self._kind_of[self._everywhere]
        # by layer: rows of the batch; whether it acts (1 or B, T, 1); row of the table (K,)
        self._somewhere: list[list[tuple[slice, torch.Tensor, torch.Tensor]]] = [[] for _ in range(shape[0])]
        for (row, positions), table in somewhere.items():
            rows = slice(None) if len(edits_by_row) == 1 else slice(row, row + 1)
            here = among(rows_of(position_ids, rows), positions).unsqueeze(-1)
            for layer in np.flatnonzero(table.any(axis=1)).tolist():
                self._somewhere[layer].append((rows, here, torch.from_numpy(table[layer]).to(device)))
        self._full = (max(len(edits_by_row), len(position_ids)), position_ids.shape[1], shape[1])

    def kinds_in(self, layer: int) -> dict[int, EditT]:
        """What the edits of a layer do, by number; empty where none acts."""
        return self._kinds[layer]

    def at(self, layer: int, device: torch.device) -> torch.Tensor:
        """The number of what is done at each place of a layer, 0 for nothing: [1 or B, 1 or T, K] int64."""
        if not self._somewhere[layer]:
            return self._kind_everywhere[:, layer].unsqueeze(1).to(device)
        winner = self._everywhere[:, layer].unsqueeze(1).expand(self._full).clone()
        for rows, here, numbers in self._somewhere[layer]:
            winner[rows] = torch.maximum(winner[rows], here * numbers)
        return self._kind_of[winner].to(device)


def switched_off(weights: torch.Tensor, off: torch.Tensor, renormalized: torch.Tensor | None) -> torch.Tensor:
    """The routing weights once banks are off.

    Args:
        weights: [B, T, K+1], null last.
        off: bool, broadcasts to [B, T, K].
        renormalized: the same; those whose weight goes to all that remains instead of to null. None: there are none.

    Returns:
        [B, T, K+1], rows summing to one.
    """
    banks, null = weights[..., :-1], weights[..., -1:]
    kept = banks.masked_fill(off, 0.0)
    taken = banks - kept
    if renormalized is None:
        return torch.cat([kept, null + taken.sum(dim=-1, keepdim=True)], dim=-1)
    null = null + taken.masked_fill(renormalized, 0.0).sum(dim=-1, keepdim=True)
    left = torch.cat([kept, null], dim=-1)
    total = left.sum(dim=-1, keepdim=True)
    all_null = torch.zeros_like(left)
    all_null[..., -1] = 1.0
    shared = torch.where(total > 0, left / total, all_null)
    return torch.where(renormalized.any(dim=-1, keepdim=True), shared, left)


def ruled(rule: Rule, routing: torch.Tensor) -> torch.Tensor:
    """The routing weights [..., K+1] that a rule makes of the router's own."""
    if rule.kind == "temperature":
        # The logarithm of a softmax is its logits up to a constant, which the next softmax ignores. Clamped, since a
        # weight is 0 where its logit lies more than 103 below the largest, and to keep every quotient in float32.
        logits = routing.clamp_min(torch.finfo(routing.dtype).smallest_normal).log()
        return (logits / min(max(rule.value, 1e-30), 1e30)).softmax(dim=-1)
    if rule.kind == "uniform":
        return torch.full_like(routing, 1 / routing.shape[-1])
    weights = torch.zeros_like(routing)
    weights[..., -1 if rule.kind == "null" else int(rule.value)] = 1.0
    return weights


@lru_cache(maxsize=1024)
def random_direction(seed: int, layer: int, bank: int, size: int) -> torch.Tensor:
    """A unit vector [size] float32 on the CPU, the same for the same (seed, layer, bank) whatever the model."""
    with torch.inference_mode(False):  # it outlives the forward that asks first
        generator = torch.Generator().manual_seed((seed * 1009 + layer) * 1009 + bank)
        vector = torch.randn(size, generator=generator, dtype=torch.float32, device="cpu")
        return vector / vector.norm()


def among(numbers: torch.Tensor, wanted: Iterable[int]) -> torch.Tensor:
    """Whether each of `numbers` is one of `wanted`: a bool of their shape."""
    return torch.isin(numbers, torch.tensor(sorted(wanted), dtype=numbers.dtype, device=numbers.device))


def rows_of(tensor: torch.Tensor, rows: slice) -> torch.Tensor:
    """Rows of a batch of a tensor that may be one for all rows."""
    return tensor if len(tensor) == 1 else tensor[rows]


def _index(number: int | None) -> int | slice:
    return slice(None) if number is None else number

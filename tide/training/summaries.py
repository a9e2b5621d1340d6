"""What a run keeps about itself while it trains: when does the memory's structure form?

At about twelve logarithmically spaced steps a run writes one line into `summaries.jsonl`, a few KB each: routing
weights by layer and frequency decile, norms of all tables by decile (figure 1), loss by decile (figure 5), and the
squared gradient norm that every table has received so far (proposition 3.2, measured instead of bounded).
"""

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tide.cli import UserError
from tide.frequency import NUM_DECILES
from tide.model import TideForCausalLM
from tide.training.module import TrainingModule, evaluating, full

SUMMARY_FILE = "summaries.jsonl"
NUM_SUMMARIES = 12
NUM_BINS = NUM_DECILES + 1  # the deciles, then the tokens that have none
SIGNIFICANT_DIGITS = 5


def summary_steps(steps: int, count: int = NUM_SUMMARIES) -> list[int]:
    """Step 0 and about `count` logarithmically spaced steps from 1 to `steps`, ascending; none when `count` is 0."""
    if not count:
        return []
    return sorted({0, *np.geomspace(1, steps, count).round().astype(int).tolist()})


@dataclass(frozen=True)
class Summary:
    """A run at one step. Bins are the ten frequency deciles of the training data, then the tokens without one.

    Attributes:
        step: optimiser steps done.
        tokens: tokens seen.
        types: [11], token types in the bin.
        positions: [11], positions of the probe text whose own token is in the bin.
        routing: [L, 11, K+1], mean routing weight over those positions, null last; [L, 11, 0] for Base.
        targets: [11], positions of the probe text whose next token is in the bin.
        loss: [11], mean cross entropy of the next token over those, nats.
        loss_sd: [11], its standard deviation over positions.
        embedding_norm: [11], mean L2 norm of the rows of the input embedding.
        embedding_norm_sd: [11], its standard deviation over types.
        bank_norm: [K, 11], mean L2 norm of the raw rows E_k[v].
        bank_norm_sd: [K, 11].
        embedding_gradient: [11], squared L2 norm of a row's gradient through the lookup, summed over the steps so
            far, before clipping; mean over the types of the bin.
        bank_gradient: [K, 11], the same for every bank.
        embedding_parameter_gradient: [11], the same for the embedding as a parameter: where the unembedding is tied
            to it, the unembedding's gradient is in here too.
    """

    step: int
    tokens: int
    types: np.ndarray
    positions: np.ndarray
    routing: np.ndarray
    targets: np.ndarray
    loss: np.ndarray
    loss_sd: np.ndarray
    embedding_norm: np.ndarray
    embedding_norm_sd: np.ndarray
    bank_norm: np.ndarray
    bank_norm_sd: np.ndarray
    embedding_gradient: np.ndarray
    bank_gradient: np.ndarray
    embedding_parameter_gradient: np.ndarray

    @property
    def total_gradient(self) -> np.ndarray:
        """[11], the lookup gradient of all tables together: E and every bank (the sum in proposition 3.2)."""
        return self.embedding_gradient + self.bank_gradient.sum(axis=0)

    def to_json(self) -> str:
        """One line; numbers have five significant digits, the mean of an empty bin is null."""
        return json.dumps({name: _plain(value) for name, value in asdict(self).items()}, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> "Summary":
        """The inverse of `to_json`, up to its rounding.

        Raises:
            ValueError: when the line is no summary.
        """
        stored: Any = json.loads(line)
        if not isinstance(stored, dict):
            raise ValueError("a line is no summary")
        missing = {f.name for f in fields(cls)} - stored.keys()
        if missing:
            raise ValueError(f"no {min(missing)}")
        num_banks = len(stored["bank_norm"])
        for name in stored.keys() - {"step", "tokens"}:
            stored[name] = np.array(stored[name], dtype=np.float64)
        for name in ("bank_norm", "bank_norm_sd", "bank_gradient"):
            stored[name] = stored[name].reshape(num_banks, NUM_BINS)
        return cls(**stored)


def read_summaries(folder: str | Path) -> list[Summary]:
    """The summaries that a run kept, by step; none where the folder has no file of them.

    A last line without its end, which a run is writing at this moment or a kill has left, is not read.

    Raises:
        UserError: when the file is damaged.
    """
    file = Path(folder) / SUMMARY_FILE
    if not file.is_file():
        return []
    try:
        text = file.read_text(encoding="utf-8")
        return [Summary.from_json(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    except (ValueError, TypeError) as error:
        raise UserError(f"{file} is damaged ({error}); remove it or copy it anew.") from error


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [_plain(element) for element in value]
    number = float(value)
    if not math.isfinite(number):
        return None
    return int(number) if number.is_integer() else float(f"{number:.{SIGNIFICANT_DIGITS}g}")


class GradientNorms:
    """The squared norm of every row's gradient, summed over steps: of E, of each bank, by token id.

    Attributes:
        sums: [V, K+2] float32: E through its lookup, every bank, and E as a parameter.
    """

    def __init__(self, model: TideForCausalLM, device: torch.device):
        config = model.config
        self.sums = torch.zeros(config.vocab_size, config.num_memory_blocks + 2, device=device)
        embedding = model.get_input_embeddings().weight
        self.splits_lookup = config.tie_word_embeddings and embedding.requires_grad
        """Whether the lookup's gradient must be measured apart from the parameter's."""

    def add(self, model: TideForCausalLM, lookup_gradient: torch.Tensor | None) -> None:
        """Adds one step's gradients, whole and not yet clipped.

        Args:
            model: the model after the backward pass.
            lookup_gradient: [V, d], E's gradient through the lookup, where `splits_lookup` asks for it.
        """
        embedding = model.get_input_embeddings().weight.grad
        if embedding is not None:
            whole = squared_row_norms(embedding)
            self.sums[:, -1] += whole
            self.sums[:, 0] += whole if lookup_gradient is None else squared_row_norms(lookup_gradient)
        if model.model.memory is not None and model.model.memory.weight.grad is not None:
            self.sums[:, 1:-1] += squared_row_norms(model.model.memory.weight.grad)


def squared_row_norms(table: Any) -> torch.Tensor:
    """Squared L2 norms over the last dimension, float32, of a table that may be sharded."""
    return full(torch.linalg.vector_norm(table, dim=-1, dtype=torch.float32)).square()


class BinnedRouting:
    """A recorder that keeps routing weights summed by bin instead of every position's.

    Attributes:
        sums: a tensor [bins, K+1] float32 a layer; empty for the Base model.
    """

    def __init__(self, bins: torch.Tensor, num_bins: int = NUM_BINS):
        self.bins, self.num_bins = bins.flatten(), num_bins
        self.sums: list[torch.Tensor] = []

    def start(self, embedding: torch.Tensor, memory: torch.Tensor | None) -> None:
        """Nothing is kept of the embedding and the memory."""

    def add_layer(self, hidden: torch.Tensor, routing: torch.Tensor | None, *parts: torch.Tensor | None) -> None:
        """Adds a layer's weights [B, T, K+1]."""
        if routing is not None:
            flat = routing.flatten(0, 1)
            self.sums.append(flat.new_zeros(self.num_bins, flat.shape[1]).index_add_(0, self.bins, flat))


class Summarizer:
    """Makes the summaries of one run.

    Args:
        windows: the probe text, token ids [N, T] int64.
        deciles: [V], the frequency decile of every token id, -1 where it has none.
        batch_size: windows a forward.
    """

    def __init__(self, windows: np.ndarray, deciles: np.ndarray, batch_size: int):
        self.windows, self.batch_size = windows, batch_size
        self.bins = np.where(deciles < 0, NUM_DECILES, deciles).astype(np.int64)

    def summarize(
        self, module: TrainingModule, gradients: GradientNorms, step: int, tokens: int, device: torch.device
    ) -> Summary:
        """Measures the run at this step; with FSDP every process must call it."""
        model = module.model
        routing, loss = self._probe(module, device)
        own, targets = self.bins[self.windows], self.bins[self.windows[:, 1:]]
        positions = np.bincount(own.ravel(), minlength=NUM_BINS)
        types = np.bincount(self.bins, minlength=NUM_BINS)
        loss_mean, loss_sd = mean_and_sd(loss.reshape(-1, 1), targets.ravel())

        embedding_mean, embedding_sd = mean_and_sd(row_norms(model.get_input_embeddings().weight)[:, None], self.bins)
        num_banks = model.config.num_memory_blocks
        norms = row_norms(model.model.memory.weight) if num_banks else np.empty((len(self.bins), 0))
        bank_mean, bank_sd = mean_and_sd(norms, self.bins)
        gradient, _ = mean_and_sd(gradients.sums.cpu().numpy().astype(np.float64), self.bins)
        with np.errstate(invalid="ignore"):
            mean_routing = routing / positions[None, :, None]
        return Summary(
            step=step,
            tokens=tokens,
            types=types,
            positions=positions,
            routing=mean_routing,
            targets=np.bincount(targets.ravel(), minlength=NUM_BINS),
            loss=loss_mean[:, 0],
            loss_sd=loss_sd[:, 0],
            embedding_norm=embedding_mean[:, 0],
            embedding_norm_sd=embedding_sd[:, 0],
            bank_norm=bank_mean.T,
            bank_norm_sd=bank_sd.T,
            embedding_gradient=gradient[:, 0],
            bank_gradient=gradient[:, 1:-1].T,
            embedding_parameter_gradient=gradient[:, -1],
        )

    def _probe(self, module: TrainingModule, device: torch.device) -> tuple[np.ndarray, np.ndarray]:
        """Routing weights summed by bin [L, 11, K+1] and the loss of every predicted position [N, T-1]."""
        config = module.model.config
        num_slots = config.num_memory_blocks + 1 if config.num_memory_blocks else 0
        routing = np.zeros((config.num_hidden_layers, NUM_BINS, num_slots))
        losses = []
        with evaluating(module):
            for start in range(0, len(self.windows), self.batch_size):
                ids = self.windows[start : start + self.batch_size]
                recorder = BinnedRouting(torch.from_numpy(self.bins[ids]).to(device))
                losses.append(module(torch.from_numpy(ids).to(device), recorder=recorder).cpu().numpy())
                for layer, sums in enumerate(recorder.sums):
                    routing[layer] += sums.cpu().double().numpy()
        return routing, np.concatenate(losses)


def row_norms(table: Any) -> np.ndarray:
    """L2 norms over the last dimension of a table that may be sharded, float64 on the CPU."""
    return squared_row_norms(table.detach()).sqrt().cpu().numpy().astype(np.float64)


def mean_and_sd(values: np.ndarray, bins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means and standard deviations by bin.

    Args:
        values: [N, C].
        bins: [N] in 0..10.

    Returns:
        Two arrays [11, C]: the mean, NaN for an empty bin, and the population's standard deviation.
    """
    mean = np.full((NUM_BINS, values.shape[1]), np.nan)
    sd = mean.copy()
    for b in np.unique(bins):
        chosen = values[bins == b]
        mean[b], sd[b] = chosen.mean(axis=0), chosen.std(axis=0)
    return mean, sd

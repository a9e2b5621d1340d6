"""Stage `ablation`: what the loss becomes when parts of the memory are switched off (figure 11, and more).

Figure 11 sets the injection of one layer to zero. Ours beside it: every bank in all layers, every (layer, bank), and
all of the memory; and two other replacements, the mean injection and the control, a random direction as long as what
it replaces. Zeroing measures what the trained model leans on, not what the memory is worth: what follows a layer has
learned to expect an injection of this length.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

from precompute.blocks import REPLICATES, SEED
from precompute.parts import Parts
from precompute.probe import BATCH_TOKENS, CellSums, check_names, difference_table, probe_windows
from precompute.stage import Context, Stage
from precompute.store import Tables
from tide.evaluation.losses import target_losses
from tide.intervention import REPLACEMENTS, Intervention, Off
from tide.model import TideForCausalLM
from tide.resume import ResumedForwards

PIECE_TOKENS = 2048  # of a piece: all forwards of so many tokens take a minute or two of the demo on one core
FORWARD_TOKENS = {"cpu": BATCH_TOKENS, "cuda": 4 * BATCH_TOKENS}  # most tokens of all rows, to fill the device
CONTROL_SEED = 0  # of the control's random directions
ANY = -1  # in the place of a layer or bank: all of them
UNCHANGED = "none"  # kind and replacement of the model as trained


class Target(NamedTuple):
    """A part of the memory that is switched off.

    Attributes:
        kind: "layer", "bank" (in all layers), "pair" or "all".
        layer: 0-based, or `ANY`.
        bank: 0-based, or `ANY`.
    """

    kind: str
    layer: int
    bank: int

    def intervention(self, replacement: Any) -> Intervention:
        """What a forward with this part off does differently.

        Args:
            replacement: one of `REPLACEMENTS`.
        """
        layer, bank = (None if number == ANY else number for number in (self.layer, self.bank))
        return Intervention((Off(layer, bank, replacement=replacement, seed=CONTROL_SEED),))


def targets(num_layers: int, num_banks: int) -> list[Target]:
    """Every layer, every bank, every (layer, bank), and all of the memory: L + K + L K + 1 targets."""
    layers, banks = range(num_layers), range(num_banks)
    return [
        *(Target("layer", layer, ANY) for layer in layers),
        *(Target("bank", ANY, bank) for bank in banks),
        *(Target("pair", layer, bank) for layer in layers for bank in banks),
        Target("all", ANY, ANY),
    ]


def changes(num_layers: int, num_banks: int) -> list[tuple[Target, str]]:
    """Every target with every replacement, in the order in which their losses are stored."""
    return [(target, replacement) for target in targets(num_layers, num_banks) for replacement in REPLACEMENTS]


@torch.no_grad()
def ablation_losses(
    model: TideForCausalLM,
    input_ids: torch.Tensor,
    mean_injection: torch.Tensor,
    forward_tokens: int = BATCH_TOKENS,
    advance: Callable[[int], Any] = lambda forwards: None,
) -> np.ndarray:
    """Losses of the unchanged model and with every change.

    Targets in one layer start from the unchanged forward at that layer; those in all layers are whole forwards.

    Args:
        model: in evaluation mode, K > 0.
        input_ids: [B, T].
        mean_injection: [L, K, d], for the replacement "mean".
        forward_tokens: most tokens of several changes that run together, each being B rows of the batch.
        advance: told after every forward how many changes it was.

    Returns:
        [1 + changes, B, T-1] float32, nats: the unchanged model, then in the order of `changes`.
    """
    config = model.config
    listed = changes(config.num_hidden_layers, config.num_memory_blocks)
    losses = np.empty((1 + len(listed), input_ids.shape[0], input_ids.shape[1] - 1), dtype=np.float32)
    trace = model.trace(input_ids, with_logits=False)
    resumed = ResumedForwards(model, trace, mean_injection)
    losses[0] = target_losses(model, model.model.norm(trace.hidden[:, :, -1]), input_ids).cpu().numpy()
    del trace  # `resumed` keeps what is needed of it
    advance(1)
    for layer, numbers in _together(listed, max(1, forward_tokens // input_ids.numel())):
        interventions = [target.intervention(how) for target, how in (listed[number] for number in numbers)]
        if layer == ANY:
            streams = _whole_forwards(model, input_ids, interventions, mean_injection)
        else:
            streams = resumed.run(layer, interventions)
        losses[1 + np.array(numbers)] = target_losses(model, streams, input_ids).cpu().numpy()
        advance(len(numbers))
    return losses


def _together(listed: list[tuple[Target, str]], most: int) -> Iterator[tuple[int, list[int]]]:
    """Which changes run as one batch: their layer (`ANY` for those in all layers) and their numbers."""
    for layer in sorted({target.layer for target, _ in listed}):
        numbers = [number for number, (target, _) in enumerate(listed) if target.layer == layer]
        yield from ((layer, numbers[start : start + most]) for start in range(0, len(numbers), most))


def _whole_forwards(
    model: TideForCausalLM, input_ids: torch.Tensor, interventions: list[Intervention], mean_injection: torch.Tensor
) -> torch.Tensor:
    """Last residual streams of R forwards from layer 0 on, after the final norm: [R, B, T, d]."""
    count, batch = len(interventions), len(input_ids)
    output = model.model(
        input_ids.repeat(count, 1),
        intervention=[intervention for intervention in interventions for _ in range(batch)],
        mean_injection=mean_injection,
        use_cache=False,
    )
    return output.last_hidden_state.unflatten(0, (count, batch))


def ablation_table(
    sums: CellSums,
    window_domains: np.ndarray,
    domains: Sequence[str],
    num_layers: int,
    num_banks: int,
    replicates: int = REPLICATES,
    seed: int = SEED,
) -> pd.DataFrame:
    """The stage's table.

    Args:
        sums: of the unchanged model and every change, in the order of `changes`.
        window_domains: as `difference_table`.
        domains: as `difference_table`.
        num_layers: L.
        num_banks: K.
        replicates: of the bootstrap.
        seed: of the bootstrap.

    Returns:
        Columns kind, layer and bank (-1 for all), replacement; then those of `difference_table` without model. The
        unchanged model is kind and replacement "none".
    """
    unchanged = (Target(UNCHANGED, ANY, ANY), UNCHANGED)
    rows = [(*target, replacement) for target, replacement in (unchanged, *changes(num_layers, num_banks))]
    names = pd.DataFrame(rows, columns=["kind", "layer", "bank", "replacement"])
    table = difference_table(sums, window_domains, domains, replicates, seed)
    return names.astype({"layer": np.int32, "bank": np.int32}).join(table.set_index("model")).reset_index(drop=True)


class Ablation(Stage):
    """One piece a run of windows of the probe text, in which everything is switched off in turn."""

    name = "ablation"
    needs = ("text", "frequency", "routing")

    def unavailable(self, context: Context) -> str | None:
        """A Base model has nothing to switch off."""
        if context.config.num_memory_blocks:
            return None
        return f"{context.job.checkpoint} is a Base model (K = 0) without memory to switch off; give a TIDE checkpoint."

    def check(self, context: Context) -> None:
        """`check_names`."""
        check_names(context.job.text)

    def inputs(self, context: Context) -> dict[str, Any]:
        """How much is measured how."""
        return {
            "probe_tokens": context.job.probe_tokens,
            "replacements": list(REPLACEMENTS),
            "control_seed": CONTROL_SEED,
            "replicates": REPLICATES,
            "seed": SEED,
        }

    def pieces(self, context: Context) -> Sequence[str]:
        """Runs of about `PIECE_TOKENS` tokens, by their places among the windows of the probe text."""
        lengths = self._lengths(context)
        edges = np.flatnonzero(np.diff((np.cumsum(lengths) - lengths) // PIECE_TOKENS)) + 1
        bounds = [0, *edges.tolist(), len(lengths)]
        return [f"windows-{a:06d}-{b:06d}" for a, b in itertools.pairwise(bounds)]

    @staticmethod
    def _lengths(context: Context) -> np.ndarray:
        text = context.text
        return text.window_lengths[probe_windows(text, context.job.probe_tokens)]

    def measure(self, context: Context, piece: str) -> Tables:
        """`CellSums` of the windows of a piece."""
        model, text, deciles = context.model, context.text, context.deciles
        _, start, stop = piece.split("-")
        windows = probe_windows(text, context.job.probe_tokens)[int(start) : int(stop)]
        batches = list(text.batches(windows.tolist(), BATCH_TOKENS))
        mean_injection = torch.from_numpy(context.artifacts.mean_injection()).to(model.device)
        forward_tokens = FORWARD_TOKENS.get(model.device.type, BATCH_TOKENS)
        forwards = 1 + len(changes(model.config.num_hidden_layers, model.config.num_memory_blocks))
        parts = []
        with context.bar(len(batches) * forwards, f"ablation, {piece}", "forwards") as bar:
            for batch in batches:
                input_ids = torch.from_numpy(batch.input_ids).to(model.device)
                losses = ablation_losses(model, input_ids, mean_injection, forward_tokens, bar.update)
                parts.append(CellSums.of(losses, batch.input_ids, deciles))
        return {"sums": CellSums.join(parts).arrays()}

    def combine(self, context: Context, parts: Parts) -> Tables:
        """`ablation_table`."""
        text, config = context.text, context.config
        sums = CellSums.join([CellSums(**parts.tensors(piece, "sums")) for piece in parts.pieces])
        window_domains = text.window_domains[probe_windows(text, context.job.probe_tokens)]
        table = ablation_table(sums, window_domains, text.domains, config.num_hidden_layers, config.num_memory_blocks)
        return {"ablation": table}

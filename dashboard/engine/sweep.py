"""Every layer and every (layer, bank) of a prompt switched off in turn, many in one forward.

What makes it cheaper than a forward each: up to the injection of layer l all forwards that change layer l alone are
the trained one, so they start from its stream there and run as the rows of one batch (`tide.resume`); what comes after
the position asked for cannot act on it and is cut off; and only that position is unembedded.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import pandas as pd
import torch

from tide import Intervention, TideForCausalLM
from tide.resume import ResumedForwards
from tide.trace import Trace, kl_divergence

# Tokens of a batch: enough to fill the device, few enough for others not to wait long.
CHUNK_TOKENS = {"cpu": 256, "mps": 2048, "cuda": 8192}
WHOLE_LAYER = -1  # in the place of a bank


class Row(NamedTuple):
    """One forward of a sweep: a switch, or its control.

    Attributes:
        layer: 0-based.
        bank: 0-based, or `WHOLE_LAYER`.
        is_control: a random direction of the same length is injected in the place of what is off.
    """

    layer: int
    bank: int
    is_control: bool

    def intervention(self, control_seed: int | None) -> Intervention:
        """What this forward does differently."""
        how = {"replacement": "random", "seed": control_seed} if self.is_control else {}
        if self.bank == WHOLE_LAYER:
            return Intervention.layers_off([self.layer], **how)
        return Intervention.off([(self.layer, self.bank)], **how)


class Sweep:
    """The sweep of one prompt, chunk by chunk, so that others can compute in between.

    Args:
        model: in evaluation mode, K > 0.
        trace: of the prompt as trained, B = 1, with its parts.
        position: whose prediction is measured.
        target_id: the token whose log-probability is measured.
        control_seed: of the controls' random directions; None leaves the controls out.
    """

    def __init__(self, model: TideForCausalLM, trace: Trace, position: int, target_id: int, control_seed: int | None):
        self._model = model
        trace = trace.at(slice(0, position + 1))
        self._length = position + 1
        self._forwards = ResumedForwards(model, trace)
        self._log_p = self._log_probs(model.model.norm(trace.hidden[:, -1, -1]))  # (1, V)
        self._target_id = target_id
        self._control_seed = control_seed
        self._found: dict[Row, tuple[float, float]] = {}  # (kl, delta)

    def chunks(self) -> Iterator[list[Row]]:
        """The rows that run together: those of one layer, within the device's tokens."""
        config = self._model.config
        tokens = CHUNK_TOKENS.get(self._model.device.type, CHUNK_TOKENS["cpu"])
        fitting = max(1, tokens // self._length)
        kinds = (False,) if self._control_seed is None else (False, True)
        for layer in range(config.num_hidden_layers):
            banks = range(WHOLE_LAYER, config.num_memory_blocks)
            rows = [Row(layer, bank, is_control) for is_control in kinds for bank in banks]
            size = math.ceil(len(rows) / math.ceil(len(rows) / fitting))  # of one size
            yield from (rows[start : start + size] for start in range(0, len(rows), size))

    def run(self, chunk: list[Row]) -> None:
        """Runs one of `chunks` and notes what it found."""
        interventions = [row.intervention(self._control_seed) for row in chunk]
        streams = self._forwards.run(chunk[0].layer, interventions)  # (R, 1, T, d)
        log_q = self._log_probs(streams[:, 0, -1])  # (R, V)
        kl = kl_divergence(self._log_p, log_q).clamp_min(0.0).tolist()  # rounding can bring it below zero
        delta = (log_q - self._log_p)[:, self._target_id].tolist()
        self._found.update(zip(chunk, zip(kl, delta, strict=True), strict=True))

    def _log_probs(self, stream: torch.Tensor) -> torch.Tensor:
        return self._model.lm_head(stream).float().log_softmax(dim=-1)

    def table(self) -> pd.DataFrame:
        """What was found, as `LiveModel.sweep` returns it."""
        nothing = (float("nan"), float("nan"))
        rows = [
            (
                "layer" if row.bank == WHOLE_LAYER else "pair",
                row.layer,
                row.bank,
                *found,
                *self._found.get(Row(row.layer, row.bank, is_control=True), nothing),
            )
            for row, found in self._found.items()
            if not row.is_control
        ]
        columns = ["kind", "layer", "bank", "kl", "delta", "control_kl", "control_delta"]
        frame = pd.DataFrame(rows, columns=columns)
        return frame.sort_values("kl", ascending=False, kind="stable", ignore_index=True)

"""`Recipe`: every setting of a training run, validated, saved with the checkpoint."""

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from tide.cli import UserError


@dataclass(frozen=True)
class Recipe:
    """How a model is trained. Defaults are the paper's where Table 7 states them.

    Attributes:
        steps: optimiser steps. The paper states tokens (200-500 billion), not steps.
        batch_size: sequences a step; not stated in the paper.
        micro_batch_size: sequences a forward; gradients accumulate up to `batch_size`. Ours.
        sequence_length: tokens a sequence (Table 7: 2048).
        peak_lr: learning rate after warm-up (Table 7: 1e-4).
        start_lr: learning rate at step 0 (Table 7: 1e-6).
        floor_lr: learning rate at the last step (Table 7: 1e-5).
        warmup_steps: linear warm-up (Table 7: 10,000).
        beta1: Adam (Table 7: 0.9).
        beta2: Adam (Table 7: 0.95).
        weight_decay: decoupled, on every matrix and table, not on norm gains (Table 7: 0.1; which parameters
            it spares is ours).
        grad_clip: maximum norm of the gradient; 0 is off. Ours.
        seed: of the initial weights and of the order of batches.
        autocast: dtype of the matrix products, "bfloat16" or "float32"; parameters stay in float32.
        compile: run the model through torch.compile. Faster; but on several CPU threads two runs of a compiled model
            differ in the last bits (4e-5 nats after 30 steps of the demo), resumed or not. Without it they are equal.
    """

    steps: int = 100_000
    batch_size: int = 512
    micro_batch_size: int = 8
    sequence_length: int = 2048
    peak_lr: float = 1e-4
    start_lr: float = 1e-6
    floor_lr: float = 1e-5
    warmup_steps: int = 10_000
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    grad_clip: float = 1.0
    seed: int = 0
    autocast: str = "bfloat16"
    compile: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and not value >= 0:
                raise UserError(f"The recipe's {field.name} is {value}; it must not be negative.")
        for name in ("steps", "batch_size", "micro_batch_size", "sequence_length"):
            if getattr(self, name) < 1:
                raise UserError(f"The recipe's {name} is {getattr(self, name)}; it must be at least 1.")
        if self.batch_size % self.micro_batch_size:
            raise UserError(f"batch_size {self.batch_size} is no multiple of micro_batch_size {self.micro_batch_size}.")
        if self.autocast not in ("bfloat16", "float32"):
            raise UserError(f"The recipe's autocast is {self.autocast!r}; it is bfloat16 or float32.")

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimiser step sees."""
        return self.batch_size * self.sequence_length

    def learning_rate(self, step: int) -> float:
        """Linear warm-up from `start_lr` to `peak_lr`, then a cosine down to `floor_lr` at the last step."""
        if step < self.warmup_steps:
            return self.start_lr + (self.peak_lr - self.start_lr) * step / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.steps - 1 - self.warmup_steps)
        return self.floor_lr + (self.peak_lr - self.floor_lr) * (1 + math.cos(math.pi * min(1.0, done))) / 2

    @classmethod
    def for_preset(cls, preset: str, **overrides: Any) -> "Recipe":
        """The recipe that belongs to a model preset; `overrides` whose value is None are left out."""
        given = {name: value for name, value in overrides.items() if value is not None}
        return replace(DEMO if preset == "demo" else PAPER, **given)


PAPER = Recipe()

# Ours: what trains the demo size well on two CPU cores. 2,560 steps are 10.5 million tokens.
DEMO = Recipe(
    steps=2560,
    batch_size=16,
    micro_batch_size=8,
    sequence_length=256,
    peak_lr=2e-3,
    start_lr=2e-5,
    floor_lr=1e-4,
    warmup_steps=100,
)

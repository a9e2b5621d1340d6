"""`Recipe`: every setting of a training run, validated, saved with the checkpoint."""

import json
import math
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from tide.cli import UserError

AUTOCAST_DTYPES = ("bfloat16", "float32")


def setting(default: Any, about: str, source: str = "ours", execution: bool = False) -> Any:
    """A field of `Recipe` with what `--help` says of it.

    Args:
        default: its value in the paper's recipe.
        about: what it is, in one line.
        source: where the value comes from: "Table 7" of the paper, or "ours" where the paper is silent.
        execution: it says how the same run is computed, not which run it is: free to change when a run is resumed.
    """
    return field(default=default, metadata={"about": about, "source": source, "execution": execution})


@dataclass(frozen=True)
class Recipe:
    """How a model is trained. Defaults are the paper's where Table 7 states them, else ours.

    Every field carries its explanation and its source; `tide-train --help` prints them.

    Raises:
        UserError: at construction, when a value is impossible.
    """

    steps: int = setting(100_000, "optimiser steps; the paper states 200 to 500 billion tokens instead")
    batch_size: int = setting(512, "sequences a step, over all processes")
    sequence_length: int = setting(2048, "tokens a sequence", "Table 7")
    peak_lr: float = setting(1e-4, "learning rate after warm-up", "Table 7")
    start_lr: float = setting(1e-6, "learning rate at step 0", "Table 7")
    floor_lr: float = setting(1e-5, "learning rate at the last step, the end of the cosine", "Table 7")
    warmup_steps: int = setting(10_000, "steps of linear warm-up", "Table 7")
    beta1: float = setting(0.9, "Adam's decay of the first moment", "Table 7")
    beta2: float = setting(0.95, "Adam's decay of the second moment", "Table 7")
    weight_decay: float = setting(
        0.1, "decoupled, on matrices and tables; that norm gains and biases are spared is ours", "Table 7"
    )
    z_loss: float = setting(1e-6, "weight of mean(logsumexp(logits)^2) in the loss", "Table 7")
    grad_clip: float = setting(1.0, "largest norm of the gradient; 0 is off")
    freeze_backbone: bool = setting(False, "train memory tables, their norm gains and routers only")
    seed: int = setting(0, "of the initial weights and of the order of sequences")
    autocast: str = setting(
        "bfloat16", f"dtype of matrix products, {' or '.join(AUTOCAST_DTYPES)}; parameters stay in float32"
    )
    micro_batch_size: int = setting(
        8, "sequences a forward in each process; gradients accumulate up to batch-size", execution=True
    )
    attention: str = setting(
        "sdpa",
        "how transformers computes attention: sdpa, eager, flash_attention_2, flex_attention, ...",
        execution=True,
    )
    gradient_checkpointing: bool = setting(
        False, "recompute activations in the backward pass: less memory, about a third more time", execution=True
    )
    compile: bool = setting(
        False,
        "run the model through torch.compile: faster; on several CPU threads two such runs differ in the last bits "
        "(4e-5 nats after 30 steps of the demo), resumed or not",
        execution=True,
    )

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, (int, float)) and not isinstance(value, bool) and not 0 <= value < math.inf:
                raise UserError(f"The recipe's {name} is {value}; it must be a number from 0 on.")
        for name in ("steps", "batch_size", "micro_batch_size"):
            if getattr(self, name) < 1:
                raise UserError(f"The recipe's {name} is {getattr(self, name)}; it must be at least 1.")
        if self.sequence_length < 2:
            raise UserError(f"The recipe's sequence_length is {self.sequence_length}; it must be at least 2.")
        for name in ("beta1", "beta2"):
            if getattr(self, name) >= 1:
                raise UserError(f"The recipe's {name} is {getattr(self, name)}; it must be below 1.")
        if self.autocast not in AUTOCAST_DTYPES:
            raise UserError(f"The recipe's autocast is {self.autocast!r}; it is {' or '.join(AUTOCAST_DTYPES)}.")

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimiser step sees."""
        return self.batch_size * self.sequence_length

    def learning_rate(self, step: int) -> float:
        """Linear warm-up from `start_lr` to `peak_lr`, then a cosine down to `floor_lr` at the last step (Table 7)."""
        if step < self.warmup_steps:
            return self.start_lr + (self.peak_lr - self.start_lr) * step / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.steps - 1 - self.warmup_steps)
        return self.floor_lr + (self.peak_lr - self.floor_lr) * (1 + math.cos(math.pi * min(1.0, done))) / 2

    def what_is_trained(self) -> dict[str, Any]:
        """The settings that make this run another run than one that differs in them; all but the execution's."""
        kept = {f.name for f in fields(self) if not f.metadata["execution"]}
        return {name: value for name, value in asdict(self).items() if name in kept}

    @classmethod
    def named(cls, name: str, **overrides: Any) -> "Recipe":
        """A recipe by name or from a file.

        Args:
            name: one of `RECIPES`, or the path of a JSON file: a `recipe.json` that a run saved, or its settings alone.
            **overrides: settings to change; those whose value is None are left as they are.

        Raises:
            UserError: for a name that is none, a file that is no recipe, or an impossible value.
        """
        given = {key: value for key, value in overrides.items() if value is not None}
        if name in RECIPES:
            return replace(RECIPES[name], **given)
        try:
            saved = json.loads(Path(name).read_text(encoding="utf-8"))
        except OSError:
            raise UserError(f"There is no recipe {name!r}: give {', '.join(RECIPES)} or a recipe.json file.") from None
        except ValueError as error:
            raise UserError(f"The recipe {name} is no JSON file; give one that tide-train saved.") from error
        settings = saved.get("recipe", saved) if isinstance(saved, dict) else None
        known = {f.name: type(f.default) for f in fields(cls)}
        if not isinstance(settings, dict) or not settings.keys() <= known.keys():
            unknown = sorted(settings.keys() - known.keys()) if isinstance(settings, dict) else []
            what = f"has no setting {unknown[0]!r} that tide-train knows" if unknown else "is no recipe"
            raise UserError(f"The file {name} {what}; give one that tide-train saved.")
        for key, value in settings.items():
            number = known[key] is float and isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number and type(value) is not known[key]:
                raise UserError(f"In the recipe {name}, {key} is {value!r}; its type must be {known[key].__name__}.")
        return cls(**{**settings, **given})


# Table 7 of the paper, in the defaults above.
PAPER = Recipe()

# Ours: what trains the demo size well on two CPU cores (docs/training.md has the sweep).
DEMO = Recipe(
    steps=9766,  # 40 million tokens
    batch_size=16,
    micro_batch_size=8,
    sequence_length=256,
    peak_lr=3e-3,
    start_lr=3e-5,
    floor_lr=3e-4,
    warmup_steps=100,
)

RECIPES = {"demo": DEMO, "paper": PAPER}

"""A run's weights as a checkpoint folder: what `load_checkpoint` and transformers read."""

import json
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerFast

from tide.checkpoint import COUNTS_FILE
from tide.config import TideConfig
from tide.model import TideForCausalLM
from tide.training.folder import RECIPE_FILE


def write_checkpoint(
    folder: Path,
    config: TideConfig,
    weights: dict[str, torch.Tensor],
    tokenizer: PreTrainedTokenizerFast,
    counts: torch.Tensor,
    about: dict[str, Any],
) -> None:
    """Saves weights, tokenizer, what the model was trained on and how.

    Args:
        folder: to make.
        config: of the model.
        weights: by parameter name, whole, in the dtype that is to be saved; a tied unembedding may be left out.
        tokenizer: the model's.
        counts: [V] int64, how often each token id was seen in training.
        about: the content of recipe.json.
    """
    with init_empty_weights(include_buffers=False):
        shell = TideForCausalLM(config)
    shell.load_state_dict(weights, strict=False, assign=True)
    shell.tie_weights()
    shell.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    metadata = {"corpus": f"the {int(counts.sum()):,} tokens of the training run"}
    save_file({"counts": counts}, folder / COUNTS_FILE, metadata)
    (folder / RECIPE_FILE).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")

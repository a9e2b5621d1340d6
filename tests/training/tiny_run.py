"""A training run of seconds, as the tests and the process that one of them kills build it."""

import sys
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer

from tests.conftest import tiny_config
from tide.training.data import WindowDataset, tokenize
from tide.training.loop import Run, Schedule
from tide.training.recipe import Recipe
from tide.training.sources import DataSource

SAVE_EVERY = 5


class SlowData(WindowDataset):
    """Leaves the test time to kill the run in its middle."""

    seconds_a_batch = 0.0

    def batch(self, step: int, rank: int = 0, world_size: int = 1) -> torch.Tensor:
        time.sleep(self.seconds_a_batch)
        return super().batch(step, rank, world_size)


def tiny_recipe(**changes) -> Recipe:
    """Few and short steps; float32, so that equal means equal."""
    settings = {"batch_size": 4, "micro_batch_size": 2, "sequence_length": 16, "warmup_steps": 4, "autocast": "float32"}
    rates = {"peak_lr": 1e-2, "start_lr": 1e-4, "floor_lr": 1e-3}
    return Recipe(**{"steps": 24, **settings, **rates, **changes})


def tiny_run(
    data_folder: Path, out: Path, num_banks: int = 2, steps: int = 24, accelerator=None, shape=None, **recipe
) -> Run:
    """A run on the toy text; the same arguments make the same run."""
    tokenizer = AutoTokenizer.from_pretrained(data_folder / "tokenizer")
    made = tiny_recipe(steps=steps, **recipe)
    config = tiny_config(
        **{
            "vocab_size": len(tokenizer),
            "num_hidden_layers": 2,
            "num_memory_blocks": num_banks,
            "z_loss_coefficient": made.z_loss,
            **(shape or {}),
        }
    )
    tokens = tokenize(DataSource.parse(str(data_folder)), tokenizer, show_progress=False)
    data = SlowData(tokens, made.sequence_length, made.batch_size, made.seed)
    probe = tokens.read(0, 4 * made.sequence_length).reshape(4, -1).astype(np.int64)
    return Run(out, config, made, data, tokenizer, probe, accelerator)


def every_step(**changes) -> Schedule:
    """Logs every step and saves every fifth."""
    return Schedule(**{"save_every": SAVE_EVERY, "log_every": 1, **changes})


if __name__ == "__main__":
    torch.set_num_threads(1)
    SlowData.seconds_a_batch = 0.02
    tiny_run(Path(sys.argv[1]), Path(sys.argv[2]), steps=int(sys.argv[3])).train(schedule=every_step())

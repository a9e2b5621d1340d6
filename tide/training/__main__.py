"""`tide-train`: train a TIDE or Base model on a folder of text."""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tide.cli import ArgumentParser, UserError, run_command, whole_number
from tide.config import PRESETS, ParameterBudget, TideConfig
from tide.training.data import WindowDataset, tokenize, training_files
from tide.training.loop import Run
from tide.training.recipe import Recipe


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = ArgumentParser(prog="tide-train", description=__doc__.split(": ", 1)[1])
    parser.add_argument("--preset", choices=list(PRESETS), default="demo", help="size of the model (default demo)")
    parser.add_argument(
        "--blocks", type=whole_number(0), default=8, metavar="K", help="memory banks; 0 trains the Base model"
    )
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder of .txt files")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="tokenizer folder (default DATA/tokenizer)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the run, then the checkpoint")
    parser.add_argument("--resume", action="store_true", help="go on with the unfinished run in --out")
    parser.add_argument("--steps", type=int, help="optimiser steps (default: the preset's recipe)")
    parser.add_argument("--batch-size", type=int, help="sequences a step")
    parser.add_argument("--micro-batch-size", type=int, help="sequences a forward; gradients accumulate")
    parser.add_argument("--sequence-length", type=int, help="tokens a sequence")
    parser.add_argument("--lr", type=float, dest="peak_lr", help="peak learning rate")
    parser.add_argument("--warmup-steps", type=int, help="steps of linear warm-up")
    parser.add_argument("--seed", type=int, help="of initial weights and batch order (default 0)")
    parser.add_argument(
        "--compile",
        action="store_true",
        default=None,
        help="run through torch.compile: faster, not bit-reproducible on several CPU threads",
    )
    parser.add_argument("--autocast", choices=["bfloat16", "float32"], help="dtype of matrix products")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda or mps")
    parser.add_argument("--save-every", type=whole_number(1), default=200, metavar="STEPS", help="steps between saves")
    parser.add_argument(
        "--log-every", type=whole_number(1), default=10, metavar="STEPS", help="steps between log lines"
    )
    return parser


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Loads a saved tokenizer.

    Raises:
        UserError: when the folder holds none, or a broken one.
    """
    if not (folder / "tokenizer.json").exists():
        raise UserError(
            f"{folder} holds no tokenizer.json; make one with "
            f"`python -m tide.training.tokenizer --text {folder.parent} --out {folder}` or give --tokenizer."
        )
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # transformers and tokenizers raise whatever they meet in a broken file
        raise UserError(f"{folder} holds no tokenizer that transformers can read ({type(error).__name__}).") from error
    return tokenizer


def check_device(name: str) -> str:
    """Checks that tensors can be made on a device.

    Raises:
        UserError: when they cannot.
    """
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"--device {name} is not usable on this machine; choose another, such as cpu.") from error
    return name


def main(argv: list[str] | None = None) -> int:
    """Trains; returns the exit code."""
    args = build_parser().parse_args(argv)
    settings = ("steps", "batch_size", "micro_batch_size", "sequence_length", "peak_lr", "warmup_steps", "seed")
    recipe = Recipe.for_preset(
        args.preset, compile=args.compile, autocast=args.autocast, **{s: getattr(args, s) for s in settings}
    )
    device = check_device(args.device)
    training_files(args.data)  # a wrong --data is told before a missing tokenizer in it
    tokenizer = load_tokenizer(args.tokenizer or args.data / "tokenizer")
    config = TideConfig.from_preset(args.preset, num_memory_blocks=args.blocks)
    if len(tokenizer) > config.vocab_size:
        raise UserError(
            f"The tokenizer has {len(tokenizer):,} ids, the preset {args.preset} room for {config.vocab_size:,}; "
            "train a smaller tokenizer or choose another preset."
        )
    data = WindowDataset(tokenize(args.data, tokenizer), recipe.sequence_length, recipe.batch_size, recipe.seed)
    budget = ParameterBudget.of(config)
    print(
        f"{args.preset}, K={args.blocks}: backbone {budget.backbone:,}, embeddings {budget.embeddings:,}, "
        f"memory {budget.memory:,}, router {budget.router:,} parameters; "
        f"{recipe.steps * recipe.tokens_per_step:,} of {len(data.tokens):,} tokens"
    )
    run = Run(args.out, config, recipe, data, tokenizer, device=device)
    run.train(resume=args.resume, save_every=args.save_every, log_every=args.log_every)
    print(f"saved in {args.out}")
    return 0


def entry_point() -> None:
    """Console script."""
    sys.exit(run_command(main))


if __name__ == "__main__":
    entry_point()

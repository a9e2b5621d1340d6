"""`tide-train`: train a TIDE or Base model, from scratch or from a LLaMA checkpoint."""

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.benchmark import Timer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tide.cli import ArgumentParser, UserError, run_command, whole_number
from tide.config import PRESETS, ParameterBudget, TideConfig

SLOW_BFLOAT16 = 3  # from this many times the time of float32 on, it is said
PROBE_TOKENS = 24_576  # of held-out text, on which the training summaries are measured
SHORT_NAMES = {"peak_lr": ["--lr"]}


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    from tide.training.log import TRACKERS
    from tide.training.recipe import RECIPES, Recipe

    parser = ArgumentParser(
        prog="tide-train",
        description=(__doc__ or "").split(": ", 1)[1],
        epilog="Several GPUs or processes: `accelerate launch [--use_fsdp --fsdp_version 2] -m tide.training ...`.",
    )
    model = parser.add_argument_group("model")
    model.add_argument("--preset", choices=list(PRESETS), help="size of the model (default demo)")
    model.add_argument(
        "--from", dest="source", metavar="CHECKPOINT", help="start from this LLaMA or TIDE checkpoint, folder or hub"
    )
    model.add_argument(
        "--blocks", type=whole_number(0), default=8, metavar="K", help="memory banks (default 8); 0 trains Base"
    )
    model.add_argument("--tokenizer", metavar="DIR", help="folder or hub name (default: that of --from, else DATA's)")

    data = parser.add_argument_group("data")
    data.add_argument(
        "--data", required=True, help="text, JSON lines or Parquet: a file or folder; or hf:NAME[:CONFIG][@REVISION]"
    )
    data.add_argument("--text-column", default="text", metavar="NAME", help="field that holds the text (default text)")
    data.add_argument("--split", default="train", help="split of a hub dataset (default train)")
    data.add_argument(
        "--max-tokens", type=whole_number(1), metavar="N", help="tokenise no more (default: all; hub: what is needed)"
    )
    data.add_argument(
        "--token-cache", type=Path, metavar="DIR", help="where tokens are kept (default: beside the data)"
    )
    data.add_argument(
        "--heldout",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="text of the training summaries (default: heldout_*.txt)",
    )

    run = parser.add_argument_group("run")
    run.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the run, then the checkpoint")
    run.add_argument("--resume", action="store_true", help="go on with the unfinished run in --out")
    run.add_argument("--device", default=None, help="cpu, cuda or mps (default: the best there is)")
    run.add_argument("--save-every", type=whole_number(1), default=200, metavar="STEPS", help="between states (200)")
    run.add_argument("--log-every", type=whole_number(1), default=10, metavar="STEPS", help="between log lines (10)")
    run.add_argument(
        "--keep", type=whole_number(1), nargs="+", default=[], metavar="STEP", help="keep the checkpoint of this step"
    )
    run.add_argument("--stop-at", type=whole_number(1), metavar="STEP", help="save and stop after this step")
    run.add_argument(
        "--summaries", type=whole_number(0), default=12, metavar="N", help="training summaries to keep (12); 0: none"
    )
    run.add_argument("--log-with", choices=TRACKERS, nargs="+", default=[], help="other logs beside train_log.jsonl")

    recipe = parser.add_argument_group("recipe", "Table 7: the paper's value; ours: the paper states none.")
    recipe.add_argument(
        "--recipe", metavar="NAME", help=f"{', '.join(RECIPES)}, or a recipe.json (default: the preset's)"
    )
    for setting in fields(Recipe):
        names = ["--" + setting.name.replace("_", "-"), *SHORT_NAMES.get(setting.name, [])]
        about = f"{setting.metadata['about']} [paper recipe: {setting.default}, {setting.metadata['source']}]"
        kind = type(setting.default)
        how: dict[str, Any] = (
            {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind, "metavar": "X"}
        )
        recipe.add_argument(*names, dest=setting.name, default=None, help=about.replace("%", "%%"), **how)
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


def choose_tokenizer(args: argparse.Namespace) -> PreTrainedTokenizerFast:
    """The tokenizer that was asked for, else the one of --from, else `tokenizer/` beside the data.

    Raises:
        UserError: when there is none.
    """
    from tide.training.upcycle import source_tokenizer

    if args.tokenizer and not Path(args.tokenizer).exists():
        return source_tokenizer(args.tokenizer)
    if args.tokenizer:
        return load_tokenizer(Path(args.tokenizer))
    if args.source:
        return source_tokenizer(args.source)
    data = Path(args.data)
    if not data.exists():
        raise UserError(f"--data {args.data} brings no tokenizer; give --tokenizer, a folder or a name on the hub.")
    return load_tokenizer((data if data.is_dir() else data.parent) / "tokenizer")


def check_device(name: str | None) -> str | None:
    """Checks that tensors can be made on a device.

    Raises:
        UserError: when they cannot.
    """
    if name is not None:
        try:
            torch.empty(0, device=name)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise UserError(f"--device {name} is not usable on this machine; choose another, such as cpu.") from error
    return name


def heldout_files(args: argparse.Namespace) -> list[Path]:
    """The held-out text of the summaries: what was given, or the data folder's `heldout_*.txt`."""
    if args.heldout:
        return args.heldout
    folder = Path(args.data)
    return sorted(folder.glob("heldout_*.txt")) if folder.is_dir() else []


def probe_windows(files: list[Path], tokenizer: PreTrainedTokenizerFast, data: Any, length: int) -> np.ndarray:
    """A fixed sample of held-out text, equally many windows of every file, evenly spread; without files, of the data.

    Args:
        files: held-out UTF-8 text.
        tokenizer: the model's.
        data: `WindowDataset`, of which windows are taken when there is no held-out text.
        length: T, tokens a window.

    Returns:
        Token ids [N, T] int64, about `PROBE_TOKENS` in all.

    Raises:
        UserError: when a file is missing or shorter than one window.
    """
    from tide.evaluation.losses import heldout_windows

    count = max(1, PROBE_TOKENS // length)
    if not files:
        chosen = np.linspace(0, data.num_windows - 1, min(count, data.num_windows)).astype(int)
        return np.stack([data.tokens.read(w * length, (w + 1) * length) for w in chosen]).astype(np.int64)
    parts = []
    for file in files:
        windows = heldout_windows(file, tokenizer, length)
        share = min(max(1, count // len(files)), len(windows))
        parts.append(windows[np.linspace(0, len(windows) - 1, share).astype(int)])
    return np.concatenate(parts)


def make_config(args: argparse.Namespace, z_loss: float) -> TideConfig:
    """The configuration of the preset, or of the checkpoint to start from with K banks.

    Raises:
        UserError: when the checkpoint is none of LLaMA or TIDE.
    """
    if not args.source:
        return TideConfig.from_preset(args.preset or "demo", args.blocks, z_loss_coefficient=z_loss)
    from tide.training.upcycle import source_config

    return source_config(args.source, args.blocks, z_loss_coefficient=z_loss)


def tokenize_everywhere(
    args: argparse.Namespace, source: Any, tokenizer: PreTrainedTokenizerFast, recipe: Any, accelerator: Any
) -> Any:
    """Tokenises on one process of every computer and opens the shards on all. Of a hub dataset, what the run needs.

    Raises:
        UserError: as `tokenize`, and when two computers have different text.
    """
    from accelerate.utils import gather_object

    from tide.training.data import tokenize
    from tide.training.sources import HubDataset

    needed = recipe.steps * recipe.tokens_per_step if isinstance(source, HubDataset) else None
    with accelerator.local_main_process_first():
        tokens = tokenize(source, tokenizer, args.token_cache, args.max_tokens or needed)
    if len(set(gather_object([tokens.sha256]))) > 1:
        raise UserError(f"--data {args.data} is not the same text on every computer; give all of them one copy.")
    return tokens


def main(argv: list[str] | None = None) -> int:
    """Trains; returns the exit code."""
    args = build_parser().parse_args(argv)
    if args.preset and args.source:
        raise UserError("--preset and --from exclude each other: the checkpoint says the size.")
    from tide.training.data import WindowDataset
    from tide.training.log import check_trackers
    from tide.training.loop import Run, Schedule, make_accelerator
    from tide.training.recipe import Recipe
    from tide.training.sources import DataSource
    from tide.training.upcycle import source_name, upcycle

    settings = {setting.name: getattr(args, setting.name) for setting in fields(Recipe)}
    default = "demo" if args.preset in (None, "demo") and not args.source else "paper"
    recipe = Recipe.named(args.recipe or default, **settings)
    device = check_device(args.device)
    trackers = check_trackers(args.log_with)
    source = DataSource.parse(args.data, text_column=args.text_column, split=args.split)
    tokenizer = choose_tokenizer(args)
    config = make_config(args, recipe.z_loss)
    size = args.source or f"preset {args.preset or 'demo'}"
    if len(tokenizer) > config.vocab_size:
        raise UserError(
            f"The tokenizer has {len(tokenizer):,} ids, the {size} has room for {config.vocab_size:,}; "
            "give the tokenizer that belongs to it, or train a smaller one."
        )
    accelerator = make_accelerator(recipe, device)
    tokens = tokenize_everywhere(args, source, tokenizer, recipe, accelerator)
    data = WindowDataset(tokens, recipe.sequence_length, recipe.batch_size, recipe.seed)
    probe = probe_windows(heldout_files(args), tokenizer, data, recipe.sequence_length)
    if accelerator.is_main_process:
        budget = ParameterBudget.of(config)
        print(
            f"{size}, K={args.blocks}: backbone {budget.backbone:,}, embeddings {budget.embeddings:,}, "
            f"memory {budget.memory:,}, router {budget.router:,} parameters; "
            f"{recipe.steps * recipe.tokens_per_step:,} tokens from {tokens.num_tokens:,} "
            f"on {accelerator.num_processes} x {accelerator.device.type}"
        )
        if recipe.autocast == "bfloat16" and (times := bfloat16_slowdown(accelerator.device)) > SLOW_BFLOAT16:
            print(
                f"note: this {accelerator.device.type} takes {times:.0f} times as long for a product in bfloat16 as in "
                "float32; --autocast float32 is faster here",
                file=sys.stderr,
            )
    run = Run(
        args.out,
        config,
        recipe,
        data,
        tokenizer,
        probe,
        accelerator,
        initial=(lambda: upcycle(args.source, args.blocks, recipe.seed, z_loss_coefficient=recipe.z_loss))
        if args.source
        else None,
        origin=source_name(args.source) if args.source else None,
    )
    schedule = Schedule(args.save_every, args.log_every, tuple(args.keep), args.stop_at, args.summaries, trackers)
    try:
        done = run.train(args.resume, schedule)
    except KeyboardInterrupt:
        print(f"stopped; {args.out} goes on with --resume from step {run.folder.latest_step()}", file=sys.stderr)
        return 130
    if accelerator.is_main_process:
        print(f"saved in {args.out}" if done == recipe.steps else f"stopped after step {done}; --resume goes on")
    accelerator.end_training()
    return 0


def bfloat16_slowdown(device: torch.device, size: int = 256) -> float:
    """Time of a matrix product in bfloat16 over that of one in float32, each the best of three.

    Processors without bfloat16 instructions emulate them.

    Args:
        device: where to multiply.
        size: of the square matrices.
    """
    best = []
    for dtype in (torch.bfloat16, torch.float32):
        matrix = torch.ones(size, size, dtype=dtype, device=device)
        timer = Timer("matrix @ matrix", globals={"matrix": matrix})
        timer.timeit(1)  # the first one sets up
        best.append(min(timer.timeit(1).mean for _ in range(3)))
    return best[0] / best[1]


def entry_point() -> None:
    """Console script."""
    sys.exit(run_command(main))


if __name__ == "__main__":
    entry_point()

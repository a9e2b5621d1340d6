"""`tide-evaluate`: held-out loss and zero-shot tasks of one model or several, compared with a base model."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from tide.checkpoint import fingerprint, first_line, load_checkpoint
from tide.cli import ArgumentParser, UserError, run_command, whole_number
from tide.config import ParameterBudget
from tide.evaluation.bins import deciles_of
from tide.evaluation.bootstrap import LEVEL
from tide.evaluation.compare import loss_tables
from tide.evaluation.inputs import Checkpoint, find_checkpoints, find_texts, prepare_folder, window_length
from tide.evaluation.losses import heldout_windows, token_losses
from tide.evaluation.printing import loss_text, task_text
from tide.evaluation.report import write_report

DTYPES = ("float32", "bfloat16", "float16")
NO_COUNTS = "no checkpoint carries token counts."


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = ArgumentParser(prog="tide-evaluate", description=(__doc__ or "").split(": ", 1)[1])
    parser.add_argument("checkpoint", type=Path, nargs="+", metavar="CHECKPOINT", help="folder that tide-train saved")
    parser.add_argument("--base", type=Path, metavar="CHECKPOINT", help="the model to compare the others with")
    parser.add_argument(
        "--text", type=Path, nargs="+", default=[], metavar="FILE", help="held-out UTF-8 text, or folders of it"
    )
    parser.add_argument(
        "--tasks", nargs="+", default=[], metavar="TASK", help="tasks of lm-eval; paper: the eight of Table 2"
    )
    parser.add_argument("--task-folder", type=Path, metavar="DIR", help="folder of further tasks for lm-eval")
    parser.add_argument("--limit", type=whole_number(1), metavar="N", help="documents of each task (default all)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for report.json and a Parquet file a table")
    parser.add_argument("--max-tokens", type=whole_number(2), metavar="N", help="tokens of each text (default all)")
    parser.add_argument("--length", type=whole_number(2), metavar="N", help="tokens a window (default the models')")
    parser.add_argument(
        "--batch-size", type=whole_number(1), default=16, metavar="N", help="windows or requests a forward (default 16)"
    )
    parser.add_argument(
        "--bootstrap", type=whole_number(1), default=1000, metavar="N", help="replicates (default 1000)"
    )
    parser.add_argument("--seed", type=whole_number(0), default=0, help="of the bootstrap and the tasks (default 0)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda or mps")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default float32 on the CPU, else bfloat16)")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Evaluates; returns the exit code."""
    args = build_parser().parse_args(argv)
    if not args.text and not args.tasks:
        raise UserError("There is nothing to evaluate on: give --text, --tasks or both.")
    if args.task_folder and not args.tasks:
        raise UserError("--task-folder says where tasks lie, not which to run: give --tasks too.")
    checkpoints = find_checkpoints(args.checkpoint, args.base)
    texts = find_texts(args.text)
    length = window_length(checkpoints, args.length)
    if args.out:
        prepare_folder(args.out)
    tasks = task_module().load_tasks(args.tasks, args.task_folder) if args.tasks else []

    evaluation = Evaluation(args, checkpoints)
    if texts:
        evaluation.run_texts(texts, length)
    if tasks:
        evaluation.run_tasks(tasks)
    return 0


def task_module() -> Any:
    """`tide.evaluation.tasks`, which needs lm-eval.

    Raises:
        UserError: when lm-eval is not installed.
    """
    try:
        from tide.evaluation import tasks
    except ImportError as error:
        raise UserError(
            f'--tasks needs lm-eval ({first_line(error)}); install it with `pip install "tide-explorer[evaluate]"`.'
        ) from error
    return tasks


class Evaluation:
    """The models, and what is known of them so far. Every part is printed and saved as soon as it is done."""

    def __init__(self, args: argparse.Namespace, checkpoints: Sequence[Checkpoint]):
        self.args, self.checkpoints = args, checkpoints
        self.base = checkpoints[0].name if args.base else None
        self.labels = {checkpoint.name: checkpoint.label for checkpoint in checkpoints}
        self.facts: dict[str, Any] = {
            "models": [
                {
                    "name": checkpoint.name,
                    "checkpoint": str(checkpoint.path),
                    "fingerprint": fingerprint(checkpoint.path),
                    "num_memory_blocks": checkpoint.config.num_memory_blocks,
                    "parameters": ParameterBudget.of(checkpoint.config).total,
                }
                for checkpoint in checkpoints
            ],
            "base": self.base,
            "device": args.device,
            "versions": {package: version(package) for package in ("torch", "transformers")},
        }
        self.tables: dict[str, Any] = {}

    def run_texts(self, texts: Mapping[str, Path], length: int) -> None:
        """Losses of every model on the same windows, their tables, and the verdict."""
        windows: dict[str, np.ndarray] = {}
        losses = {}
        for checkpoint in self.checkpoints:
            model, tokenizer = self._load(checkpoint)
            windows = windows or {
                name: heldout_windows(file, tokenizer, length, self.args.max_tokens) for name, file in texts.items()
            }
            losses[checkpoint.name] = {
                name: token_losses(model, ids, self.args.batch_size, progress=f"{checkpoint.label} {name}")
                for name, ids in windows.items()
            }
            del model  # before the next one is loaded
        deciles, counted = self._deciles(tokenizer)
        settings = (self.base, self.args.bootstrap, self.args.seed)
        self.tables |= loss_tables(losses, windows, deciles, *settings, by_repetition=True)
        self.facts |= {
            "unit": "nats",
            "window_length": length,
            "texts": [
                {"name": name, "file": str(texts[name]), "windows": len(ids), "positions": ids[:, 1:].size}
                for name, ids in windows.items()
            ],
            "deciles": counted,
            "bootstrap": {
                "replicates": self.args.bootstrap,
                "seed": self.args.seed,
                "level": LEVEL,
                "unit": "windows, drawn within each text",
            },
        }
        self._save()
        print(loss_text(self.tables, self.labels, self.base, counted["counted"] if counted else NO_COUNTS))

    def run_tasks(self, tasks: Sequence[Any]) -> None:
        """Scores of every model on the tasks."""
        module, scores = task_module(), {}
        self.facts["versions"]["lm_eval"] = version("lm_eval")
        self.facts["tasks"] = {"limit": self.args.limit, "average": "mean of acc, every task weighing the same"}
        for checkpoint in self.checkpoints:
            model, tokenizer = self._load(checkpoint)
            settings = (self.args.batch_size, self.args.limit, self.args.bootstrap, self.args.seed)
            scores[checkpoint.name] = module.score_tasks(model, tokenizer, tasks, *settings)
            del model
            self.tables["tasks"] = module.task_table(scores, self.base)
            self._save()
        if "losses" in self.tables:
            print()
        print(task_text(self.tables["tasks"], self.labels, self.base))

    def _load(self, checkpoint: Checkpoint) -> tuple[Any, PreTrainedTokenizerFast]:
        dtype = getattr(torch, self.args.dtype) if self.args.dtype else None
        model, tokenizer = load_checkpoint(checkpoint.path, device=self.args.device, dtype=dtype)
        self.facts["dtype"] = str(model.dtype).removeprefix("torch.")
        return model, tokenizer

    def _deciles(self, tokenizer: PreTrainedTokenizerFast) -> tuple[np.ndarray | None, dict[str, str] | None]:
        """Deciles by the counts beside the first TIDE checkpoint, or beside the first that has counts."""
        for checkpoint in sorted(self.checkpoints, key=lambda c: c.config.num_memory_blocks == 0):
            found = deciles_of(checkpoint.path, tokenizer, checkpoint.config.vocab_size)
            if found is not None:
                return found[0], {"checkpoint": checkpoint.name, "counted": found[1]}
        return None, None

    def _save(self) -> None:
        if self.args.out:
            write_report(self.args.out, self.facts, self.tables)
            print(f"saved in {self.args.out}", file=sys.stderr)


def entry_point() -> None:
    """Console script."""
    sys.exit(run_command(main))


if __name__ == "__main__":
    entry_point()

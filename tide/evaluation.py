"""How well two models predict held-out text, position by position, and where they differ.

    python -m tide.evaluation TIDE_CHECKPOINT --base BASE_CHECKPOINT --text FILE ... [--out FILE.json]

Losses are cross entropies in nats, the z-loss left out. Every mean is over positions, so that a frequent token
weighs as often as it occurs. Figures 5 and 7 of the paper do not say whether theirs are over positions or types.
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch.nn import functional as F
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from tide.checkpoint import load_checkpoint, token_counts
from tide.cli import ArgumentParser, UserError, run_command, whole_number
from tide.frequency import GROUPS, NO_DECILE, frequency_deciles
from tide.intervention import Intervention
from tide.model import TideForCausalLM
from tide.tokens import Vocabulary
from tide.training.corpus import read_documents
from tide.training.data import encode_documents
from tide.training.loop import write_text

MAX_LOGITS_BYTES = 256 * 2**20
ALL_TEXTS = "all"
NO_GROUP = "none"
GROUP_OF = {decile: group for group, deciles in GROUPS.items() for decile in deciles} | {NO_DECILE: NO_GROUP}


def heldout_windows(
    file: str | Path, tokenizer: PreTrainedTokenizerFast, length: int, max_tokens: int | None = None
) -> np.ndarray:
    """Cuts a text into windows as the training stream does: documents one after another, each with its BOS in front.

    Windows do not overlap. The tokens that fill no last window, fewer than `length`, are left out.

    Args:
        file: UTF-8 text, a blank line between documents.
        tokenizer: the models' own.
        length: T, tokens a window.
        max_tokens: read no further than this many tokens.

    Returns:
        Token ids [N, T] int64.

    Raises:
        UserError: when the file does not exist, is not UTF-8, or holds less than one window.
    """
    parts, total = [], 0
    for ids in encode_documents(read_documents(file), tokenizer):
        parts.append(ids)
        total += len(ids)
        if max_tokens is not None and total >= max_tokens:
            break
    stream = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
    stream = stream[:max_tokens]
    if len(stream) < length:
        raise UserError(f"{file} gives {len(stream)} tokens, less than one window of {length}; give a longer text.")
    return stream[: len(stream) // length * length].reshape(-1, length)


@torch.no_grad()
def token_losses(
    model: TideForCausalLM,
    windows: np.ndarray,
    batch_size: int,
    intervention: Intervention | None = None,
    progress: str | None = None,
) -> np.ndarray:
    """Cross entropy of every predicted position.

    The unembedding is applied to a few positions at a time, so that logits never take more than 256 MB.

    Args:
        model: the model, on its device.
        windows: token ids [N, T].
        batch_size: windows a forward.
        intervention: what the forwards do differently.
        progress: name of a progress bar on stderr; None draws none.

    Returns:
        [N, T-1] float32, nats; column t is the loss of token t+1 of the window.
    """
    ids = torch.as_tensor(windows)
    positions = max(1, MAX_LOGITS_BYTES // (4 * model.config.vocab_size))
    losses = []
    for batch in tqdm(ids.split(batch_size), desc=progress, unit="batch", disable=progress is None):
        batch = batch.to(model.device)
        hidden = model.model(batch, intervention=intervention, use_cache=False).last_hidden_state[:, :-1]  # (B, T-1, d)
        pairs = zip(hidden.flatten(0, 1).split(positions), batch[:, 1:].flatten().split(positions), strict=True)
        parts = [F.cross_entropy(model.lm_head(h).float(), target, reduction="none") for h, target in pairs]
        losses.append(torch.cat(parts).view(len(batch), -1).cpu())
    return torch.cat(losses).numpy()


def perplexity(losses: np.ndarray) -> float:
    """The exponential of the mean over all positions, whatever the shape of `losses` (nats)."""
    return math.exp(np.asarray(losses, dtype=np.float64).mean())


def compare(
    tide_losses: Mapping[str, np.ndarray],
    base_losses: Mapping[str, np.ndarray],
    ids: Mapping[str, np.ndarray],
    bins: np.ndarray | None,
) -> dict[str, pd.DataFrame]:
    """Tables of two models' losses on the same positions.

    Args:
        tide_losses: [N, T-1] nats by name of the text, from `token_losses`.
        base_losses: the same positions under the other model.
        ids: the windows [N, T] by name of the text.
        bins: [V], the frequency decile of every token id, -1 where it has none (`tide.frequency`); None leaves
            the tables by frequency out.

    Returns:
        Tables "text", "decile" and "group" (rare, mid, common; appendix B of the paper; the bin is that of the
        predicted token). Every table has a row a text and bin, and rows of all texts together, named "all";
        positions whose token has no decile are in decile -1, group "none". Columns: `n` positions, mean, standard
        deviation and perplexity of either model, and the mean paired difference Base - TIDE (positive: TIDE
        predicts better) with its standard error, which takes positions for independent: ours, and somewhat too
        small where neighbours have losses alike.
    """
    frames = []
    for name, tide in tide_losses.items():
        frame = pd.DataFrame({"tide": tide.ravel(), "base": base_losses[name].ravel()}, dtype=np.float64)
        if bins is not None:
            frame["decile"] = bins[ids[name][:, 1:].ravel()].astype(int)
            frame["group"] = pd.Categorical(frame["decile"].map(GROUP_OF), [*GROUPS, NO_GROUP], ordered=True)
        frames.append(frame.assign(text=name))
    positions = pd.concat([*frames, pd.concat(frames).assign(text=ALL_TEXTS)])
    positions["text"] = pd.Categorical(positions["text"], [*tide_losses, ALL_TEXTS], ordered=True)
    keys = {"text": ["text"], "decile": ["text", "decile"], "group": ["text", "group"]}
    return {table: summarize(positions, by) for table, by in keys.items() if set(by) <= set(positions.columns)}


def summarize(positions: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Counts, means and spreads of the columns `tide` and `base` in every group that occurs."""
    positions = positions.assign(difference=positions["base"] - positions["tide"])
    groups = positions.groupby(by, observed=True)
    mean, sd, n = groups.mean(numeric_only=True), groups[["tide", "base", "difference"]].std(ddof=1), groups.size()
    table = pd.DataFrame({"n": n})
    for model in ("tide", "base"):
        table[f"{model}_mean"], table[f"{model}_sd"] = mean[model], sd[model]
        table[f"{model}_perplexity"] = np.exp(mean[model])
    table["difference_mean"] = mean["difference"]
    table["difference_se"] = sd["difference"] / np.sqrt(n)
    return table.reset_index()


def text_names(files: Sequence[Path]) -> list[str]:
    """What to call each text: its file name, or its whole path where two files share a name."""
    names = [file.name for file in files]
    return names if len(set(names)) == len(names) else [str(file) for file in files]


def deciles_of(checkpoint: Path, tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> tuple[np.ndarray, str] | None:
    """The frequency deciles [V] by the counts that a checkpoint carries, and what was counted; None without counts."""
    stored = token_counts(checkpoint)
    if stored is None:
        return None
    counts, corpus = stored
    bins = np.full(vocab_size, NO_DECILE, dtype=np.int8)
    deciles = frequency_deciles(counts, Vocabulary(tokenizer, size=len(counts)))[:vocab_size]
    bins[: len(deciles)] = deciles
    return bins, corpus


def rows_of(table: pd.DataFrame) -> list[dict]:
    """A table as JSON rows; a spread that a single position does not have becomes null."""
    return json.loads(table.to_json(orient="records", double_precision=9))


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = ArgumentParser(prog="python -m tide.evaluation", description="Compare a TIDE and a Base checkpoint.")
    parser.add_argument("checkpoint", type=Path, metavar="TIDE_CHECKPOINT")
    parser.add_argument("--base", type=Path, required=True, metavar="CHECKPOINT", help="the model to compare with")
    parser.add_argument("--text", type=Path, nargs="+", required=True, metavar="FILE", help="held-out UTF-8 text")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="where to write the tables")
    parser.add_argument("--max-tokens", type=whole_number(2), metavar="N", help="tokens of each file (default all)")
    parser.add_argument("--length", type=whole_number(2), help="tokens a window (default: the model's longest)")
    parser.add_argument("--batch-size", type=whole_number(1), default=16, help="windows a forward (default 16)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda or mps")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Evaluates; returns the exit code."""
    args = build_parser().parse_args(argv)
    if args.out and not args.out.absolute().parent.is_dir():
        raise UserError(f"--out {args.out}: there is no folder {args.out.parent}; make it first.")
    tide, tokenizer = load_checkpoint(args.checkpoint, device=args.device)
    base, base_tokenizer = load_checkpoint(args.base, device=args.device)
    if tokenizer.backend_tokenizer.to_str() != base_tokenizer.backend_tokenizer.to_str():
        raise UserError(f"{args.checkpoint} and {args.base} have different tokenizers; their losses do not compare.")

    length = args.length or tide.config.max_position_embeddings
    names = text_names(args.text)
    files = zip(names, args.text, strict=True)
    windows = {name: heldout_windows(file, tokenizer, length, args.max_tokens) for name, file in files}
    tide_losses, base_losses = (
        {name: token_losses(model, w, args.batch_size, progress=f"{label} {name}") for name, w in windows.items()}
        for label, model in (("TIDE", tide), ("Base", base))
    )
    binned = deciles_of(args.checkpoint, tokenizer, tide.config.vocab_size)
    tables = compare(tide_losses, base_losses, windows, binned[0] if binned else None)
    corpus = binned[1] if binned else None

    print_tables(tables, corpus)
    if args.out:
        report = {
            "tide": str(args.checkpoint),
            "base": str(args.base),
            "unit": "nats, mean over positions",
            "window_length": length,
            "counted_corpus": corpus,
            "tables": {name: rows_of(table) for name, table in tables.items()},
        }
        write_text(args.out, json.dumps(report, indent=1) + "\n")
        print(f"saved in {args.out}", file=sys.stderr)
    return 0


def print_tables(tables: Mapping[str, pd.DataFrame], corpus: str | None) -> None:
    """Prints the tables for people."""
    print("Cross entropy in nats, mean over positions; difference is Base - TIDE, with its standard error.")
    titles = {"text": "By text", "decile": f"By frequency decile in {corpus}", "group": "Rare, mid, common"}
    for name, table in tables.items():
        print(f"\n{titles[name]}\n{table.to_string(index=False, float_format='{:.4f}'.format)}")
    if corpus is None:
        print("\nNo tables by frequency: the TIDE checkpoint carries no token counts.")


if __name__ == "__main__":
    raise SystemExit(run_command(main))

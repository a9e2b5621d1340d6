"""Stage `history`: what training kept about itself (`tide.training.summaries`), as tidy tables.

When does the memory's structure form? Routing weights, norms of the tables (figure 1), the loss by frequency decile
(figure 5) and the squared gradients that every table has received (proposition 3.2, measured), each over training.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from precompute.stage import Context, Stage
from precompute.store import Tables
from precompute.tables import EMBEDDING, table_name
from precompute.tidy import long_table
from tide.frequency import NO_DECILE, NUM_DECILES
from tide.training.summaries import SUMMARY_FILE, Summary, read_summaries

BINS = np.array([*range(NUM_DECILES), NO_DECILE])
"""The decile of each of a summary's bins: token types without a decile come last there, and are -1 here."""


def routing_rows(summary: Summary) -> pd.DataFrame:
    """Mean routing weights: columns layer, decile, bank (K null), mean, n (positions of the probe text)."""
    layers, _, slots = summary.routing.shape
    return long_table(
        {"layer": np.arange(layers), "decile": BINS, "bank": np.arange(slots)},
        mean=summary.routing,
        n=summary.positions.astype(np.int64)[:, None],
    )


def norm_rows(summary: Summary) -> pd.DataFrame:
    """L2 norms of rows (figure 1): columns table, decile, mean, sd, n (token types)."""
    mean = np.concatenate([summary.embedding_norm[None], summary.bank_norm])  # (1 + K, 11)
    sd = np.concatenate([summary.embedding_norm_sd[None], summary.bank_norm_sd])
    names = [EMBEDDING, *map(table_name, range(len(summary.bank_norm)))]
    return long_table(
        {"table": names, "decile": BINS}, mean=mean, sd=_sample_sd(sd, summary.types), n=summary.types.astype(np.int64)
    )


def loss_rows(summary: Summary) -> pd.DataFrame:
    """Cross entropy by the decile of the token to predict, nats (figure 5): columns decile, mean, sd, n (positions)."""
    sd = _sample_sd(summary.loss_sd, summary.targets)
    return long_table({"decile": BINS}, mean=summary.loss, sd=sd, n=summary.targets.astype(np.int64))


def gradient_rows(summary: Summary) -> pd.DataFrame:
    """Squared norm of a row's gradient, summed over the steps so far (proposition 3.2).

    Returns:
        Columns table, decile, mean, n (token types). Table "embedding" is the input embedding through its lookup,
        "embedding_parameter" the same with what a tied unembedding adds, "total" the lookups of all tables.
    """
    named = {EMBEDDING: summary.embedding_gradient, "embedding_parameter": summary.embedding_parameter_gradient}
    named |= {table_name(bank): mean for bank, mean in enumerate(summary.bank_gradient)}
    named["total"] = summary.total_gradient
    return long_table(
        {"table": list(named), "decile": BINS}, mean=np.stack(list(named.values())), n=summary.types.astype(np.int64)
    )


def _sample_sd(sd: np.ndarray, n: np.ndarray) -> np.ndarray:
    """The sample standard deviation from the population's, which summaries keep; NaN where n < 2."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(n > 1, sd * np.sqrt(n / (n - 1)), np.nan)


KINDS: dict[str, Callable[[Summary], pd.DataFrame]] = {
    "routing": routing_rows,
    "norms": norm_rows,
    "losses": loss_rows,
    "gradients": gradient_rows,
}


def history_tables(runs: Mapping[str, Sequence[Summary]]) -> dict[str, pd.DataFrame]:
    """Everything that some runs kept.

    Args:
        runs: summaries by step of "tide" and, where it kept some, "base".

    Returns:
        `KINDS`, each with the columns model, step and tokens (seen until then) in front.
    """
    keys = ["model", "step", "tokens"]
    tables = {}
    for kind, rows_of in KINDS.items():
        parts = {(model, kept.step, kept.tokens): rows_of(kept) for model, run in runs.items() for kept in run}
        tables[kind] = pd.concat(parts, names=keys).reset_index(keys).reset_index(drop=True)
    return tables


class History(Stage):
    """One piece: the files are small."""

    name = "history"

    def unavailable(self, context: Context) -> str | None:
        """A checkpoint without summaries has no history."""
        if read_summaries(context.job.checkpoint):
            return None
        return (
            f"{context.job.checkpoint} holds no {SUMMARY_FILE} with what training kept about itself; train it with "
            f"tide-train (without --summaries 0), or copy the file of its run there."
        )

    def inputs(self, context: Context) -> dict[str, Any]:
        """The files of both runs."""
        base = context.job.base
        return {"tide": _digest(context.job.checkpoint), "base": None if base is None else _digest(base)}

    def parameters(self, context: Context) -> dict[str, Any]:
        """Which steps were kept."""
        return {model: [summary.step for summary in kept] for model, kept in _runs(context).items()}

    def top(self, context: Context) -> dict[str, Any]:
        """The Base checkpoint."""
        return {"base": context.base_entry()}

    def measure(self, context: Context, piece: str) -> Tables:
        """`history_tables`."""
        return history_tables(_runs(context))


def _runs(context: Context) -> dict[str, list[Summary]]:
    folders = {"tide": context.job.checkpoint, "base": context.job.base}
    runs = {model: read_summaries(folder) for model, folder in folders.items() if folder is not None}
    return {model: kept for model, kept in runs.items() if kept}


def _digest(checkpoint: Path) -> str | None:
    file = checkpoint / SUMMARY_FILE
    return hashlib.sha256(file.read_bytes()).hexdigest()[:32] if file.is_file() else None

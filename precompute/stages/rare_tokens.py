"""Stage `rare_tokens`: the loss of Base and TIDE on the held-out text by frequency bin (figures 5 and 7).

The comparison of `tide-evaluate`, with its own functions, kept beside the other artifacts: whole windows only, the bin
of a position is that of the token to predict, and the two models are compared on the same positions and draws.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from precompute.parts import Parts
from precompute.probe import check_names
from precompute.stage import Context, Stage
from precompute.store import Tables
from precompute.text import PIECE_TOKENS, HeldOutText
from tide.checkpoint import read_config
from tide.cli import UserError
from tide.config import TideConfig
from tide.evaluation.compare import loss_tables
from tide.evaluation.inputs import find_checkpoints
from tide.evaluation.losses import token_losses

BASE, TIDE = "base", "tide"
BATCH_TOKENS = 4096  # tokens a forward, as in the stage `routing`
MOST_TOKENS = 4_194_304  # of a longer text, evenly spaced windows: the tables are made of all losses at once
REPLICATES = 1000  # of the bootstrap, as `tide-evaluate` draws by default
SEED = 0

_KEYS = dict.fromkeys(("text", "bin_kind", "bin", "averaging"), "str")
_COUNTS = dict.fromkeys(("n", "n_types", "n_windows"), "int64")
_MEANS = dict.fromkeys(("mean", "low", "high"), "float64")
_PERPLEXITIES = dict.fromkeys(("perplexity", "perplexity_low", "perplexity_high"), "float64")
COLUMNS = {
    "losses": {"model": "str", **_KEYS, **_COUNTS, **_MEANS, **_PERPLEXITIES},
    "differences": {"model": "str", "base": "str", **_KEYS, **_COUNTS, **_MEANS, "better": "str"},
}
"""The columns of `tide.evaluation.compare` and their types, for a table without rows."""


def measured_windows(text: HeldOutText, most_tokens: int = MOST_TOKENS) -> np.ndarray:
    """The windows that losses are measured in: whole ones, as `tide-evaluate` reads a text.

    Args:
        text: the held-out text.
        most_tokens: of a text that is longer, each file gives about equally many, evenly spaced.

    Returns:
        Numbers of windows [N] int64, ascending; none of a file that is shorter than a window.
    """
    chosen = np.array(text.probe(most_tokens), dtype=np.int64)
    return chosen[text.window_lengths[chosen] == text.length]


def read_windows(text: HeldOutText, windows: np.ndarray) -> np.ndarray:
    """The token ids of whole windows: [N, T] int64."""
    rows = [text.read(start, start + text.length) for start in text.window_starts[windows].tolist()]
    return np.stack(rows) if rows else np.empty((0, text.length), dtype=np.int64)


def rare_token_tables(
    losses: Mapping[str, np.ndarray],
    windows: np.ndarray,
    domains: Sequence[str],
    deciles: np.ndarray,
    replicates: int = REPLICATES,
) -> dict[str, pd.DataFrame]:
    """Losses of every model by text and bin, and what Base and TIDE differ by (figures 5 and 7).

    Args:
        losses: [N, T-1] nats of "tide" and, where there is one, "base".
        windows: token ids [N, T].
        domains: [N], the text that each window is of; windows of one text lie together.
        deciles: [V], frequency decile of every token id, -1 for none.
        replicates: of the bootstrap.

    Returns:
        `losses` and `differences` with the columns of `tide.evaluation.compare.loss_tables`, empty where there is
        nothing to say.
    """
    of_text = {name: np.array([domain == name for domain in domains]) for name in dict.fromkeys(domains)}
    made = {}
    if of_text:
        made = loss_tables(
            {model: {name: of_model[inside] for name, inside in of_text.items()} for model, of_model in losses.items()},
            {name: windows[inside] for name, inside in of_text.items()},
            deciles,
            BASE if BASE in losses else None,
            replicates,
            SEED,
        )
    empty = {name: pd.DataFrame({c: pd.Series(dtype=t) for c, t in types.items()}) for name, types in COLUMNS.items()}
    return {**empty, **made}


class RareTokens(Stage):
    """One piece a model and run of windows."""

    name = "rare_tokens"
    needs = ("text", "frequency")

    def unavailable(self, context: Context) -> str | None:
        """Losses of models that read the text in other tokens, or in shorter windows, do not compare."""
        base = context.job.base
        if base is None:
            return None
        try:
            find_checkpoints([context.job.checkpoint], base)
        except UserError as error:
            return str(error)
        longest = read_config(base).get("max_position_embeddings", TideConfig().max_position_embeddings)
        if context.window > longest:
            return f"--base {base} takes {longest} tokens at once, not {context.window}; give --window {longest}."
        return None

    def check(self, context: Context) -> None:
        """`check_names`."""
        check_names(context.job.text)

    def inputs(self, context: Context) -> dict[str, Any]:
        """The Base checkpoint, and how much is measured how."""
        base = context.base_entry()
        return {**self.parameters(context), "base": base["fingerprint"] if base else None}

    def parameters(self, context: Context) -> dict[str, Any]:
        """How much is measured how."""
        return {"most_tokens": MOST_TOKENS, "replicates": REPLICATES, "seed": SEED}

    def top(self, context: Context) -> dict[str, Any]:
        """The Base checkpoint."""
        return {"base": context.base_entry()}

    def pieces(self, context: Context) -> Sequence[str]:
        """All of Base, then all of TIDE, so that each is loaded once: "base-00000000-00000256"."""
        windows = len(measured_windows(context.text))
        step = max(1, PIECE_TOKENS // context.text.length)
        runs = [f"{start:08d}-{min(start + step, windows):08d}" for start in range(0, windows, step)]
        return [f"{label}-{run}" for label in self._labels(context) for run in runs]

    def measure(self, context: Context, piece: str) -> Tables:
        """Losses of one model in a run of windows: `losses` float32 [n, T-1]."""
        label, start, stop = piece.split("-")
        text = context.text
        ids = read_windows(text, measured_windows(text)[int(start) : int(stop)])
        progress = f"rare_tokens, {label} {int(start)}-{int(stop)}" if context.shows_progress else None
        model = context.base[0] if label == BASE else context.model
        losses = token_losses(model, ids, max(1, BATCH_TOKENS // text.length), progress=progress)
        return {"losses": {"losses": losses}}

    def combine(self, context: Context, parts: Parts) -> Tables:
        """`rare_token_tables`."""
        text = context.text
        windows = measured_windows(text)
        losses = {
            label: [parts.tensors(p, "losses")["losses"] for p in parts.pieces if p.startswith(f"{label}-")]
            for label in self._labels(context)
        }
        whole = {label: np.concatenate(of_label) for label, of_label in losses.items() if of_label}
        domains = [text.domains[domain] for domain in text.window_domains[windows].tolist()]
        return rare_token_tables(whole, read_windows(text, windows), domains, context.deciles)

    @staticmethod
    def _labels(context: Context) -> list[str]:
        return [TIDE] if context.job.base is None else [BASE, TIDE]

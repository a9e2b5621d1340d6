"""Two next-token predictions side by side."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

from tide.trace import kl_divergence


@dataclass(frozen=True)
class Comparison:
    """Two next-token predictions side by side.

    Attributes:
        trained: the k likeliest tokens as trained; see `ranking` for the columns.
        switched: the k likeliest tokens with the switches.
        kl: KL(trained || switched) in nats.
    """

    trained: pd.DataFrame
    switched: pd.DataFrame
    kl: float

    @classmethod
    def of(cls, log_p: torch.Tensor, log_q: torch.Tensor, k: int) -> "Comparison":
        """Compares the log-probabilities [V] as trained, `log_p`, with those switched, `log_q`; k rows a table."""
        kl = max(0.0, float(kl_divergence(log_p, log_q)))  # rounding can bring it below zero
        return cls(ranking(log_p, log_q, k), ranking(log_q, log_p, k), kl)


def ranking(log_probs: torch.Tensor, other: torch.Tensor, k: int) -> pd.DataFrame:
    """The k likeliest tokens of one prediction and where they stand in another.

    Args:
        log_probs: [V] nats.
        other: [V] nats.
        k: rows.

    Returns:
        token_id, probability, rank (1-based), other_rank (1-based), delta (log-probability here minus there, nats).
    """
    values, ids = log_probs.topk(min(k, len(log_probs)))
    other_rank = (other.unsqueeze(0) > other[ids].unsqueeze(1)).sum(dim=1) + 1
    return pd.DataFrame(
        {
            "token_id": ids.cpu().numpy(),
            "probability": values.exp().cpu().numpy(),
            "rank": np.arange(1, len(ids) + 1),
            "other_rank": other_rank.cpu().numpy(),
            "delta": (values - other[ids]).cpu().numpy(),
        }
    )

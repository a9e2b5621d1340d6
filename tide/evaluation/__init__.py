"""How well models predict held-out text and answer multiple-choice tasks, and where a TIDE model differs from Base.

    tide-evaluate CHECKPOINT ... --base CHECKPOINT --text FILE ... --out DIR

Losses are cross entropies in nats, the z-loss left out. What the tables hold and how: docs/evaluation.md.
"""

from tide.evaluation.bins import deciles_of
from tide.evaluation.compare import loss_tables
from tide.evaluation.losses import heldout_windows, perplexity, token_losses

__all__ = ["deciles_of", "heldout_windows", "loss_tables", "perplexity", "token_losses"]

"""What follows from a `Trace`: functions of one forward, or of two, at every position.

All of them take a trace and return float32 tensors whose first dimensions are [B, T]. For one position of a prompt,
hand them `trace.at(position)`. Where a value does not exist, as the cosine of an injection that is zero, it is NaN.
"""

from tide.analysis.attribution import Contributions, contributions
from tide.analysis.lens import AFTER, BEFORE, EMBEDDING, Lens, logit_lens
from tide.analysis.prediction import PredictionChange, compare, first_difference, surprisal
from tide.analysis.usage import bank_entropy, effective_banks, feed_forward_cosine, routing_entropy

__all__ = [
    "AFTER",
    "BEFORE",
    "EMBEDDING",
    "Contributions",
    "Lens",
    "PredictionChange",
    "bank_entropy",
    "compare",
    "contributions",
    "effective_banks",
    "feed_forward_cosine",
    "first_difference",
    "logit_lens",
    "routing_entropy",
    "surprisal",
]

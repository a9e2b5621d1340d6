"""The logit lens: what the residual stream would predict if the model ended here.

Every stream goes through the final norm with its own root mean square, then through the unembedding
(nostalgebraist, "interpreting GPT: the logit lens", 2020). Before and after each layer's injection: ours.
"""

from dataclasses import dataclass

import torch

from tide.analysis import prediction
from tide.trace import Trace

EMBEDDING = 0  # indices along the dimension of streams, 2L+1 long
BEFORE = slice(1, None, 2)  # before each layer's injection: h~ + FFN(n~)
AFTER = slice(2, None, 2)  # after it: the layer's output


@dataclass(frozen=True)
class Lens:
    """What 2L+1 streams a position would predict: the embedding, then each layer before and after its injection.

    `lens.entropy[..., BEFORE]` and `[..., AFTER]` are [B, T, L]; `[..., EMBEDDING]` is [B, T].

    Attributes:
        target_log_prob: [B, T, 2L+1] float32, log-probability of the target, nats.
        target_rank: [B, T, 2L+1] int64, 1 is the likeliest.
        entropy: [B, T, 2L+1] float32, of the whole prediction, nats.
        token_ids: [B, T, 2L+1, k] int64, the likeliest tokens, in descending order.
        log_probs: [B, T, 2L+1, k] float32, theirs, nats.
    """

    target_log_prob: torch.Tensor
    target_rank: torch.Tensor
    entropy: torch.Tensor
    token_ids: torch.Tensor
    log_probs: torch.Tensor


def logit_lens(trace: Trace, target_ids: torch.Tensor, k: int = 10) -> Lens:
    """Reads every stream of a forward through the unembedding.

    The last stream gives the model's own prediction. The unembedding is the cost: 2L+1 times that of a forward.

    Args:
        trace: with its parts; of one position it is `trace.at(position)`.
        target_ids: broadcasts to [B, T]: the token at each position that is followed through the layers.
        k: how many of the likeliest tokens; all where the vocabulary is smaller.

    Raises:
        ValueError: for a trace without parts, and for an id outside the vocabulary.
    """
    all_streams = streams(trace)
    shape = all_streams.shape[:3]
    targets = trace.targets(target_ids).unsqueeze(-1).expand(shape).flatten()
    chunks = (part.split(prediction.UNEMBEDDED_ROWS) for part in (all_streams.flatten(0, 2), targets))
    found = []
    for rows, target in zip(*chunks, strict=True):
        logits = trace.unembed(rows)  # (n, V)
        log_probs = logits.log_softmax(dim=-1)
        token_ids = logits.topk(min(k, logits.shape[-1]), dim=-1).indices  # (n, k)
        entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
        of_target = prediction.pick(log_probs, target), prediction.rank(logits, target)
        found.append((*of_target, entropy, token_ids, log_probs.gather(-1, token_ids)))
    return Lens(*(torch.cat(column).unflatten(0, shape) for column in zip(*found, strict=True)))


def streams(trace: Trace) -> torch.Tensor:
    """The residual streams in the order of the forward: [B, T, 2L+1, d], the embedding first.

    Raises:
        ValueError: for a trace without parts.
    """
    per_layer = torch.stack([trace.before_injection(), trace.hidden[:, :, 1:]], dim=3)  # (B, T, L, 2, d)
    return torch.cat([trace.hidden[:, :, :1], per_layer.flatten(2, 3)], dim=2)

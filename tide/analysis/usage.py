"""How a forward uses its memory, layer by layer. Ours: the paper shows routing weights only.

How large the injection is beside the stream: `Trace.injection_ratio`.
"""

import torch
from torch.nn import functional as F

from tide.trace import Trace


def routing_entropy(trace: Trace) -> torch.Tensor:
    """Entropy of the routing weights over the K banks and null: [B, T, L], nats, 0 to log(K+1).

    0 is one choice, null included; log(K+1) is no choice at all.
    """
    return torch.special.entr(trace.routing).sum(dim=-1).clamp(min=0)  # a weight of 1 may be rounded to above it


def bank_entropy(trace: Trace) -> torch.Tensor:
    """Entropy of the choice among banks, given that it is not null: [B, T, L], nats, 0 to log K.

    The weights of the K banks are divided by their sum. NaN where all weight is on null, as in a layer that is off.
    """
    weights = trace.routing[..., :-1]
    total = weights.sum(dim=-1, keepdim=True)
    entropy = torch.special.entr(weights / total).sum(dim=-1).clamp(min=0)
    return torch.where(total.squeeze(-1) > 0, entropy, torch.nan)


def effective_banks(trace: Trace) -> torch.Tensor:
    """Effective number of banks, exp(`bank_entropy`): [B, T, L], 1 to K.

    n banks that share the weight equally count n, however much goes to null. NaN where all weight is on null.
    """
    return bank_entropy(trace).exp()


def feed_forward_cosine(trace: Trace) -> torch.Tensor:
    """Cosine of the injection m with the feed-forward output that it is added beside: [B, T, L], -1 to 1.

    NaN where either is zero.

    Raises:
        ValueError: for a trace without parts.
    """
    injection, fed_forward = trace.injection().float(), trace.parts()[1].float()
    cosine = F.cosine_similarity(injection, fed_forward, dim=-1, eps=torch.finfo(torch.float32).tiny)
    return torch.where(injection.any(dim=-1) & fed_forward.any(dim=-1), cosine, torch.nan)

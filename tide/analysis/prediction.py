"""What a forward predicts, and how the predictions of two forwards differ."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tide.trace import Trace, kl_divergence

UNEMBEDDED_ROWS = 64  # streams unembedded at once: with 128,256 tokens 33 MB of logits, whatever the length of a text


@dataclass(frozen=True)
class PredictionChange:
    """The next-token predictions of two forwards of one text, position by position.

    Attributes:
        kl: [B, T] float32, KL(plain || changed) in nats.
        plain_log_prob: [B, T] float32, log-probability of the target, nats.
        changed_log_prob: [B, T] float32.
        plain_rank: [B, T] int64, how many tokens are likelier than the target, plus 1.
        changed_rank: [B, T] int64.
        plain_greedy: [B, T] int64, the likeliest token.
        changed_greedy: [B, T] int64.
    """

    kl: torch.Tensor
    plain_log_prob: torch.Tensor
    changed_log_prob: torch.Tensor
    plain_rank: torch.Tensor
    changed_rank: torch.Tensor
    plain_greedy: torch.Tensor
    changed_greedy: torch.Tensor

    def log_prob_change(self) -> torch.Tensor:
        """Log-probability of the target, changed minus plain: [B, T], nats."""
        return self.changed_log_prob - self.plain_log_prob

    def rank_change(self) -> torch.Tensor:
        """Places that the target fell, negative where it rose: [B, T] int64."""
        return self.changed_rank - self.plain_rank

    def first_departure(self) -> list[int | None]:
        """For each row of the batch the first position whose likeliest next token differs; None where none does.

        Both forwards read the same text, so this is where greedy text that has come so far would part.
        """
        rows = zip(self.plain_greedy.tolist(), self.changed_greedy.tolist(), strict=True)
        return [first_difference(plain, changed) for plain, changed in rows]


def compare(plain: Trace, changed: Trace, target_ids: torch.Tensor) -> PredictionChange:
    """Compares what two forwards predict at every position.

    For the text's own next tokens: `compare(a.at(slice(0, -1)), b.at(slice(0, -1)), input_ids[:, 1:])`.

    Args:
        plain: the forward that is compared with.
        changed: of a text of the same shape, by a model of the same vocabulary: with an intervention, say.
        target_ids: broadcasts to [B, T]: the token at each position that is followed.

    Raises:
        ValueError: for traces of different shapes, and for an id outside the vocabulary.
    """
    shape = plain.input_ids.shape
    if changed.input_ids.shape != shape:
        raise ValueError(f"Two traces of {list(shape)} and {list(changed.input_ids.shape)} tokens are not of one text.")
    found = []
    targets = plain.targets(target_ids).flatten().split(UNEMBEDDED_ROWS)
    for logits, other, target in zip(logit_rows(plain), logit_rows(changed), targets, strict=True):
        log_p, log_q = logits.log_softmax(dim=-1), other.log_softmax(dim=-1)
        kl = kl_divergence(log_p, log_q).clamp(min=0)  # rounding leaves equal predictions a hair below zero
        log_prob = pick(log_p, target), pick(log_q, target)
        ranks = rank(logits, target), rank(other, target)
        found.append((kl, *log_prob, *ranks, logits.argmax(dim=-1), other.argmax(dim=-1)))
    return PredictionChange(*(torch.cat(column).view(shape) for column in zip(*found, strict=True)))


def surprisal(trace: Trace) -> torch.Tensor:
    """How unexpected each token was, -log p(token | those before it): [B, T-1] float32, nats.

    Column t is of the token at position t+1, predicted at position t.
    """
    upto = trace.at(slice(0, -1))
    targets = trace.input_ids[:, 1:]
    rows = zip(logit_rows(upto), targets.flatten().split(UNEMBEDDED_ROWS), strict=True)
    found = [-pick(logits.log_softmax(dim=-1), target) for logits, target in rows]
    return torch.cat(found).view(targets.shape)


def first_difference(tokens: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token in which two texts differ; None for equal texts.

    Where one text begins with the other, they differ where the shorter one ends.
    """
    for index, (a, b) in enumerate(zip(tokens, other, strict=False)):
        if a != b:
            return index
    return None if len(tokens) == len(other) else min(len(tokens), len(other))


def logit_rows(trace: Trace) -> Iterator[torch.Tensor]:
    """The logits [n, V] float32 of all B * T positions, a few rows at a time; computed where the trace has none."""
    if trace.logits is not None:
        yield from (rows.float() for rows in trace.logits.flatten(0, 1).split(UNEMBEDDED_ROWS))
    else:
        yield from (trace.unembed(rows) for rows in trace.hidden[:, :, -1].flatten(0, 1).split(UNEMBEDDED_ROWS))


def pick(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The value of one token a row: [n, V], [n] -> [n]."""
    return values.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def rank(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """1-based rank of one token a row, [n, V], [n] -> [n]; tokens of equal logits share the better rank."""
    return (logits > pick(logits, ids).unsqueeze(-1)).sum(dim=-1) + 1

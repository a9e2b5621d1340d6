"""`Trace`: all that one forward did. What follows from it is in `tide.analysis`."""

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tide.model import TideForCausalLM


@dataclass
class Trace:
    """What one forward of a TIDE model did. Layers and banks are 0-based, the null bank is last.

    The last stream is the sum of its parts: the embedding, and of every layer what attention, the feed-forward part
    and the injection added. In float32 the sum holds to rounding error; a bfloat16 model rounds its stream after
    every addition, so there the parts miss it by that much.

    Attributes:
        input_ids: [B, T].
        routing: [B, T, L, K+1] float32, the routing weights that took effect (an intervention included). The
            Base model, which has no router, has one column of ones: all null.
        hidden: [B, T, L+1, d], the residual stream before the final norm: the embedding, then each layer's output.
        memory: [B, T, K, d], M_k(v) of the tokens whose rows were read (equation 3.4).
        attention: [B, T, L, d], what attention added to the stream; None where the trace was asked to leave it out.
        feed_forward: [B, T, L, d], what the feed-forward part added; None as `attention`.
        replacement: [B, T, L, d], what an intervention injected in the place of banks that are off; None where it
            replaced nothing.
        logits: [B, T, V], or None where the trace was asked not to compute them.
    """

    input_ids: torch.Tensor
    routing: torch.Tensor
    hidden: torch.Tensor
    memory: torch.Tensor
    attention: torch.Tensor | None
    feed_forward: torch.Tensor | None
    replacement: torch.Tensor | None
    logits: torch.Tensor | None
    _model: "TideForCausalLM" = field(repr=False)

    def at(self, position: int | slice) -> "Trace":
        """The trace of one position, or of a stretch of neighbours, as views: what follows costs as little.

        Args:
            position: in -T..T-1, or a slice without a step.

        Returns:
            A trace whose T is 1, or the slice's length.

        Raises:
            ValueError: for a position that the text does not have, or a slice with a step.
        """
        length = self.input_ids.shape[1]
        if isinstance(position, int):
            if not -length <= position < length:
                raise ValueError(f"The trace has positions 0..{length - 1}, not {position}.")
            position = slice(position % length, position % length + 1)
        if position.step not in (None, 1):
            raise ValueError(f"A part of a trace is a stretch of neighbours; the slice has step {position.step}.")
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        there: dict[str, Any] = {n: v[:, position] for n, v in values.items() if isinstance(v, torch.Tensor)}
        return replace(self, **there)

    def parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`attention` and `feed_forward`, [B, T, L, d] each.

        Raises:
            ValueError: where the trace was asked to leave them out.
        """
        if self.attention is None or self.feed_forward is None:
            raise ValueError("This trace has no attention and feed-forward outputs; trace again with_parts=True.")
        return self.attention, self.feed_forward

    def injection(self) -> torch.Tensor:
        """m of equation 3.6 in every layer, a replacement included: [B, T, L, d]."""
        mixed = torch.einsum("btlk,btkd->btld", self.routing[..., :-1].to(self.memory.dtype), self.memory)
        return mixed if self.replacement is None else mixed + self.replacement

    def injection_ratio(self) -> torch.Tensor:
        """Size of the injection beside the stream it is added to, |m| / |h|: [B, T, L] float32.

        h is the residual stream that enters the layer. Ours: the paper shows routing weights only.
        """
        return self.injection().float().norm(dim=-1) / self.hidden[:, :, :-1].float().norm(dim=-1)

    def before_injection(self) -> torch.Tensor:
        """The stream h~ + FFN(n~) just before each layer's injection, the very numbers of the forward: [B, T, L, d].

        Raises:
            ValueError: as `parts`.
        """
        attention, feed_forward = self.parts()
        return self.hidden[:, :, :-1] + attention + feed_forward  # added in the forward's order, so rounded as there

    def attribution(self, target_ids: torch.Tensor) -> torch.Tensor:
        """Direct contribution of every (layer, bank) to the logit of a target token.

        How a logit is divided among all parts, and what that does not show: `tide.analysis.attribution`.

        Args:
            target_ids: [B, T] token ids, or anything that broadcasts to it: the token at each position whose logit
                is explained.

        Returns:
            [B, T, L, K] float32, in logits. What stands in for banks that are off is not in here.
        """
        per_bank = torch.einsum("btd,btkd->btk", self.target_direction(target_ids), self.memory.float())
        weights = self.routing[..., :-1].to(self.memory.dtype).float()  # as rounded in the forward
        return weights * per_bank.unsqueeze(2)

    @torch.no_grad()
    def target_direction(self, target_ids: torch.Tensor) -> torch.Tensor:
        """The vector whose inner product with any part of the last stream is that part's logit contribution.

        Args:
            target_ids: broadcasts to [B, T].

        Returns:
            [B, T, d] float32: unembedding row of the target, times the final norm's gain, over the stream's RMS.
        """
        norm = self._model.model.norm
        last = self.hidden[:, :, -1].float()
        rms = (last.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()  # (B, T, 1)
        return self._model.lm_head.weight[self.targets(target_ids)].float() * norm.weight.float() / rms

    def targets(self, target_ids: torch.Tensor) -> torch.Tensor:
        """Target token ids as one a position: [B, T], on the trace's device.

        Args:
            target_ids: broadcasts to [B, T].

        Raises:
            ValueError: for an id outside the vocabulary.
        """
        targets = torch.as_tensor(target_ids, device=self.hidden.device).expand(self.input_ids.shape)
        size = self._model.config.vocab_size
        outside = targets[(targets < 0) | (targets >= size)]
        if len(outside):
            raise ValueError(f"Target token id {int(outside[0])} is outside the vocabulary, 0..{size - 1}.")
        return targets

    @torch.no_grad()
    def unembed(self, streams: torch.Tensor) -> torch.Tensor:
        """The logits that any residual stream would give, normalised by its own root mean square.

        Args:
            streams: [..., d], before the final norm.

        Returns:
            [..., V] float32; norm and product are the model's own, in its dtype.
        """
        return self._model.lm_head(self._model.model.norm(streams)).float()


class Recorder:
    """Collects a `Trace` while one forward runs. Handed down as an argument; belongs to that forward alone.

    Args:
        with_parts: keep the attention and feed-forward outputs, which take twice the memory of the stream.
    """

    def __init__(self, with_parts: bool = True) -> None:
        self._with_parts = with_parts
        self._hidden: list[torch.Tensor] = []
        self._routing: list[torch.Tensor] = []
        self._attention: list[torch.Tensor] = []
        self._feed_forward: list[torch.Tensor] = []
        self._replacement: list[torch.Tensor | None] = []
        self._memory: torch.Tensor | None = None

    def start(self, embedding: torch.Tensor, memory: torch.Tensor | None) -> None:
        """Notes the stream before layer 0, [B, T, d], and the memory, [B, T, K, d] or None."""
        self._hidden.append(embedding)
        self._memory = embedding.new_zeros((*embedding.shape[:2], 0, embedding.shape[-1])) if memory is None else memory

    def add_layer(
        self,
        hidden: torch.Tensor,
        routing: torch.Tensor | None,
        attended: torch.Tensor,
        fed_forward: torch.Tensor,
        replaced: torch.Tensor | None,
    ) -> None:
        """Notes what a layer did.

        Args:
            hidden: [B, T, d], its output.
            routing: [B, T, K+1], the weights that took effect; None where there is no router.
            attended: [B, T, d], what attention added to the stream.
            fed_forward: [B, T, d], what the feed-forward part added.
            replaced: [B, T, d], what was injected in the place of banks that are off; None where nothing was.
        """
        self._hidden.append(hidden)
        self._routing.append(hidden.new_ones((*hidden.shape[:2], 1)).float() if routing is None else routing)
        self._replacement.append(replaced)
        if self._with_parts:
            self._attention.append(attended)
            self._feed_forward.append(fed_forward)

    def finish(self, model: "TideForCausalLM", input_ids: torch.Tensor, logits: torch.Tensor | None) -> Trace:
        """Stacks what was noted, and forgets it."""
        assert self._memory is not None, "finish() before a forward ran"
        replacement = None
        if any(layer is not None for layer in self._replacement):
            nothing = torch.zeros_like(self._hidden[0])
            replacement = torch.stack([nothing if layer is None else layer for layer in self._replacement], dim=2)
        return Trace(
            input_ids=input_ids,
            routing=_stack(self._routing),
            hidden=_stack(self._hidden),
            memory=self._memory,
            attention=_stack(self._attention) if self._with_parts else None,
            feed_forward=_stack(self._feed_forward) if self._with_parts else None,
            replacement=replacement,
            logits=logits,
            _model=model,
        )


def _stack(layers: list[torch.Tensor]) -> torch.Tensor:
    """Stacks [B, T, ...] of every layer to [B, T, L, ...] and empties the list: one kind at a time is held twice."""
    stacked = torch.stack(layers, dim=2)
    layers.clear()
    return stacked


def kl_divergence(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) in nats over the last dimension: [..., V], [..., V] log-probabilities -> [...]."""
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)

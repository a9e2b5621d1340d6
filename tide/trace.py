"""`Trace`: all that one forward did, and what follows from it."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tide.model import TideForCausalLM


@dataclass
class Trace:
    """What one forward of a TIDE model did. Layers and banks are 0-based, the null bank is last.

    Attributes:
        input_ids: [B, T].
        routing: [B, T, L, K+1] float32, the routing weights that took effect (an intervention included). The
            Base model, which has no router, has one column of ones: all null.
        hidden: [B, T, L+1, d], the residual stream before the final norm: the embedding, then each layer's output.
        memory: [B, T, K, d], M_k(v) of the tokens (equation 3.4).
        logits: [B, T, V], or None where the trace was asked not to compute them.
    """

    input_ids: torch.Tensor
    routing: torch.Tensor
    hidden: torch.Tensor
    memory: torch.Tensor
    logits: torch.Tensor | None
    _model: "TideForCausalLM" = field(repr=False)

    def injection(self) -> torch.Tensor:
        """m of equation 3.6 in every layer: [B, T, L, d]."""
        return torch.einsum("btlk,btkd->btld", self.routing[..., :-1].to(self.memory.dtype), self.memory)

    def injection_ratio(self) -> torch.Tensor:
        """Size of the injection beside the stream it is added to, |m| / |h|: [B, T, L] float32.

        h is the residual stream that enters the layer. Ours: the paper shows routing weights only.
        """
        return self.injection().float().norm(dim=-1) / self.hidden[:, :, :-1].float().norm(dim=-1)

    def attribution(self, target_ids: torch.Tensor) -> torch.Tensor:
        """Direct contribution of every (layer, bank) to the logit of a target token.

        The last residual stream is a sum: embedding, attention and feed-forward outputs, injections. The final
        norm divides all of them by the same number, the root mean square of that very stream, and the unembedding
        is linear. With that number held at its value, the contributions of all parts add up to the logit.
        What a bank changes through later layers is not in here: that is what an intervention shows.

        Args:
            target_ids: [B, T] token ids, or anything that broadcasts to it: the token at each position whose logit
                is explained.

        Returns:
            [B, T, L, K] float32, in logits.
        """
        read = self.target_direction(target_ids)  # (B, T, d)
        per_bank = torch.einsum("btd,btkd->btk", read, self.memory.float())
        return self.routing[..., :-1] * per_bank.unsqueeze(2)

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
        targets = torch.as_tensor(target_ids, device=last.device).expand(self.input_ids.shape)
        return self._model.lm_head.weight[targets].float() * norm.weight.float() / rms


class Recorder:
    """Collects a `Trace` while one forward runs. Handed down as an argument; belongs to that forward alone."""

    def __init__(self) -> None:
        self._hidden: list[torch.Tensor] = []
        self._routing: list[torch.Tensor] = []
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

    def finish(self, model: "TideForCausalLM", input_ids: torch.Tensor, logits: torch.Tensor | None) -> Trace:
        """Stacks what was noted."""
        assert self._memory is not None, "finish() before a forward ran"
        routing, hidden = torch.stack(self._routing, dim=2), torch.stack(self._hidden, dim=2)
        return Trace(input_ids, routing, hidden, self._memory, logits, model)


def kl_divergence(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) in nats over the last dimension: [..., V], [..., V] log-probabilities -> [...]."""
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)

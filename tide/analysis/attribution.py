"""Direct logit attribution: what every part of the residual stream contributes to the logit of a token.

The last residual stream is a sum: the embedding, and of every layer what attention, the feed-forward part, the banks
and a replacement added. The final norm divides all of them by the same number, the root mean square of that very
stream, and multiplies by its gain; the unembedding is linear and has no bias. With the root mean square held at the
value that the forward had, a logit is therefore the sum of one contribution a part, exactly.

What is not in here is what a part changes by way of later layers, or through the root mean square: that is what an
intervention shows. Ours; the paper attributes nothing.
"""

from dataclasses import dataclass

import pandas as pd
import torch

from tide.trace import Trace


@dataclass(frozen=True)
class Contributions:
    """How the logit of one target token a position divides among the parts of the stream; float32, in logits.

    Attributes:
        embedding: [B, T], of the input embedding.
        attention: [B, T, L], of each layer's attention output.
        feed_forward: [B, T, L], of each layer's feed-forward output.
        banks: [B, T, L, K], of each bank, alpha_k M_k(v), in each layer.
        replacement: [B, T, L], of what was injected in the place of banks that are off; zero where nothing was.
        logit: [B, T], of the last stream itself. The parts add up to it but for `rounding`.
    """

    embedding: torch.Tensor
    attention: torch.Tensor
    feed_forward: torch.Tensor
    banks: torch.Tensor
    replacement: torch.Tensor
    logit: torch.Tensor

    def total(self) -> torch.Tensor:
        """The sum of all parts: [B, T]."""
        return self.embedding + self.by_layer().sum(dim=-1)

    def by_layer(self) -> torch.Tensor:
        """Of all that each layer added to the stream: [B, T, L]."""
        return self.attention + self.feed_forward + self.injection()

    def by_bank(self) -> torch.Tensor:
        """Of each bank in all layers together: [B, T, K]."""
        return self.banks.sum(dim=-2)

    def injection(self) -> torch.Tensor:
        """Of each layer's whole injection m, replacement included: [B, T, L]."""
        return self.banks.sum(dim=-1) + self.replacement

    def rounding(self) -> torch.Tensor:
        """What the logit has beyond its parts: [B, T].

        The stream is rounded to the model's dtype after every addition: next to nothing in float32, but a part worth
        showing in bfloat16, which keeps 8 bits.
        """
        return self.logit - self.total()

    def table(self) -> pd.DataFrame:
        """One position as a table, one row a part.

        Returns:
            part ("embedding", "attention", "feed_forward", "bank", "replacement" or "rounding"), layer and bank
            (Int64, missing where the part has none), contribution (in logits, float32). They add up to the logit.

        Raises:
            ValueError: where there is more than one position.
        """
        if self.logit.numel() != 1:
            shape = list(self.logit.shape)
            raise ValueError(f"A table is of one position, these contributions are of {shape}: use trace.at(position).")
        num_layers, num_banks = self.banks.shape[-2:]
        places: list[tuple[str, int | None, int | None]] = [("embedding", None, None), ("rounding", None, None)]
        places += [(part, i, None) for part in ("attention", "feed_forward", "replacement") for i in range(num_layers)]
        places += [("bank", layer, bank) for layer in range(num_layers) for bank in range(num_banks)]
        parts = (self.embedding, self.rounding(), self.attention, self.feed_forward, self.replacement, self.banks)
        table = pd.DataFrame(places, columns=["part", "layer", "bank"]).astype({"layer": "Int64", "bank": "Int64"})
        return table.assign(contribution=torch.cat([part.flatten() for part in parts]).cpu().numpy())


def contributions(trace: Trace, target_ids: torch.Tensor) -> Contributions:
    """Divides the logit of a target token among the parts of the stream.

    The contribution of a part x is W_U[target] . (g * x) / rms, with g the final norm's gain and rms the root mean
    square of the last stream. Numbers of different targets can be subtracted: what a part says for one token
    against another.

    Args:
        trace: with its parts; of one position, `trace.at(position)`, it costs next to nothing.
        target_ids: [B, T] token ids, or anything that broadcasts to it: the token at each position whose logit is
            explained.

    Raises:
        ValueError: for a trace without parts, and for an id outside the vocabulary.
    """
    attention, feed_forward = trace.parts()
    read = trace.target_direction(target_ids)  # (B, T, d)

    def by_layer(parts: torch.Tensor) -> torch.Tensor:
        return torch.einsum("btd,btld->btl", read, parts.float())

    attended = by_layer(attention)
    return Contributions(
        embedding=(read * trace.hidden[:, :, 0].float()).sum(dim=-1),
        attention=attended,
        feed_forward=by_layer(feed_forward),
        banks=trace.attribution(target_ids),
        replacement=torch.zeros_like(attended) if trace.replacement is None else by_layer(trace.replacement),
        logit=(read * trace.hidden[:, :, -1].float()).sum(dim=-1),
    )

"""Reading the stage `compression`."""

from typing import TYPE_CHECKING

from precompute.artifacts.probe import ProbeReader

if TYPE_CHECKING:
    import pandas as pd


class CompressionReader(ProbeReader):
    """The loss with the memory compressed (table 5, figure 12)."""

    def compression(self, text: str = "all", bin: str = "all") -> "pd.DataFrame":
        """What the loss becomes when the memory is stored in fewer bits (table 5) or in fewer ranks (figure 12).

        Args:
            text: one of `domains`, or "all", all of them together.
            bin: "all"; "rare", "mid" or "common", by the frequency of the token to predict; "none", tokens without.

        Returns:
            One row a form. Columns form ("none", "int8", "int4", "svd-0".."svd-90"), bits (of a number), percent (of
            the ranks taken away) and rank (-1 where there is no SVD), bytes (of the whole memory, scales included; of
            an SVD its two factors), error (|E' - E| / |E| over all banks, Frobenius norms); and n (positions),
            n_windows, loss (mean, nats), difference (from the unchanged memory on the same positions, mean, nats), sd
            (of the difference over positions), low and high (95 % interval of the difference over windows; NaN in one
            window), perplexity and perplexity_change_percent. No rows where the text has no positions in the bin.

        Raises:
            ValueError: for a text or bin that is not there.
        """
        return self._of_probe("compression", text, bin)

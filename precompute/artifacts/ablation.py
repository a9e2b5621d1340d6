"""Reading the stage `ablation`."""

from typing import TYPE_CHECKING

from precompute.artifacts.probe import ProbeReader, check_known

if TYPE_CHECKING:
    import pandas as pd

KINDS = ("none", "layer", "bank", "pair", "all")
REPLACEMENTS = ("none", "zero", "mean", "random")


class AblationReader(ProbeReader):
    """The loss with parts of the memory switched off (figure 11)."""

    def ablation(
        self, kind: str | None = None, replacement: str | None = None, text: str = "all", bin: str = "all"
    ) -> "pd.DataFrame":
        """What the loss becomes when parts of the memory are switched off.

        `a.ablation("layer", "zero")` is figure 11. Zeroing measures what the trained model leans on, not what a part
        is worth: read "random" beside it, the control, which injects as much in a direction that means nothing.

        Args:
            kind: "layer", "bank" (in all layers), "pair" (one bank in one layer), "all" (the whole memory), or "none",
                the unchanged model; None for all kinds.
            replacement: "zero", "mean" or "random", or "none", the unchanged model; None for all.
            text: one of `domains`, or "all", all of them together.
            bin: "all"; "rare", "mid" or "common", by the frequency of the token to predict; "none", tokens without.

        Returns:
            Columns kind, layer and bank (-1 for all), replacement, n (positions), n_windows, loss (mean, nats),
            difference (from the unchanged model on the same positions, mean, nats), sd (of the difference over
            positions), low and high (95 % interval of the difference over windows; NaN in one window), perplexity and
            perplexity_change_percent (100 (exp(difference) - 1), the unit of figure 11). No rows where the text has no
            positions in the bin.

        Raises:
            ValueError: for a kind, replacement, text or bin that is not there.
        """
        rows = self._of_probe("ablation", text, bin)
        for column, value, known in (("kind", kind, KINDS), ("replacement", replacement, REPLACEMENTS)):
            if value is not None:
                check_known(column, value, known)
                rows = rows[rows[column] == value]
        return rows.reset_index(drop=True)

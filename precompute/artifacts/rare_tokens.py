"""Reading the stage `rare_tokens`."""

from typing import TYPE_CHECKING

from precompute.artifacts.reader import Reader

if TYPE_CHECKING:
    import pandas as pd

ALL_TEXTS = "all"
BIN_KINDS = ("decile", "group", "all")
AVERAGINGS = ("position", "type")


class RareTokensReader(Reader):
    """Loss by frequency (figures 5 and 7)."""

    def rare_token_losses(
        self, bin_kind: str = "decile", text: str = "all", averaging: str = "position"
    ) -> "pd.DataFrame":
        """Cross entropy of the held-out text by the frequency of the token to predict (figure 7).

        Args:
            bin_kind: "decile", "group" (rare, mid, common) or "all".
            text: one of `domains`, or "all", all of them together.
            averaging: "position", every position weighs the same; "type", every token id that occurs does.

        Returns:
            Columns model ("base", "tide"), bin, n (positions), n_types (token ids), n_windows, mean, low, high (nats;
            95 % interval over windows, NaN where the bin lies in one window), perplexity, perplexity_low,
            perplexity_high (of "all" by position, else NaN). Bins without positions have no row, and so has a text
            that is shorter than a window.

        Raises:
            ValueError: for a bin kind, text or averaging that is not there.
        """
        return self._chosen("losses", bin_kind, text, averaging)

    def rare_token_differences(
        self, bin_kind: str = "decile", text: str = "all", averaging: str = "position"
    ) -> "pd.DataFrame":
        """Loss of Base minus loss of TIDE on the same positions (figure 5).

        Args:
            bin_kind: as `rare_token_losses`.
            text: as `rare_token_losses`.
            averaging: as `rare_token_losses`.

        Returns:
            Columns model, base, bin, n, n_types, n_windows, mean (nats, above 0 where TIDE predicts better), low, high
            (95 %, paired), better ("model", "base" or "unclear"). No rows where there was no Base.

        Raises:
            ValueError: for a bin kind, text or averaging that is not there.
        """
        return self._chosen("differences", bin_kind, text, averaging)

    def _chosen(self, name: str, bin_kind: str, text: str, averaging: str) -> "pd.DataFrame":
        rows = self.frame("rare_tokens", name)
        texts = (*self.parameters("text")["domains"], ALL_TEXTS)
        for column, value, known in (
            ("bin_kind", bin_kind, BIN_KINDS),
            ("text", text, texts),
            ("averaging", averaging, AVERAGINGS),
        ):
            if value not in known:
                raise ValueError(f"There is no {column} {value!r}; there are {', '.join(map(repr, known))}.")
            rows = rows[rows[column] == value].drop(columns=column)
        return rows.reset_index(drop=True)

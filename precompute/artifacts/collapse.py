"""Reading the stage `collapse`."""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from precompute.artifacts.reader import Reader

if TYPE_CHECKING:
    import pandas as pd

METRICS = ("l2", "normalized_l2", "cosine_distance")
RELATIVE_L2 = "relative_l2"
PROBE_METRICS = ("pair_accuracy", "d_prime", "identity_accuracy")


class CollapseReader(Reader):
    """The collapse study (figures 2 and 6)."""

    @cached_property
    def _collapse(self) -> "pd.DataFrame":
        return self.frame("collapse")

    def collapse(
        self, category: str | None = None, pair: str | None = None, metrics: Sequence[str] = METRICS
    ) -> "pd.DataFrame":
        """Distance between the hidden states of two words in the same template, by layer (figures 2 and 6).

        Args:
            category: one of `collapse_pairs().category`; None for all.
            pair: one of `collapse_pairs().pair`; None for all.
            metrics: of "l2"; "normalized_l2", L2 of the vectors scaled to length one; "cosine_distance", 1 - cosine;
                and "relative_l2" (ours), L2 over the mean L2 distance between the states of one word in different
                templates: 1 where another word moves the state as far as another sentence does. It has no value in
                the embedding, which does not depend on the sentence.

        Returns:
            Columns model ("base", "tide"), layer (the residual stream before the final norm: 0 is the embedding, l
            is the stream after decoder layer l-1, up to L), metric, mean, sd (sample standard deviation, NaN for
            n < 2) and n, over every pair and template that was selected and has a value.

        Raises:
            ValueError: for a category, pair or metric that is not there, also for a pair of another category.
        """
        rows = self._collapse
        if unknown := [metric for metric in metrics if metric not in (*METRICS, RELATIVE_L2)]:
            raise ValueError(f"There is no metric {unknown[0]!r}; there are {', '.join((*METRICS, RELATIVE_L2))}.")
        for column, value in (("category", category), ("pair", pair)):
            if value is None:
                continue
            known = rows[column].unique()
            rows = rows[rows[column] == value]
            if rows.empty:
                raise ValueError(f"There is no {column} {value!r}; there are {', '.join(map(repr, known))}.")
        long = rows.melt(["model", "layer"], list(metrics), var_name="metric", value_name="distance")
        return long.groupby(["model", "layer", "metric"], as_index=False, sort=True)["distance"].agg(
            mean="mean", sd="std", n="count"
        )

    def collapse_probe(self, category: str | None = None) -> "pd.DataFrame":
        """Whether a linear probe can tell which word a hidden state stands at, in templates it has not seen (ours).

        Args:
            category: one of `collapse_pairs().category`; None for all, each in rows of its own.

        Returns:
            Columns category, model ("base", "tide"), layer (as in `collapse`), metric, mean, sd (sample standard
            deviation over pairs, NaN for n < 2), n (pairs that have a value), sentences (tested, of those pairs) and
            chance. Metrics: "pair_accuracy", which of the two words it is; "d_prime", the distance between the scores
            of the two words in units of their spread over sentences (0 cannot be told apart; no value in the
            embedding, which does not depend on the sentence); "identity_accuracy", which of all words of the category
            it is. Nothing has a value where the category has a single template.

        Raises:
            ValueError: for a category that is not there.
        """
        rows = self.frame("collapse", "probe")
        if category is not None:
            if category not in set(rows["category"]):
                known = ", ".join(map(repr, rows["category"].unique()))
                raise ValueError(f"There is no category {category!r}; there are {known}.")
            rows = rows[rows["category"] == category]
        keys = ["category", "model", "layer", "words"]
        long = rows.melt([*keys, "sentences"], list(PROBE_METRICS), var_name="metric", value_name="value")
        long["sentences"] = long["sentences"].where(long["value"].notna(), 0)
        grouped = long.groupby(["category", "metric", *keys[1:]], as_index=False, sort=True)
        table = grouped.agg(
            mean=("value", "mean"), sd=("value", "std"), n=("value", "count"), sentences=("sentences", "sum")
        )
        chance = {"pair_accuracy": 0.5, "d_prime": 0.0}
        table["chance"] = table["metric"].map(chance).fillna(1 / table["words"])
        return table[["category", "model", "layer", "metric", "mean", "sd", "n", "sentences", "chance"]]

    def collapse_pairs(self) -> "pd.DataFrame":
        """The pairs of words of the collapse study.

        Returns:
            Columns category, pair ("their / there"), word_a, word_b, tokens_a, tokens_b: the number of tokens of each
            word. A word of more than one is read at its last token.
        """
        return self.frame("collapse", "pairs")

"""Reading the stage `overlap`."""

from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from precompute.artifacts.neighbors import NeighborReader
from precompute.artifacts.vocabulary import VocabularyReader
from precompute.search import jaccard, rank_biased_overlap

if TYPE_CHECKING:
    import pandas as pd

OVERLAP_K = 10  # figure 13 compares the 10 nearest neighbours
RBO_P = 0.9  # weight of each rank against the one before: the first 10 of 50 have 86 %
OverlapMeasure = Literal["jaccard", "rbo"]
MEASURES = get_args(OverlapMeasure)


class OverlapReader(NeighborReader, VocabularyReader):
    """How far neighbour lists agree between tables (figure 13).

    Two measures: "jaccard", of the 10 nearest as sets, and "rbo", rank-biased overlap of all that are stored. Both go
    from 0 (nothing in common) to 1 (the same).
    """

    def overlap(self, token_id: int, measure: OverlapMeasure = "jaccard") -> np.ndarray:
        """Overlap of a token's neighbours in each bank with those in the input embedding (figure 13).

        Args:
            token_id: 0..V-1.
            measure: "jaccard" or "rbo".

        Returns:
            [K] float32, 0 to 1.

        Raises:
            ValueError: for a token id or measure that is not there.
        """
        by_table = self.overlap_by_table(token_id)[_check_measure(measure)].to_numpy()
        return by_table[len(by_table) - self.num_banks :]

    def overlap_by_table(self, token_id: int) -> "pd.DataFrame":
        """Overlap of a token's neighbours in every other table with those in the input embedding.

        Returns:
            Columns table ("unembedding" where it is another table, "bank_0", ...), jaccard, rbo (float32, 0 to 1).

        Raises:
            ValueError: for a token id that is not there.
        """
        import pandas as pd

        token_id, names = self._check_token(token_id), [self._table_name(table) for table in self.tables[1:]]
        rows, columns = slice(token_id, token_id + 1), {name: np.empty(0, np.float32) for name in MEASURES}
        self._path("overlap", "")
        if names:
            stored = self.tensors("overlap", "tokens")
            columns = {name: stored.get_slice(name)[rows][0] for name in MEASURES}
        return pd.DataFrame({"table": names, **columns})

    def overlap_by_decile(self, measure: OverlapMeasure = "jaccard") -> "pd.DataFrame":
        """Mean of `overlap` over the tokens of each frequency decile (figure 13 by decile).

        Args:
            measure: "jaccard" or "rbo".

        Returns:
            Columns decile (those that have tokens), bank, mean, sd (sample standard deviation, NaN for n < 2), n
            (tokens).

        Raises:
            ValueError: for a measure that is not there.
        """
        rows = self._pair_means(measure)
        is_bank = (rows["a"] == "embedding") & (rows["b"] != "unembedding")
        rows = rows[is_bank & rows["decile"].isin(range(10)) & (rows["n"] > 0)]
        table = rows.assign(bank=rows["b"].str.removeprefix("bank_")).astype({"decile": np.int64, "bank": np.int64})
        ordered = table.sort_values(["decile", "bank"], ignore_index=True)
        return ordered[["decile", "bank", "mean", "sd", "n"]]

    def overlap_between(self, measure: OverlapMeasure = "jaccard", decile: int | None = None) -> "pd.DataFrame":
        """Mean overlap of the neighbours of a token in every two tables (ours).

        Args:
            measure: "jaccard" or "rbo".
            decile: over the token ids of one, -1 for those without one; None for all.

        Returns:
            Columns a, b (every two, both ways, a table with itself too, whose overlap is 1), mean, sd (sample standard
            deviation over token ids, NaN for n < 2), n (token ids).

        Raises:
            ValueError: for a measure or decile that is not there.
        """
        import pandas as pd

        if decile is not None and not -1 <= decile <= 9:
            raise ValueError(f"There is no decile {decile}; they go from 0 to 9, and -1 is none.")
        rows = self._pair_means(measure)
        rows = rows[rows["decile"].isna() if decile is None else rows["decile"] == decile]
        names = [self._table_name(table) for table in self.tables]
        n = self.vocab_size if decile is None else int((self.bins == decile).sum())
        mean, sd = (1.0 if n else np.nan), (0.0 if n > 1 else np.nan)
        with_itself = pd.DataFrame({"a": names, "b": names, "mean": mean, "sd": sd, "n": n})
        turned = rows.rename(columns={"a": "b", "b": "a"})
        every = pd.concat([part for part in (with_itself, rows, turned) if len(part)]).set_index(["a", "b"])
        both_ways = pd.MultiIndex.from_product([names, names], names=["a", "b"])
        return every.loc[both_ways, ["mean", "sd", "n"]].reset_index()

    def random_overlap(self, measure: OverlapMeasure = "jaccard") -> float:
        """Mean overlap of two random lists: what chance alone would give.

        Raises:
            ValueError: for a measure that is not there.
        """
        return self.parameters("overlap")["random"][_check_measure(measure)]

    def overlap_matrix(self, token_id: int, k: int = OVERLAP_K, measure: OverlapMeasure = "jaccard") -> np.ndarray:
        """Overlap of a token's k nearest neighbours between the input embedding and the banks; reads `neighbors` alone.

        Args:
            token_id: 0..V-1.
            k: how many, at most the number stored (50, or V - 1).
            measure: "jaccard" or "rbo".

        Returns:
            [K+1, K+1] float32; the input embedding first, then bank 0..K-1; symmetric, ones on the diagonal.

        Raises:
            ValueError: for a token id, k or measure that is not there.
        """
        is_jaccard = _check_measure(measure) == "jaccard"
        tables = ("embedding", *range(self.num_banks))
        ids = np.stack([self.neighbors(token_id, table, k)[0] for table in tables])
        size = len(ids)
        first, second = np.repeat(ids, size, axis=0), np.tile(ids, (size, 1))
        same = jaccard(first, second) if is_jaccard else rank_biased_overlap(first, second, RBO_P)
        return same.reshape(size, size)

    def _pair_means(self, measure: str) -> "pd.DataFrame":
        rows = self.frame("overlap", "pairs")
        return rows[rows["measure"] == _check_measure(measure)].drop(columns="measure")


def _check_measure(measure: str) -> str:
    if measure not in MEASURES:
        raise ValueError(f"There is no measure {measure!r}; there are {', '.join(map(repr, MEASURES))}.")
    return measure

"""Reading the stage `geometry`."""

from typing import TYPE_CHECKING

import numpy as np

from precompute.artifacts.reader import Reader

if TYPE_CHECKING:
    import pandas as pd

_NUM_DECILES = 10
_NO_DECILE, _ALL_TOKENS = 10, 11  # places behind the deciles in the tensors


class GeometryReader(Reader):
    """How the tables lie to one another (figures 1 and 9). In data frames bank k is called "bank_k"."""

    def cosine_distance(self, decile: int | None = None) -> "pd.DataFrame":
        """Mean cosine distance of the rows of every two tables, 1 - cosine of A[v] and B[v] over tokens v (figure 9).

        A row of zeros has cosine 0 with every row, itself included.

        Args:
            decile: over the token ids of one, -1 for those without one; None for all.

        Returns:
            Columns a, b (every two, both ways, a table with itself too), mean, sd (sample standard deviation over
            token ids, NaN for n < 2), n (token ids).

        Raises:
            ValueError: for a decile that is not there.
        """
        group = self._group(decile)
        stored, rows = self.tensors("geometry"), slice(group, group + 1)
        frame = self._pairs()
        return frame.assign(
            mean=stored.get_slice("distance_mean")[rows].reshape(-1),
            sd=stored.get_slice("distance_sd")[rows].reshape(-1),
            n=int(stored.get_slice("distance_n")[rows][0]),
        )

    def row_norms(self) -> "pd.DataFrame":
        """L2 norm of the rows of every table by decile (figure 1), of a bank the rows E_k[v] as they are stored.

        Returns:
            Columns table, decile (0 to 9; -1 none), mean, sd (sample standard deviation, NaN for n < 2), n (token
            ids), and quantiles q05, q25, q50, q75, q95.
        """
        return self.frame("geometry", "norms")

    def norms_of(self, token_id: int) -> np.ndarray:
        """L2 norm of a token's row in every table, of a bank E_k[v] as it is stored.

        Returns:
            [T] float32, in the order of `tables`.

        Raises:
            ValueError: for a token id that is not there.
        """
        token_id = self._check_token(token_id)
        return self.tensors("geometry").get_slice("norms")[:, token_id : token_id + 1][:, 0]

    def spectrum(self, centered: bool = True) -> "pd.DataFrame":
        """Singular values of every table, of M_k(v) for a bank (ours).

        Args:
            centered: of the table without its mean row; else as it is, where a direction that all rows have in common
                comes first.

        Returns:
            Columns table, index (0 the largest), singular_value (below 1e-7 of the largest uncentred one it is
            rounding), share (of the table's sum of squares, or variance; NaN for a table of zeros).
        """
        import pandas as pd

        values = self.tensors("geometry").get_tensor("centered" if centered else "uncentered")
        squares = values**2
        total = squares.sum(axis=1, keepdims=True)
        share = np.divide(squares, total, out=np.full_like(squares, np.nan), where=total > 0)
        return pd.DataFrame(
            {
                "table": np.repeat(self.table_names, values.shape[1]),
                "index": np.tile(np.arange(values.shape[1]), len(values)),
                "singular_value": values.reshape(-1),
                "share": share.reshape(-1),
            }
        )

    def effective_rank(self) -> "pd.DataFrame":
        """How many directions every table uses (ours).

        Returns:
            Columns table, centered (bool), effective_rank (exp of the entropy of the singular values as shares of
            their sum; Roy & Vetterli 2007), participation_ratio (1 over the sum of squared shares of the variance),
            top_1, top_10, top_100 (share of the variance in so many directions). NaN for a table of zeros.
        """
        return self.frame("geometry", "ranks")

    def principal_angles(self) -> "pd.DataFrame":
        """How much the leading directions of every two tables have in common (ours).

        Of each table, without its mean row, the first r right singular vectors span a subspace.

        Returns:
            Columns a, b (every two, both ways, a table with itself too), mean_cosine and mean_squared_cosine (over
            the r principal angles; 1 the same subspace, 0 orthogonal), largest (the largest cosine), directions (r),
            random (r/d, what mean_squared_cosine is of two random subspaces on average).
        """
        cosines = self.tensors("geometry").get_tensor("principal_cosines")
        count, width = cosines.shape[-1], self.manifest["model"]["hidden_size"]
        flat = cosines.reshape(-1, count)
        return self._pairs().assign(
            mean_cosine=flat.mean(axis=1),
            mean_squared_cosine=(flat**2).mean(axis=1),
            largest=flat[:, 0],
            directions=count,
            random=count / width,
        )

    def principal_cosines(self, a: str | int, b: str | int) -> np.ndarray:
        """Cosines of the principal angles between the leading directions of two tables: [r] float64, descending.

        Args:
            a: "embedding", "unembedding" or a bank 0..K-1.
            b: likewise.

        Raises:
            ValueError: for a table that is not there.
        """
        row, column = self._table_row(a), self._table_row(b)
        return self.tensors("geometry").get_slice("principal_cosines")[row : row + 1, column : column + 1][0, 0]

    def _pairs(self) -> "pd.DataFrame":
        import pandas as pd

        names = self.table_names
        return pd.DataFrame({"a": np.repeat(names, len(names)), "b": np.tile(names, len(names))})

    @staticmethod
    def _group(decile: int | None) -> int:
        if decile is None:
            return _ALL_TOKENS
        if not -1 <= decile < _NUM_DECILES:
            raise ValueError(f"There is no decile {decile}; they go from 0 to {_NUM_DECILES - 1}, and -1 is none.")
        return _NO_DECILE if decile == -1 else int(decile)

"""Reading the stage `maps`."""

from typing import TYPE_CHECKING

import numpy as np

from precompute.artifacts.vocabulary import VocabularyReader

if TYPE_CHECKING:
    import pandas as pd


class MapReader(VocabularyReader):
    """Maps of the tables, laid out together (ours)."""

    def map_of(self, table: str | int = "embedding") -> np.ndarray:
        """Where every token lies in a table's map.

        Args:
            table: one of `tables`.

        Returns:
            [V, 2] float32, in standard deviations of the input embedding's map; places in different maps compare.

        Raises:
            ValueError: for a table that is not there.
        """
        row = self._table_row(table)
        return self.tensors("maps").get_slice("coordinates")[row : row + 1][0]

    def movement(self, token_id: int) -> "pd.DataFrame":
        """How far a token lies from its place in the input embedding's map.

        Returns:
            Columns table (all but the input embedding), distance, in standard deviations of that map's coordinates.

        Raises:
            ValueError: for a token id that is not there.
        """
        import pandas as pd

        token_id = self._check_token(token_id)
        if len(self.tables) == 1:  # safetensors does not slice an empty tensor
            return pd.DataFrame({"table": [], "distance": np.empty(0, dtype=np.float32)})
        distances = self.tensors("maps").get_slice("movement")[token_id : token_id + 1][0]
        return pd.DataFrame({"table": self.tables[1:], "distance": distances})

    def movement_by_decile(self) -> "pd.DataFrame":
        """Movement between the input embedding's map and every other one, by frequency decile.

        Returns:
            Columns table, decile (-1 for tokens without one), mean, sd (sample standard deviation), median, n (tokens).
        """
        import pandas as pd

        moved = pd.DataFrame(self.tensors("maps").get_tensor("movement"), dtype=np.float64)
        moved.columns = pd.Index(self.tables[1:], dtype=object)
        rows = moved.assign(decile=self.bins).melt("decile", var_name="table", value_name="distance")
        groups = rows.groupby(["table", "decile"], as_index=False, sort=False)["distance"]
        return groups.agg(mean="mean", sd="std", median="median", n="count")

    def trustworthiness(self) -> "pd.DataFrame":
        """How far each map's neighbours are neighbours in its table (Venna and Kaski 2001).

        Returns:
            Columns table, mean (1 where they are the same, 0.5 at random), sd over tokens, n (tokens of the sample).
        """
        import pandas as pd

        values = self.tensors("maps").get_tensor("trustworthiness").astype(np.float64)
        sd = values.std(axis=1, ddof=1) if values.shape[1] > 1 else np.full(len(values), np.nan)
        return pd.DataFrame({"table": self.tables, "mean": values.mean(axis=1), "sd": sd, "n": values.shape[1]})

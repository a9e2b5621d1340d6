"""Reading the stage `frequency`: counts, deciles and texts of all token ids."""

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from precompute.artifacts.reader import Reader

if TYPE_CHECKING:
    import pandas as pd


class VocabularyReader(Reader):
    """The vocabulary (appendix B)."""

    @cached_property
    def counts(self) -> np.ndarray:
        """Occurrences of every token id in `count_corpus`: [V] int64."""
        return self._column("count").to_numpy()

    @cached_property
    def bins(self) -> np.ndarray:
        """Frequency decile of every token id, 0 rarest to 9 most common, -1 none: [V] int8 (appendix B)."""
        return self._column("decile").to_numpy()

    @property
    def count_corpus(self) -> str:
        """Names the text whose tokens were counted."""
        return self.parameters("frequency")["count_corpus"]

    @cached_property
    def texts(self) -> list[str]:
        """Decoded text of every token id, [V]; bytes that are no whole character are U+FFFD."""
        return self._column("text").tolist()

    @cached_property
    def shown(self) -> list[str]:
        """Visible form of every token id, [V] (`tide.tokens.Vocabulary.show`)."""
        return self._column("shown").tolist()

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens."""
        return frozenset(np.flatnonzero(self._column("special").to_numpy()).tolist())

    def _column(self, name: str) -> "pd.Series":
        return self.frame("frequency", "tokens", [name])[name]

"""What the readers of the stages that measure on the probe text share."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from precompute.artifacts.reader import Reader

if TYPE_CHECKING:
    import pandas as pd

BINS = ("all", "rare", "mid", "common", "none")


class ProbeReader(Reader):
    """Losses on the probe text by text and frequency bin."""

    def _of_probe(self, stage: str, text: str, bin: str) -> "pd.DataFrame":
        """The rows of a text and bin, without the columns that say so.

        Raises:
            ValueError: for a text or bin that is not there.
        """
        check_known("text", text, ["all", *self.parameters("text")["domains"]])
        check_known("bin", bin, BINS)
        rows = self.frame(stage)
        chosen = rows[(rows["text"] == text) & (rows["bin"] == bin)]
        return chosen.drop(columns=["text", "bin_kind", "bin"]).reset_index(drop=True)


def check_known(name: str, value: str, known: Sequence[str]) -> None:
    """Checks an argument against what there is.

    Raises:
        ValueError: one sentence that lists what there is.
    """
    if value not in known:
        raise ValueError(f"There is no {name} {value!r}; there are {', '.join(map(repr, known))}.")

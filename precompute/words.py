"""Where in its word a token stands. Ours: the paper has no such measure.

A word is a run of tokens in which letters or digits go on: a token continues the word before it if its text begins with
a letter or digit and the text of the token before ends with one. Letters and digits are those of `str.isalnum`. A token
that holds none, and every special token, is of no word; so is a token that is a part of a character only.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

WORD_POSITIONS = ("start", "1", "2", "3+", "no word")
"""Names of the positions: the word's first token, its second, its third, all later ones; and tokens of no word."""

_LATER = WORD_POSITIONS.index("3+")
_NO_WORD = WORD_POSITIONS.index("no word")


@dataclass(frozen=True)
class TokenEdges:
    """What is known of every token id, so that words are found without its text.

    Attributes:
        begins: [V] bool, its text begins with a letter or digit.
        ends: [V] bool, its text ends with one.
        holds: [V] bool, there is one in it.
    """

    begins: np.ndarray
    ends: np.ndarray
    holds: np.ndarray

    @classmethod
    def of(cls, texts: Sequence[str], special_ids: Collection[int]) -> "TokenEdges":
        """Looks at every text once.

        Args:
            texts: [V], decoded text of every token id.
            special_ids: special tokens, whose texts are names.
        """
        plain = ["" if token_id in special_ids else text for token_id, text in enumerate(texts)]
        return cls(
            np.array([text[:1].isalnum() for text in plain], dtype=bool),
            np.array([text[-1:].isalnum() for text in plain], dtype=bool),
            np.array([any(map(str.isalnum, text)) for text in plain], dtype=bool),
        )


def word_positions(input_ids: np.ndarray, edges: TokenEdges) -> np.ndarray:
    """The position in its word of every token.

    Nothing stands before the first token of a window, whatever the text held there: the model does not see it either,
    so that such a token starts a word.

    Args:
        input_ids: [B, T] token ids; a row is a window.
        edges: of the tokenizer's token ids.

    Returns:
        [B, T] int64, indexes of `WORD_POSITIONS`.
    """
    continues = edges.begins[input_ids]
    continues[:, 1:] &= edges.ends[input_ids[:, :-1]]
    continues[:, :1] = False
    place = np.arange(input_ids.shape[1])
    start = np.maximum.accumulate(np.where(continues, 0, place), axis=1)  # of the run that each token is in
    return np.where(edges.holds[input_ids], np.minimum(place - start, _LATER), _NO_WORD)

"""Reading the stage `text`: the tokens of the held-out text, and contexts in it."""

import numpy as np

from precompute.artifacts.reader import Reader


class TextReader(Reader):
    """The held-out text."""

    @property
    def domains(self) -> list[str]:
        """What each held-out text is called."""
        return list(self.parameters("text")["domains"])

    @property
    def window_tokens(self) -> int:
        """Tokens that the model read at once."""
        return self.parameters("text")["window_tokens"]

    def context(self, position: int, before: int = 16, after: int = 8) -> tuple[np.ndarray, int]:
        """The tokens around a position of the held-out text, of the window in which the model read it.

        Args:
            position: its place in the token stream, as other stages give it.
            before: at most how many tokens before it.
            after: at most how many behind it.

        Returns:
            Token ids int64 [n], and the index of the position among them.

        Raises:
            ValueError: for a position that is not there.
        """
        starts = self._file_starts()
        file = self._file_of(position)
        window = int(starts[file]) + (position - int(starts[file])) // self.window_tokens * self.window_tokens
        first = max(window, position - before)
        last = min(window + self.window_tokens, int(starts[file + 1]), position + after + 1)
        tokens = self.tensors("text", "tokens").get_slice("tokens")[first:last]
        return tokens.astype(np.int64), position - first

    def domain_of(self, position: int) -> str:
        """The held-out text that a position lies in.

        Raises:
            ValueError: for a position that is not there.
        """
        return self.domains[self._file_of(position)]

    def _file_starts(self) -> np.ndarray:
        return self.tensors("text", "tokens").get_tensor("file_starts")

    def _file_of(self, position: int) -> int:
        starts = self._file_starts()
        if not 0 <= position < starts[-1]:
            raise ValueError(f"There is no position {position}; the text has positions 0 to {starts[-1] - 1}.")
        return int(np.searchsorted(starts, position, side="right")) - 1

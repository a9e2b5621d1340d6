"""The held-out text: files, their token ids, and the windows in which the model reads them."""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tide.cli import UserError

if TYPE_CHECKING:
    from precompute.artifacts import Artifacts

PIECE_TOKENS = 65_536  # of a piece of a stage that runs the model: a minute of a small model on two cores
MAX_PIECES = 128  # of a long text: what they keep on disk until they are combined grows with their number
PREFIX = "heldout_"


def check_text_files(files: Sequence[Path], option: str) -> None:
    """Checks that every file can be read.

    Raises:
        UserError: one sentence that names the first file that is missing or no file.
    """
    for file in files:
        if not file.is_file():
            raise UserError(f"There is no text file {file}; give {option} UTF-8 text files.")


def describe_text(files: Sequence[Path]) -> dict[str, Any]:
    """Names and sizes of text files, and a fingerprint of all that is in them, for the manifest."""
    digest, entries = hashlib.sha256(), []
    for file in files:
        with file.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256")
        digest.update(content.digest())
        entries.append({"name": file.name, "bytes": file.stat().st_size})
    return {"files": entries, "fingerprint": digest.hexdigest()[:32]}


def domain_names(files: Sequence[Path]) -> list[str]:
    """What each file's text is called: its name without `heldout_` and suffix; numbered where two are alike."""
    stems = [file.stem.removeprefix(PREFIX) for file in files]
    return [
        stem if stems.count(stem) == 1 else f"{stem} {stems[:number].count(stem) + 1}"
        for number, stem in enumerate(stems)
    ]


@dataclass(frozen=True)
class Batch:
    """Some windows of one length.

    Attributes:
        input_ids: [B, T] int64.
        starts: [B] int64, where each window begins in the token stream.
        windows: [B] int64, numbers of the windows.
        domains: [B] int64, number of the file that each window is of.
    """

    input_ids: np.ndarray
    starts: np.ndarray
    windows: np.ndarray
    domains: np.ndarray

    @property
    def positions(self) -> np.ndarray:
        """[B, T] int64, the place of every token in the stream."""
        return self.starts[:, None] + np.arange(self.input_ids.shape[1])


class HeldOutText:
    """The token stream of the held-out files, cut into windows as the model reads them.

    Documents stand one after the other, each behind its document mark, as in training. A file is cut into windows
    that follow one another; its last window is shorter, and no position is left out.

    Args:
        tokens: [N] integer; anything that gives an array when it is sliced.
        file_starts: [F+1], where each file begins in the stream, then N.
        domains: [F], what each file is called.
        length: tokens a window.
    """

    def __init__(self, tokens: Any, file_starts: np.ndarray, domains: Sequence[str], length: int):
        self._tokens = tokens
        self.file_starts = np.asarray(file_starts, dtype=np.int64)
        self.domains = tuple(domains)
        self.length = length

    @classmethod
    def open(cls, artifacts: "Artifacts") -> "HeldOutText":
        """The text that artifacts were made on; its tokens stay on disk."""
        stored = artifacts.tensors("text", "tokens")
        return cls(
            stored.get_slice("tokens"), stored.get_tensor("file_starts"), artifacts.domains, artifacts.window_tokens
        )

    def __len__(self) -> int:
        """N, all tokens."""
        return int(self.file_starts[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Token ids start..stop-1 of the stream: int64."""
        return np.asarray(self._tokens[start:stop], dtype=np.int64)

    @cached_property
    def window_starts(self) -> np.ndarray:
        """[W] int64, where each window begins in the stream."""
        return np.concatenate(
            [np.arange(start, stop, self.length) for start, stop in itertools.pairwise(self.file_starts)]
        )

    @cached_property
    def window_lengths(self) -> np.ndarray:
        """[W] int64, tokens of each window."""
        return np.diff(np.append(self.window_starts, len(self)))

    @cached_property
    def window_domains(self) -> np.ndarray:
        """[W] int64, number of the file that each window is of."""
        return np.searchsorted(self.file_starts, self.window_starts, side="right") - 1

    def pieces(self) -> list[str]:
        """Names of runs of windows of about `PIECE_TOKENS` tokens, more in a long text: "windows-00000000-00000256"."""
        size = max(PIECE_TOKENS, -(-len(self) // MAX_PIECES))
        edges = np.flatnonzero(np.diff(self.window_starts // size)) + 1
        bounds = [0, *edges.tolist(), len(self.window_starts)]
        return [f"windows-{a:08d}-{b:08d}" for a, b in itertools.pairwise(bounds)]

    def windows_of(self, piece: str) -> range:
        """The windows of a piece."""
        _, start, stop = piece.split("-")
        return range(int(start), int(stop))

    def batches(self, windows: Sequence[int], batch_tokens: int) -> Iterator[Batch]:
        """Windows in order, as many together as have one length and `batch_tokens` tokens, at least one.

        Args:
            windows: numbers of windows.
            batch_tokens: tokens a forward.
        """
        batch: list[int] = []
        for window in windows:
            length = self.window_lengths[window]
            if batch and (length != self.window_lengths[batch[0]] or (len(batch) + 1) * length > batch_tokens):
                yield self._batch(batch)
                batch = []
            batch.append(window)
        if batch:
            yield self._batch(batch)

    def _batch(self, windows: list[int]) -> Batch:
        chosen = np.array(windows)
        starts, length = self.window_starts[chosen], int(self.window_lengths[chosen[0]])
        rows = [self.read(start, start + length) for start in starts.tolist()]
        return Batch(np.stack(rows), starts, chosen, self.window_domains[chosen])

    def probe(self, tokens: int) -> list[int]:
        """Whole windows, evenly spaced in every file, each file with about the same number of tokens.

        Args:
            tokens: about how many tokens in all; at least one window a file is taken.

        Returns:
            Numbers of windows, ascending; of a file without a whole window its last, shorter one.
        """
        chosen: list[int] = []
        for domain in range(len(self.domains)):
            inside = np.flatnonzero(self.window_domains == domain)
            whole = inside[self.window_lengths[inside] == self.length]
            if not len(whole):
                chosen += inside[:1].tolist()
                continue
            count = min(len(whole), max(1, round(tokens / len(self.domains) / self.length)))
            chosen += whole[((np.arange(count) + 0.5) * len(whole) / count).astype(int)].tolist()
        return sorted(chosen)

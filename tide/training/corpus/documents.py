"""What a corpus file is: one paragraph a line, one blank line between documents, UTF-8; reading, cleaning, writing."""

import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tide.cli import UserError
from tide.files import replacing

Paragraphs = Iterable[str]
"""A document on its way into the corpus: its paragraphs, in order, not yet cleaned."""

MIN_LETTERS = 0.62
"""A paragraph is prose when more than this share of its characters are letters; tables and code have fewer."""

_SPACES = re.compile(r"\s+")
_INVISIBLE = str.maketrans("", "", "\u00ad\u200b\ufeff")  # soft hyphen, zero-width space, byte-order mark


def read_documents(path: str | Path) -> Iterator[str]:
    """Yields the documents of a corpus file, reading no more than one at a time.

    Args:
        path: a file of documents that are separated by one blank line.

    Yields:
        A document: its paragraphs, joined by line ends, without the blank line.

    Raises:
        UserError: if the file is not there or is not UTF-8 text.
    """
    lines: list[str] = []
    try:
        with open(path, encoding="utf-8") as file:
            for line in file:
                if line != "\n":
                    lines.append(line)
                elif lines:
                    yield "".join(lines).rstrip("\n")
                    lines = []
    except FileNotFoundError:
        raise UserError(
            f"there is no corpus file {path}; build the corpus with `python -m tide.training.corpus --out DIR`"
        ) from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text; give a corpus file, such as train_wiki.txt") from None
    if lines:
        yield "".join(lines).rstrip("\n")


def write_documents(path: Path, documents: Iterable[str]) -> None:
    """Writes a corpus file that `read_documents` reads back; the file appears under its name only when it is whole."""
    with replacing(path) as partial, open(partial, "w", encoding="utf-8", newline="\n") as file:
        for number, document in enumerate(documents):
            file.write(f"\n{document}\n" if number else f"{document}\n")


def clean(documents: Iterable[Paragraphs], min_words: int | None) -> Iterator[str]:
    """Turns extracted documents into corpus documents: one line a paragraph, prose only, no paragraph twice.

    Args:
        documents: the documents of one source, in order.
        min_words: paragraphs with fewer words, or with too few letters, are left out; None keeps every one.

    Yields:
        The documents of which a paragraph is left, paragraphs joined by line ends.
    """
    seen: set[bytes] = set()
    for document in documents:
        kept = []
        for paragraph in map(one_line, document):
            if not paragraph or (min_words is not None and not is_prose(paragraph, min_words)):
                continue
            mark = fingerprint(paragraph)
            if mark not in seen:
                seen.add(mark)
                kept.append(paragraph)
        if kept:
            yield "\n".join(kept)


def one_line(text: str) -> str:
    """Removes invisible characters and makes every run of white space one space."""
    return _SPACES.sub(" ", text.translate(_INVISIBLE)).strip()


def is_prose(paragraph: str, min_words: int) -> bool:
    """Says whether a paragraph is running text: at least `min_words` words, more than `MIN_LETTERS` of it letters."""
    if len(paragraph.split()) < min_words:
        return False
    return sum(map(str.isalpha, paragraph)) / len(paragraph) > MIN_LETTERS


def fingerprint(paragraph: str) -> bytes:
    """Eight bytes that stand for a paragraph: a set of them is small enough to hold for a whole corpus."""
    return hashlib.blake2b(paragraph.encode(), digest_size=8).digest()

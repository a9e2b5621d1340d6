"""Books and speeches. A book, or a chapter where the file has chapters, is a document."""

import html
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from tide.training.corpus.documents import Paragraphs

_BLANK_LINE = re.compile(r"\n\s*\n")
_MARKDOWN_MARKS = re.compile(r"[*_#>|]")
_OSIS_ASIDE = re.compile(r"<(?:note|title)[^>]*>")
_OSIS_BREAK = re.compile(r"</?(?:p|div|lb|lg|l|br|title|list|item|milestone|chapter|verse)\b[^>]*>")
_TAG = re.compile(r"<[^>]+>")

_R_STRING_VECTOR = 16  # type numbers of R's serialization format (R internals, section 1.8)
_R_HEADER = struct.Struct(">2s4i")  # "X\n", format version, R's version, oldest reader, length of the encoding's name
_SWORD_BLOCK = struct.Struct("<3I")  # offset and size in the data file, size when decompressed


def paragraphs_by_blank_line(files: list[Path]) -> Iterator[Paragraphs]:
    """Plain text, paragraphs between blank lines."""
    for file in files:
        yield _BLANK_LINE.split(file.read_text(encoding="utf-8"))


def paragraphs_by_line(files: list[Path]) -> Iterator[Paragraphs]:
    """Plain text, a paragraph a line."""
    for file in files:
        yield file.read_text(encoding="utf-8", errors="replace").split("\n")


def markdown_plays(files: list[Path]) -> Iterator[Paragraphs]:
    """Plays in Markdown: every line of verse is a paragraph."""
    for file in files:
        yield _MARKDOWN_MARKS.sub("", file.read_text(encoding="utf-8")).split("\n")


def r_novels(files: list[Path]) -> Iterator[Paragraphs]:
    """Novels in an R package's data base (`Rdata.rdb`): each a vector of lines, paragraphs between empty ones."""
    for file in files:
        for novel in r_string_vectors(file.read_bytes()):
            # One line of the six novels is not ASCII ("£20,000"); the recorded corpus is without it.
            yield _BLANK_LINE.split("\n".join(line for line in novel if line.isascii()))


def r_string_vectors(database: bytes) -> Iterator[list[str]]:
    """Yields the character vectors of an R lazy-load data base, which has an object after the other.

    Each object is its size (4 bytes), then, deflated, R's serialization in its XDR form, version 3.
    """
    while database:
        stream = zlib.decompressobj()
        content = stream.decompress(database[4:])
        database = stream.unused_data
        *_, encoding_length = _R_HEADER.unpack_from(content)
        at = _R_HEADER.size + encoding_length
        kind, count = struct.unpack_from(">2i", content, at)
        at += 8
        if kind != _R_STRING_VECTOR:
            continue
        strings = []
        for _ in range(count):
            (length,) = struct.unpack_from(">i", content, at + 4)  # after the flags; -1 for a missing string
            at += 8
            strings.append(content[at : at + max(length, 0)].decode("utf-8", "replace"))
            at += max(length, 0)
        yield strings


def sword_module(files: list[Path]) -> Iterator[Paragraphs]:
    """A Bible or commentary for the SWORD library: a document a block (a book or a chapter), Old Testament first."""
    by_name = {file.name: file for file in files}
    for testament in ("ot", "nt"):
        for unit in ("b", "c"):  # blocks of a book, blocks of a chapter
            if index := by_name.get(f"{testament}.{unit}zs"):
                data = by_name[f"{testament}.{unit}zz"].read_bytes()
                for offset, size, _ in _SWORD_BLOCK.iter_unpack(index.read_bytes()):
                    if size:
                        yield osis_paragraphs(zlib.decompress(data[offset : offset + size]).decode("utf-8", "replace"))


def osis_paragraphs(markup: str) -> list[str]:
    """The paragraphs of text in OSIS or ThML markup: what is between block elements, notes and titles."""
    text = _OSIS_BREAK.sub("\n", _OSIS_ASIDE.sub("\n", markup))
    return html.unescape(_TAG.sub("", text)).replace("\0", "\n").split("\n")

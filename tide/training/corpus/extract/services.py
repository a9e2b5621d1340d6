"""Descriptions of web services, out of their client libraries' machine-readable files. A service is a document."""

import gzip
import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tide.training.corpus.documents import Paragraphs
from tide.training.corpus.extract.nested import strings_at

_BREAK = re.compile(r"</?(?:p|li|ul|ol|note|important|dl|dt|dd|h\d|div|fullname|examples?)\b[^>]*>")
_TAG = re.compile(r"<[^>]+>")


def aws_services(files: list[Path]) -> Iterator[Paragraphs]:
    """Amazon's services, `SERVICE/DATE/service-2.json.gz`: the newest date of each, by name of the service."""
    newest = {file.parts[-3]: file for file in sorted(files)}
    for _, file in sorted(newest.items()):
        description = json.loads(gzip.decompress(file.read_bytes()))
        yield [line for text in strings_at(description, {"documentation"}) for line in markup_lines(text)]


def markup_lines(markup: str) -> list[str]:
    """The lines of a text in Amazon's HTML, broken at block elements."""
    return html.unescape(_TAG.sub("", _BREAK.sub("\n", markup))).split("\n")


def google_services(files: list[Path]) -> Iterator[Paragraphs]:
    """Google's discovery documents."""
    for file in files:
        yield _google_descriptions(json.loads(file.read_bytes()))


def _google_descriptions(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("description", "deprecationNotice") and isinstance(value, str):
                yield from value.split("\n")
            elif key == "enumDescriptions" and isinstance(value, list):
                yield from value
            else:
                yield from _google_descriptions(value)
    elif isinstance(node, list):
        for value in node:
            yield from _google_descriptions(value)

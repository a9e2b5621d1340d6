"""Collections of short texts: article leads, country profiles, dictionary entries, recipes, speeches."""

import csv
import gzip
import io
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

from tide.training.corpus.documents import Paragraphs
from tide.training.corpus.extract.nested import strings_at

_BLANK_LINE = re.compile(r"\n\s*\n")
_LINK_BRACES = re.compile(r"[{}]")


def article_leads(files: list[Path]) -> Iterator[Paragraphs]:
    """Lead paragraphs of Wikipedia articles, a document each: a mapping of articles with an `extract`."""
    for file in files:
        for article in json.loads(file.read_bytes()).values():
            yield [article["extract"]]


def country_profiles(files: list[Path]) -> Iterator[Paragraphs]:
    """The World Factbook, a file and a document a country: every text in it is a paragraph."""
    for file in files:
        yield strings_at(json.loads(file.read_bytes()))


def dictionary_entries(files: list[Path]) -> Iterator[Paragraphs]:
    """A dictionary in dictd's compressed format: every paragraph is a document; words in braces are links."""
    for file in files:
        text = gzip.decompress(file.read_bytes()).decode("utf-8", "replace")
        yield from ([_LINK_BRACES.sub("", entry)] for entry in _BLANK_LINE.split(text))


def recipes(files: list[Path]) -> Iterator[Paragraphs]:
    """Recipes, a document each: a paragraph of title and ingredients, and a paragraph of steps."""
    for file in files:
        for recipe in json.loads(file.read_bytes()).values():
            ingredients = ", ".join(recipe.get("ingredients") or [])
            yield [f"{recipe['title']}. Ingredients: {ingredients}.", " ".join(recipe.get("steps") or [])]


def speeches(files: list[Path]) -> Iterator[Paragraphs]:
    """Speeches in parliament, a document each: zipped CSV files with a column `text`."""
    for file in files:
        with zipfile.ZipFile(file) as archive:
            for name in archive.namelist():
                with archive.open(name) as table:
                    rows = csv.DictReader(io.TextIOWrapper(table, encoding="utf-8", newline=""))
                    yield from ([row["text"]] for row in rows)

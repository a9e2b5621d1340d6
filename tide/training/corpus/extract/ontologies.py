"""Definitions of terms. A definition is a document, as `term: definition`."""

import json
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from tide.training.corpus.documents import Paragraphs
from tide.training.corpus.extract.extras import import_extra
from tide.training.corpus.extract.nested import strings_at

DATABASE_REGISTRIES = (
    "data/bioregistry",
    "fairsharing/processed",
    "re3data/processed",
    "bartoc/processed",
    "integbio/processed",
)

_OBO_NAME = re.compile(r"^name: (.*)$", re.MULTILINE)
_OBO_DEFINITION = re.compile(r'^def: "((?:[^"\\]|\\.)*)"', re.MULTILINE)
_OBO_COMMENT = re.compile(r"^comment: (.*)$", re.MULTILINE)


def cellxgene_terms(files: list[Path]) -> Iterator[Paragraphs]:
    """An ontology of the CELLxGENE guide, its newest version by name: terms in use that have a description."""
    zstandard = import_extra("zstandard")
    with open(max(files), "rb") as compressed, zstandard.ZstdDecompressor().stream_reader(compressed) as file:
        terms = json.load(file)
    for term in terms.values():
        if term.get("description") and not term.get("deprecated"):
            yield [f"{(term.get('label') or '').strip()}: {term['description']}"]


def obo_terms(files: list[Path]) -> Iterator[Paragraphs]:
    """An ontology in OBO format: terms that have a definition, with their comment."""
    for file in files:
        for stanza in file.read_text(encoding="utf-8").split("[Term]")[1:]:
            name, definition = _OBO_NAME.search(stanza), _OBO_DEFINITION.search(stanza)
            if name and definition:
                comment = _OBO_COMMENT.search(stanza)
                parts = [f"{name[1]}: {definition[1]}"] + ([comment[1]] if comment else [])
                yield [" ".join(parts).replace('\\"', '"').replace("\\n", " ")]


def gene_ontology_terms(files: list[Path]) -> Iterator[Paragraphs]:
    """The Gene Ontology in Bioconductor's SQLite file."""
    for file in files:
        connection = sqlite3.connect(file)
        query = "SELECT term, definition FROM go_term WHERE definition IS NOT NULL ORDER BY rowid"
        yield from ([f"{term}: {definition}"] for term, definition in connection.execute(query))
        connection.close()


def database_descriptions(files: list[Path]) -> Iterator[Paragraphs]:
    """Descriptions of scientific data bases, from the registries that Bioregistry collects."""
    by_registry = {"/".join(file.with_suffix("").parts[-2:]): file for file in files}
    for registry in DATABASE_REGISTRIES:
        for description in strings_at(json.loads(by_registry[registry].read_bytes()), {"description"}):
            yield [description]

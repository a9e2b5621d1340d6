"""Manuals: HTML pages and Perl's POD files. A page is a document."""

import gzip
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tide.training.corpus.documents import Paragraphs
from tide.training.corpus.extract.extras import import_extra

BLOCKS = frozenset("p li dd blockquote h1 h2 h3 h4 td dt figcaption".split())
"""Elements whose text is a paragraph, when none of them is inside; so is `<div class="para">` (DocBook)."""
NOT_TEXT = frozenset("script style pre nav header footer table math svg head form button noscript".split())
"""Elements that are dropped, with all that is in them."""
NOT_TEXT_CLASSES = ("navheader", "navfooter", "sphinxsidebar", "related", "highlight", "toc", "headerlink")
"""So are elements with one of these in their class: the navigation, code and contents of DocBook and Sphinx."""

_XML_DECLARATION = re.compile(r"^\s*<\?xml[^>]*\?>")
_BLANK_LINE = re.compile(r"\n\s*\n")
_POD_FORMATTING = re.compile(r"[A-Z]<+\s*(.*?)\s*>+", re.DOTALL)


def html_pages(files: list[Path]) -> Iterator[Paragraphs]:
    """HTML pages, gzipped or not, in UTF-8 or else Latin-1."""
    for file in files:
        content = file.read_bytes()
        if file.suffix == ".gz":
            content = gzip.decompress(content)
        try:
            page = content.decode("utf-8")
        except UnicodeDecodeError:
            page = content.decode("latin-1")
        yield page_paragraphs(page)


def page_paragraphs(page: str) -> list[str]:
    """The paragraphs of an HTML page: the text of its innermost blocks, without navigation, code and tables."""
    lxml_html, lxml_etree = import_extra("lxml.html"), import_extra("lxml.etree")
    page = _XML_DECLARATION.sub("", page)
    if not page.strip():
        return []
    try:
        root = lxml_html.fromstring(page)
    except (lxml_etree.ParserError, ValueError):  # nothing in it but a comment; bytes that XML has no place for
        return []
    for element in list(root.iter("*")):
        if _is_not_text(element) and element.getparent() is not None:
            element.drop_tree()
    return [
        element.text_content()
        for element in root.iter("*")
        if _is_block(element) and not any(_is_block(inner) for inner in element.iterdescendants("*"))
    ]


def _is_not_text(element: Any) -> bool:
    if element.tag in NOT_TEXT:
        return True
    classes = element.get("class")
    if not classes or element.tag in ("html", "body"):
        return False
    return any(name in classes for name in NOT_TEXT_CLASSES)


def _is_block(element: Any) -> bool:
    return element.tag in BLOCKS or (element.tag == "div" and "para" in (element.get("class") or "").split())


def pod_pages(files: list[Path]) -> Iterator[Paragraphs]:
    """Perl's POD files: paragraphs between blank lines, without commands (`=head1`) and code (indented)."""
    for file in files:
        paragraphs = _BLANK_LINE.split(file.read_text(encoding="utf-8", errors="replace"))
        yield [_POD_FORMATTING.sub(r"\1", text) for text in paragraphs if not text.startswith((" ", "\t", "="))]

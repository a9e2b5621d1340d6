"""Wikipedia articles out of a dump in MediaWiki's markup. An article is a document."""

import bz2
import html
import re
from collections.abc import Iterator
from pathlib import Path

from tide.training.corpus.documents import Paragraphs

MAX_TEMPLATE_DEPTH = 8
MAX_LINK_DEPTH = 4

_PAGE = re.compile(r"<page>(.*?)</page>", re.DOTALL)
_NAMESPACE = re.compile(r"<ns>(\d+)</ns>")
_TEXT = re.compile(r"<text[^>]*>(.*?)</text>", re.DOTALL)
_BACK_MATTER = re.compile(
    r"^= (?:References|External links|Further reading|See also|Notes|Bibliography|Footnotes|Citations) =\s*$",
    re.MULTILINE,
)
_LIST_MARK = re.compile(r"^[*#:;]+\s*")

_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_REFERENCES = (re.compile(r"<ref[^>/]*/>"), re.compile(r"<ref[^>]*>.*?</ref>", re.DOTALL))
_NOT_TEXT = re.compile(r"<(math|gallery|timeline|code|source|pre)[^>]*>.*?</\1>", re.DOTALL)
_TEMPLATE = re.compile(r"\{\{[^{}]*\}\}")
_TABLE = re.compile(r"\{\|.*?\|\}", re.DOTALL)
_MEDIA_LINK = re.compile(  # also links to other languages; the caption may hold links
    r"\[\[(?:File|Image|Category|[a-z\-]{2,12}):[^\[\]]*(?:\[\[[^\[\]]*\]\][^\[\]]*)*\]\]"
)
_LINK = re.compile(r"\[\[(?:[^|\]\[]*\|)?([^\]\[]*)\]\]")
_WEB_LINK = re.compile(r"\[https?://[^\s\]]*\s*([^\]]*)\]")
_EMPHASIS = re.compile(r"'{2,}")
_TAG = re.compile(r"<[^>]+>")
_HEADING = re.compile(r"^=+\s*(.*?)\s*=+\s*$", re.MULTILINE)


def dump_articles(files: list[Path]) -> Iterator[Paragraphs]:
    """Articles of bzip2-ed dumps, up to the references; redirects and pages that are no articles are left out.

    The dumps are parts cut out of larger ones, not well-formed XML, so pages are found by pattern.
    """
    for file in files:
        for page in _PAGE.findall(bz2.decompress(file.read_bytes()).decode("utf-8")):
            namespace, text = _NAMESPACE.search(page), _TEXT.search(page)
            if text and "<redirect" not in page and (namespace is None or namespace[1] == "0"):
                yield article_paragraphs(html.unescape(text[1]))


def article_paragraphs(markup: str) -> list[str]:
    """The paragraphs of one article, a line of markup each, headings as `= Heading =`."""
    body = _BACK_MATTER.split(plain_text(markup))[0]
    lines = (line for line in body.split("\n") if not line.lstrip().startswith(("|", "!", "{", "}")))
    return [_LIST_MARK.sub("", line) for line in lines]


def plain_text(markup: str) -> str:
    """Takes templates, tables, references, files and formatting out of MediaWiki markup; keeps the text of links."""
    text = _COMMENT.sub("", html.unescape(markup))
    for pattern in (*_REFERENCES, _NOT_TEXT):
        text = pattern.sub("", text)
    text = _remove_nested(_TEMPLATE, text, MAX_TEMPLATE_DEPTH)
    text = _TABLE.sub("", text)
    text = _remove_nested(_MEDIA_LINK, text, MAX_LINK_DEPTH)
    text = _LINK.sub(r"\1", text)
    text = _WEB_LINK.sub(r"\1", text)
    text = _TAG.sub("", _EMPHASIS.sub("", text))
    return _HEADING.sub(r"= \1 =", text)


def _remove_nested(innermost: re.Pattern[str], text: str, max_depth: int) -> str:
    """Removes what matches, from the inside out."""
    for _ in range(max_depth):
        text, found = innermost.subn("", text)
        if not found:
            break
    return text

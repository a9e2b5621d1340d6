"""What kind of text a token is: eight classes that exclude each other, by rules of ours (the paper has none)."""

import re
import unicodedata
from collections.abc import Collection, Sequence

import numpy as np

KINDS = ("special", "code", "digit", "punctuation", "capital", "word start", "inside", "other")
"""The classes; the place of each is its number in `token_kinds`."""

NOT_WHOLE = "\N{REPLACEMENT CHARACTER}"  # stands for bytes that are no whole character
_CODE = re.compile(r"[{}\[\]()<>=_/\\|#$%&*+@^~`]")
_DIGIT = re.compile(r"\d")


def token_kinds(texts: Sequence[str], special_ids: Collection[int]) -> np.ndarray:
    r"""The kind of every token, by the first rule that holds.

    1. special: a special token, such as a document mark;
    2. code: holds one of {}[]()<>=_/\|#$%&*+@^~`, identifiers with underscores included;
    3. digit: holds a digit, in Unicode's sense;
    4. punctuation: white space apart, nothing but punctuation and other signs;
    5. capital: begins with an upper-case letter, behind white space or not;
    6. word start: white space, then a lower-case letter;
    7. inside: begins with a lower-case letter, without white space: the rest of a word that began before, or a word
       behind punctuation or a line's end;
    8. other: blank; bytes that are no whole character; letters of scripts without case; letters behind punctuation,
       such as 's; ids without text.

    Args:
        texts: [V], the decoded text of every token id (`tide.tokens.Vocabulary.texts`).
        special_ids: ids of the special tokens.

    Returns:
        [V] int8, indices into `KINDS`.
    """
    numbers = {name: number for number, name in enumerate(KINDS)}
    kinds = np.fromiter((numbers[_kind(text)] for text in texts), dtype=np.int8, count=len(texts))
    kinds[[i for i in special_ids if i < len(texts)]] = numbers["special"]
    return kinds


def _kind(text: str) -> str:
    """The class of a token that is not special."""
    if _CODE.search(text):
        return "code"
    if _DIGIT.search(text):
        return "digit"
    if NOT_WHOLE in text or text.isspace() or not text:
        return "other"
    if all(char.isspace() or unicodedata.category(char)[0] in "PS" for char in text):
        return "punctuation"
    first = text.lstrip()[0]
    if first.isupper() or first.istitle():
        return "capital"
    if not first.islower():
        return "other"
    return "word start" if text[0].isspace() else "inside"

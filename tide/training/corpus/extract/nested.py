"""Strings out of nested JSON."""

from collections.abc import Iterator, Set
from typing import Any


def strings_at(node: Any, keys: Set[str] | None = None) -> Iterator[str]:
    """Yields the strings that are values of a mapping, however deep, in the order of the file.

    Args:
        node: parsed JSON.
        keys: only the strings under these keys; None for all.
    """
    if isinstance(node, dict):
        for key, value in node.items():
            if isinstance(value, str):
                if keys is None or key in keys:
                    yield value
            else:
                yield from strings_at(value, keys)
    elif isinstance(node, list):
        for value in node:
            yield from strings_at(value, keys)

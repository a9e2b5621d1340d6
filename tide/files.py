"""Writing files whole or not at all."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a temporary name beside `path`; what was written there takes the place of `path` at the end.

    When the block fails, `path` stays as it was and the temporary file is removed. No other process has the same
    temporary name, on whatever computer.

    Args:
        path: the file to write; its folder must exist.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a small UTF-8 file whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")

"""The libraries that only the corpus builder needs: the extra `corpus` of the project."""

import importlib
from types import ModuleType

from tide.cli import UserError

EXTRAS = ("lxml.html", "zstandard")


def import_extra(name: str) -> ModuleType:
    """Imports a module of the extra.

    Raises:
        UserError: if it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        library = name.partition(".")[0]
        raise UserError(f'building the corpus needs {library}; run `pip install "tide-explorer[corpus]"`') from None

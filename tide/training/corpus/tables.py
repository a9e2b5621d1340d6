"""The corpus in tables, as Markdown: sources with their licences, files with their recorded sizes and sums."""

from collections.abc import Mapping, Sequence

from tide.training.corpus.recorded import RECORDED
from tide.training.corpus.sources import DOMAINS, HELD_OUT, SOURCES, Package


def licence_table(versions: Mapping[Package, str] | None = None) -> str:
    """A row a source: domain, text, package and version, licence, whether held-out excerpts may be shipped.

    Args:
        versions: the versions that were downloaded; without, those that the recorded corpus was made of.
    """
    header = ("domain", "text", "package and version", "licence", "held-out excerpts may be shipped")
    rows = []
    for source in sorted(SOURCES, key=lambda source: DOMAINS.index(source.domain)):
        version = (versions or {}).get(source.package, source.package.version)
        package = f"{source.package.registry} {source.package.name} {version}"
        rows.append((source.domain, source.text, package, source.licence, "yes" if source.excerpts else "no"))
    return markdown_table(header, rows)


def held_out_table() -> str:
    """A row a held-out set: its file, what it is."""
    rows = [(f"`heldout_{one.name}.txt`", one.text) for one in HELD_OUT]
    return markdown_table(("file", "what it is"), rows)


def file_table() -> str:
    """A row a file: its recorded size and MD5 sum."""
    rows = [(f"`{name}`", f"{size / 1e6:.1f}", f"`{md5}`") for name, (size, md5) in RECORDED.items()]
    return markdown_table(("file", "MB", "MD5"), rows)


def markdown_table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A Markdown table, one line a row."""
    lines = [header, ("---",) * len(header), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)

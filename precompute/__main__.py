"""`tide-precompute`: measure a checkpoint once, for the dashboard to read."""

import sys
from pathlib import Path

from precompute.pipeline import NEEDS, Job, run
from precompute.store import MANIFEST_FILE
from tide.cli import ArgumentParser, run_command

ASSETS = Path(__file__).resolve().parent.parent / "assets"  # of the repository
HELD_OUT = ASSETS / "heldout"
TEMPLATES = ASSETS / "templates" / "collapse.json"


def build_parser() -> ArgumentParser:
    """The command line."""
    parser = ArgumentParser(prog="tide-precompute", description=__doc__.split(": ", 1)[1])
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="folder of a TIDE checkpoint")
    parser.add_argument("--base", type=Path, metavar="CHECKPOINT", help="Base checkpoint (K = 0) of the collapse study")
    parser.add_argument(
        "--text", type=Path, nargs="+", metavar="FILE", help="held-out text (default: the .txt files of assets/heldout)"
    )
    parser.add_argument(
        "--count-text",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="text whose tokens are counted where the checkpoint holds no counts (default: as --text)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="artifacts folder (default artifacts/NAME_OF_CHECKPOINT)"
    )
    parser.add_argument("--only", nargs="+", choices=list(NEEDS), default=[], metavar="STAGE", help=", ".join(NEEDS))
    parser.add_argument("--device", default="cpu", help="cpu, cuda or mps (default cpu)")
    parser.add_argument(
        "--templates", type=Path, default=TEMPLATES, metavar="FILE", help="pairs and templates of the study"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Makes the artifacts that are not there yet; returns the exit code."""
    args = build_parser().parse_args(argv)
    job = Job(
        checkpoint=args.checkpoint,
        out=args.out or Path("artifacts") / args.checkpoint.resolve().name,
        templates=args.templates,
        text=tuple(args.text or sorted(HELD_OUT.glob("*.txt"))),
        count_text=tuple(args.count_text),
        base=args.base,
        device=args.device,
    )
    made = run(job, args.only)
    print(f"{job.out / MANIFEST_FILE}: {', '.join(made) + ' made' if made else 'everything is there'}")
    return 0


def entry_point() -> None:
    """Console script."""
    sys.exit(run_command(main))


if __name__ == "__main__":
    entry_point()

"""`tide-precompute`: measure a checkpoint once, for the dashboard to read."""

import argparse
import sys
from pathlib import Path

from precompute.artifacts import Artifacts
from precompute.export import check_export_folder, export
from precompute.pipeline import Pipeline, stages_to_run
from precompute.stage import GIB, Job
from precompute.stages import STAGES
from precompute.store import MANIFEST_FILE
from tide.cli import ArgumentParser, run_command, whole_number

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
        nargs="+",
        default=[],
        metavar="DATA",
        help="text whose tokens are counted, as tide-train --data takes it: files, folders, hf:NAME "
        "(default: the counts that the checkpoint holds, else as --text)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="artifacts folder (default artifacts/NAME_OF_CHECKPOINT)"
    )
    parser.add_argument("--only", nargs="+", choices=list(STAGES), default=[], metavar="STAGE", help=", ".join(STAGES))
    parser.add_argument("--device", default="cpu", help="cpu, cuda or mps (default cpu)")
    parser.add_argument(
        "--templates", type=Path, default=TEMPLATES, metavar="FILE", help="pairs and templates of the study"
    )
    parser.add_argument(
        "--window",
        type=whole_number(2),
        metavar="TOKENS",
        help="tokens that the model reads at once (default: what it was made for, at most 2048)",
    )
    parser.add_argument(
        "--probe-tokens",
        type=whole_number(1),
        default=8_192,
        metavar="N",
        help="tokens of the text on which ablation and compression are measured (default 8192)",
    )
    parser.add_argument(
        "--index",
        choices=("flat", "fp16", "sq8"),
        default="flat",
        help="neighbour indexes on disk: exact, or half or a quarter of the size (default flat)",
    )
    parser.add_argument(
        "--max-memory",
        type=gibibytes,
        default=4 * GIB,
        metavar="GIB",
        help="memory that a stage may take beyond the backbone and one table (default 4)",
    )
    parser.add_argument(
        "--reuse",
        type=Path,
        metavar="DIR",
        help="another artifacts folder of this checkpoint; what is there and was made from the same inputs is taken",
    )
    parser.add_argument(
        "--export",
        type=Path,
        metavar="DIR",
        help="write tidy Parquet and CSV files for other tools, and vectors for TensorBoard's projector",
    )
    return parser


def gibibytes(text: str) -> int:
    """An argparse type: a size in GiB, as bytes."""
    try:
        size = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of GiB") from None
    if not 0 < size < 2**20:
        raise argparse.ArgumentTypeError(f"{text} GiB is no size of a memory")
    return int(size * GIB)


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
        window=args.window,
        probe_tokens=args.probe_tokens,
        index=args.index,
        max_memory=args.max_memory,
        reuse=args.reuse,
    )
    if args.export:
        check_export_folder(args.export)  # before any work
    pipeline = Pipeline(job)
    made = pipeline.run(args.only)
    if pipeline.workers.is_first:
        print(f"{job.out / MANIFEST_FILE}: {', '.join(made) + ' made' if made else 'everything is there'}")
        if args.export:
            artifacts = Artifacts.open(job.out, job.checkpoint)
            written = export(artifacts, pipeline.context.tables, args.export, stages_to_run(args.only))
            print(f"{args.export}: {', '.join(written)}")
    return 0


def entry_point() -> None:
    """Console script."""
    sys.exit(run_command(main))


if __name__ == "__main__":
    entry_point()

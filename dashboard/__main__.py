"""`tide-dashboard`: explore TIDE artifacts in a browser."""

import contextlib
import gc
import logging
import os
import socket
import sys
from pathlib import Path

from dashboard import trust
from dashboard.engine import DEVICE_VARIABLE, shared_engine
from precompute import Artifacts
from tide.cli import ArgumentParser, UserError, run_command

HOST = "127.0.0.1"
DEFAULT_PORT = 8501
ROOT = Path(__file__).resolve().parent.parent
DEMO_ARTIFACTS = ROOT / "artifacts" / "tide-8e"


def build_parser() -> ArgumentParser:
    """The command line."""
    parser = ArgumentParser(prog="tide-dashboard", description=__doc__.split(": ", 1)[1])
    parser.add_argument("artifacts", nargs="*", type=Path, help="artifact folders (default: the demo's)")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help=f"port on {HOST} (default {DEFAULT_PORT})")
    parser.add_argument("--device", choices=["cpu", "cuda", "mps"], help="device of the live model")
    parser.add_argument("--browser", action="store_true", help="open a browser window")
    return parser


def check_port(port: int) -> None:
    """Raises a `UserError` when the port cannot be used."""
    if not 0 < port < 2**16:
        raise UserError(f"--port {port} is no port; choose one between 1 and 65535.")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise UserError(f"Port {port} on {HOST} is in use; choose another with --port.") from error


def check_device(device: str | None) -> None:
    """Raises a `UserError` when torch does not have the device."""
    if device in (None, "cpu"):
        return
    import torch

    available = torch.cuda.is_available() if device == "cuda" else torch.backends.mps.is_available()
    if not available:
        raise UserError(f"--device {device} is not available to torch {torch.__version__} here; leave it out.")


def preload(artifacts: Artifacts, device: str | None) -> None:
    """Loads the live model of the first artifacts and checks it; where that fails, the Live page says why."""
    with contextlib.suppress(UserError):
        engine = shared_engine(artifacts.checkpoint, artifacts.manifest["checkpoint"]["fingerprint"], device)
        trust.check(engine, artifacts).wait()


def main(argv: list[str] | None = None) -> int:
    """Checks what was asked for, then hands over to Streamlit."""
    args = build_parser().parse_args(argv)
    folders = args.artifacts or [DEMO_ARTIFACTS]
    if not args.artifacts and not DEMO_ARTIFACTS.exists():
        raise UserError(f"The demo's artifacts are missing in {DEMO_ARTIFACTS}; `make demo` builds them.")
    opened = [Artifacts.open(folder) for folder in folders]
    check_device(args.device)
    check_port(args.port)
    if args.device:
        os.environ[DEVICE_VARIABLE] = args.device

    # Loaded before the server answers, so that the first page waits neither for torch nor for the model.
    from streamlit.web import cli as streamlit_cli

    # Streamlit warns that what is imported here has caches and no server yet.
    logging.getLogger("streamlit.runtime.caching.cache_data_api").setLevel(logging.ERROR)
    import dashboard.app  # noqa: F401

    preload(opened[0], args.device)
    # Streamlit collects garbage after every run. What was loaded up to here never is any; without it a collection
    # takes some 10 ms instead of 200.
    gc.collect()
    gc.freeze()

    script = Path(__file__).parent / "entry" / "main.py"
    options = {
        "server.address": HOST,
        "server.port": args.port,
        "server.headless": not args.browser,
        "server.fileWatcherType": "none",
        "browser.gatherUsageStats": False,
        "client.showErrorDetails": "none",
        "client.toolbarMode": "minimal",
        "theme.light.primaryColor": "#0B6E99",
        "theme.dark.primaryColor": "#5BB8DE",
    }
    flags = [f"--{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in options.items()]
    print(f"TIDE explorer on http://{HOST}:{args.port}", flush=True)
    sys.argv = ["streamlit", "run", str(script), *flags, "--", *(str(folder.resolve()) for folder in folders)]
    return streamlit_cli.main(standalone_mode=False) or 0


def entry_point() -> None:
    """Console script."""
    sys.exit(run_command(main))


if __name__ == "__main__":
    entry_point()

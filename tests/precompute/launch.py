"""`tide-precompute` with pieces so short that a short text has several; for processes of their own."""

import sys

import precompute.text
from precompute.__main__ import main
from tide.cli import run_command

PIECE_TOKENS = 500

if __name__ == "__main__":
    precompute.text.PIECE_TOKENS = PIECE_TOKENS
    sys.exit(run_command(main))

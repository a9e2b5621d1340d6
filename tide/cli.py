"""What every command line of the project shares: how a wrong input is told to the person at the keyboard."""

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn


class UserError(Exception):
    """A wrong input: one sentence that says what is wrong, where, and what to do. Never a bug."""


class ArgumentParser(argparse.ArgumentParser):
    """argparse, but a wrong option is a `UserError`: one line, like every other wrong input."""

    def error(self, message: str) -> NoReturn:
        """Called by argparse for a wrong option.

        Raises:
            UserError: always.
        """
        raise UserError(f"{message}; `{self.prog} --help` lists the options")


def whole_number(minimum: int) -> Callable[[str], int]:
    """An argparse type: an integer of at least `minimum`."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if number < minimum:
            raise argparse.ArgumentTypeError(f"{number} is below {minimum}")
        return number

    return parse


def run_command(main: Callable[[], int]) -> int:
    """Runs a command and turns its `UserError` into one line on stderr and exit code 2.

    Args:
        main: the command; returns its exit code.

    Returns:
        The exit code: the command's own, 2 for a wrong input, 130 after Ctrl-C.
    """
    try:
        return main()
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130

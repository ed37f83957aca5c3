"""Where the command `forebay` begins. Nothing is imported before Control-C is seen to: Forebay takes a while."""

import sys


def main() -> int:
    try:
        from forebay.cli import main as run

        return run()
    except KeyboardInterrupt:
        sys.stderr.write("forebay: interrupted\n")
        return 130

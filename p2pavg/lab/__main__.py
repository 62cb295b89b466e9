"""`python -m p2pavg.lab VERB` is `p2pavg lab VERB`."""

from __future__ import annotations

import argparse
import sys

from p2pavg.errors import P2PAvgError
from p2pavg.lab.cli import add_verbs


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m p2pavg.lab")
    add_verbs(parser)
    args = parser.parse_args()
    try:
        code: int = args.func(args)
    except P2PAvgError as error:
        print(error, file=sys.stderr)
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())

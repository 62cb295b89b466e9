"""`python -m p2pavg VERB` is the installed `p2pavg VERB`."""

from __future__ import annotations

import sys

from p2pavg.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""Lines for a person at a terminal about what happens in the run, each told once."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("p2pavg.peer")


def tell(words: str, *values: object) -> None:
    """Log a line at level INFO; where the program has not set up logging, print it on stderr."""
    if logger.hasHandlers():
        logger.info(words, *values)
    elif logger.isEnabledFor(logging.WARNING):
        print(words % values, file=sys.stderr, flush=True)

"""What a person at a terminal wants to know without asking: a few lines, once each."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("p2pavg.peer")


def tell(words: str, *values: object) -> None:
    """At level INFO where the program has set up logging, else on stderr, where warnings go, too."""
    if logger.hasHandlers():
        logger.info(words, *values)
    elif logger.isEnabledFor(logging.WARNING):
        print(words % values, file=sys.stderr, flush=True)

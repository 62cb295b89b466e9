"""The choice of the engine on which a peer runs."""

from __future__ import annotations

import logging
from typing import Any

from p2pavg import codecs
from p2pavg.transport import pump_engine
from p2pavg.transport.engine import Engine

logger = logging.getLogger("p2pavg.peer.peer")


def make_engine(events: Any, codec: codecs.Codec | None = None, *, encrypted: bool = False) -> Engine:
    """The native pump, where it is built, knows the codec and can encrypt if need be; else its Python twin.

    codec: the run's; None: a built-in one.
    """
    foreign = [] if codec is None or codecs.is_built_in(codec) else [codec]
    if pump_engine.can_encrypt() if encrypted else pump_engine.available():
        if not foreign:
            return pump_engine.PumpEngine(events)
        name = foreign[0].name
        logger.info("the native pump does not know the codec %r: gradients take the Python engine", name)
    from p2pavg.transport.python.engine import PythonEngine

    return PythonEngine(events, foreign)

"""What nobody expected on the loop thread ends the session, so that no thread waits for an answer in vain."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from p2pavg.errors import InternalError, ProtocolError


class Breakable(Protocol):
    """Whoever has ways in."""

    def broken(self, error: Exception) -> None:
        """End, and tell all that wait and all that come."""


B = TypeVar("B", bound=Breakable)
P = ParamSpec("P")


def guarded(method: Callable[Concatenate[B, P], None]) -> Callable[Concatenate[B, P], None]:
    """A way in. A ProtocolError is the fault of the peer that sent a message, and goes to the caller."""

    @wraps(method)
    def call(self: B, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except ProtocolError:
            raise
        except Exception as error:
            self.broken(error)

    return call


def failure(error: Exception) -> InternalError:
    """What the training thread is told."""
    told = InternalError(
        f"averaging ended by an error in p2pavg ({type(error).__name__}: {error}): close() this optimizer "
        "and build it anew, from a checkpoint if there is one; please report it, with the log"
    )
    told.__cause__ = error
    return told

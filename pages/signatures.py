"""The reference's view of constructors whose arguments are the fields of a dataclass (`peer.signature`)."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import griffe

_PREFIX = re.compile(r"\b(?:\w+\.)+(?=[A-Z])")  # torch.optim.Optimizer is shown as Optimizer
_KINDS = {
    inspect.Parameter.POSITIONAL_OR_KEYWORD: griffe.ParameterKind.positional_or_keyword,
    inspect.Parameter.KEYWORD_ONLY: griffe.ParameterKind.keyword_only,
}


class Signatures(griffe.Extension):
    """Shows the arguments that callers give, where the source has one object of options, and says of the
    fields of a dataclass what the comment behind each says.
    """

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Replace the parameters of a constructor that is decorated with `takes`."""
        if not any(str(decorator.value).startswith("takes(") for decorator in func.decorators):
            return
        assert func.parent is not None
        module, name = func.parent.path.rsplit(".", 1)
        shown = inspect.signature(getattr(importlib.import_module(module), name).__init__)
        func.parameters = griffe.Parameters(
            *(
                griffe.Parameter(
                    given.name,
                    kind=_KINDS[given.kind],
                    annotation=None if given.annotation is given.empty else _PREFIX.sub("", given.annotation),
                    default=None if given.default is given.empty else repr(given.default),
                )
                for given in shown.parameters.values()
            )
        )

    def on_attribute(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Take the comment on an attribute's line for its description, where it has no docstring."""
        if attr.docstring is not None or attr.lineno is None or not attr.parent.is_class:
            return
        code, mark, comment = attr.source.partition("  # ")
        if mark and "\n" not in code:
            attr.docstring = griffe.Docstring(comment.strip(), parent=attr, parser="google")

"""Verbs of the command line: each lives in a module that is imported only when its verb is called."""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from p2pavg import __version__
from p2pavg.errors import P2PAvgError

FAILED = 1
INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Verb:
    """One sub-command. `module` has `register(subparsers)`, whose parser sets `func`: `(args) -> int`.
    `help` is its line in the list of all verbs; the parser has no `help` of its own.
    """

    name: str
    module: str
    help: str
    rest: bool = False  # what follows "--" is for something else, and comes as `args.rest`

    def exists(self) -> bool:
        """Whether the module that implements the verb is part of this installation."""
        return importlib.util.find_spec(self.module) is not None


class Parser(argparse.ArgumentParser):
    """A parser that names what a misspelt verb or option may stand for."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            raise argparse.ArgumentError(
                action,
                f"invalid choice: {value!r}{_meant(str(value), known) or ' (choose from ' + _list(known)}",
            )

    def words(self, message: str) -> str:
        """A sentence of the library, in which its arguments are called by this verb's options: "listen=" is
        "--listen" here, and "map_port=True" is "--map-port".
        """
        for action in self._actions:
            option = next((name for name in action.option_strings if name.startswith("--")), None)
            if option is not None:
                named = re.escape(action.dest)
                message = re.sub(rf"\bOuter\({named}=(\.\.\.|[^)]*)\)", partial(_given, option), message)
                message = re.sub(rf'(?<![\w-]){named}="([^"]*)"', partial(_given, option), message)
                name = action.dest if "_" in action.dest else action.dest + "="
                message = re.sub(rf"(?<![\w-]){re.escape(name)}(=True\b|=)?", option, message)
        return message

    def surplus(self, words: Sequence[str], *, rest: bool) -> NoReturn:
        """End with a usage error about words that no argument takes. rest: the verb passes on what
        follows "--".
        """
        options = [option for action in self._actions for option in action.option_strings]
        close = [_meant(word.partition("=")[0], options) for word in words if word.startswith("--")]
        meant = next(filter(None, close), "; what is for the script stands behind --" if rest else "")
        self.error(f"unrecognized arguments: {' '.join(words)}{meant}")


def _given(option: str, found: re.Match[str]) -> str:
    """An argument of the library as an option, with its value where it has one."""
    return option if found[1] == "..." else f"{option} {found[1]}"


def _meant(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {close[0]}?" if close else ""


def _list(known: Iterable[str]) -> str:
    return ", ".join(known) + ")"


class _Told:
    """The sub-parsers of a command; the table of the verbs has the line of each in the list."""

    def __init__(self, subparsers: Any, verbs: Sequence[Verb]) -> None:
        self._subparsers = subparsers
        self._help = {verb.name: verb.help for verb in verbs}

    def add_parser(self, name: str, **options: Any) -> Parser:
        """As `argparse` does it."""
        made: Parser = self._subparsers.add_parser(name, **{**options, "help": self._help[name]})
        return made


def _parser(prog: str, description: str, verbs: Sequence[Verb], wanted: str | None) -> Parser:
    parser = Parser(
        prog=prog, description=description, epilog=f"'{prog} VERB --help' tells more, with an example."
    )
    parser.add_argument("--version", action="version", version=f"p2pavg {__version__}")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    registered: set[str] = set()
    for verb in verbs:
        if verb.name in registered:
            continue
        if verb.name == wanted:
            importlib.import_module(verb.module).register(_Told(subparsers, verbs))
            registered.update(v.name for v in verbs if v.module == verb.module)
        elif not any(v.name == wanted and v.module == verb.module for v in verbs):
            subparsers.add_parser(verb.name, help=verb.help, add_help=False)
    return parser


def _named(parser: Parser, args: argparse.Namespace) -> Parser:
    """The parser of the innermost verb that was named: its usage is the one that helps."""
    for action in parser._actions:
        chosen = getattr(args, action.dest, None)
        if isinstance(action, argparse._SubParsersAction) and chosen in action.choices:
            return _named(action.choices[chosen], args)
    return parser


def run(prog: str, description: str, verbs: Sequence[Verb], argv: Sequence[str]) -> int:
    """Parse `argv`, import the one verb that it names, run it. Returns the exit code.

    A `P2PAvgError` becomes one line on stderr and code 1; argparse leaves with code 2 on a usage error.
    """
    there = [verb for verb in verbs if verb.exists()]
    wanted = next((word for word in argv if not word.startswith("-")), None)
    parser = _parser(prog, description, there, wanted)
    words, rest = list(argv), []
    if "--" in words and any(verb.name == wanted and verb.rest for verb in there):
        at = words.index("--")
        words, rest = words[:at], words[at + 1 :]
    args, surplus = parser.parse_known_args(words)
    args.rest = rest
    if surplus:
        takes_rest = any(verb.name == wanted and verb.rest for verb in there)
        _named(parser, args).surplus(surplus, rest=takes_rest)
    try:
        return int(args.func(args))
    except P2PAvgError as error:
        print(f"{prog} {args.verb}: {_named(parser, args).words(str(error))}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output is gone; at exit the interpreter must not write the rest to a closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED

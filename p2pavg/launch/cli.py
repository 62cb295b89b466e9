"""`p2pavg launch SCRIPT`: the shortest way to a swarm, here or on machines that ssh reaches."""

from __future__ import annotations

import argparse
import difflib
import tempfile
from pathlib import Path

from p2pavg.bench.options import processes
from p2pavg.errors import ConfigurationError
from p2pavg.launch import swarm_file
from p2pavg.launch.deployment import WEB, Deployment
from p2pavg.launch.emit import Emission, start
from p2pavg.launch.fleet import Fleet
from p2pavg.launch.local import Local
from p2pavg.launch.rehearsal import Rehearsal

DEFAULT_PEERS = 2
MOST_PEERS = 64
STEPS = ("status", "logs", "stop", "add", "watch")  # of a swarm that was launched before


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb to the command line's sub-parsers."""
    launch = subparsers.add_parser(
        "launch",
        description="Starts a training script as the peers of a swarm. Without --swarm: as several processes "
        "of this machine, behind a bootstrap node of their own, whose output is shown; Ctrl-C lets all "
        "leave. With --swarm FILE: one peer on each machine of a TOML file, over ssh; the swarm then lives "
        "without this command, and 'launch status', 'launch logs', 'launch watch', 'launch stop' and "
        "'launch add' look after it. --to docker makes an image and a compose file, --to sky a managed job "
        "of SkyPilot per peer. The script builds its optimizer without initial_peers= and credentials=, "
        "which then come from the environment.",
        usage="%(prog)s SCRIPT [--peers N | --swarm FILE] [-- ARGUMENTS OF THE SCRIPT]\n"
        "       %(prog)s status|logs|watch|stop|add [PEER ...] --swarm FILE",
        epilog="example: p2pavg launch examples/train_lm.py --peers 3 -- --epochs 20",
    )
    launch.add_argument("script", metavar="SCRIPT", help="a Python script, or status, logs, watch, stop, add")
    launch.add_argument(
        "names", nargs="*", default=[], metavar="PEER", help="machines of the file; default: all"
    )
    launch.add_argument(
        "--to", choices=("local", "ssh", "docker", "sky"), help="default: ssh with --swarm, else local"
    )
    launch.add_argument("--peers", type=processes, metavar="N", help=f"local ones; default: {DEFAULT_PEERS}")
    launch.add_argument("--swarm", type=Path, metavar="FILE", help="the machines (TOML)")
    launch.add_argument(
        "--emit",
        type=Path,
        metavar="DIR",
        help="docker, sky: only write the files there, and show the commands",
    )
    launch.add_argument(
        "--dry-run", action="store_true", help="say what would be done, look at the machines, start nothing"
    )
    launch.add_argument(
        "--web", metavar="HOST:PORT", help=f"with watch: where the page is served; default: {WEB}"
    )
    launch.add_argument("--jsonl", metavar="PATH", help="with watch: as of 'p2pavg monitor'")
    launch.add_argument("--follow", action="store_true", help="with logs: go on as the log grows")
    launch.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Carry out the step. Returns 0 when everything came about."""
    script = Path(args.script)
    if args.script in STEPS and not script.is_file():
        return _step(args)
    if not script.is_file():
        meant = difflib.get_close_matches(args.script, STEPS, 1)
        hint = f"; did you mean {meant[0]}?" if meant else ""
        raise ConfigurationError(f"there is no script {args.script!r}{hint}")
    if args.names:
        raise ConfigurationError(f"{args.names[0]!r} is no option; arguments of the script stand behind --")
    to = args.to or ("local" if args.swarm is None else "ssh")
    for given, option, of in (
        (args.swarm, "--swarm", ("ssh", "docker", "sky")),
        (args.peers, "--peers", ("local",)),
        (args.emit, "--emit", ("docker", "sky")),
    ):
        if given is not None and to not in of:
            raise ConfigurationError(f"{option} is for --to {' and --to '.join(of)}, and this is --to {to}")
    _check_options(args, "")
    if to == "ssh":
        fleet = Fleet(_swarm(args))
        step = Rehearsal(fleet).run if args.dry_run else Deployment(fleet).launch
        return step(script, args.rest)
    if to != "local":
        return _emit(args, script)
    peers = args.peers or DEFAULT_PEERS
    if peers > MOST_PEERS:
        raise ConfigurationError(f"--peers {peers} is more than {MOST_PEERS} on one machine")
    local = Local(script, args.rest, peers)
    return local.tell() if args.dry_run else local.run()


def _check_options(args: argparse.Namespace, step: str) -> None:
    """Raises ConfigurationError for an option of another step than this one; empty: starting."""
    for given, option, of in (
        (args.follow, "--follow", "logs"),
        (args.web, "--web", "watch"),
        (args.jsonl, "--jsonl", "watch"),
    ):
        if given and of != step:
            raise ConfigurationError(f"{option} is for 'launch {of}'")
    for given, option in ((args.dry_run, "--dry-run"), (args.emit, "--emit"), (args.peers, "--peers")):
        if given and step:
            raise ConfigurationError(f"{option} is for starting a script, not for 'launch {step}'")


def _swarm(args: argparse.Namespace) -> swarm_file.SwarmFile:
    if args.swarm is None:
        raise ConfigurationError(f"--swarm FILE is missing: the machines; an example:\n{swarm_file.EXAMPLE}")
    return swarm_file.load(args.swarm)


def _emit(args: argparse.Namespace, script: Path) -> int:
    swarm = _swarm(args)
    folder = args.emit or args.swarm.with_suffix(f".{args.to}")
    with tempfile.TemporaryDirectory(prefix="p2pavg-launch-") as aside:
        emission = Emission(swarm, script, args.rest, Path(aside) if args.dry_run else folder)
        commands = emission.docker() if args.to == "docker" else emission.sky()
        if args.dry_run:
            print(f"{folder} would have {', '.join(sorted(path.name for path in Path(aside).iterdir()))}")
    return start(folder, commands, only_show=args.dry_run or args.emit is not None)


def _step(args: argparse.Namespace) -> int:
    _check_options(args, args.script)
    deployment = Deployment(Fleet(_swarm(args)))
    match args.script:
        case "status":
            return deployment.status()
        case "logs":
            return deployment.logs(args.names, follow=args.follow)
        case "stop":
            return deployment.stop(args.names)
        case "add":
            return deployment.add(args.names)
        case _:
            return deployment.watch(args.web or WEB, args.jsonl)

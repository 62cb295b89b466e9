"""`bench net`: the throughput of a link by number of streams, and its limits."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import textwrap
import threading
from typing import TYPE_CHECKING, Any

from p2pavg.bench.net import fit
from p2pavg.bench.net.protocol import Client, MeasurementServer
from p2pavg.bench.net.sweep import Limits, measure
from p2pavg.bench.options import at_least
from p2pavg.bench.progress import progress
from p2pavg.bench.result import add_output_options, emit
from p2pavg.errors import AddressInUseError, ConfigurationError, P2PAvgError, ProtocolError
from p2pavg.report.plot import plain_log

if TYPE_CHECKING:
    from p2pavg.lab.lab import RunningLab

EXAMPLE = (
    "example: p2pavg bench net --listen 0.0.0.0:31400   and elsewhere: p2pavg bench net --connect HOST:31400"
)
DEFAULT_SECONDS = 60.0
DEFAULT_GIGABYTES = 10.0
_LAB_PORT = 31400
_MARGIN_S = 30.0


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "net",
        description="Measures a link, one stream and more, both ways, and says what limits it.",
        epilog=EXAMPLE,
    )
    role = parser.add_mutually_exclusive_group(required=True)
    role.add_argument("--listen", metavar="HOST:PORT", help="be the other side, until interrupted")
    role.add_argument("--connect", metavar="HOST:PORT", help="measure the link to a listening side")
    role.add_argument("--lab", metavar="TOPOLOGY", help="measure between two hosts of a lab topology")
    parser.add_argument(
        "--pair", metavar="A:B", help="with --lab: from which host to which (default: the first two)"
    )
    parser.add_argument(
        "--seconds", type=at_least(0.1), default=DEFAULT_SECONDS, help="take no longer than this (default 60)"
    )
    parser.add_argument(
        "--gigabytes",
        type=at_least(0.001),
        default=DEFAULT_GIGABYTES,
        help="send no more than this, both ways together; with --listen: for each measurement (default 10)",
    )
    add_output_options(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Listen, or measure and print."""
    if args.pair and not args.lab:
        raise ConfigurationError("--pair goes with --lab.")
    if args.listen:
        return _listen(args)
    result = _on_lab(args) if args.lab else _connect(args)
    emit(args, result, table(result), lambda figure: _draw(figure, result))
    if result["void_reason"]:
        print(f"VOID: {result['void_reason']}; measure again on a quieter machine.", file=sys.stderr)
        return 1
    return 0


def parse_address(text: str) -> tuple[str, int]:
    """Parse HOST:PORT or [IPV6]:PORT. Raises ConfigurationError."""
    match = re.fullmatch(r"(?:\[([^\]]+)\]|([^:]*)):(\d{1,5})", text)
    if match is None or int(match[3]) > 65535:
        raise ConfigurationError(f"{text!r} is not HOST:PORT; an IPv6 address goes in brackets.")
    return match[1] or match[2] or "0.0.0.0", int(match[3])


def _listen(args: argparse.Namespace) -> int:
    host, port = parse_address(args.listen)
    try:
        server = MeasurementServer(host, port, args.gigabytes)
    except OSError as error:
        raise AddressInUseError(
            f"Cannot listen on {args.listen}: {error.strerror}; choose another."
        ) from None
    shown = f"[{host}]" if ":" in host else host
    print(f"listening on {shown}:{server.port}", flush=True)
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    try:
        thread.join()
    except KeyboardInterrupt:
        server.close()
    return 0


def _announce(args: argparse.Namespace) -> None:
    print(
        f"This takes at most {args.seconds:.0f} s and sends at most {args.gigabytes:g} GB.",
        file=sys.stderr,
        flush=True,
    )


def _connect(args: argparse.Namespace) -> dict[str, Any]:
    host, port = parse_address(args.connect)
    _announce(args)
    limits = Limits(args.seconds, int(args.gigabytes * 1e9))
    client = Client(host, port, limits.bytes)
    try:
        with progress("measuring", args.seconds, by_clock=True):
            return measure(client, limits)
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(
            f"{args.connect} answered what 'bench net' does not understand: {error!r}."
        ) from None
    finally:
        client.close()


def _on_lab(args: argparse.Namespace) -> dict[str, Any]:
    """Run both sides on two hosts of a lab. The result also holds the lab's true values and its router's
    lateness.
    """
    from p2pavg.lab import Lab, load

    shape = load(args.lab)
    src, _, dst = (args.pair or ":".join(shape.hosts[:2])).partition(":")
    for host in (src, dst):
        shape.index(host)
    if src == dst:
        raise ConfigurationError("--pair needs two different hosts, as A:B.")
    _announce(args)
    with Lab(shape) as lab, progress("measuring", args.seconds, by_clock=True):
        before = lab.stats()
        result = between(lab, src, dst, args.seconds, args.gigabytes)
        passed = lab.stats().since(before)
    late = passed.to_json(shape.smallest_rtt_ms())
    result["void_reason"] = late["void_reason"] or result["void_reason"]
    rate, back = (shape.rate_mbps(*pair) / 1e3 for pair in ((src, dst), (dst, src)))
    result["lab"] = {
        "topology": shape.name,
        "pair": [src, dst],
        "true_rtt_ms": shape.rtt_ms(src, dst),
        "true_rate_gbps": rate if rate != float("inf") else None,
        "true_reverse_rate_gbps": back if back != float("inf") else None,
        **late,
    }
    return result


def between(lab: RunningLab, src: str, dst: str, seconds: float, gigabytes: float) -> dict[str, Any]:
    """Measure between two hosts of a lab that is up: a process on each. Raises P2PAvgError."""
    verb = [sys.executable, "-m", "p2pavg.bench", "net"]
    bounds = ["--seconds", str(seconds), "--gigabytes", str(gigabytes)]
    listening = [*verb, "--listen", f"0.0.0.0:{_LAB_PORT}", *bounds]
    server = lab.spawn(dst, listening, stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        if not server.stdout.readline():
            raise P2PAvgError(f"The listening side did not start on host {dst!r}.")
        connecting = [*verb, "--connect", f"{lab.address(dst)}:{_LAB_PORT}", *bounds, "--json", "-"]
        output = lab.run(src, connecting, timeout=seconds + _MARGIN_S)
    except subprocess.TimeoutExpired:
        raise P2PAvgError("The measurement took far longer than it may; is the machine too busy?") from None
    except subprocess.CalledProcessError as error:
        output = error.stdout  # a void measurement has printed its result, too
        if not output:
            raise P2PAvgError(error.stderr.strip().splitlines()[-1]) from None
    finally:
        server.kill()
        server.wait()
    found: dict[str, Any] = json.loads(output)
    return found


def table(result: dict[str, Any]) -> list[str]:
    """The result as lines for people."""
    lines = [
        f"round-trip time {result['rtt_ms']:.2f} ms",
        f"{'':10}{'streams':>8}{'warm':>12}{'cold':>12}{'loaded RTT':>13}{'sent again':>12}",
        *(_row("there", point) for point in result["sweep"]),
        *(_row("back", point) for point in result["reverse"]["sweep"]),
    ]
    if both := result["both"]:
        there, back = _rate(both["forward_gbps"]), _rate(both["reverse_gbps"])
        lines.append(f"{'at once':10}{both['streams']:8}{there:>12} there, {back} back")
    lines += result["words"]
    if burst := result["burst"]:
        warm, idle, cold = (_seconds(burst[name]) for name in ("warm_s", "idle_s", "cold_s"))
        lines.append(
            f"{fit.bytes_text(burst['bytes'])} over {burst['streams']} streams: {warm} at full speed, "
            f"{idle} after a pause of {burst['pause_s']:.1f} s, {cold} over new streams."
        )
    if len(result["congestion_controls"]) > 1:
        each = (f"{name} {fit.rate_text(gbps)}" for name, gbps in result["congestion_controls"].items())
        lines.append(f"One stream by congestion control: {', '.join(each)}.")
    if result["advice_lines"]:
        lines.append("The machine's owner may set:")
        lines += [f"  {line}" for line in result["advice_lines"]]
    elif result["doubt"] is None:
        lines.append("No setting of the kernel would gain anything here.")
    lines.append(f"({result['seconds']:.0f} s, {fit.bytes_text(result['bytes_sent'])} sent)")
    if lab := result.get("lab"):
        truth = f"{lab['true_rate_gbps']:g} Gb/s" if lab["true_rate_gbps"] else "unlimited"
        lines.append(
            f"lab {lab['topology']} {':'.join(lab['pair'])}: truly {lab['true_rtt_ms']:g} ms and {truth}, "
            f"headers counted; router late by at most {lab['late_us_p99']:.0f} us (99%)"
        )
    return lines


def _row(title: str, point: dict[str, Any]) -> str:
    warm, cold = _rate(point["gbps"]), fit.rate_text(point["cold_gbps"])
    return (
        f"{title:10}{point['streams']:8}{warm:>12}{cold:>12}{point['loaded_rtt_ms']:10.1f} ms"
        f"{point['retransmit_share']:12.2%}"
    )


def _rate(gbps: float) -> str:
    return fit.rate_text(gbps) if gbps > 0 else "no rate"


def _seconds(seconds: float | None) -> str:
    return "too long" if seconds is None else fit.seconds_text(seconds)


def _draw(figure: Any, result: dict[str, Any]) -> None:
    """Rate over streams, both ways, with the fitted model."""
    axes = figure.subplots()
    for title, part, colour in (("there", result, "C0"), ("back", result["reverse"], "C1")):
        if not part["sweep"]:
            continue
        streams = [point["streams"] for point in part["sweep"]]
        axes.plot(
            streams, [point["gbps"] for point in part["sweep"]], "o", color=colour, label=f"{title}, warm"
        )
        axes.plot(
            streams,
            [point["cold_gbps"] for point in part["sweep"]],
            "x",
            color=colour,
            label=f"{title}, cold",
        )
        if "window_bytes" in part:
            found = fit.Fit(
                result["rtt_ms"] / 1e3,
                *(
                    part[key]
                    for key in ("window_bytes", "rate_gbps", "best_streams", "filled", "window_limited")
                ),
            )
            law = range(1, max(streams) + 1)
            axes.plot(
                law,
                [found.predict(k) for k in law],
                "-",
                color=colour,
                alpha=0.5,
                label=f"{title}, min(k·W/RTT, rate)",
            )
    axes.set_xscale("log", base=2)
    counts = sorted({point["streams"] for part in (result, result["reverse"]) for point in part["sweep"]})
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_yscale("log")
    plain_log(axes.yaxis)
    axes.set_xlabel("TCP streams")
    axes.set_ylabel("Gb/s")
    axes.set_title("\n".join(textwrap.wrap(result["words"][0], 90)), fontsize="small")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")

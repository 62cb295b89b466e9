"""Averaging against the links' true rates, in the lab: `python -m bench.line_rate --help`.

long      two-300ms, 100M values in fp16: automatic streams, one stream, and 16 raw TCP streams that move the
          same bytes both ways
quarter   two-300ms, 25M values
idle      two-300ms, 100M values, with a minute without traffic before every round
flowcap   two-300ms-flowcap: bytes over the time from the first to the last gradient byte
streams   every topology, or those of --topologies: automatic against fixed numbers of streams
shares    mixed, 10M values: against the shortest time that any part sizes allow (a linear program)
clouds    clouds-4, 8 peers, 25M values: the same, after three rounds that find the streams
stall     two-300ms, 8 streams, 100M values: one stream is black-holed in mid-round
capped    lan-4, max_upload_mbps: what the lab counts
encrypted two-300ms: a closed run beside an open one

--scale 0.1 multiplies all rates of `clouds`, of clouds-4 and six-100ms in `streams` and of `encrypted`, and
the number of values, so that seconds stay comparable: peers and router need more than two cores at the full
rates. Needs root or unprivileged user namespaces, and scipy for `shares` and `clouds`. Every figure is a
median of rounds after a first one; it is void when the lab's router was late (`void_reason`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from bench.line_rate.sections import SECTIONS
from p2pavg.bench.machine import environment


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; none: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="of rates and values")
    parser.add_argument("--topologies", nargs="*", help="of `streams`; what the file holds of others stays")
    parser.add_argument("--json", type=Path, help="sections are added to what the file holds")
    args = parser.parse_args()
    unknown = set(args.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    found = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    for name in args.sections or SECTIONS:
        print(name, flush=True)
        section = SECTIONS[name](args.rounds, args)
        found[name] = {**found.get(name, {}), **section} if args.topologies else section
        print(json.dumps({k: v for k, v in found[name].items() if not isinstance(v, dict)}), flush=True)
        found["environment"] = environment()
        if args.json:
            args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (subprocess.SubprocessError, OSError) as error:
        sys.exit(f"line_rate: {error}")

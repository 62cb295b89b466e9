"""Notices of clouds that take a machine: they are asked for where the firmware names such a cloud.

A notice has the effect of SIGTERM: optimizers leave their runs at the next `step()`, within their notice.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

log = logging.getLogger("p2pavg.optim.process.spot")
POLL_S = 2.0  # Azure gives 30 seconds' notice, Google 30, AWS 120
ANSWERS_S = 2.0
TOKEN_S = 21600  # that a token of AWS holds
BASE = "http://169.254.169.254"  # of the metadata service, in all three
FIRMWARE = Path("/sys/class/dmi/id")
AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"  # of the chassis of Azure's machines
ENDING = {
    "Preempt",
    "Terminate",
    "Redeploy",
    "Reboot",
}  # the other events of Azure pause a machine for seconds

Look: TypeAlias = Callable[[], str | None]
"""Asks once: what the cloud will do, in words; None: nothing. Raises OSError or ValueError without an
answer.
"""

_watching = threading.Lock()
_direct = urllib.request.build_opener(
    urllib.request.ProxyHandler({})
)  # no proxy reaches a link-local address


def cloud(firmware: Path = FIRMWARE) -> str | None:
    """The cloud whose machine this is, by its firmware; None: none of the three."""

    def says(name: str) -> str:
        try:
            return (firmware / name).read_text().strip()
        except OSError:
            return ""

    if "Amazon EC2" in (says("sys_vendor"), says("bios_vendor")):
        return "AWS"
    if says("product_name") == "Google Compute Engine":
        return "Google Cloud"
    return "Azure" if says("chassis_asset_tag") == AZURE_TAG else None


def _ask(path: str, headers: Mapping[str, str], method: str = "GET") -> str:
    request = urllib.request.Request(BASE + path, headers=dict(headers), method=method)
    with _direct.open(request, timeout=ANSWERS_S) as answer:
        return str(answer.read(1 << 16).decode())


class Aws:
    """Spot instances of EC2: `instance-action` is there two minutes before one is taken."""

    def __init__(self) -> None:
        self._token: str | None = None

    def __call__(self) -> str | None:
        if self._token is None:
            seconds = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
            self._token = _ask("/latest/api/token", seconds, "PUT")
        try:
            told = json.loads(
                _ask("/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": self._token})
            )
        except urllib.error.HTTPError as error:
            if error.code == 401:
                self._token = None  # it has expired
                return None
            if error.code == 404:
                return None
            raise
        return f"AWS will {told['action']} it at {told['time']}"


def google() -> str | None:
    """Spot machines of Compute Engine: `preempted` becomes TRUE half a minute before."""
    told = _ask("/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    return "Google Cloud preempts it" if told.strip() == "TRUE" else None


class Azure:
    """Machines of Azure: scheduled events, those of other machines of the same set among them."""

    def __init__(self) -> None:
        self._name: str | None = None

    def __call__(self) -> str | None:
        asks = {"Metadata": "true"}
        if self._name is None:
            named = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            self._name = _ask(named, asks).strip()
        for event in json.loads(_ask("/metadata/scheduledevents?api-version=2020-07-01", asks))["Events"]:
            if event["EventType"] in ENDING and self._name in event["Resources"]:
                return f"Azure: {event['EventType']}, not before {event.get('NotBefore') or 'now'}"
        return None


def looks() -> dict[str, Callable[[], Look]]:
    """How each cloud is asked."""
    return {"AWS": Aws, "Google Cloud": lambda: google, "Azure": Azure}


def watch(wanted: bool | None, leaves: Callable[[], bool]) -> None:
    """Ask for notices from now on, on a thread of its own, once per process.

    wanted: None: where the firmware names a cloud that gives notices. leaves: whether SIGTERM lets an
    optimizer leave, without which a notice is only logged.
    """
    known = cloud()
    if wanted is False or known is None or not _watching.acquire(blocking=False):
        return
    look = looks()[known]()
    threading.Thread(target=_watch, args=(look, leaves), name="p2pavg-spot", daemon=True).start()


def _watch(look: Look, leaves: Callable[[], bool], pause: threading.Event | None = None) -> None:
    pause = pause or threading.Event()
    while (told := _told(look)) is None:
        pause.wait(POLL_S)
    if not leaves():
        log.warning("this machine is taken (%s), and this process does not leave by itself", told)
        return
    log.warning("this machine is taken (%s): leaving the run", told)
    os.kill(os.getpid(), signal.SIGTERM)


def _told(look: Look) -> str | None:
    """What was said; an answer that did not come, or cannot be read, is none."""
    try:
        return look()
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.debug("no answer from the metadata service: %s", error)
        return None

"""What the security page promises is tested: each row and each paragraph names tests, and they are there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pavg.membership import names
from p2pavg.membership.table import dialling_back, ledger, record, serving
from p2pavg.membership.table.carrying import streams
from p2pavg.membership.table.records import store
from p2pavg.peer.reach import errands, relaying
from p2pavg.rounds.loop import handover
from p2pavg.rounds.machine import core, healing, newcomers, refusals, transfer
from p2pavg.rounds.machine.rules import complaints, dawdling, offences, plausible
from p2pavg.rounds.measure import status
from p2pavg.rounds.state import donor, manifest
from p2pavg.rounds.state.trust import patience
from p2pavg.transport import frames
from p2pavg.transport.links import budget, control, half_open, handshake, link, raw_socket
from p2pavg.transport.links.streams import keeper
from p2pavg.transport.ways import punching, relay
from tests.fuzz.targets import TARGETS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
SHORT = dict(re.findall(r"`(\w+)`\s+is\s+`(tests/[\w/]+\.py)`", PAGE))
SECTIONS = {
    "What protects what": 9,
    "What others can cost": 20,
    "What holds against whom": 25,
}  # rows, at least
FREE = ("What is not protected", "Reporting a hole")  # nothing is promised there


WORDS = {2: "two", 3: "three", 4: "four", 5: "five", 6: "six", 10: "ten", 1000: "thousand"}
FIGURES = [
    f"say {handshake.MAX_HELLO_BYTES >> 10} KB at a time, for {WORDS[int(raw_socket.HANDSHAKE_S)]} seconds",
    f"be one of {half_open.MOST}, of which",
    f"be one of {half_open.MOST_SILENT} of its source",
    f"begin {budget.HANDSHAKES_PER_S:.0f} a second, {budget.HANDSHAKES_AT_ONCE:.0f} at once, from one source",
    f"send {serving.REQUESTS_PER_S:.0f} requests a second, {serving.REQUESTS_AT_ONCE:,.0f} at once",
    f"records {WORDS[int(serving.SIGNED_WORK)]}. Of requests",
    f"{serving.STRANGERS_PER_S:.0f} a second cost a signature",
    f"send {WORDS[ledger.AMPLIFICATION]} times the bytes that it sent itself",
    f"of at most {record.MAX_VALUE_BYTES} bytes",
    f"{store.MAX_RECORDS_PER_KEY:,} under one key and {store.MAX_RECORDS:,} in all",
    f"have {WORDS[names.MAX_LOOKUPS]} looked up at once",
    f"at most {budget.MAX_LINKS} links",
    f"{frames.MAX_BODY_BYTES >> 20} MiB for a chunk",
    f"{control.MAX_MESSAGE_BYTES >> 20} MiB for a control message",
    f"{manifest.MAX_STATE_BYTES >> 30} GiB for a state",
    f"{manifest.MAX_META_BYTES >> 20} MiB for what stands at its head",
    f"send {budget.MESSAGES_PER_S:,.0f} a second, {budget.MESSAGES_AT_ONCE:,.0f} at once",
    f"have {keeper.MOST_ACCEPTED} open on a link",
    f"open {budget.STREAMS_PER_S:.0f} a second, {budget.STREAMS_AT_ONCE:.0f} at once",
    f"after {link._MOST_STREAMS:,} the link ends",
    f"hold {control.MAX_QUEUED_BYTES >> 20} MiB",
    f"nothing comes for {WORDS[link._MOST_UNHEARD // 60]} minutes",
    f"get every chunk {WORDS[donor.MOST_TIMES]} times",
    f"after {'twice' if donor.SNAPSHOT_PAUSE == 2 else ''} the time that the last one took",
    f"hold them up for {WORDS[int(newcomers.MOST_HELD_S) // 60]} minutes in all",
    f"of {core.MOST_WORDS} peers beside the members",
    f"{WORDS[handover.MOST_AT_ONCE]} may at a time",
    f"at most {plausible.MOST_HANDED:.0f} times what the whole run counts",
    f"try {WORDS[int(errands._MEETINGS_PER_S)]} a second, {errands._MEETINGS_AT_ONCE:.0f} at once",
    f"{errands._STREAMS_PER_S:.0f} a second, {errands._STREAMS_AT_ONCE:.0f} at once, with the host",
    f"{punching.BURSTS * punching.MOST_DIALS} at most",
    f"have {streams.MOST_OF_SOURCE} of one source, {streams.MOST_OF_NETWORK} of one network",
    f"open {streams.OPENED_PER_S:.0f} and {streams.OF_NETWORK * streams.OPENED_PER_S:.0f} a second",
    f"where {streams.MOST_ACCEPTED:,} are there",
    f"try {WORDS[dialling_back.MOST_OF_SOURCE]} ports of its own at once",
    f"{WORDS[dialling_back.MOST_OF_NETWORK]} of its network",
    f"get {WORDS[int(relaying._TUNNELS_PER_S)]} a second, {relaying._TUNNELS_AT_ONCE:.0f} at once",
    f"{relay.MOST_OF_ONE} at a time",
    f"be one of {status.MOST_WATCHERS} watchers",
    f"the samples of a {WORDS[plausible.MOST_TARGETS]} epochs",
    f"waits {patience.ANSWER_S:.0f} s without an answer",
    f"the model can have, at {patience.COPIED_BPS / 1e6:.0f} MB/s",
    f"at {'half' if patience.SLOWEST_BPS == 62.5e3 else ''} a Mb/s for {patience.MOST_OWED >> 20} MB at most",
    f"the rest go on, for {healing.DOUBT_S:.0f} s, then {2 * healing.DOUBT_S:.0f} s",
    f"gets {WORDS[int(transfer.LATE_FACTOR) + 1]} times as long as most others needed",
    f"else {WORDS[refusals.MOST_REFUSALS]} times in an epoch",
    f"complain {'twice' if complaints.MOST_VAGUE == 2 else ''} in an epoch",
    f"after {WORDS[dawdling.MOST_SLOW + 1]} of them",
    f"up to {offences.MOST_EPOCHS_OUT}, and only rounds",
]


def rows(section: str) -> Iterator[list[str]]:
    """The cells of each row of the section's tables, their heads left out."""
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if cells[-1].strip("| ") != "test":
            yield cells


def named(text: str) -> Iterator[tuple[Path, str]]:
    """(file, test) of each test that a cell or a paragraph names; test "": all of the file."""
    path = None
    for name in re.findall(r"`([^`]+)`", text):
        if name in TARGETS and f"fuzz target `{name}`" in text:
            yield ROOT / "tests" / "fuzz" / "targets.py", ""
        elif re.fullmatch(r"(tests/[\w/]+\.py|\w+)(::test_\w+)?|test_\w+", name):
            file, _, test = name.partition("::") if not name.startswith("test_") else ("", "", name)
            if file in SHORT or file.startswith("tests/") or test:
                path = ROOT / SHORT.get(file, file) if file else path
                assert path is not None, text
                yield path, test


def paragraphs() -> Iterator[tuple[str, str]]:
    """(section, text) of each paragraph: no heading, table, comment or block of code."""
    section = ""
    for block in re.sub(r"^```.*?^```$", "", PAGE, flags=re.MULTILINE | re.DOTALL).split("\n\n"):
        if heading := re.match(r"\s*##? (.+)", block):
            section = heading[1]
        elif block.strip() and not block.lstrip().startswith(("|", "<!--")):
            yield section, block


def is_there(path: Path, test: str) -> bool:
    """Whether the file has this test, or any."""
    return path.is_file() and bool(
        re.search(rf"def {test}\b" if test else r"def test_|Target\(", path.read_text())
    )


@pytest.mark.parametrize("figure", FIGURES)
def test_the_figures_are_the_codes(figure: str) -> None:
    """The bounds that the page tells are those that the code keeps."""
    assert figure in " ".join(PAGE.split())


@pytest.mark.parametrize("section", SECTIONS)
def test_each_sentence_names_its_test(section: str) -> None:
    """A row without a test, or with one that does not exist, is no promise."""
    found = list(rows(section))
    assert len(found) >= SECTIONS[section]
    for cells in found:
        tests = list(named(cells[-1]))
        assert tests, cells[0]
        assert len(tests) == cells[-1].count("`") / 2, cells[-1]
        assert [each for each in tests if not is_there(*each)] == []


def test_each_paragraph_names_a_test() -> None:
    """Whatever is said outside of tables, and not under what is not protected, names a test that exists."""
    found = list(paragraphs())
    assert {section for section, _ in found} > {*SECTIONS, *FREE, "Closing a run", "Ending a membership"}
    for section, text in found:
        tests = list(named(text))
        assert tests or section in FREE, text
        assert [each for each in tests if not is_there(*each)] == [], text

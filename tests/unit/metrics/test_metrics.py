"""Metrics: names, values, the port of a peer, and what reads them."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from p2pavg.errors import AddressInUseError, ConfigurationError
from p2pavg.identity import short_id
from p2pavg.metrics.catalogue import METRICS
from p2pavg.metrics.endpoint import MOST_CONNECTIONS, MetricsEndpoint
from p2pavg.metrics.exposition import text_of
from p2pavg.metrics.own import OwnMetrics
from p2pavg.monitor import exported
from p2pavg.peer.settings import Settings
from p2pavg.report.distance import Distance
from p2pavg.report.status import LinkSeen, Status
from tests.unit.monitor.test_monitor import PRICES, A, B, C, status, three, told_of
from tests.unit.report.reports import link, report

parser: Any = pytest.importorskip("prometheus_client.parser")
GRAFANA = Path(__file__).parents[3] / "docs" / "grafana"


def stands(**changes: Any) -> Status:
    found = Status.from_message(status(**changes))
    assert found is not None
    return replace(found, links=(LinkSeen(B, Distance.WORLD, 0.1, 8, 8e8, 1, 1),))


def own(**changes: Any) -> dict[str, Any]:
    """What a peer exports after two epochs of 10 s, by name."""
    made = OwnMetrics("run", A, "ada")
    for epoch in (3, 4):
        made.add(report(epoch=epoch, links=(link(10**6, Distance.WORLD),), **changes), 10.0 * epoch)
    return parsed(text_of(made.values(stands(loss=2.5), 3, 45.0)))


def parsed(text: bytes) -> dict[str, list[tuple[Mapping[str, str], float]]]:
    """Samples by name, as Prometheus reads them."""
    found: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    for family in parser.text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def page() -> dict[str, Any]:
    """What the monitor's page exports of three peers, by name."""
    picture = three(PRICES)
    row = [B, list(Distance).index(Distance.WORLD), 0.103, 8, 2.1e8, 1000, 1000]
    for peer in (A, B, C):
        picture.told(peer, told_of(4, samples_discarded=2), 0.2)
    picture.told(A, status(counted=300, loss=2.5, links=[row]), 0.5)
    return parsed(text_of(exported.values(picture.show(1.0))))


def test_names_are_as_prometheus_wants_them() -> None:
    """One prefix, base units, counters end in _total, each metric once and with its meaning."""
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert re.fullmatch(r"p2pavg_[a-z][a-z_]*[a-z]", metric.name)
        assert metric.help.endswith(".")
        assert not re.search(r"_(ms|milliseconds|kb|mb|gb|bits|minutes|percent)(_|$)", metric.name)


def test_a_peer_exports_what_its_reports_and_status_say() -> None:
    """Counters add up over its epochs; rates, ages and links are as measured."""
    found = own(samples_discarded=5, attempts=2)
    mine = {"run": "run", "peer": short_id(A)}
    values = {
        "p2pavg_epochs_total": 2,
        "p2pavg_samples_total": 2000,
        "p2pavg_failed_attempts_total": 2,
        "p2pavg_samples_per_second": 100,
        "p2pavg_peer_samples_per_second": 40,
        "p2pavg_epoch_usual_seconds": 10,
        "p2pavg_epoch_age_seconds": 5,
        "p2pavg_peers": 3,
        "p2pavg_loss": 2.5,
        "p2pavg_peer_samples_discarded_total": 10,
        "p2pavg_peer_sent_bytes_total": 2e6,
        "p2pavg_peer_memory_bytes": 1e9,
        "p2pavg_epoch": 4,
    }
    for name, value in values.items():
        assert found[name] == [(mine, value)], name
    assert found["p2pavg_link_bytes_per_second"] == [({**mine, "other": short_id(B)}, 1e8)]
    phases = {labels["phase"]: value for labels, value in found["p2pavg_peer_phase_seconds_total"]}
    assert phases["calculation"] == 16.0
    ((about, one),) = found["p2pavg_peer_info"]
    assert (about["name"], about["region"], one) == ("ada", "eu-west-1", 1.0)


def test_a_peer_that_does_not_train_yet_can_be_scraped() -> None:
    """Counters begin at 0, so that the first increase counts."""
    found = parsed(text_of(OwnMetrics("run", A, "ada").values(None, 1, 0.0)))
    assert found["p2pavg_peer_samples_discarded_total"] == [({"run": "run", "peer": short_id(A)}, 0.0)]
    assert "p2pavg_epoch_age_seconds" not in found


def test_what_a_leaving_peer_discards_is_counted_and_no_epoch_is() -> None:
    """The last report has no members: no round ended with it."""
    assert own(members=(), samples_discarded=3)["p2pavg_epochs_total"][0][1] == 0
    assert own(members=(), samples_discarded=3)["p2pavg_peer_samples_discarded_total"][0][1] == 6


def test_the_page_exports_all_metrics_and_a_peer_all_but_the_price() -> None:
    """Both use the names of the catalogue, each with its labels, so that one dashboard reads either."""
    names = {metric.name for metric in METRICS}
    of_page, of_peer = page(), own()
    assert set(of_page) == names
    assert set(of_peer) == names - {"p2pavg_dollars_per_hour"}
    for metric in METRICS:
        for found in (of_page, of_peer):
            for labels, _ in found.get(metric.name, []):
                assert set(labels) == set(metric.labels)
    discarded = {labels["peer"]: value for labels, value in of_page["p2pavg_peer_samples_discarded_total"]}
    assert discarded == {short_id(peer): 2.0 for peer in (A, B, C)}
    assert {value for _, value in of_page["p2pavg_peer_up"]} == {1.0}


@pytest.mark.parametrize(
    "text", ['a"} evil{x="', "a\\", "a\nevil 1", "<script>alert(1)</script>", "\ud800", "{{x}}"]
)
def test_hostile_text_stays_inside_its_label(text: str) -> None:
    """A name, a region or a run that looks like the format ends neither its label nor its line."""
    made = OwnMetrics(text, A, text)
    found = parsed(text_of(made.values(replace(stands(), region=text, version=text, reach=text), 1, 0.0)))
    ((labels, _),) = found["p2pavg_peer_info"]
    told = text.encode("utf-8", "replace").decode()
    assert [labels[name] for name in ("run", "name", "region", "version", "reach")] == 5 * [told]
    assert set(found) <= {metric.name for metric in METRICS}


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, 1e308, -1e308])
def test_a_strange_loss_is_a_value_like_another(loss: float) -> None:
    """Prometheus' format has names for what is no number."""
    found = parsed(text_of(OwnMetrics("run", A, "ada").values(stands(loss=loss), 1, 0.0)))
    ((_, value),) = found["p2pavg_loss"]
    assert value == loss or (math.isnan(value) and math.isnan(loss))


def used(expression: str) -> set[str]:
    """The metrics that a query names."""
    return set(re.findall(r"p2pavg_[a-z_]+", expression))


def labels_used(expression: str) -> set[str]:
    """The labels that a query groups, joins or filters by."""
    lists = re.findall(r"(?:by|on|group_left) \(([^)]*)\)", expression)
    return {name.strip() for one in lists for name in one.split(",")} | set(
        re.findall(r'(\w+)=~?"', expression)
    )


def test_the_dashboard_asks_for_what_is_exported() -> None:
    """Every query of the Grafana dashboard names exported metrics and labels that they have; all are used."""
    data = json.loads((GRAFANA / "dashboard.json").read_text())
    queries = [target["expr"] for panel in data["panels"] for target in panel["targets"]]
    names = {metric.name: set(metric.labels) for metric in METRICS}
    assert len(queries) > 20
    seen: set[str] = set()
    for query in queries:
        assert used(query) <= names.keys(), query
        assert labels_used(query) <= set().union(*(names[name] for name in used(query))), query
        assert query.count("(") == query.count(")")
        seen |= used(query)
        for name in used(query):
            assert ("rate(" in query or "increase(" in query) or not name.endswith("_total"), query
    shown = {
        name
        for name in names
        if name not in ("p2pavg_epochs_total", "p2pavg_samples_total", "p2pavg_data_blocks")
    }
    assert seen == shown
    ids = [panel["id"] for panel in data["panels"]]
    assert len(set(ids)) == len(ids)


def test_the_alerts_ask_for_what_is_exported() -> None:
    """Each alert names exported metrics, a severity, and says in words what is wrong."""
    yaml = pytest.importorskip("yaml")
    (group,) = yaml.safe_load((GRAFANA / "alerts.yml").read_text())["groups"]
    names = {metric.name for metric in METRICS}
    assert [rule["alert"] for rule in group["rules"]] == [
        "P2PAvgNoEpoch",
        "P2PAvgSamplesDiscarded",
        "P2PAvgOnePeerLeft",
    ]
    for rule in group["rules"]:
        assert used(rule["expr"])
        assert used(rule["expr"]) <= names
        assert rule["annotations"]["summary"].endswith(".")
        assert rule["labels"]["severity"] in ("warning", "critical")


async def ask(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        async with asyncio.timeout(20):
            return await reader.read()
    finally:
        writer.close()


async def test_a_peers_port_answers_scrapes_and_nothing_else() -> None:
    """GET /metrics gives the text; other paths and methods, and what is no HTTP, get 404 or are closed."""
    endpoint = MetricsEndpoint(lambda: b"p2pavg_epoch 7\n")
    await endpoint.start("127.0.0.1", 0)
    try:
        answer = await ask(endpoint.port, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert answer.endswith(b"\r\n\r\np2pavg_epoch 7\n")
        for request in (b"GET /x HTTP/1.1", b"POST /metrics HTTP/1.1", b"\xff\x00", b"GET"):
            assert (await ask(endpoint.port, request + b"\r\n\r\n")).startswith(b"HTTP/1.1 404")
        assert await ask(endpoint.port, b"x" * 100_000) == b""
        with pytest.raises(AddressInUseError, match="metrics="):
            await MetricsEndpoint(bytes).start("127.0.0.1", endpoint.port)
    finally:
        await endpoint.close()


async def test_scrapers_that_hang_take_no_more_than_their_places() -> None:
    """Beyond so many open connections a new one is closed at once."""
    endpoint = MetricsEndpoint(bytes)
    await endpoint.start("127.0.0.1", 0)
    hanging = [await asyncio.open_connection("127.0.0.1", endpoint.port) for _ in range(MOST_CONNECTIONS)]
    try:
        assert await ask(endpoint.port, b"") == b""
    finally:
        for _, writer in hanging:
            writer.close()
        await endpoint.close()


def test_the_option_is_checked_before_anything_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no address, or needs what is not installed, is one sentence."""
    assert Settings("r", listen="127.0.0.1:0", metrics="127.0.0.1:9100").metrics_place == ("127.0.0.1", 9100)
    with pytest.raises(ConfigurationError, match="host:port"):
        Settings("r", listen="127.0.0.1:0", metrics="9100")
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    with pytest.raises(ConfigurationError, match="pip install 'prometheus-client"):
        Settings("r", listen="127.0.0.1:0", metrics="127.0.0.1:9100")

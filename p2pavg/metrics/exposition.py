"""Values of metrics in Prometheus' text format, by prometheus-client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from p2pavg.metrics.catalogue import METRICS, Values

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def text_of(values: Values) -> bytes:
    """All metrics that have values. Labels may be any text: what would end one is escaped."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Told(values))
    made: bytes = generate_latest(registry)
    return made


class _Told:
    """The values as prometheus-client wants them: a collector."""

    def __init__(self, values: Values) -> None:
        self._values = values

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for metric in METRICS:
            rows = self._values.get(metric.name)
            if not rows:
                continue
            kind = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
            family = kind(metric.name.removesuffix("_total"), metric.help, labels=metric.labels)
            for labels, value in rows:
                family.add_metric([label.encode("utf-8", "replace").decode() for label in labels], value)
            yield family

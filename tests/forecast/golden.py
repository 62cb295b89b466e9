"""The measured swarms, and Hivemind's law for them: what the product's way of predicting is tried on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

DATA: dict[str, Any] = json.loads((Path(__file__).parent / "golden.json").read_text())
RUNS: list[dict[str, Any]] = DATA["runs"]
STABLE = [run for run in RUNS if not run["unstable"]]
Row = np.ndarray


def slowest_gbps(run: dict[str, Any]) -> float:
    """Of one stream between any two peers of a run."""
    rates = {}
    for link in DATA["links"]:
        rates[link["a"], link["b"]] = rates[link["b"], link["a"]] = link["single_stream_gbps"]
    sites = [peer["site"] for peer in run["peers"]]
    pairs = [(a, b) for i, a in enumerate(sites) for b in sites[i + 1 :]]
    return float(min(rates[pair] for pair in pairs if pair in rates))


def gigabytes(run: dict[str, Any]) -> float:
    return float(DATA["models"][run["model"]]["bytes_fp16"] / 1e9)


def law(run: dict[str, Any]) -> Row:
    """c0 + c1·N + g·2(N-1)/N·bytes + β·2·bytes/(N·slowest pair): what each constant is multiplied by."""
    n, size = len(run["peers"]), gigabytes(run)
    return np.array([1, n, 2 * (n - 1) / n * size, 8 * 2 * size / (n * slowest_gbps(run))])


def one_zone_law(models: Sequence[str]) -> Callable[[dict[str, Any]], Row]:
    """In one zone what a model costs beside its bytes is a constant, told by other runs of it."""

    def features(run: dict[str, Any]) -> Row:
        n = len(run["peers"])
        own = [float(run["model"] == model) for model in models]
        return np.array([*own, n - 2, gigabytes(run) * (2 * (n - 1) / n - 1)])

    return features


def fitted(runs: Sequence[dict[str, Any]], features: Callable[[dict[str, Any]], Row]) -> Row:
    """Constants by least squares over relative errors of the communication."""
    weights = np.array([1 / run["comm_median_s"] for run in runs])
    rows = np.array([features(run) for run in runs])
    found: Row = np.linalg.lstsq(rows * weights[:, None], np.ones(len(runs)), rcond=None)[0]
    return found


def left_out(
    runs: Sequence[dict[str, Any]], features: Callable[[dict[str, Any]], Row]
) -> list[tuple[dict[str, Any], float]]:
    """Each run with its communication as the others foretell it, seconds."""
    found = []
    for run in runs:
        others = [other for other in runs if other is not run]
        found.append((run, float(features(run) @ fitted(others, features))))
    return found

"""The manifests for Kubernetes: valid by its own schemas, and fit for a peer's way to leave."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from p2pavg.launch.swarm_file import BOOTSTRAP_PORT
from p2pavg.optim.training_options import TrainingOptions
from p2pavg.peer.settings import DEFAULT_PORT

yaml = pytest.importorskip("yaml")
validator = pytest.importorskip("kubernetes_validate")
FILE = Path(__file__).resolve().parents[3] / "docs" / "deploy" / "kubernetes.yaml"
VERSIONS = ("1.30", "1.33")


def documents() -> dict[tuple[str, str], dict[str, Any]]:
    """By kind and name."""
    found = list(yaml.safe_load_all(FILE.read_text()))
    return {(document["kind"], document["metadata"]["name"]): document for document in found}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_manifests_fit_the_schemas_of_kubernetes(version: str) -> None:
    """Strictly, so that a misspelt field is an error; one that is misspelt is found."""
    for document in documents().values():
        validator.validate(document, version, strict=True)
    wrong = copy.deepcopy(documents()["StatefulSet", "peers"])
    wrong["spec"]["template"]["spec"]["terminationGraceSeconds"] = 60
    with pytest.raises(validator.ValidationError):
        validator.validate(wrong, version, strict=True)


def test_a_pod_has_longer_than_the_notice_and_its_own_credentials() -> None:
    """SIGTERM reaches Python, the grace exceeds `leave_notice_s`; names, ports and secrets fit each other."""
    found = documents()
    assert set(found) == {
        (kind, name) for kind in ("Service", "StatefulSet") for name in ("bootstrap", "peers")
    }
    notice = TrainingOptions.leave_notice_s
    for name, port in (("bootstrap", BOOTSTRAP_PORT), ("peers", DEFAULT_PORT)):
        service, group = found["Service", name]["spec"], found["StatefulSet", name]["spec"]
        assert service["clusterIP"] == "None"
        assert group["serviceName"] == name
        labels = group["template"]["metadata"]["labels"]
        assert service["selector"] == group["selector"]["matchLabels"] == labels
        (container,) = group["template"]["spec"]["containers"]
        assert "command" not in container  # no shell stands between the signal and the image's entry point
        opened = {(told["containerPort"], told["protocol"]) for told in container["ports"]}
        assert opened == {(port, "TCP"), (port, "UDP")}
        (volume,) = group["template"]["spec"]["volumes"]
        assert volume["secret"]["defaultMode"] == 0o400
    pod = found["StatefulSet", "peers"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] >= notice + 10
    given = {told["name"]: told.get("value") for told in pod["containers"][0]["env"]}
    assert given["P2PAVG_INITIAL_PEERS"] == f"bootstrap:{BOOTSTRAP_PORT}"
    assert given["P2PAVG_CREDENTIALS"] == "/credentials/$(POD_NAME).credentials"

"""The manifests of docs/nodes.md name what there is: a command and its options, a metric, and the time that a drain takes."""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from actorllm.actors.engine_thread import STOP_TIMEOUT_S
from actorllm.cli.node import node
from actorllm.client.metric_families import families_of
from actorllm.fleet.nodes.remote import LEAVE_TIMEOUT_S

PAGE = Path(__file__).parents[3] / "docs" / "nodes.md"
MANIFESTS = [yaml.safe_load(code) for code in re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.M | re.S)]


def manifest(kind: str) -> dict[str, Any]:
    (found,) = [one for one in MANIFESTS if one["kind"] == kind]
    return dict(found)


def test_a_pod_runs_an_agent_that_may_read_its_key_and_has_the_time_to_drain() -> None:
    pod = manifest("StatefulSet")["spec"]["template"]["spec"]
    (container,), (volume,) = pod["containers"], pod["volumes"]
    assert container["command"][:2] == ["sh", "-c"]
    words = shlex.split(container["command"][2])
    assert words[:2] == ["actorllm", "node"]
    given = dict(zip(words[2::2], words[3::2], strict=True))
    assert given.keys() <= {"--" + name.replace("_", "-") for name in inspect.signature(node).parameters}
    (variable,) = [one["name"] for one in container["env"]]
    assert given["--listen"].partition(":")[0] == f"${variable}"
    (mount,) = container["volumeMounts"]
    assert mount["name"] == volume["name"]
    assert given["--key-file"].startswith(mount["mountPath"] + "/")
    assert volume["secret"]["defaultMode"] == 0o600
    assert pod["terminationGracePeriodSeconds"] > LEAVE_TIMEOUT_S + 2.0 + STOP_TIMEOUT_S + 1.0


def test_keda_asks_for_a_metric_of_the_engine() -> None:
    spec = manifest("ScaledObject")["spec"]
    assert spec["scaleTargetRef"] == {"kind": "StatefulSet", "name": manifest("StatefulSet")["metadata"]["name"]}
    (trigger,) = spec["triggers"]
    (name,) = re.findall(r"actorllm:(\w+)", trigger["metadata"]["query"])
    scaling = {"num_wanted": 2, "num_needed": 1.5, "predicted_attainment": 1.0}
    families = families_of({"supervisor": {"scaling": scaling}, "scheduler": None}, 2048)
    assert [value for family in families if family.name == name for _, _, value in family.samples] == [2]
    assert trigger["metadata"]["threshold"] == "1"

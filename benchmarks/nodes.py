"""A Ray cluster on this machine whose autoscaler starts and ends pretended nodes, of the groups of a RayCluster's manifest.

Ray's own AutoscalingCluster for this ends every Ray there is on the machine, and its provider's defaults are not in Ray's
packages. Here the cluster is a process group of its own, with its own ports, folder and token.
"""

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID, FAKE_HEAD_NODE_TYPE
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.util import get_node_ip_address

from benchmarks.server import ROOT, free_port, get

_PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
_RAY = str(Path(sys.executable).parent / "ray")
_STORE_BYTES = 100 << 20  # of objects, on each node
_START_S, _STOP_S = 180.0, 20.0  # how long it may take


@dataclass(frozen=True, slots=True)
class Nodes:
    """A cluster that runs."""

    address: str  # of Ray
    environment: dict[str, str]  # of whoever connects to it
    metrics: str  # URL of the autoscaler's
    head_metrics: str  # URL of those of the head's own node, as Ray exports them

    def count(self) -> dict[str, int]:
        """Nodes that run, by group; none before the head does."""
        shown = re.findall(r'^autoscaler_active_nodes\{NodeType="([^"]+)".*} (\S+)$', get(self.metrics) or "", re.M)
        numbers = {group: int(float(number)) for group, number in shown}
        return numbers if numbers.pop(FAKE_HEAD_NODE_TYPE, 0) else {}

    def used(self) -> dict[str, float]:
        """What replicas have of each resource, as `ray status` says."""
        command = [_RAY, "status", "--address", self.address]
        status = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=True)
        shown = re.findall(r"^ ([0-9.]+)/[0-9.]+ (\S+)$", status.stdout, re.M)
        return {name: float(number) for number, name in shown}


def autoscaling(ray_cluster: dict[str, Any], idle_s: float) -> dict[str, Any]:
    """What Ray's autoscaler is told of a RayCluster, as it reads the manifest itself.

    ray_cluster: its spec. idle_s: when a node that has nothing to do goes, instead of what the groups say.
    """
    manifest = {"metadata": {"name": "paceline", "namespace": "paceline"}, "spec": ray_cluster}
    config: dict[str, Any] = _derive_autoscaling_config_from_ray_cr(manifest)
    types: dict[str, Any] = config["available_node_types"]
    for each in types.values():
        # A pod's; here all have this machine's. And Ray would start a process ahead of time for each core.
        del each["resources"]["memory"], each["resources"]["CPU"]
        each["resources"]["object_store_memory"] = _STORE_BYTES
        each["idle_timeout_s"] = idle_s
    types[FAKE_HEAD_NODE_TYPE] = types.pop(config["head_node_type"])
    return {**config, "head_node_type": FAKE_HEAD_NODE_TYPE}


@contextmanager
def pretended_nodes(ray_cluster: dict[str, Any], idle_s: float, log: Path) -> Iterator[Nodes]:
    """A head, and what the autoscaler (v2, as in the manifests) adds to it; ended at the end. See `autoscaling`."""
    folder = Path(tempfile.mkdtemp(prefix="paceline"))  # short: names of sockets have a limit
    nodes = Nodes(
        address=f"{get_node_ip_address()}:{free_port()}",  # type: ignore[no-untyped-call]
        environment={**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)},
        metrics=f"http://127.0.0.1:{free_port()}/metrics",
        head_metrics=f"http://127.0.0.1:{free_port()}/metrics",
    )
    head_pod = ray_cluster["headGroupSpec"]["template"]["spec"]["containers"][0]
    of_pods = {each["name"]: each["value"] for each in head_pod["env"] if each["name"].startswith("RAY_")}
    config = autoscaling(ray_cluster, idle_s)
    # "external" rather than by its short name: that one has defaults in a file that is not there.
    provider = {"type": "external", "module": _PROVIDER, "launch_multiple": True, "head_node_id": FAKE_HEAD_NODE_ID}
    config["provider"] = {**config["provider"], **provider, "gcs_address": nodes.address}
    (folder / "autoscaler.json").write_text(json.dumps(config))
    with log.open("wb") as output:
        head = subprocess.Popen(
            _command(nodes, folder),
            env=of_pods | _environment(nodes),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + _START_S
        while not nodes.count():
            if head.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"Ray did not start: {log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield nodes
    finally:
        _end(head)
        shutil.rmtree(folder, ignore_errors=True)


def _command(nodes: Nodes, folder: Path) -> list[str]:
    # One port for each thing that would take a fixed one. The head has no CPUs, as in the manifests.
    ports = {"port": _port(nodes.address), "ray-client-server-port": free_port()}
    ports["metrics-export-port"] = _port(nodes.head_metrics)
    ports |= {"dashboard-agent-listen-port": 0, "min-worker-port": 0, "max-worker-port": 0}
    own = {"autoscaling-config": folder / "autoscaler.json", "temp-dir": folder, "include-dashboard": "false"}
    own["include-log-monitor"] = "false"
    head = {"num-cpus": 0, "object-store-memory": _STORE_BYTES}
    options = [f"--{name}={value}" for name, value in {**ports, **own, **head}.items()]
    return [_RAY, "start", "--head", "--block", "--disable-usage-stats", *options]


def _port(address: str) -> int:
    return int(address.removesuffix("/metrics").rpartition(":")[2])


def _environment(nodes: Nodes) -> dict[str, str]:
    return {
        **nodes.environment,
        "PYTHONPATH": str(ROOT),
        "RAY_enable_autoscaler_v2": "1",
        "RAY_FAKE_CLUSTER": "1",
        "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "AUTOSCALER_METRIC_PORT": str(_port(nodes.metrics)),
        # A node without replicas keeps its proxy for so long, and is not idle; 30 by default.
        "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "1",
    }


def _end(head: subprocess.Popen[bytes]) -> None:
    """All processes of the cluster, which are the group of its head: there is nothing that they should still do."""
    os.killpg(head.pid, signal.SIGKILL)
    head.wait()
    deadline = time.monotonic() + _STOP_S
    while _runs(head.pid) and time.monotonic() < deadline:
        time.sleep(0.05)


def _runs(group: int) -> bool:
    """Whether a process of the group is left."""
    with suppress(ProcessLookupError):
        os.killpg(group, 0)
        return True
    return False

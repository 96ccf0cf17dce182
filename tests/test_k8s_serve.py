"""The demo overlay's Serve configuration runs: each replica takes what only the pods of its group have, and answers."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from deployments.config import ServeConfig, parse_config
from deployments.serve import base_url, deploy, withdraw
from tests.cluster_fixtures import PATIENCE_S, until
from tests.manifests import K8S, ROOT
from tests.served import free_ports

pytestmark = pytest.mark.ray

# One of each group's pods, and no CPUs, as on the head: what asks for none of these would find no place.
NODES: dict[str, float] = {"target": 1, "draft": 4, "ingress": 1}


def demo_config(keys: Path) -> ServeConfig:
    """The overlay's own, with paths and ports of this machine."""
    text = (K8S / "overlays" / "cpu-demo" / "serve.yaml").read_text().replace("/opt/paceline", str(ROOT))
    (application,) = yaml.safe_load(text)["applications"]
    args: dict[str, Any] = application["args"]
    http, grpc, first = free_ports(3)
    args["http"] |= {"host": "127.0.0.1", "port": http, "api_keys_file": str(keys)}
    args["grpc"] = {"port": grpc}
    args["models"][0]["draft"] |= {"host": "127.0.0.1", "ports": [min(first, 65000), min(first, 65000) + 9]}
    return parse_config(args)


def complete(config: ServeConfig, key: str) -> str:
    body = json.dumps({"model": "code", "prompt": "def add(", "max_tokens": 8, "temperature": 0}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{base_url(config.http)}/v1/completions", body, headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def available() -> dict[str, float]:
    held: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    return {name: held.get(name, 0) for name in NODES}


def test_the_demo_answers_and_each_replica_takes_its_groups_resource(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("demo")
    config = demo_config(keys)
    ray.init(
        address="local",
        num_cpus=0,
        resources=NODES,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
    )
    try:
        deploy(config, lambda text: None)
        assert complete(config, "demo")
        left = {name: amount - 1 for name, amount in NODES.items()}  # when one replica of each has its place
        until(lambda: available() == left, "all in their places")
        withdraw(config)
    finally:
        ray.shutdown()

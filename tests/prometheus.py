"""A Prometheus that scrapes what runs here, by the scrape configuration and rules that are for Kubernetes."""

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.server import free_port, get
from tests.cluster_fixtures import until
from tests.manifests import K8S, ROOT

FOLDER = K8S / "components" / "monitoring"
_BINARIES = ROOT / "build" / "promtool" / "usr" / "bin"
PROMETHEUS = shutil.which("prometheus") or shutil.which(_BINARIES / "prometheus")
PROMTOOL = shutil.which("promtool") or shutil.which(_BINARIES / "promtool")
needs_prometheus = pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not here: 'make promtool' gets it")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not here: 'make promtool' gets it")
_EVERY = "1s"  # scrapes and evaluations, instead of what the manifests say


def rule_groups() -> list[dict[str, Any]]:
    """Ours."""
    groups: list[dict[str, Any]] = yaml.safe_load((FOLDER / "rules.yaml").read_text())["spec"]["groups"]
    return groups


def panel_queries() -> Iterator[str]:
    """Of the dashboard, for all models."""
    for panel in json.loads((FOLDER / "dashboard.json").read_text())["panels"]:
        yield from (target["expr"].replace("$model", ".*") for target in panel["targets"])


def alert_operands() -> Iterator[str]:
    """The alerts' queries, as ones that give 0 or 1 wherever there is something to compare, whatever the result.

    Without `offset`: nobody waits for yesterday's figures here.
    """
    alerts = [rule["expr"] for group in rule_groups() for rule in group["rules"] if "alert" in rule]
    for query in alerts:
        if not query.startswith("absent("):  # it gives nothing when all is well
            yield re.sub(r" offset \w+", "", re.sub(r" ([<>]|==) ", r" \1 bool ", query))


class Prometheus:
    """One that runs."""

    def __init__(self, url: str) -> None:
        """url: of its API."""
        self._url = url

    def ask(self, path: str, **parameters: str) -> Any:
        """The data of an answer; an error is raised by urllib."""
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    def values(self, query: str) -> list[float]:
        """What a query gives now, a value a sample."""
        return [float(sample["value"][1]) for sample in self.ask("query", query=query)["result"]]

    def rules(self) -> list[dict[str, Any]]:
        """All rules, and how they are."""
        return [rule for group in self.ask("rules")["groups"] for rule in group["rules"]]


@contextmanager
def scraping(served: str, node: str, folder: Path) -> Iterator[Prometheus]:
    """Prometheus with our rules, for the addresses of a served application and of what Ray exports of a node."""
    assert PROMETHEUS is not None
    (folder / "rules.yaml").write_text(
        yaml.safe_dump({"groups": [{**each, "interval": _EVERY} for each in rule_groups()]})
    )
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(_config(served, node)))
    port = free_port()
    options = {"config.file": "prometheus.yaml", "storage.tsdb.path": "data", "web.listen-address": f"127.0.0.1:{port}"}
    command = [PROMETHEUS, *(f"--{name}={value}" for name, value in options.items())]
    with (folder / "prometheus.log").open("wb") as log:
        server = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        until(lambda: get(f"http://127.0.0.1:{port}/-/ready") is not None, "Prometheus is ready")
        yield Prometheus(f"http://127.0.0.1:{port}")
    finally:
        server.terminate()
        server.wait()


def _config(served: str, node: str) -> dict[str, Any]:
    """The manifests' ScrapeConfig and PodMonitor as Prometheus's operator would write them, with addresses of here."""
    scrape, monitor = yaml.safe_load_all((FOLDER / "scrape.yaml").read_text())
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    jobs = {
        scrape["spec"]["jobName"]: (scrape["spec"]["metricsPath"], served),
        monitor["metadata"]["name"]: (endpoint.get("path", "/metrics"), node),
    }
    return {
        "global": {"scrape_interval": _EVERY, "evaluation_interval": _EVERY},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [
            {"job_name": name, "metrics_path": path, "static_configs": [{"targets": [address]}]}
            for name, (path, address) in jobs.items()
        ],
    }

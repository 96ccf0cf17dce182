"""The demo overlay's Serve configuration on nodes of the manifests' groups, which Ray's autoscaler starts and ends.

The nodes are pretended: all of them are this machine. Everything else is real: Serve, the models, autoscaler v2, Prometheus.
"""

import json
import math
import re
import shutil
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from benchmarks.nodes import Nodes, pretended_nodes
from benchmarks.server import get, serving
from tests.cluster_fixtures import PATIENCE_S, until
from tests.manifests import K8S, ROOT
from tests.prometheus import Prometheus, alert_operands, needs_prometheus, panel_queries, scraping

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]  # the first test waits for the nodes as well
AT_REST = {"target": 1, "draft": 1, "ingress": 1}
KEY = "demo"
_IDLE_S = 1.0
_DELAYS = {"up_s": 1, "down_s": 2, "interval_s": 1, "look_back_s": 2}


def demo_settings(keys: Path) -> dict[str, Any]:
    """The overlay's own, with paths of this machine, and faster."""
    text = (K8S / "overlays" / "cpu-demo" / "serve.yaml").read_text().replace("/opt/paceline", str(ROOT))
    (application,) = yaml.safe_load(text)["applications"]
    args: dict[str, Any] = application["args"]
    args["http"] |= {"host": "127.0.0.1", "api_keys_file": str(keys)}
    (model,) = args["models"]
    model["target"]["scaling"] |= {"target_ongoing": 2, "delays": _DELAYS}
    model["draft"] |= {"host": "127.0.0.1", "scaling": {"delays": _DELAYS}}
    return args


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    service = yaml.safe_load((K8S / "base" / "rayservice.yaml").read_text())
    log = tmp_path_factory.mktemp("nodes") / "ray.log"
    with pretended_nodes(service["spec"]["rayClusterConfig"], _IDLE_S, log) as running:
        yield running


@pytest.fixture(scope="module")
def url(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of the API, when the application runs."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "keys").write_text(KEY)
    settings = demo_settings(folder / "keys")
    with serving(settings, folder, address=nodes.address, environment=nodes.environment) as served:
        yield served


def complete(url: str, tokens: int = 16) -> int:
    """How many tokens came."""
    body = {"model": "code", "prompt": "def add(", "max_tokens": tokens, "ignore_eos": True}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return int(json.load(answer)["usage"]["completion_tokens"])


@contextmanager
def clients(url: str, number: int) -> Iterator[None]:
    """So many that ask again and again; none may fail."""
    ended, failed = threading.Event(), list[BaseException]()

    def ask() -> None:
        try:
            while not ended.is_set():
                assert complete(url, 64) == 64
        except BaseException as error:  # noqa: BLE001  raised below, in the test's thread
            failed.append(error)

    threads = [threading.Thread(target=ask) for _ in range(number)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert not failed, failed[0]


def replicas(url: str, measure: str) -> int:
    """How many report this."""
    return (get(f"{url}/metrics") or "").count(f"\n{measure}{{")


def test_the_demo_answers_and_each_replica_takes_its_groups_resource(url: str, nodes: Nodes) -> None:
    assert complete(url) == 16
    until(lambda: nodes.count() == AT_REST, "a node of each group")
    used = nodes.used()
    assert {name: used[name] for name in AT_REST} == {"target": 1, "draft": 1, "ingress": 1}


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not here")
def test_the_request_of_the_page_is_answered(url: str) -> None:
    page = (ROOT / "docs" / "KUBERNETES.md").read_text()
    (command,) = re.findall(r"^curl .*\n  -d .*$", page, re.MULTILINE)
    command = command.replace("localhost:8000", urlsplit(url).netloc)
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    assert done.stdout.rstrip().endswith("data: [DONE]"), done.stdout


def test_under_load_the_targets_group_grows_and_when_idle_it_shrinks(url: str, nodes: Nodes) -> None:
    seen: list[dict[str, int]] = []

    def at(**groups: int) -> bool:
        seen.append(nodes.count())
        return seen[-1] == AT_REST | groups

    until(at, "only what is needed")
    with clients(url, 6):
        until(lambda: at(target=2), "another node for targets")
        until(lambda: at(target=2) and replicas(url, "paceline_running") == 2, "a second target on it")
        until(lambda: at(target=2) and replicas(url, "paceline_draft_sessions") == 2, "its draft, on the node there is")
    until(at, "without load, the node is given back")
    most = {group: max(each.get(group, 0) for each in seen) for group in AT_REST}
    assert most == AT_REST | {"target": 2}, "the other groups stay as they are"
    assert complete(url) == 16


@needs_prometheus
def test_a_real_prometheus_finds_data_for_every_query(url: str, nodes: Nodes, tmp_path: Path) -> None:
    alerts = [part for query in alert_operands() for part in re.split(r"\s+unless on \(model_name\) ", query)]
    queries = [*panel_queries(), *alerts]
    assert len(queries) > 30
    with scraping(urlsplit(url).netloc, urlsplit(nodes.head_metrics).netloc, tmp_path) as prometheus:

        def all_have_data() -> bool:
            complete(url)
            return not without_data(prometheus, queries)

        def speculation_shows() -> bool:
            complete(url)
            (acceptance,) = prometheus.values("paceline:acceptance:ratio5m")
            (tokens,) = prometheus.values("paceline:tokens_per_step:ratio5m")
            return 0 < acceptance <= 1 < tokens

        until(lambda: prometheus.values("up") == [1, 1], "both are scraped")
        try:
            until(all_have_data, "data for each query")
        except AssertionError:
            raise AssertionError(without_data(prometheus, queries)) from None
        until(speculation_shows, "tokens by drafts")
        assert prometheus.values('ray_node_cpu_count{IsHeadNode="true"}')
        assert {rule["health"] for rule in prometheus.rules()} == {"ok"}
        assert not [rule["name"] for rule in prometheus.rules() if rule.get("state") == "firing"]
        wrong = ["paceline_windows", 'paceline_window{model="code"}', "rate(paceline_hits_total[5m]) / paceline_steps"]
        assert without_data(prometheus, wrong) == wrong


def without_data(prometheus: Prometheus, queries: list[str]) -> list[str]:
    """Those that give nothing, or no number."""
    return [query for query in queries if not any(map(math.isfinite, prometheus.values(query)))]

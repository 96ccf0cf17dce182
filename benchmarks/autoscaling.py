"""Nodes under load: many clients come and go; Ray's autoscaler adds nodes of the groups that need them, and ends them again.

python -m benchmarks.autoscaling --json FILE --picture FILE     exit code 1 unless everything held
"""

import argparse
import http.client
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from matplotlib.figure import Figure

from benchmarks.nodes import Nodes, pretended_nodes
from benchmarks.server import ROOT, get, serving

AT_REST = {"target": 1, "draft": 1, "ingress": 1}  # nodes
UNDER_LOAD = {"target": 3, "draft": 2, "ingress": 1}
FEW, MANY = 1, 10  # clients
COLOURS = {"target": "#d9822b", "draft": "#2f7f93", "ingress": "#888888"}
_IDLE_S = 10.0  # a node without work goes
_AROUND_S = 15.0  # before, between and after
_PATIENCE_S = 600.0  # for nodes to come, and to go
_TOKENS = 96


@dataclass(frozen=True, slots=True)
class Sample:
    """A look at nodes and metrics."""

    second: float  # from the start of the load
    nodes: dict[str, int]  # by group
    targets: int  # replicas that report
    drafts: int
    clients: int


@dataclass
class Crowd:
    """Clients that ask again and again. `wanted` says how many at this moment."""

    url: str
    wanted: int = FEW
    done: int = 0
    failed: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def ask(self, number: int) -> None:
        """One of them, in a thread of its own."""
        seed = number
        while not self.ended.wait(0.01):
            if number < self.wanted:
                seed += MANY
                try:
                    self._complete(seed)
                    self.done += 1
                except (OSError, http.client.HTTPException, ValueError) as error:
                    self.failed.append(repr(error))

    def _complete(self, seed: int) -> None:
        body = {"model": "code", "prompt": "def fibonacci(n):\n", "seed": seed, "max_tokens": _TOKENS}
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=_PATIENCE_S)
        text = json.dumps({**body, "ignore_eos": True})
        connection.request("POST", "/v1/completions", text, {"Content-Type": "application/json"})
        with connection.getresponse() as answer:
            said = json.load(answer)
            if answer.status != 200 or said["usage"]["completion_tokens"] != _TOKENS:
                raise ValueError(f"{answer.status}: {said}")


def groups() -> dict[str, Any]:
    """The base's RayCluster, with up to three targets, and two drafts to a node."""
    service = yaml.safe_load((ROOT / "k8s" / "base" / "rayservice.yaml").read_text())
    cluster: dict[str, Any] = service["spec"]["rayClusterConfig"]
    target, draft, _ = cluster["workerGroupSpecs"]
    target["maxReplicas"], draft["resources"] = UNDER_LOAD["target"], {"draft": "2"}
    return cluster


def settings() -> dict[str, Any]:
    """The bundled pair: each replica takes its group's resource, and scaling is fast enough to watch."""
    delays = {"up_s": 2.0, "down_s": 10.0, "interval_s": 1.0, "look_back_s": 5.0}
    scaling = {"min_replicas": 1, "max_replicas": UNDER_LOAD["target"], "target_ongoing": 3.0, "delays": delays}
    target = {"checkpoint": str(ROOT / "models" / "code-target"), "scaling": scaling}
    draft = {"checkpoint": str(ROOT / "models" / "code-draft"), "host": "127.0.0.1", "scaling": {"delays": delays}}
    model = {
        "name": "code",
        "target": {**target, "replicas": {"resources": {"target": 1}}},
        "draft": {**draft, "replicas": {"resources": {"draft": 1}}},
    }
    return {"models": [model], "http": {"resources": {"ingress": 1}}}


@contextmanager
def asking(url: str) -> Iterator[Crowd]:
    """Threads for all clients there may be."""
    crowd = Crowd(url)
    threads = [threading.Thread(target=crowd.ask, args=(number,)) for number in range(MANY)]
    for thread in threads:
        thread.start()
    try:
        yield crowd
    finally:
        crowd.ended.set()
        for thread in threads:
            thread.join()


def run(nodes: Nodes, crowd: Crowd) -> list[Sample]:
    """Few clients, many until all nodes are there and have replicas, few until they are gone; a look each second."""
    started = time.monotonic()
    samples: list[Sample] = []

    def look_until(held: Callable[[Sample], bool]) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            shown = get(f"{crowd.url}/metrics") or ""
            targets, drafts = (shown.count(f"\n{name}{{") for name in ("paceline_running", "paceline_draft_sessions"))
            second = round(time.monotonic() - started, 1)
            samples.append(Sample(second, nodes.count(), targets, drafts, crowd.wanted))
            if held(samples[-1]):
                return
            time.sleep(1)

    def look_for(seconds: float) -> None:
        end = time.monotonic() - started + seconds
        look_until(lambda sample: sample.second >= end)

    look_for(_AROUND_S)
    crowd.wanted = MANY
    most = UNDER_LOAD["target"]
    look_until(lambda now: now.nodes == UNDER_LOAD and now.targets == now.drafts == most)
    look_for(_AROUND_S)
    crowd.wanted = FEW
    look_until(lambda now: now.nodes == AT_REST and now.targets == now.drafts == 1)
    look_for(_AROUND_S)
    return samples


def complaints(samples: list[Sample], failed: list[str]) -> list[str]:
    """What did not hold."""
    most = {group: max(sample.nodes.get(group, 0) for sample in samples) for group in AT_REST}
    found = [f"{len(failed)} requests failed: {failed[0]}"] if failed else []
    if samples[0].nodes != AT_REST or samples[-1].nodes != AT_REST:
        found.append(f"nodes at first {samples[0].nodes}, at last {samples[-1].nodes}, not {AT_REST}")
    if most != UNDER_LOAD:
        found.append(f"nodes at most {most}, not {UNDER_LOAD}")
    if (samples[-1].targets, samples[-1].drafts) != (1, 1):
        found.append(f"at last {samples[-1].targets} targets and {samples[-1].drafts} drafts")
    return found


def draw(samples: list[Sample], path: Path) -> None:
    """Nodes of each group, replicas on them, and clients, over time."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    above, middle, below = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 2))
    seconds = [sample.second for sample in samples]
    for group, colour in COLOURS.items():
        shown = [sample.nodes.get(group, 0) for sample in samples]
        above.step(
            seconds, shown, where="post", color=colour, label=group, linestyle=":" if group == "ingress" else "-"
        )
    middle.step(seconds, [sample.targets for sample in samples], where="post", color=COLOURS["target"], label="targets")
    drafts = [sample.drafts for sample in samples]
    middle.step(seconds, drafts, where="post", color=COLOURS["draft"], linestyle="--", label="drafts")
    below.step(seconds, [sample.clients for sample in samples], where="post", color="#444444")
    for axes, name in ((above, "nodes by group"), (middle, "replicas"), (below, "clients")):
        axes.set(ylabel=name, ylim=(0, None))
        axes.grid(alpha=0.3)
    for axes in (above, middle):
        axes.legend(frameon=False, loc="upper left", fontsize="small")
        axes.set_yticks(range(UNDER_LOAD["target"] + 1))
    below.set_xlabel("seconds")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    """See the top."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--picture", type=Path, default=Path("build/autoscaling.png"), help="where the picture goes")
    chosen = parser.parse_args()
    out = Path(tempfile.mkdtemp(prefix="autoscaling"))
    with (
        pretended_nodes(groups(), _IDLE_S, out / "ray.log") as nodes,
        serving(settings(), out, address=nodes.address, environment=nodes.environment) as url,
        asking(url) as crowd,
    ):
        samples = run(nodes, crowd)
    found = complaints(samples, crowd.failed)
    result = {"complaints": found, "requests": crowd.done, "failed": crowd.failed, "idle_s": _IDLE_S}
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(result | {"samples": [asdict(each) for each in samples]}, indent=1) + "\n")
    draw(samples, chosen.picture)
    sys.stdout.write(f"{crowd.done} requests, {len(crowd.failed)} failed; logs in {out}, picture {chosen.picture}\n")
    sys.stdout.write("".join(f"{text}\n" for text in found) or "everything held\n")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()

"""Scaling under load: ramp one of two models up and down, watch the replicas of both, and count failed requests.

python -m benchmarks.load --out DIR     writes load.json and load.png; exit code 1 unless everything held
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.server import ROOT, get, serving

mpl.use("agg")
from matplotlib import pyplot as plt

LOCUST = ROOT / "tests" / "load" / "locustfile.py"
MODELS = ("busy", "quiet")
MOST = 3  # target replicas of each model
_LOAD_S, _FALL_S = 400.0, 180.0  # how long each part may take


@dataclass(frozen=True, slots=True)
class Sample:
    """A look at the metrics."""

    second: float  # from the start of the load
    targets: dict[str, int]  # replicas, by model
    drafts: dict[str, int]
    streams: dict[str, int]  # that clients wait for


def config() -> dict[str, Any]:
    """The bundled pair twice, scaled fast enough to watch."""
    delays = {"up_s": 2.0, "down_s": 10.0, "interval_s": 1.0, "look_back_s": 5.0}
    scaling = {"min_replicas": 1, "max_replicas": MOST, "target_ongoing": 4.0, "delays": delays}
    folder = ROOT / "models"
    models = [
        {
            "name": name,
            "target": {"checkpoint": str(folder / "code-target"), "scaling": scaling},
            "draft": {
                "checkpoint": str(folder / "code-draft"),
                "ports": [26000 + 100 * index, 26099 + 100 * index],
                "scaling": {"ratio": 0.5, "delays": delays},
            },
        }
        for index, name in enumerate(MODELS)
    ]
    return {"models": models}


def all_awake(url: str) -> bool:
    """Whether each model has a target that reports."""
    return all(watch(url, 0).targets.get(name) for name in MODELS)


def watch(url: str, started: float) -> Sample:
    """What the metrics say now."""
    seen: dict[str, dict[str, set[str]]] = {"paceline_running": {}, "paceline_draft_sessions": {}}
    streams: dict[str, int] = {}
    for family in text_string_to_metric_families(get(f"{url}/metrics") or ""):
        for sample in family.samples:
            model = sample.labels.get("model_name", "")
            if family.name in seen:
                seen[family.name].setdefault(model, set()).add(sample.labels["replica"])
            elif family.name == "paceline_streams":
                streams[model] = streams.get(model, 0) + int(sample.value)
    targets, drafts = ({model: len(names) for model, names in each.items()} for each in seen.values())
    return Sample(round(time.monotonic() - started, 1), targets, drafts, streams)


def run_load(url: str, out: Path) -> tuple[list[Sample], list[dict[str, Any]]]:
    """The ramp and the fall behind it; what was seen each second, and Locust's statistics by model."""
    command = [
        sys.executable,
        "-m",
        "locust",
        "-f",
        str(LOCUST),
        "--headless",
        "--host",
        url,
        "--only-summary",
        "--json",
    ]
    started = time.monotonic()
    samples: list[Sample] = []
    with (out / "locust.json").open("wb") as output, (out / "locust.log").open("wb") as log:
        locust = subprocess.Popen([*command, "--exit-code-on-error", "0"], cwd=ROOT, stdout=output, stderr=log)
        try:
            while locust.poll() is None and time.monotonic() - started < _LOAD_S:
                samples.append(watch(url, started))
                time.sleep(1)
        finally:
            locust.terminate()
            locust.wait()
    ended = time.monotonic()
    while samples[-1].targets.get("busy") != 1 and time.monotonic() - ended < _FALL_S:
        time.sleep(1)
        samples.append(watch(url, started))
    stats: list[dict[str, Any]] = json.loads((out / "locust.json").read_text())
    return samples, stats


def plot(samples: list[Sample], path: Path) -> None:
    """Replicas and load over time."""
    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(8, 5), layout="constrained")
    seconds = [sample.second for sample in samples]
    for model, color in zip(MODELS, ("tab:red", "tab:blue"), strict=True):
        below.plot(seconds, [sample.streams.get(model, 0) for sample in samples], color=color, label=model)
        targets = [sample.targets.get(model, 0) for sample in samples]
        drafts = [sample.drafts.get(model, 0) for sample in samples]
        above.step(seconds, targets, where="post", color=color, label=f"targets of {model}")
        above.step(seconds, drafts, where="post", color=color, linestyle=":", label=f"drafts of {model}")
    above.set_ylabel("replicas")
    above.set_ylim(0, MOST + 0.5)
    below.set_ylabel("open streams")
    below.set_xlabel("seconds")
    for axes in (above, below):
        axes.legend(loc="upper left", fontsize="small")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def complaints(samples: list[Sample], stats: list[dict[str, Any]]) -> list[str]:
    """What did not hold."""
    found = []
    failed = {each["name"]: each["num_failures"] for each in stats if each["num_failures"]}
    if failed or {each["name"] for each in stats} != set(MODELS):
        found.append(f"failed requests: {failed}, of {[(each['name'], each['num_requests']) for each in stats]}")
    busy = [sample.targets.get("busy", 0) for sample in samples]
    quiet = [sample.targets.get("quiet", 0) for sample in samples]
    if max(busy) < MOST:
        found.append(f"the loaded model had {max(busy)} targets at most")
    if set(quiet) != {1}:
        found.append(f"the other model did not stay at one target: {sorted(set(quiet))}")
    if busy[-1] != 1:
        found.append(f"the loaded model still has {busy[-1]} targets")
    return found


def main() -> None:
    """See the top."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/load"), help="folder of load.json, load.png and logs")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    with serving(config(), out, all_awake) as url:
        samples, stats = run_load(url, out)
    found = complaints(samples, stats)
    result = {"complaints": found, "requests": stats, "samples": [asdict(sample) for sample in samples]}
    (out / "load.json").write_text(json.dumps(result, indent=1) + "\n")
    plot(samples, out / "load.png")
    for each in stats:
        sys.stdout.write(f"{each['name']}: {each['num_requests']} requests, {each['num_failures']} failed\n")
    sys.stdout.write("".join(f"{text}\n" for text in found) or "everything held\n")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()

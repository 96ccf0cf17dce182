"""The Kubernetes manifests: what would be applied is valid, fits together, and mistakes are found."""

import copy
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import manifests
from tests.cluster_fixtures import until
from tests.manifests import CRDS, K8S, OVERLAYS, Manifest, complaints, rendered

HADOLINT = Path(sys.executable).parent / "hadolint"
needs_kustomize = pytest.mark.skipif(manifests.kustomize() is None, reason="neither kustomize nor kubectl is here")
needs_kinds = pytest.mark.skipif(
    shutil.which("node") is None or not manifests.KINDS.is_dir(),
    reason="node or its packages are not here: 'make kinds'",
)
needs_crds = pytest.mark.skipif(not CRDS.is_dir(), reason=f"KubeRay's CRDs are not in {CRDS.parent.name}/{CRDS.name}")


def ray_service(documents: list[Manifest]) -> Any:
    return next(each for each in documents if each["kind"] == "RayService")["spec"]


def budget(documents: list[Manifest]) -> Any:
    return next(each for each in documents if each["kind"] == "PodDisruptionBudget")["spec"]


def test_every_file_is_yaml_with_a_comment_that_says_what_it_is_for() -> None:
    files = [path for path in K8S.rglob("*.yaml") if path.name != "namespace.yaml"]
    assert len(files) > 10
    for path in files:
        assert list(yaml.safe_load_all(path.read_text())), path
        assert path.read_text().startswith("# "), path


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_serve_takes_the_configuration_of_each_overlay(overlay: str) -> None:
    assert list(manifests.serve_complaints((K8S / "overlays" / overlay / "serve.yaml").read_text())) == []


@needs_kustomize
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_an_overlay_applies_is_valid_and_fits_together(overlay: str) -> None:
    assert complaints(rendered(overlay)) == []


@needs_kustomize
@needs_kinds
@pytest.mark.parametrize("overlay", ["gpu-small", "gpu-multi"])
def test_kinds_of_gateway_api_and_prometheus_operator_are_valid_by_their_own_types(overlay: str) -> None:
    assert manifests.other_complaints(rendered(overlay)) == []


@needs_kustomize
@needs_kinds
def test_a_wrong_value_in_another_projects_kind_is_found() -> None:
    documents = rendered("gpu-small")
    by_kind: dict[str, Any] = {each["kind"]: each.get("spec") for each in documents}
    by_kind["Gateway"]["listeners"][0]["port"] = "https"
    by_kind["HTTPRoute"]["rules"][0]["timeouts"] = {"request": 5}
    del by_kind["PrometheusRule"]["groups"][0]["rules"][0]["expr"]
    by_kind["ScrapeConfig"]["scrapeInterval"] = 10
    found = manifests.other_complaints(documents)
    assert len(found) == 4, found
    assert any("listeners/0/port must be integer" in line for line in found), found


def test_the_pods_ray_exporter_is_the_port_that_prometheus_asks() -> None:
    _, monitor = yaml.safe_load_all((K8S / "components" / "monitoring" / "scrape.yaml").read_text())
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    chosen = monitor["spec"]["selector"]["matchLabels"].items()
    for name, pod in manifests.pods([yaml.safe_load((K8S / "base" / "rayservice.yaml").read_text())]):
        ports = {each["name"]: each["containerPort"] for each in pod["spec"]["containers"][0]["ports"]}
        assert ports.get(endpoint["port"]) == 8080, name  # where KubeRay has Ray export
        assert chosen <= pod["metadata"]["labels"].items(), name


@needs_crds
def test_the_schemas_of_kuberay_are_used() -> None:
    assert all(manifests.ray_schema(kind) for kind in ("RayService", "RayJob"))


def _serve_text(old: str, new: str) -> Callable[[list[Manifest]], None]:
    def change(documents: list[Manifest]) -> None:
        spec = ray_service(documents)
        assert old in spec["serveConfigV2"]
        spec["serveConfigV2"] = spec["serveConfigV2"].replace(old, new)

    return change


def _cluster(*path: str | int, to: Any) -> Callable[[list[Manifest]], None]:
    def change(documents: list[Manifest]) -> None:
        place = ray_service(documents)
        for part in path[:-1]:
            place = place[part]
        place[path[-1]] = to

    return change


def _without(kind: str, name: str) -> Callable[[list[Manifest]], None]:
    def change(documents: list[Manifest]) -> None:
        kept = [each for each in documents if (each["kind"], each["metadata"]["name"]) != (kind, name)]
        assert len(kept) == len(documents) - 1
        documents[:] = kept

    return change


_GROUPS = ("rayClusterConfig", "workerGroupSpecs")
_TARGET, _DRAFT = (*_GROUPS, 0), (*_GROUPS, 1)
MISTAKES: list[tuple[Callable[[list[Manifest]], None], str]] = [
    (_serve_text("{target: 1}", "{targets: 1}"), r"main-target: asks for {'targets': 1.0, 'GPU': 1.0}, which is in no"),
    (_serve_text("{gpus: 1, resources: {target: 1}}", "{gpus: 1, resources: {target: 2}}"), "which is in no group"),
    (_serve_text("{draft: 1}", "{target: 1}"), "main-draft: asks .* its role is draft"),
    (_serve_text("port: 9000", "port: 9001"), "serveConfigV2: .* is not what config export makes"),
    (_serve_text("[26500, 26599]", "[27500, 27599]"), "draft port 27500 of main is open to"),
    (_serve_text("max_replicas: 2", "max_replicas: 3"), "group target: its most pods are too few"),
    (_serve_text("  models:", "  limits: {drain_s: 700}\n      models:"), "target: pods end after 660 s"),
    (_cluster("rayClusterConfig", "authOptions", to={"mode": "disabled"}), "Ray takes code without a token"),
    (_cluster(*_TARGET, "template", "spec", "securityContext", to={}), "target: may run as root"),
    (_cluster(*_TARGET, "template", "spec", "containers", 0, "ports", to=[]), "target: container ports {}"),
    (
        _cluster(*_TARGET, "template", "spec", "containers", 0, "env", to=[]),
        "target: RAY_grpc_client_.* is None, not 5000",
    ),
    (_cluster("rayClusterDeletionDelaySeconds", to=60), "an old cluster ends before its streams"),
    (_cluster(*_DRAFT, "template", "spec", "terminationGracePeriodSeconds", to=60), "draft: pods end after 60 s"),
    (_cluster("rayClusterConfig", "headGroupSpec", "rayStartParams", to={}), "the head has CPUs"),
    (_without("NetworkPolicy", "draft-links"), r"draft port 26500 of main is open to \[\]"),
    (_without("NetworkPolicy", "api"), "the gateway can't reach port 8000"),
]


@needs_kustomize
@pytest.mark.parametrize(("plant", "message"), MISTAKES)
def test_a_planted_mistake_is_found(plant: Callable[[list[Manifest]], None], message: str) -> None:
    documents = copy.deepcopy(rendered("gpu-small"))
    plant(documents)
    found = complaints(documents)
    assert any(re.search(message, line) for line in found), found


@needs_kustomize
@needs_crds
def test_a_field_that_kuberay_does_not_have_is_found() -> None:
    documents = rendered("cpu-demo")
    ray_service(documents)["rayClusterConfig"]["workerGroupSpecs"][0]["maxReplica"] = 3
    assert any("maxReplica" in line for line in complaints(documents))


@needs_kustomize
def test_an_unknown_field_of_kubernetes_is_found() -> None:
    documents = rendered("gpu-multi")
    budget(documents)["maxUnavailble"] = 1
    assert any("maxUnavailble" in line for line in complaints(documents))


@needs_kustomize
@pytest.mark.parametrize("spec", [{"maxUnavailable": 1}, {"minAvailable": 2}])
def test_a_budget_that_lets_no_pod_go_is_found(spec: dict[str, int]) -> None:
    documents = rendered("gpu-multi")
    del budget(documents)["minAvailable"]
    budget(documents).update(spec)
    assert any("so none may go" in line for line in complaints(documents))


class Ending:
    """A pod's preStop, among processes and beside a `ray` that are pretended, with two seconds for its minute."""

    def __init__(self, folder: Path) -> None:
        """folder: for both."""
        self._processes, self._ray, self.asked = folder / "proc", folder / "ray", folder / "asked"
        self.asked.touch()
        self.ray_answers(True)
        service = yaml.safe_load((K8S / "base" / "rayservice.yaml").read_text())
        for group in manifests.groups(service).values():
            (container,) = group["template"]["spec"]["containers"]
            shell, option, script = container["lifecycle"]["preStop"]["exec"]["command"]
            for there, here in (("/proc/", f"{self._processes}/"), ("60", "2"), ("sleep 5", "sleep 0.2")):
                assert there in script
                script = script.replace(there, here)
            self._command = [shell, option, script]
        self._environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}

    def ray_answers(self, answers: bool) -> None:
        """Whether the head does."""
        self._ray.write_text(f'#!/bin/sh\necho "$1" >> {self.asked}\nexit {int(not answers)}\n')
        self._ray.chmod(0o755)

    def run(self, number: int, title: str) -> None:
        """A process runs."""
        (self._processes / str(number)).mkdir(parents=True)
        (self._processes / str(number) / "cmdline").write_text(f"{title}\0\0")

    def end(self, number: int) -> None:
        """It runs no more."""
        shutil.rmtree(self._processes / str(number))

    @contextmanager
    def begun(self) -> Iterator[subprocess.Popen[bytes]]:
        """The command, which must have ended by then."""
        with subprocess.Popen(self._command, env=self._environment) as command:
            try:
                yield command
                assert command.wait(20) == 0
            finally:
                command.kill()


def test_a_pod_that_ends_waits_for_its_replicas_and_for_what_its_proxy_passes_on(tmp_path: Path) -> None:
    pod = Ending(tmp_path)
    pod.run(1, "ray::ServeReplica:paceline:code-draft")
    pod.run(2, "ray::ProxyActor.update_draining")
    pod.run(3, "ray::DashboardAgent")
    with pod.begun() as command:
        until(lambda: "health-check" in pod.asked.read_text(), "it waits")
        pod.end(1)
        with pytest.raises(subprocess.TimeoutExpired):
            command.wait(4)
        pod.end(2)
    assert pod.asked.read_text().split()[0] == "drain-node"


def test_a_pod_that_ends_with_its_whole_cluster_does_not_wait_for_a_proxy_that_nobody_ends(tmp_path: Path) -> None:
    pod = Ending(tmp_path)
    pod.run(1, "ray::ProxyActor")
    pod.ray_answers(False)
    with pod.begun():
        pass
    assert pod.asked.read_text().split().count("drain-node") > 1, "it asks again: another head may start"
    pod.asked.write_text("")
    pod.ray_answers(True)
    with pod.begun():
        until(lambda: "health-check" in pod.asked.read_text(), "it waits")
        pod.ray_answers(False)


def test_what_the_page_names_is_there() -> None:
    page = (manifests.ROOT / "docs" / "KUBERNETES.md").read_text()
    named = set(re.findall(r"\b(?:k8s|tests|benchmarks|docs)/[\w./-]*\w", page))
    assert len(named) > 8
    assert not [name for name in named if not (manifests.ROOT / name).exists()]
    targets = set(re.findall(r"`make ([a-z0-9-]+)", page))
    assert targets <= set(re.findall(r"^([a-z0-9-]+):", (manifests.ROOT / "Makefile").read_text(), re.MULTILINE))
    alerts = set(re.findall(r"\bPaceline[A-Z]\w+", page))
    assert alerts <= set(re.findall(r"alert: (\w+)", (K8S / "components" / "monitoring" / "rules.yaml").read_text()))


def test_the_dockerfile_passes_its_linter() -> None:
    done = subprocess.run([HADOLINT, K8S / "Dockerfile"], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout


def test_the_image_takes_what_is_there_and_installs_it_as_make_does() -> None:
    text = (K8S / "Dockerfile").read_text()
    sources = [name for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for name in line.split()]
    assert {"engine", "cluster", "deployments", "models", "Makefile", "pyproject.toml"} <= set(sources)
    let_in = re.findall(r"^!(.*)$", (K8S / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    for name in sources:
        assert (manifests.ROOT / name).exists(), name
        assert any(name == each or name.startswith(f"{each}/") for each in let_in), name
    (target,) = re.findall(r"make (\S+)$", text, re.MULTILINE)
    assert f"$(VENV)/{target.removeprefix('.venv/')}: pyproject.toml" in (manifests.ROOT / "Makefile").read_text()
    assert re.search(r"^FROM \S+:\d+\.\d+\.\d+\S*$", text, re.MULTILINE)
    base = ray_service([yaml.safe_load((K8S / "base" / "rayservice.yaml").read_text())])
    pod = base["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]
    assert re.findall(r"^USER (\d+):", text, re.MULTILINE) == [str(pod["securityContext"]["runAsUser"])]


@pytest.mark.parametrize("name", ["load-test", "benchmark"])
def test_a_job_is_valid_locked_down_and_runs_what_is_there(name: str) -> None:
    documents = list(yaml.safe_load_all((K8S / "jobs" / f"{name}.yaml").read_text()))
    assert [line for each in documents for line in manifests.schema_complaints(each)] == []
    assert list(manifests.security_complaints(documents)) == []
    spec = documents[0]["spec"]
    command = spec.get("entrypoint", "").split() or _command(spec["template"]["spec"]["containers"][0])
    given = {word.partition("=")[0] for word in command if word.startswith("--")}
    shown = subprocess.run([sys.executable, *command[1:3], "--help"], capture_output=True, check=True, timeout=120)
    assert command[:2] == ["python", "-m"]
    assert given
    assert all(option in shown.stdout.decode() for option in given)


def _command(container: Manifest) -> list[str]:
    return [*container["command"], *container["args"]]

"""What is wrong with rendered manifests: schemas, the Serve configuration in them, and whether one agrees with the other."""

import json
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from jsonschema import Draft202012Validator
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.serve.schema import ServeDeploySchema

from cluster.local import HEAD_LOSS_CHECKS, MACHINE_LOSS, SERVE_TRANSPORT
from deployments.config import ModelOptions, ServeConfig
from deployments.config_load import BUILDER, parse_config
from deployments.serve import serve_schema

ROOT = Path(__file__).resolve().parent.parent
K8S = ROOT / "k8s"
KINDS = ROOT / "build" / "kinds"  # validators of other projects' kinds: 'make kinds'
CRDS = ROOT.parent / "shared" / "crds"  # KubeRay's, where somebody put them
OVERLAYS = tuple(sorted(path.parent.name for path in K8S.glob("overlays/*/kustomization.yaml")))
Manifest = dict[str, Any]


def kustomize() -> list[str] | None:
    """The command that renders a folder; None where there is none."""
    if shutil.which("kustomize"):
        return ["kustomize", "build"]
    return ["kubectl", "kustomize"] if shutil.which("kubectl") else None


@cache
def rendered_text(overlay: str) -> str:
    """What would be applied, as text."""
    command = kustomize()
    assert command is not None
    folder = str(K8S / "overlays" / overlay)
    done = subprocess.run([*command, folder], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rendered(overlay: str) -> list[Manifest]:
    """What would be applied."""
    return list(yaml.safe_load_all(rendered_text(overlay)))


def complaints(manifests: list[Manifest]) -> list[str]:
    """All that is wrong, a line each."""
    (service,) = (each for each in manifests if each["kind"] == "RayService")
    return [
        *(line for each in manifests for line in schema_complaints(each)),
        *serve_complaints(service["spec"]["serveConfigV2"]),
        *placement_complaints(service),
        *port_complaints(service, manifests),
        *environment_complaints(service),
        *lifetime_complaints(service),
        *budget_complaints(manifests, service),
        *security_complaints(manifests),
    ]


def schema_complaints(manifest: Manifest) -> Iterator[str]:
    """By Kubernetes's schemas, or KubeRay's where they are; for other kinds see other_complaints."""
    kind, group = manifest["kind"], manifest["apiVersion"].rpartition("/")[0]
    where = f"{kind} {manifest['metadata']['name']}"
    if group == "ray.io":
        schema = ray_schema(kind)
        for error in Draft202012Validator(schema).iter_errors(manifest) if schema is not None else ():
            yield f"{where}: {error.json_path}: {error.message}"
    elif "." not in group or (group.endswith(".k8s.io") and not group.startswith("gateway.")):
        try:
            kubernetes_validate.validate(manifest, "1.32", strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"{where}: {error.message}"


def other_complaints(manifests: list[Manifest]) -> list[str]:
    """What Gateway API and Prometheus's operator say of their kinds: types and what is required, not unknown fields."""
    groups = ("gateway.networking.k8s.io/", "monitoring.coreos.com/")
    theirs = json.dumps([each for each in manifests if each["apiVersion"].startswith(groups)])
    command = ["node", str(ROOT / "tests" / "kinds.mjs"), str(KINDS)]
    done = subprocess.run(command, input=theirs, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found


@cache
def ray_schema(kind: str) -> dict[str, Any] | None:
    """KubeRay's schema of a kind, version v1, that takes no unknown fields; None where it is not at hand."""
    path = CRDS / f"ray.io_{kind.lower()}s.yaml"
    if not path.is_file():
        return None
    versions = yaml.safe_load(path.read_text())["spec"]["versions"]
    (schema,) = (version["schema"]["openAPIV3Schema"] for version in versions if version["name"] == "v1")
    return dict(_closed(schema, top=True))


def _closed(schema: dict[str, Any], top: bool = False) -> dict[str, Any]:
    """The same, without unknown fields, as the API server has it for a client that asks for strict checks."""
    made = dict(schema)
    if made.pop("x-kubernetes-int-or-string", False):
        made.pop("type", None)
    if "items" in made:
        made["items"] = _closed(made["items"])
    if isinstance(made.get("additionalProperties"), dict):
        made["additionalProperties"] = _closed(made["additionalProperties"])
    if "properties" in made:
        made["properties"] = {
            name: {} if top and name == "metadata" else _closed(each) for name, each in made["properties"].items()
        }
        made.setdefault("additionalProperties", bool(made.get("x-kubernetes-preserve-unknown-fields", False)))
    return made


def settings(text: str) -> ServeConfig:
    """Ours, out of Serve's configuration."""
    (application,) = yaml.safe_load(text)["applications"]
    return parse_config(application["args"])


def serve_complaints(text: str) -> Iterator[str]:
    """Serve takes it, we take its arguments, and around them is what `paceline config export` would say."""
    given = ServeDeploySchema.model_validate(yaml.safe_load(text)).model_dump(mode="json", exclude_unset=True)
    (application,) = given["applications"]
    assert application["import_path"] == BUILDER
    made = serve_schema(settings(text)).model_dump(mode="json", exclude_unset=True)
    for values in (given, made):
        del values["applications"][0]["args"]
    if given != made:
        yield f"serveConfigV2: {given} is not what config export makes of its args: {made}"


def groups(service: Manifest) -> dict[str, Manifest]:
    """Worker groups by name."""
    return {group["groupName"]: group for group in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]}


def asked(service: Manifest) -> Iterator[tuple[str, str, dict[str, float], int, int]]:
    """Of each deployment: its name, its role, what a replica asks of Ray, and how many there are at least and at most."""
    config = settings(service["spec"]["serveConfigV2"])
    count = config.http.replicas
    yield "ingress", "ingress", config.http.resources, count, count + 1  # while another configuration is rolled out
    for model in config.models:
        target, scaling = model.target.replicas, model.target.scaling
        amounts = {**target.resources, "CPU": target.cpus, "GPU": target.gpus}
        most = scaling.max_replicas + (scaling.max_surge_percent > 0)
        yield model.target_deployment, "target", amounts, scaling.min_replicas, most
        yield from _asked_by_drafts(model)


def _asked_by_drafts(model: ModelOptions) -> Iterator[tuple[str, str, dict[str, float], int, int]]:
    if model.separate is not None:
        own = model.separate.replicas
        amounts = {**own.resources, "CPU": own.cpus, "GPU": own.gpus}
        fewest = model.draft_replicas(model.target.scaling.min_replicas)
        yield model.draft_deployment, "draft", amounts, fewest, model.most_drafts


def placement_complaints(service: Manifest) -> Iterator[str]:
    """Every replica fits on pods of its role, and on no others; and there are pods enough, by Ray's own autoscaler."""
    cluster = {"metadata": {"name": "x", "namespace": "x"}, "spec": service["spec"]["rayClusterConfig"]}
    nodes = _derive_autoscaling_config_from_ray_cr(cluster)["available_node_types"]
    if nodes["headgroup"]["resources"]["CPU"] != 0:
        yield "the head has CPUs: replicas could land there"
    room = {name: float(node["max_workers"]) for name, node in nodes.items()}  # pods that are still free
    for name, role, amounts, _, most in asked(service):
        needed = {resource: amount for resource, amount in amounts.items() if amount}
        fitting = [group for group, node in nodes.items() if _fit(needed, node["resources"])]
        roles = {role_of(groups(service)[group]) for group in fitting if group in groups(service)}
        if roles != {role} or "headgroup" in fitting or len(fitting) != 1:
            yield f"{name}: asks for {needed}, which is in {fitting or 'no group'}; its role is {role}"
            continue
        (group,) = fitting
        room[group] -= most / _fit(needed, nodes[group]["resources"])
    yield from (f"group {group}: its most pods are too few" for group, left in room.items() if left < 0)


def _fit(needed: dict[str, float], node: dict[str, float]) -> int:
    """How many replicas fit on a node."""
    return min((int(node.get(name, 0) / amount) for name, amount in needed.items()), default=1)


def role_of(group: Manifest) -> str:
    """What a group's pods are for."""
    return str(group["template"]["metadata"]["labels"]["app.kubernetes.io/component"])


def port_complaints(service: Manifest, manifests: list[Manifest]) -> Iterator[str]:
    """The API's ports are the containers' and let in; those of drafts are let in from targets, and from nobody else."""
    config = settings(service["spec"]["serveConfigV2"])
    ports: dict[str, int | None] = {"serve": config.http.port, "serve-grpc": config.grpc.port}
    head = service["spec"]["rayClusterConfig"]["headGroupSpec"]
    for group in [head, *groups(service).values()]:
        named = {each["name"]: each["containerPort"] for each in group["template"]["spec"]["containers"][0]["ports"]}
        if {name: named.get(name) for name in ports} != ports:
            yield f"{role_of(group)}: container ports {named}, served are {ports}"
    policies = [each["spec"] for each in manifests if each["kind"] == "NetworkPolicy"]
    for model in config.models:
        for port in model.separate.ports if model.separate is not None else ():
            if (senders := set(allowed(policies, "draft", port))) != {"target"}:
                yield f"draft port {port} of {model.name} is open to {sorted(senders)}"
    for api_port in (config.http.port, config.grpc.port):
        if api_port and "namespace gateway" not in allowed(policies, "ingress", api_port):
            yield f"the gateway can't reach port {api_port}"
    if "namespace gateway" in allowed(policies, "head", 8265):
        yield "the dashboard is open to the gateway"


def allowed(policies: Iterable[Manifest], role: str, port: int) -> list[str]:
    """Who may come to a port of the pods of a role: roles, or namespaces."""
    found: list[str] = []
    for policy in policies:
        rules = policy.get("ingress", []) if role in _roles(policy["podSelector"], role) else []
        for rule in rules:
            open_ports = rule.get("ports") or [{"port": 0, "endPort": 65535}]
            if any(each["port"] <= port <= each.get("endPort", each["port"]) for each in open_ports):
                found += [who for peer in rule.get("from", [{}]) for who in _senders(peer)]
    return found


def _senders(peer: Manifest) -> list[str]:
    if "namespaceSelector" in peer:
        return [f"namespace {peer['namespaceSelector']['matchLabels']['kubernetes.io/metadata.name']}"]
    return _roles(peer.get("podSelector", {}), "anybody")


def _roles(selector: Manifest, everybody: str) -> list[str]:
    """The roles that a selector of pods names; `everybody` when it names none."""
    label = "app.kubernetes.io/component"
    named = [each["values"] for each in selector.get("matchExpressions", []) if each["key"] == label]
    if label in selector.get("matchLabels", {}):
        named.append([selector["matchLabels"][label]])
    return list(named[0]) if named else [everybody]


def environment_complaints(service: Manifest) -> Iterator[str]:
    """Ray's processes have the settings that Paceline needs of them."""
    head = service["spec"]["rayClusterConfig"]["headGroupSpec"]
    needed = {"head": {**SERVE_TRANSPORT, **MACHINE_LOSS, **HEAD_LOSS_CHECKS}}
    for group in [head, *groups(service).values()]:
        (container, *_) = group["template"]["spec"]["containers"]
        held = {each["name"]: each.get("value") for each in container["env"]}
        for name, value in needed.get(role_of(group), {**SERVE_TRANSPORT, **MACHINE_LOSS}).items():
            if held.get(name) != value:
                yield f"{role_of(group)}: {name} is {held.get(name)}, not {value}"


def lifetime_complaints(service: Manifest) -> Iterator[str]:
    """Streams may end before their pod or their cluster does."""
    drain = settings(service["spec"]["serveConfigV2"]).limits.drain_s
    for name, group in groups(service).items():
        grace = group["template"]["spec"].get("terminationGracePeriodSeconds", 30)
        if grace <= drain:
            yield f"{name}: pods end after {grace} s, streams may take {drain:g}"
    if service["spec"].get("rayClusterDeletionDelaySeconds", 60) <= drain:
        yield "rayClusterDeletionDelaySeconds: an old cluster ends before its streams"


def budget_complaints(manifests: list[Manifest], service: Manifest) -> Iterator[str]:
    """Machines can be emptied. How many pods a RayCluster wants is not for Kubernetes to see: only counted budgets work."""
    for manifest in manifests:
        if manifest["kind"] != "PodDisruptionBudget":
            continue
        name, spec = manifest["metadata"]["name"], manifest["spec"]
        chosen = [group for group in groups(service).values() if role_of(group) in _roles(spec["selector"], "nobody")]
        kept, there = spec.get("minAvailable"), sum(group["minReplicas"] for group in chosen)
        if chosen and not (isinstance(kept, int) and kept < there):
            yield f"budget {name}: it keeps {kept} of {there} pods, so none may go"


def pods(manifests: Iterable[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """All pod templates, with what they are of."""
    for manifest in manifests:
        spec = manifest["spec"] if manifest["kind"] in ("RayService", "RayJob", "StatefulSet", "Job") else {}
        cluster = spec.get("rayClusterConfig") or spec.get("rayClusterSpec")
        if cluster is not None:
            yield "head", cluster["headGroupSpec"]["template"]
            yield from ((group["groupName"], group["template"]) for group in cluster["workerGroupSpecs"])
        elif "template" in spec:
            yield manifest["metadata"]["name"], spec["template"]


def security_complaints(manifests: list[Manifest]) -> Iterator[str]:
    """What the namespace's `restricted` would refuse, writable roots, Ray without its token, and an exposed dashboard."""
    for name, template in pods(manifests):
        spec = template["spec"]
        if not spec.get("securityContext", {}).get("runAsNonRoot"):
            yield f"{name}: may run as root"
        for container in spec["containers"] + spec.get("initContainers", []):
            context = container.get("securityContext", {})
            locked = context.get("readOnlyRootFilesystem") and context.get("capabilities") == {"drop": ["ALL"]}
            if not locked or context.get("allowPrivilegeEscalation", True):
                yield f"{name}: {container['name']} is not locked down"
    for manifest in manifests:
        spec = manifest.get("spec", {})
        cluster = spec.get("rayClusterConfig") or spec.get("rayClusterSpec")
        if cluster is not None and cluster.get("authOptions") != {"mode": "token"}:
            yield "Ray takes code without a token"
        if cluster is not None and cluster["headGroupSpec"].get("enableIngress"):
            yield "the dashboard has an ingress"

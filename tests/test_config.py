"""The configuration of serving: what is refused, in one line that names the field, before anything loads."""

import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from fastapi.testclient import TestClient
from ray import serve
from ray.serve._private import constants
from ray.serve.schema import ApplicationStatus
from rich.console import Console
from starlette.routing import Route
from typer.testing import CliRunner

from deployments import cli
from deployments import serve as serving
from deployments.app import build, draft_config, registry_name, shared_tokens
from deployments.config import ServeConfig, TargetOptions
from deployments.config_load import ConfigError, check_config, chosen_config, load_config, on_gpus, parse_config
from deployments.http import HttpSettings, make_app
from deployments.ingress import context, fingerprint
from deployments.keys import ApiKeys, Unauthorized, hidden
from deployments.serve import (
    DeployError,
    base_url,
    check_ports,
    deploy,
    gcs_address,
    print_ready,
    run_server,
    serve_schema,
)
from tests import exact

PAIR_TARGET = {"checkpoint": str(exact.TARGET)}
PAIR = {"name": "code", "target": PAIR_TARGET, "draft": {"checkpoint": str(exact.DRAFT)}}


def changed(*path: str | int, to: Any) -> dict[str, Any]:
    """The settings of one pair, with one value changed or added."""
    values: dict[str, Any] = json.loads(json.dumps({"models": [PAIR], "http": {}, "grpc": {}, "limits": {}}))
    place: Any = values
    for part in path[:-1]:
        place = place.setdefault(part, {}) if isinstance(part, str) else place[part]
    place[path[-1]] = to
    return values


def write(path: Path, values: Any) -> Path:
    path.write_text(values if isinstance(values, str) else yaml.safe_dump(values))
    return path


def test_without_settings_the_bundled_pair_is_served() -> None:
    config = parse_config({})
    check_config(config)
    (model,) = config.models
    assert (model.name, model.target.checkpoint, config.http.host) == ("code", exact.TARGET, "127.0.0.1")
    assert (config.http.port, config.grpc.port) == (8000, 9000)
    assert config == load_config_of(config)


def load_config_of(config: ServeConfig) -> ServeConfig:
    """The same, as Serve hands it to the builder."""
    return parse_config(json.loads(json.dumps(config.arguments())))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("prot",), 1, "prot: there is no such setting"),
        (("models", 0, "target", "windw"), 1, "models.0.target.windw: there is no such setting"),
        (("models", 0, "target", "window_size"), 0, "models.0.target.window_size: Input should be greater than"),
        (
            ("models", 0, "target", "window"),
            "x",
            "models.0.target.window: Input should be 'goodput', 'chain', 'tree', 'h",
        ),
        (("models", 0, "target", "scaling"), {"min_replicas": 3}, "min_replicas is 3, max_replicas 1"),
        (("models", 0, "draft", "scaling"), {"ratio": 0}, "models.0.draft.scaling.ratio: Input should be greater"),
        (("models", 0, "draft", "scaling"), {"ratio": 2, "max_replicas": 1}, "1 drafts at most, 2 for the fewest"),
        (("models", 0, "draft", "ports"), [2, 1], "ports: the first is 2, the last 1"),
        (("models", 0, "draft", "ports"), [8000, 8001], "the draft ports of code include 8000"),
        (
            ("models", 0, "draft", "drafter"),
            "guess",
            "models.0.draft.drafter: Input should be 'auto', 'model', 'ngram'",
        ),
        (("models", 0, "draft"), {"drafter": "retrieval"}, "models.0.draft: the drafter retrieval needs documents"),
        (("models", 0, "draft"), {"drafter": "model"}, "models.0.draft: the drafter model needs a checkpoint"),
        (("models", 0, "draft"), {"drafter": "cascade"}, "models.0.draft: the drafter cascade needs a checkpoint"),
        (("models", 0, "draft"), {"drafter": "merged"}, "the drafter merged needs a checkpoint or documents"),
        (("models", 0, "draft", "drafter"), "ngram", "models.0.draft: the drafter ngram uses no checkpoint"),
        (("models", 0, "draft", "inner"), "there:1", "models.0.draft: the drafter auto uses no inner draft service"),
        (("models", 0, "draft", "inner"), "there", "models.0.draft.inner: 'there' is not HOST:PORT"),
        (("models", 0, "draft", "inner"), "there:0", "models.0.draft.inner: 'there:0' is not HOST:PORT"),
        (("models", 0, "draft", "documents"), "texts", "models.0.draft: the drafter auto uses no documents"),
        (
            ("models", 0, "draft", "weights"),
            "int4",
            "models.0.draft: weights int4: only on GPUs",
        ),
        (
            ("models", 0, "draft"),
            {"checkpoint": "x", "weights": "int8", "compile": True},
            "models.0.draft: weights int8: not compiled on CPUs",
        ),
        (
            ("models", 0, "draft"),
            {"checkpoint": "x", "weights": "int4", "dtype": "float32", "replicas": {"gpus": 1}},
            "models.0.draft: weights int4: not in float32, only in bfloat16",
        ),
        (("models", 0, "draft"), {"weights": "int8"}, "models.0.draft: weights int8: there is no checkpoint"),
        (("models", 0, "target", "engine"), "tgi", "models.0.target.engine: Input should be 'paceline' or 'vllm'"),
        (("models", 0, "target", "engine_args"), {"seed": 1}, "engine_args is no setting of the engine paceline"),
        (
            ("models", 0, "target"),
            {**PAIR_TARGET, "engine": "vllm", "invariant": True},
            "invariant is no setting of the engine vllm",
        ),
        (
            ("models", 0, "target"),
            {**PAIR_TARGET, "engine": "vllm", "tensor_parallel_size": 2, "replicas": {"gpus": 1}},
            "replicas.gpus must be tensor_parallel_size, 2",
        ),
        (("models", 0, "name"), "a b", "models.0.name: String should match"),
        (("models",), [], "models: Tuple should have at least 1 item"),
        (("models",), [PAIR, PAIR], "models: two have the name code"),
        (("http", "port"), 0, "http.port: Input should be greater than"),
        (("http", "port"), 9000, "grpc.port: 9000 is the HTTP port"),
        (("http", "tls_key"), "key.pem", "http: tls_certificate and tls_key go together"),
        (
            ("models", 0, "target", "replicas"),
            {"resources": {"GPU": 1}},
            "GPU is no custom resource: see cpus and gpus",
        ),
        (
            ("models", 0, "draft", "replicas"),
            {"resources": {"draft": 0}},
            "models.0.draft.replicas.resources.draft: Input should be greater than 0",
        ),
        (("http", "resources"), {"ingress": 1.5}, "http.resources.ingress: 1.5 is neither a whole number nor a part"),
        (("http", "resources"), {"ingress": 0.00001}, "http.resources.ingress: 1e-05 is less than Ray's least part"),
        (("models", 0, "target", "replicas"), {"gpus": 1.5}, "target.replicas.gpus: 1.5 is neither a whole number nor"),
        (("models", 0, "draft", "replicas"), {"gpus": 0.00001}, "draft.replicas.gpus: 1e-05 is less than Ray's least"),
        (("models", 0, "draft", "replicas"), {"cpus": 0.00001}, "draft.replicas.cpus: 1e-05 is less than Ray's least"),
        (
            ("models", 0, "target", "replicas"),
            {"gpus": 2},
            "models.0.target: replicas.gpus is 2: of the engine paceline, a target is on one GPU",
        ),
        (("models", 0, "draft", "replicas"), {"gpus": 2}, "models.0.draft: replicas.gpus is 2: a draft is on one GPU"),
        (("models", 0, "target", "replicas"), {"cores": [0, 1, 0]}, "target.replicas.cores: 0 is named 2 times"),
        (
            ("models", 0, "target"),
            {**PAIR_TARGET, "replicas": {"cores": [0, 1]}, "scaling": {"max_replicas": 2}},
            "models.0.target: replicas.cores: they are for one replica, and there may be 2",
        ),
        (
            ("models", 0, "draft"),
            {"replicas": {"cores": [0]}, "scaling": {"ratio": 2}},
            "models.0: draft.replicas.cores: they are for one replica, and there may be 2",
        ),
        (
            ("models", 0, "target", "scaling"),
            {"delays": {"interval_s": 2, "look_back_s": 2}},
            "scaling.delays: look_back_s, 2, must be more than interval_s, 2",
        ),
        (("models", 0, "target", "scaling"), {"max_replicas": 10**400}, "scaling.max_replicas: Input should be less"),
        (("models", 0, "draft", "scaling"), {"ratio": 1e308}, "scaling.ratio: Input should be less than or equal to"),
        (("limits", "request_timeout_s"), float("nan"), "limits.request_timeout_s: Input should be"),
        (("models", 0, "draft", "scaling"), {"ratio": float("inf")}, "scaling.ratio: Input should be a finite number"),
        (("http", "resources"), {"ingress": float("inf")}, "http.resources.ingress: Input should be a finite number"),
        (("models", 0, "target", "kv_tokens"), 100, "models.0.target.kv_tokens: Input should be greater than or equal"),
        (("models", 0, "draft", "kv_tokens"), 10**18, "models.0.draft.kv_tokens: Input should be less than or equal"),
        (
            ("models", 0, "target", "replicas"),
            {"threads": 100000},
            "models.0.target.replicas.threads: Input should be less than or equal to 1024",
        ),
        (("models", 0, "draft", "kv_tokens"), 512, "models.0.draft.kv_tokens: Input should be greater than or equal"),
        (("models", 0, "target", "checkpoint"), "~nosuchuser/x", "models.0.target.checkpoint: Could not determine"),
    ],
)
def test_a_bad_value_is_refused_by_name(path: tuple[str | int, ...], value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(changed(*path, to=value))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_several_gpus_are_taken_by_vllm_alone_and_cores_by_one_replica() -> None:
    target = {**PAIR_TARGET, "engine": "vllm", "tensor_parallel_size": 2, "replicas": {"gpus": 2}}
    assert parse_config(changed("models", 0, "target", to=target)).models[0].target.replicas.gpus == 2
    pinned = parse_config(changed("models", 0, "draft", "replicas", to={"cores": [1, 0], "gpus": 0.25})).models[0].draft
    assert pinned is not None
    assert pinned.replicas.cores == (1, 0)


def test_models_that_cannot_run_are_refused_before_anything_loads(tmp_path: Path) -> None:
    def refused(values: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            build(parse_config(values))

    refused(changed("models", 0, "target", "checkpoint", to=str(tmp_path)), r"models.0.target.checkpoint: no model at")
    other = tmp_path / "other"
    shutil.copytree(exact.DRAFT, other)
    settings = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**settings, "vocab_size": 77}))
    size = settings["vocab_size"]
    wrong_pair = changed("models", 0, "draft", "checkpoint", to=str(other))
    check_config(parse_config(wrong_pair))  # its own tokenizer is there: guesses are translated
    (other / "tokenizer.json").write_text("{}")
    refused(wrong_pair, r"models.0.draft.checkpoint: \S+/tokenizer.json can't be read: ")
    refused(
        changed("models", 0, "target", "checkpoint", to=str(other)), r"models.0.target.checkpoint: .* can't be read: "
    )
    (other / "tokenizer.json").unlink()
    refused(
        changed("models", 0, "target", "checkpoint", to=str(other)), r"models.0.target.checkpoint: .* has no tokenizer"
    )
    refused(wrong_pair, f"models.0.draft: vocabularies differ: {size} tokens in the target, 77 here")
    (other / "model.safetensors").unlink()
    refused(wrong_pair, r"models.0.draft.checkpoint: no weights at")
    nowhere = {"drafter": "retrieval", "documents": str(tmp_path / "texts")}
    refused(changed("models", 0, "draft", to=nowhere), r"models.0.draft.documents: there is nothing at")
    (tmp_path / "texts").mkdir()
    refused(changed("models", 0, "draft", to=nowhere), r"models.0.draft.documents: no documents in")
    missing = {"tls_key": str(tmp_path / "key"), "tls_certificate": str(tmp_path / "certificate")}
    refused(changed("http", to=missing), "http.tls_certificate: there is no file")


def test_a_draft_replica_is_told_what_was_chosen(tmp_path: Path) -> None:
    """Its drafter, its documents, and whose tokens they are read in."""
    (tmp_path / "text").write_text("import os\n")
    options = {"drafter": "retrieval", "documents": str(tmp_path / "text")}
    config = load_config_of(parse_config(changed("models", 0, "draft", to=options)))
    check_config(config)
    application: Any = build(config)
    _, _, drafts, _ = application._bound_deployment.init_args
    draft, _, _ = drafts["code"]._bound_deployment.init_args
    chosen = (draft.model, draft.drafter, draft.documents, draft.tokenizer, draft.name)
    assert chosen == (None, "retrieval", tmp_path / "text", exact.TARGET, "code")


def test_a_cascade_is_told_where_its_inner_draft_service_is() -> None:
    options = {"drafter": "cascade", "checkpoint": str(exact.DRAFT), "inner": "there:9101"}
    model = parse_config(changed("models", 0, "draft", to=options)).models[0]
    assert model.draft is not None
    assert draft_config(model, model.draft).inner == "there:9101"
    for keys, shares, refused_here in (
        [["one"], None, True],
        [["one"], True, False],
        [[], False, True],
        [[], None, False],
    ):
        values = changed("models", 0, "draft", to=options) | {"http": {"api_keys": keys}}
        values["models"][0]["share_outputs"] = shares
        if refused_here:
            with pytest.raises(ConfigError, match=r"models.0.draft.inner: .*; if it may, say share_outputs: true"):
                check_config(parse_config(values))
        else:
            check_config(parse_config(values))


@pytest.mark.parametrize(
    ("keys", "chosen", "shares"),
    [([], None, True), (["one"], None, False), (["one"], True, True), ([], False, False)],
)
def test_clients_with_keys_are_not_drafted_for_from_each_others_answers(
    keys: list[str], chosen: bool | None, shares: bool
) -> None:
    values = changed("models", 0, "share_outputs", to=chosen)
    config = parse_config(values | {"http": {"api_keys": keys}})
    assert (shared_tokens(config.models[0], config) > 0) == shares


def test_api_keys_are_read_and_never_shown(tmp_path: Path) -> None:
    file = write(tmp_path / "keys", "second\n\n third \n")
    config = parse_config(changed("http", to={"api_keys": ["first"], "api_keys_file": str(file)}))
    assert config.http.keys() == ("first", "second", "third")
    shown = load_config_of(config).http.keys()
    assert shown == (hidden("first"), "second", "third")
    assert ApiKeys(shown).salt("first") == ApiKeys(config.http.keys()).salt("first")
    with pytest.raises(Unauthorized):
        ApiKeys(shown).salt(shown[0])
    assert "first" not in repr(config) + str(config.arguments())
    with pytest.raises(ConfigError) as caught:
        parse_config(changed("http", to={"api_keys": "first"}))
    assert "first" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("# none\n", "is empty"),
        ("- 1", "holds no settings"),
        ("\0", "can't be read"),
        ("a: [", "can't be read"),
        ("applications: []", "0 have the import_path"),
        ("applications: 5", "applications: must be a list"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path / "serve.yaml", text))
    with pytest.raises(ConfigError, match="can't be read"):
        load_config(tmp_path / "missing.yaml")


def test_what_serve_is_given_holds_the_same_configuration(tmp_path: Path) -> None:
    """One file for `paceline serve`, `serve deploy` and KubeRay."""
    config = parse_config(changed("http", "port", to=8123))
    schema = serve_schema(config)
    file = write(tmp_path / "serve.yaml", schema.model_dump(mode="json", exclude_unset=True))
    assert load_config(file) == config
    assert (schema.http_options.host, schema.http_options.port) == ("127.0.0.1", 8123)


def test_a_port_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"http.port: {port} can't be had on 127.0.0.1"):
            check_ports(parse_config(changed("http", "port", to=port)))


def test_a_certificate_and_a_key_are_loaded(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    certificate, key = tmp_path / "certificate", tmp_path / "key"
    made = ["-newkey", "rsa:2048", "-nodes", "-subj", "/CN=x", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", "req", "-x509", *made], check=True, capture_output=True)
    pair = parse_config(changed("http", to={"tls_certificate": str(certificate), "tls_key": str(key)}))
    check_config(pair)
    for broken in (key, certificate):
        broken.write_text("no PEM")
        with pytest.raises(ConfigError, match=r"http.tls_certificate: it and tls_key must be PEM files"):
            check_config(pair)


def test_a_context_that_vllm_is_to_find_itself_is_no_limit_here() -> None:
    for longest, found in ((-1, 1024), (None, 1024), (512, 512)):
        arguments = {} if longest is None else {"max_model_len": longest}
        options = TargetOptions.model_validate({**PAIR_TARGET, "engine": "vllm", "engine_args": arguments})
        assert context(options, {"max_position_embeddings": 1024}) == found


def test_a_ray_cluster_that_is_not_there_is_told_at_once() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # nobody listens
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(DeployError, match=f"no Ray at {address}"):
            run_server(ServeConfig(), address, Console(quiet=True))
    assert [gcs_address(each) for each in ("auto", "ray://there:1", "there:1")] == [None, None, ("there", 1)]


def test_options_choose_a_pair_or_a_file(tmp_path: Path) -> None:
    file = write(tmp_path / "serve.yaml", changed("http", "port", to=8123))

    def chosen(
        path: Path | None = None, target: Path | None = None, draft: Path | None = None, port: int | None = None
    ) -> ServeConfig:
        return chosen_config(path, target, draft, "auto", False, None, port, None, None)

    assert chosen(file).http.port == 8123
    assert chosen(file, port=8124).http.port == 8124
    assert chosen() == ServeConfig()
    alone = chosen(target=exact.TARGET).models[0]
    assert (alone.name, alone.draft) == (exact.TARGET.name, None)
    pair = chosen(target=exact.TARGET, draft=exact.DRAFT).models[0]
    assert pair.draft is not None
    assert pair.draft.checkpoint == exact.DRAFT
    with pytest.raises(ConfigError, match="give one or the other"):
        chosen(file, target=exact.TARGET)


def test_the_command_line_checks_prints_and_exports(tmp_path: Path) -> None:
    runner = CliRunner()
    good = write(tmp_path / "good.yaml", {"models": [PAIR]})
    bad = write(tmp_path / "bad.yaml", changed("models", 0, "target", "window_size", to=0))
    checked = runner.invoke(cli.app, ["config", "check", str(good)])
    assert (checked.exit_code, checked.stdout) == (0, "good: code\n")
    for command in (["config", "check", str(bad)], ["serve", "--config", str(bad)]):
        refused = runner.invoke(cli.app, command)
        assert refused.exit_code == 2
        assert refused.stderr.startswith("paceline: models.0.target.window_size: ")
        assert refused.stderr.count("\n") == 1
    assert json.loads(runner.invoke(cli.app, ["config", "schema"]).stdout)["title"] == "ServeConfig"
    exported = yaml.safe_load(runner.invoke(cli.app, ["config", "export", str(good)]).stdout)
    assert exported["applications"][0]["import_path"] == "deployments.app:build"


def test_a_pair_without_a_file_is_served_on_the_gpus_that_there_are() -> None:
    def gpus(target: Path | None, count: int) -> list[float]:
        config = chosen_config(None, target, None, "auto", False, None, None, None, None)
        (model,) = on_gpus(config, count).models
        return [part.replicas.gpus for part in (model.target, model.draft) if part is not None]

    assert [gpus(None, count) for count in (0, 1, 2)] == [[0.0, 0.0], [0.5, 0.5], [1.0, 1.0]]
    assert [gpus(exact.TARGET, count) for count in (0, 1)] == [[0.0], [1.0]]


def test_fingerprints_and_registries_tell_models_apart(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(exact.TARGET, copy)
    (model,) = parse_config(changed("models", to=[PAIR])).models
    (same,) = parse_config(changed("models", 0, "target", "checkpoint", to=str(copy))).models
    (exactly,) = parse_config(changed("models", 0, "target", "invariant", to=True)).models
    assert fingerprint(model) == fingerprint(same) != fingerprint(exactly)
    assert registry_name(model) == registry_name(exactly) != registry_name(same)
    (copy / "config.json").write_text((copy / "config.json").read_text() + "\n")
    settings = fingerprint(same)
    with (copy / "model.safetensors").open("r+b") as weights:  # as after more training: only the numbers are others
        weights.seek(-1000, os.SEEK_END)
        weights.write(bytes(1000))
    assert len({fingerprint(model), settings, fingerprint(same)}) == 3


def test_addresses_are_those_of_this_machine() -> None:
    hosts = {"127.0.0.1": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "[::1]", "fe80::1": "[fe80::1]"}
    for host, shown in hosts.items():
        assert base_url(parse_config(changed("http", "host", to=host)).http) == f"http://{shown}:8000"


def test_replicas_ask_ray_for_the_custom_resources_of_their_group() -> None:
    values = changed("models", 0, "target", "replicas", to={"resources": {"target-l4": 1}})
    values["models"][0]["draft"]["replicas"] = {"resources": {"draft": 0.25}}
    values["http"] = {"resources": {"ingress": 2}}
    application = build(parse_config(values))
    asked = {
        deployment.name: deployment.ray_actor_options["resources"]
        for deployment in (bound._bound_deployment for bound in [application, *_bound(application)])
    }
    assert asked == {"ingress": {"ingress": 2}, "code-target": {"target-l4": 1}, "code-draft": {"draft": 0.25}}


def test_ray_knows_the_settings_that_replicas_give_serve() -> None:
    application = build(ServeConfig())
    for bound in [application, *_bound(application)]:
        variables = bound._bound_deployment.ray_actor_options["runtime_env"]["env_vars"]
        given = [name for name in variables if name.startswith("RAY_SERVE_")]
        assert given
        for name in given:  # Ray passes over names that it doesn't know, in silence
            assert hasattr(constants, name)


def _bound(application: Any) -> list[Any]:
    """The applications that one has as arguments, by the name of the model."""
    _, targets, drafts, _ = application._bound_deployment.init_args
    return [*targets.values(), *drafts.values()]


def test_what_vllm_is_not_asked_is_refused_before_it_is_looked_for() -> None:
    vllm = {**PAIR_TARGET, "engine": "vllm", "engine_args": {"speculative_config": {"method": "ngram"}}}
    with pytest.raises(ConfigError, match=r"models.0.target: engine_args: speculative_config is set by Paceline"):
        check_config(parse_config(changed("models", 0, "target", to=vllm)))


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_an_engine_that_is_not_installed_is_told_with_what_to_install() -> None:
    vllm = {**PAIR_TARGET, "engine": "vllm"}
    with pytest.raises(
        ConfigError, match=r"models.0.target: the engine vllm is not installed: pip install -e '.\[vllm\]'"
    ):
        check_config(parse_config(changed("models", 0, "target", to=vllm)))


@pytest.mark.parametrize("page", ["README.md", "docs/OPERATING.md"])
def test_the_configurations_of_the_pages_are_right(page: str, tmp_path: Path) -> None:
    found = re.findall(r"```yaml\n(.*?)```", (Path(__file__).parent.parent / page).read_text(), re.DOTALL)
    assert found
    keys = write(tmp_path / "keys", "secret")
    for text in found:
        text = text.replace("/models/chat-draft", str(exact.DRAFT)).replace("/models/chat", str(exact.TARGET))
        config = load_config(write(tmp_path / "serve.yaml", text.replace("/etc/paceline/keys", str(keys))))
        assert [model.name for model in config.models] == ["chat"]


def test_the_pages_name_every_address_that_is_open_without_a_key() -> None:
    app = make_app({}, HttpSettings(api_keys=("key",)))
    with TestClient(app) as client:
        paths = {*app.openapi()["paths"], *(route.path for route in app.routes if isinstance(route, Route))}
        opened = {path for path in paths if client.get(path).status_code not in (401, 405)}
    of_others = {"/metrics", "/-/healthz", "/-/routes"}  # of the ingress, and of Serve's proxy
    places = {"OPERATING.md": r"^\| Open without a key \| (.*): route only", "HTTP.md": r"^and `/detokenize`; (.*?)\. "}
    for page, place in places.items():
        text = (Path(__file__).parent.parent / "docs" / page).read_text()
        (named,) = re.findall(place, text, re.MULTILINE)
        assert set(re.findall(r"`(/\S+)`", named)) == opened | of_others


def test_what_is_no_key_is_refused(tmp_path: Path) -> None:
    """An empty one, as an unset variable gives it, would let everybody in."""
    for key, reason in (
        ("", "a key is empty"),
        (" ", "a key is empty"),
        ("sha256:12", "64 hex digits"),
        (" key", "printable ASCII"),
        ("schlüssel", "printable ASCII"),
        ("two\nlines", "printable ASCII"),
    ):
        with pytest.raises(ConfigError, match=f"http.api_keys: {reason}|http.api_keys: .*{reason}"):
            parse_config(changed("http", "api_keys", to=[key]))
    file = write(tmp_path / "keys", "good\nsha256:12\n")
    with pytest.raises(ConfigError, match=r"http.api_keys_file: behind sha256: 64 hex digits"):
        check_config(parse_config(changed("http", "api_keys_file", to=str(file))))
    file.write_text("\n \n")  # as somebody writes it anew: a replica that starts just then must not let everybody in
    emptied = parse_config(changed("http", "api_keys_file", to=str(file)))
    with pytest.raises(ValueError, match="it holds no key"):
        emptied.http.keys()
    with pytest.raises(ConfigError, match=r"http.api_keys_file: it holds no key"):
        check_config(emptied)
    shown = hidden("good").replace("sha256:", "").upper()
    ApiKeys([f"sha256:{shown}"]).salt("good")


def test_names_may_say_whose_a_model_is() -> None:
    config = parse_config(changed("models", 0, "name", to="Qwen/Qwen2.5-7B-Instruct"))
    (model,) = config.models
    assert (model.name, model.target_deployment) == ("Qwen/Qwen2.5-7B-Instruct", "Qwen--Qwen2.5-7B-Instruct-target")
    other = {**PAIR, "name": "Qwen--Qwen2.5-7B-Instruct"}
    with pytest.raises(ConfigError, match="differ by / and -- alone"):
        parse_config({"models": [{**PAIR, "name": model.name}, other]})
    for bad in ("/x", "x/", "a/b/c", "a//b"):
        with pytest.raises(ConfigError, match=r"models.0.name"):
            parse_config(changed("models", 0, "name", to=bad))


def test_ports_of_the_command_line_are_taken_as_they_are() -> None:
    def chosen(port: int | None, grpc_port: int | None) -> ServeConfig:
        return chosen_config(None, None, None, "auto", False, None, port, grpc_port, None)

    assert chosen(None, None).grpc.port == 9000
    assert chosen(8123, 0).grpc.port is None
    with pytest.raises(ConfigError, match=r"http.port"):
        chosen(0, None)


def test_who_serves_to_all_without_keys_is_told(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret\n")

    def told(host: str | None, keys: Path | None, grpc_port: int = 0) -> str:
        written = StringIO()
        config = chosen_config(None, None, None, "auto", False, host, None, grpc_port, keys)
        print_ready(config, Console(file=written, width=200))
        return written.getvalue()

    assert "everybody who reaches 0.0.0.0:8000 may ask" in told("0.0.0.0", None)
    assert "everybody who reaches gRPC on port 9000" in told(None, None, 9000)
    for host, keys in ((None, None), ("::1", None), ("0.0.0.0", tmp_path / "keys")):
        assert "everybody" not in told(host, keys)
    assert "Bearer KEY" in told(None, tmp_path / "keys")


def test_another_ingress_comes_before_one_goes_and_targets_as_configured() -> None:
    surges = []
    for percent in (0, 50):
        config = parse_config(changed("models", 0, "target", "scaling", to={"max_surge_percent": percent}))
        bound: Any = build(config)._bound_deployment
        (target,) = (each._bound_deployment for each in bound.init_args[1].values())
        surges.append([part._deployment_config.max_surge_percent for part in (bound, target)])
    assert surges == [[100, 0], [100, 50]]


def test_why_a_deployment_failed_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "engine.checkpoint.ModelError: no-such-folder: config.json is missing"
    trace = f"""The deployment failed to start 3 times in a row. Error: ray::ServeReplica:paceline:code-target()
  File "/a/path/replica.py", line 1, in initialize
    raise ModelError(message)
{line}

The above exception was the direct cause of the following exception:

ray.exceptions.RayTaskError: ray::ServeReplica:paceline:code-target()
"""
    deployments = {"code-target": SimpleNamespace(message=trace), "code-draft": SimpleNamespace(message="")}
    application = SimpleNamespace(
        status=ApplicationStatus.DEPLOY_FAILED, message="2 deployments failed.", deployments=deployments
    )
    asked: list[object] = []
    monkeypatch.setattr(serving, "_client", lambda: SimpleNamespace(deploy_apps=asked.append))
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications={serving.APPLICATION: application}))
    schema = serve_schema(parse_config({"models": [PAIR]}))
    with pytest.raises(DeployError) as failed:
        deploy(schema, lambda text: None)
    assert str(failed.value) == line
    assert asked == [schema]


def test_who_interrupts_the_end_leaves_no_server_that_admits_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(deadline: float) -> None:
        raise KeyboardInterrupt

    deleted: list[str] = []
    client = SimpleNamespace(delete_apps=lambda names, blocking: deleted.extend(names))
    monkeypatch.setattr(serving, "_client", lambda: client)
    monkeypatch.setattr(serving, "_finish_streams", interrupted)
    with pytest.raises(KeyboardInterrupt):
        serving.withdraw(parse_config({"models": [PAIR]}))
    assert deleted == [serving.APPLICATION]


def test_who_serves_next_keeps_the_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    applications = {serving.APPLICATION: SimpleNamespace(status=ApplicationStatus.DEPLOYING)}
    monkeypatch.setattr(serving, "_client", lambda: SimpleNamespace(delete_apps=lambda names, blocking: None))
    monkeypatch.setattr(serving, "_LEAVE_S", 0.0)
    monkeypatch.setattr(serving, "_POLL_S", 0.0)
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications=applications))
    monkeypatch.setattr("ray.get_actor", lambda *_: pytest.fail("another's registry is ended"))
    serving.withdraw(parse_config({"models": [PAIR], "limits": {"drain_s": 0.01}}))


def test_what_is_being_ended_is_waited_for_and_what_runs_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[dict[str, Any]] = [
        {serving.APPLICATION: {"status": ApplicationStatus.DELETING}},
        {},
        {serving.APPLICATION: {"status": ApplicationStatus.RUNNING}},
    ]
    client = SimpleNamespace(get_serve_details=lambda: {"applications": found.pop(0)})
    monkeypatch.setattr(serving, "_client", lambda: client)
    monkeypatch.setattr(serving, "_check_where", lambda schema: None)
    monkeypatch.setattr(serving, "_POLL_S", 0.0)
    monkeypatch.setattr(serve, "start", lambda **options: None)
    config = parse_config({"models": [PAIR]})
    said: list[str] = []
    assert serving.prepare(config, said.append) == serve_schema(config)
    assert said[-1] == "waiting for what is being ended there"
    with pytest.raises(DeployError, match="serves models like this already"):
        serving.prepare(config, said.append)

"""Configurations of serving: read, chosen and checked once, before anything slow. Errors are one line that names a field."""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from cluster.vllm_options import check_options
from deployments.cli_options import Dtype, read_text
from deployments.config import DraftOptions, ServeConfig
from engine.checkpoint import ModelError, check_checkpoint, check_tokenizer, hidden_size
from engine.choice import check_documents
from engine.local_choice import check_heads

BUILDER = "deployments.app:build"  # what Serve imports


class ConfigError(ValueError):
    """A configuration that can't be used; the message says in one line which field is wrong, and how."""


def load_config(path: Path) -> ServeConfig:
    """Reads a YAML file: a ServeConfig, or one of Serve's own with the same under its application's `args`.

    Raises ConfigError.
    """
    try:
        values: Any = yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} can't be read: {' '.join(str(error).split())}") from None
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if values is None:
        raise ConfigError(f"{path} is empty")
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no settings")
    return parse_config(_our_arguments(values) if "applications" in values else values)


def chosen_config(
    path: Path | None,
    target: Path | None,
    draft: Path | None,
    dtype: Dtype,
    invariant: bool,
    host: str | None,
    port: int | None,
    grpc_port: int | None,
    api_keys_file: Path | None,
) -> ServeConfig:
    """A file, or one pair of models (the bundled one if none is named), with addresses of its own. Raises ConfigError."""
    config = load_config(path) if path is not None else ServeConfig()
    if path is not None and (target or draft or dtype != "auto" or invariant):
        raise ConfigError("--target, --draft, --dtype and --invariant say what a --config says: give one or the other")
    values = config.arguments()
    if path is None:
        (model,) = values["models"]
        if target is not None:
            model["name"], model["target"]["checkpoint"] = target.absolute().name, str(target)
            model["draft"] = model["draft"] if draft is not None else None
        if draft is not None:
            model["draft"]["checkpoint"] = str(draft)
        model["target"].update(dtype=dtype, invariant=invariant)
        if model["draft"] is not None:
            model["draft"]["dtype"] = dtype
    values["http"].update({"host": host or config.http.host, "port": config.http.port if port is None else port})
    if api_keys_file is not None:
        values["http"]["api_keys_file"] = str(api_keys_file)
    values["grpc"].update({"port": config.grpc.port if grpc_port is None else grpc_port or None})
    return parse_config(values)


def on_gpus(config: ServeConfig, gpus: int) -> ServeConfig:
    """One pair of models on a machine with so many GPUs: one each, or half a one; on CPU cores where there is none."""
    values = config.arguments()
    (model,) = values["models"]
    parts = [part for part in (model["target"], model["draft"]) if part is not None]
    for part in parts if gpus else ():
        part["replicas"]["gpus"] = 1.0 if gpus >= len(parts) else 0.5
    return parse_config(values)


def parse_config(values: dict[str, Any]) -> ServeConfig:
    """A configuration from plain values; raises ConfigError."""
    try:
        return ServeConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        what = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            what = "there is no such setting"
        raise ConfigError(f"{where}: {what}" if where else what) from None


def check_config(config: ServeConfig) -> None:
    """What can be told without loading a model; raises ConfigError."""
    for index, model in enumerate(config.models):
        where = f"models.{index}"
        vllm = model.target.vllm(drafted=model.draft is not None)
        if vllm is not None:
            with _naming(f"{where}.target"):
                check_options(vllm)
        with _naming(f"{where}.target.checkpoint"):
            target = check_checkpoint(model.target.checkpoint, own_engine=vllm is None)
            check_tokenizer(model.target.checkpoint)
        _check_documents(f"{where}.target.documents", model.target.documents)
        if model.target.heads is not None:
            with _naming(f"{where}.target.heads"):
                check_heads(model.target.heads, hidden_size(target), model.target.checkpoint)
        if model.draft is not None:
            _check_draft(f"{where}.draft", model.draft, target["vocab_size"])
    files = {"tls_certificate": config.http.tls_certificate, "tls_key": config.http.tls_key}
    for name, path in {**files, "api_keys_file": config.http.api_keys_file}.items():
        if path is not None and not path.is_file():
            raise ConfigError(f"http.{name}: there is no file {path}")
    if config.http.tls_certificate is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
                config.http.tls_certificate, config.http.tls_key, password=""
            )
        except OSError as error:
            reason = f"it and tls_key must be PEM files that belong together, without a password: {error}"
            raise ConfigError(f"http.tls_certificate: {reason}") from None
    if config.http.api_keys_file is not None:
        try:
            config.http.keys()
        except ValueError as error:
            raise ConfigError(f"http.api_keys_file: {error}") from None
    for index, model in enumerate(config.models):
        if model.draft is not None and model.draft.inner is not None and not config.shares(model):
            reason = "the service there may guess for one client from what others were answered"
            raise ConfigError(f"models.{index}.draft.inner: {reason}; if it may, say share_outputs: true")


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Says of what is wrong with a checkpoint, or beside one, which setting names it."""
    try:
        yield
    except ModelError as error:
        raise ConfigError(f"{where}: {error}") from None


def _check_draft(where: str, draft: DraftOptions, target_size: int) -> None:
    """Beside a target with a tokenizer, and a vocabulary of this size."""
    if draft.checkpoint is not None:
        with _naming(f"{where}.checkpoint"):
            size = check_checkpoint(draft.checkpoint)["vocab_size"]
        if size != target_size:
            if not (draft.checkpoint / "tokenizer.json").is_file():
                raise ConfigError(
                    f"{where}: vocabularies differ: {target_size} tokens in the target, {size} here, "
                    "and without a tokenizer.json here none can be translated"
                )
            with _naming(f"{where}.checkpoint"):
                check_tokenizer(draft.checkpoint)
    _check_documents(f"{where}.documents", draft.documents)


def _check_documents(where: str, documents: Path | None) -> None:
    if documents is not None:
        with _naming(where):
            check_documents(documents)


def _our_arguments(values: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the one application of ours in a configuration of Serve's."""
    applications = values["applications"] or []
    if not isinstance(applications, list):
        raise ConfigError("applications: must be a list")
    ours = [each for each in applications if isinstance(each, dict) and each.get("import_path") == BUILDER]
    if len(ours) != 1:
        raise ConfigError(f"applications: {len(ours)} have the import_path {BUILDER}; there must be one")
    arguments: Any = ours[0].get("args") or {}
    if not isinstance(arguments, dict):
        raise ConfigError("applications: args holds no settings")
    return arguments

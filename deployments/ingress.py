"""What stands between clients and models: one deployment that holds every model's handle and speaks HTTP and gRPC."""

import asyncio
import hashlib
import sys
import time
import uuid
from typing import Any

import torch
from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.registry import RegistryName
from cluster.reports import Reporter
from deployments.backend import ServeBackend
from deployments.config import ModelOptions, ServeConfig, TargetOptions
from deployments.grpc_service import GrpcMethods
from deployments.http import HttpSettings, make_app
from deployments.keys import ApiKeys
from deployments.metrics import Latencies, MeasuredService, gather_reports, make_metrics_router
from deployments.service import ServedModel
from engine.checkpoint import check_checkpoint, checkpoint_digest, context_length
from engine.step import MAX_WINDOW
from engine.text import load_tokenizer

# Functions that add a servicer to Serve's gRPC proxy, by import path.
GRPC_SERVICERS: tuple[str, ...] = ("deployments.grpc_methods:add_generation_service",)


@serve.ingress()
class Ingress(GrpcMethods):
    """One replica of the API."""

    def __init__(
        self,
        config: ServeConfig,
        targets: dict[str, DeploymentHandle[Any]],
        drafts: dict[str, DeploymentHandle[Any]],
        registries: dict[str, RegistryName],
    ) -> None:
        """All by the name of the model. The drafts are here so that Serve starts them; targets find them."""
        self._config = config
        self._backends = {model.name: ServeBackend(targets[model.name]) for model in config.models}
        models = {model.name: served_model(model, self._backends[model.name]) for model in config.models}
        self._latencies = latencies = {name: Latencies() for name in models}
        service = MeasuredService(latencies, config.limits.request_timeout_s)
        super().__init__(models, service, ApiKeys(config.http.keys()), config.limits.body_bytes)
        self._registries = {name: registry.open() for name, registry in registries.items()}
        replica = f"ingress-{uuid.uuid4().hex[:12]}"
        for name, registry in self._registries.items():
            Reporter(registry, name, replica, latencies[name].samples)

    def __serve_build_asgi_app__(self) -> Any:
        """For Serve: the HTTP application, once the constructor has run."""
        http = self._config.http
        settings = HttpSettings(http.keys(), http.cors_origins, self._config.limits.body_bytes)
        app = make_app(self._models, settings, self._service, self.ready)
        app.include_router(make_metrics_router(lambda: gather_reports(self._registries)))
        return app

    async def drain(self) -> int:
        """Refuses requests from now on, each with an error of its protocol; how many requests are being prepared, and
        samples written.
        """
        self._service.drain()
        return self._service.preparing + sum(each.open for each in self._latencies.values())

    async def ready(self) -> bool:
        """Whether every model could answer: a replica is there, or a request would wake one."""
        if self._service.draining:
            return False
        awake = (model.name for model in self._config.models if model.target.scaling.min_replicas)
        return all(await asyncio.gather(*(self._backends[name].ready() for name in awake)))


def served_model(options: ModelOptions, backend: ServeBackend) -> ServedModel:
    """What protocols need to know of a model; raises ModelError or ValueError."""
    target = options.target
    values = check_checkpoint(target.checkpoint, own_engine=target.engine == "paceline")
    return ServedModel(
        name=options.name,
        tokenizer=load_tokenizer(target.checkpoint),
        context=context(target, values),
        vocab_size=int(values["vocab_size"]),
        fingerprint=fingerprint(options),
        created=int(time.time()),
        backend=backend,
    )


def context(target: TargetOptions, values: dict[str, Any]) -> int:
    """Tokens that one request may come to. values: the checkpoint's config.json."""
    room = target.kv_tokens - MAX_WINDOW - 1
    if target.engine == "vllm":
        longest = int(target.engine_args.get("max_model_len") or 0)
        room = longest if longest > 0 else sys.maxsize  # -1: as long as vLLM finds room for
    return min(context_length(values), room)


def fingerprint(options: ModelOptions) -> str:
    """A name for everything that shapes a model's outputs: OpenAI's system_fingerprint."""
    target = options.target
    parts = [checkpoint_digest(target.checkpoint), target.dtype, str(target.invariant), torch.__version__]
    if target.engine != "paceline":
        parts += [target.engine, str(target.tensor_parallel_size), str(sorted(target.engine_args.items()))]
    return "fp_" + hashlib.blake2b(" ".join(parts).encode(), digest_size=6).hexdigest()

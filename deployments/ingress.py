"""What stands between clients and models: one deployment that holds every model's handle and speaks HTTP and gRPC."""

import time
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.backend import ServeBackend
from deployments.config import ModelOptions, ServeConfig
from deployments.service import ServedModel
from engine.checkpoint import check_checkpoint, checkpoint_digest, context_length
from engine.step import MAX_WINDOW
from engine.text import load_tokenizer

# Functions that add a servicer to Serve's gRPC proxy, by import path.
GRPC_SERVICERS: tuple[str, ...] = ()


@serve.ingress()
class Ingress:
    """One replica of the API."""

    def __init__(
        self, config: ServeConfig, targets: dict[str, DeploymentHandle[Any]], drafts: dict[str, DeploymentHandle[Any]]
    ) -> None:
        """targets, drafts: by the name of the model. The drafts are here so that Serve starts them; targets find them."""
        self._config = config
        self._models = {model.name: served_model(model, ServeBackend(targets[model.name])) for model in config.models}

    def __serve_build_asgi_app__(self) -> Any:
        """For Serve: the HTTP application, once the constructor has run."""
        return make_app(self._models)


def make_app(models: dict[str, ServedModel]) -> FastAPI:
    """The HTTP application."""
    app = FastAPI()

    @app.get("/health")
    async def health() -> dict[str, list[str]]:
        return {"models": list(models)}

    return app


def served_model(options: ModelOptions, backend: ServeBackend) -> ServedModel:
    """What protocols need to know of a model; raises ModelError or ValueError."""
    target = options.target
    values = check_checkpoint(target.checkpoint)
    return ServedModel(
        name=options.name,
        tokenizer=load_tokenizer(target.checkpoint),
        context=min(context_length(values), target.kv_tokens - MAX_WINDOW - 1),
        vocab_size=int(values["vocab_size"]),
        fingerprint=fingerprint(options),
        created=int(time.time()),
        backend=backend,
    )


def fingerprint(options: ModelOptions) -> str:
    """A name for everything that shapes a model's outputs: OpenAI's system_fingerprint."""
    import hashlib

    import torch

    target = options.target
    parts = (checkpoint_digest(target.checkpoint), target.dtype, str(target.invariant), torch.__version__)
    return "fp_" + hashlib.blake2b(" ".join(parts).encode(), digest_size=6).hexdigest()

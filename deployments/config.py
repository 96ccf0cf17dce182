"""The settings of serving: frozen, and validated as far as they say for themselves."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    StringConstraints,
    field_validator,
    model_validator,
)

from cluster.address import parse_address
from cluster.vllm_options import VllmOptions
from deployments.cli_options import MOST_KV_TOKENS, MOST_THREADS, Dtype
from deployments.keys import check_key, hidden
from engine.checkpoint import MODELS
from engine.choice import LEAST_KV_TOKENS, DrafterName, Weights, check_choice, check_weights
from engine.local_choice import LocalName, check_local

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}(/[A-Za-z0-9][A-Za-z0-9._-]{0,62})?$"  # also part of the names of actors

Port = Annotated[int, Field(ge=1, le=65535)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Seconds = Annotated[float, Field(ge=0, le=86400)]
KVTokens = Annotated[int, Field(ge=LEAST_KV_TOKENS, le=MOST_KV_TOKENS)]


def _absolute(path: Path) -> Path:
    """Replicas run in folders of their own. Raises ValueError for the home of a user who is not known here."""
    try:
        return path.expanduser().absolute()
    except RuntimeError as error:
        raise ValueError(str(error)) from None


Folder = Annotated[Path, AfterValidator(_absolute)]
File = Folder


def _address(text: str) -> str:
    parse_address(text)
    return text


Address = Annotated[str, AfterValidator(_address)]  # "host:port"


class _Settings(BaseModel):
    # Values are left out of errors: one of them may be a key.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, allow_inf_nan=False)


def _refuse(settings: _Settings, names: Iterable[str], what: str) -> None:
    """Raises ValueError if one of these was set: `what` has no use for it."""
    for name in names:
        if getattr(settings, name) != type(settings).model_fields[name].get_default(call_default_factory=True):
            raise ValueError(f"{name} is no setting of {what}")


def _measurable(amount: float) -> float:
    """An amount that Ray can tell from none; raises ValueError."""
    if 0 < amount < _LEAST_AMOUNT:
        raise ValueError(f"{amount:g} is less than Ray's least part, {_LEAST_AMOUNT}")
    return amount


def _whole_or_part(amount: float) -> float:
    """An amount of what Ray gives out by the piece; raises ValueError."""
    if amount > 1 and amount != int(amount):
        raise ValueError(f"{amount:g} is neither a whole number nor a part of one")
    return amount


def _custom_resources(amounts: dict[str, float]) -> dict[str, float]:
    """The same, of resources that are not Ray's own; raises ValueError."""
    for name in amounts:
        if name in _RAY_OWN:
            raise ValueError(f"{name} is no custom resource: see cpus and gpus")
    return amounts


def _different(cores: tuple[int, ...]) -> tuple[int, ...]:
    """The same cores; raises ValueError."""
    for core in cores:
        if cores.count(core) > 1:
            raise ValueError(f"{core} is named {cores.count(core)} times")
    return cores


_LEAST_AMOUNT = 0.0001
_RAY_OWN = ("CPU", "GPU", "memory", "object_store_memory")
Amount = Annotated[float, AfterValidator(_measurable)]
Pieces = Annotated[Amount, AfterValidator(_whole_or_part)]
# By name: a replica only goes where there is so much left of each. A group of nodes is chosen by giving them one.
CustomResources = Annotated[dict[str, Annotated[Pieces, Field(gt=0)]], AfterValidator(_custom_resources)]
Cores = Annotated[tuple[NonNegativeInt, ...], AfterValidator(_different)]
Replicas = Annotated[int, Field(ge=1, le=10_000)]


class Resources(_Settings):
    """What one replica takes."""

    cpus: Amount = Field(0.0, ge=0, description="cores that Ray sets aside; 0: replicas go where there is room")
    gpus: Pieces = Field(
        0.0, ge=0, description="GPUs, or a part of one; 0: the model runs on CPU cores; above 1: engine vllm"
    )
    threads: int = Field(1, ge=1, le=MOST_THREADS, description="of the model's CPU arithmetic")
    cores: Cores = Field((), description="pins the model's thread, of a deployment of at most one replica")
    resources: CustomResources = Field(default_factory=dict, description="custom resources of Ray's, by name")


def _check_cores(resources: Resources, most: int, where: str = "") -> None:
    """Raises ValueError if so many replicas at most would all be pinned to the same cores."""
    if resources.cores and most > 1:
        raise ValueError(f"{where}replicas.cores: they are for one replica, and there may be {most}")


class Delays(_Settings):
    """How long the load must ask for another number of replicas before it is changed.

    Up after seconds: loading takes longer, and requests wait. Down after minutes: a replica that is needed again costs a
    load, one too many costs nothing but its place; and traffic comes in waves. To zero later still: the next request will
    wait for the whole model.
    """

    up_s: Seconds = Field(5.0, description="before replicas are added; from zero they are at once")
    down_s: Seconds = Field(120.0, description="before replicas are taken away")
    to_zero_s: Seconds = Field(600.0, description="before the last one is")
    interval_s: PositiveFloat = Field(2.0, description="between two reports of load")
    look_back_s: PositiveFloat = Field(10.0, description="load is averaged over; longer than interval_s")

    @model_validator(mode="after")
    def _several_reports(self) -> Self:
        if self.look_back_s <= self.interval_s:
            raise ValueError(f"look_back_s, {self.look_back_s:g}, must be more than interval_s, {self.interval_s:g}")
        return self


class TargetScaling(_Settings):
    """How many target replicas there are."""

    min_replicas: NonNegativeInt = Field(1, description="0: the model is unloaded when nobody asks for it")
    max_replicas: Replicas = 1
    target_ongoing: PositiveFloat = Field(
        16.0, description="requests, running and queued, that one replica should have"
    )
    max_surge_percent: int = Field(
        0,
        ge=0,
        le=100,
        description="of replicas beyond, while a changed configuration is rolled out: above 0, one goes when its successor "
        "is ready, for which there has to be room, or nothing changes; 0: it goes first",
    )
    delays: Delays = Delays()

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas is {self.min_replicas}, max_replicas {self.max_replicas}")
        return self


class DraftScaling(_Settings):
    """How many draft replicas there are: a share of the targets, more when those are busy and hold many sessions."""

    ratio: float = Field(1.0, gt=0, le=1000, description="drafts per target, rounded up")
    max_replicas: Replicas | None = Field(None, description="if not what the ratio makes of the most targets")
    busy: Fraction = Field(0.9, description="share of time in draft steps above which sessions count")
    sessions: PositiveFloat = Field(32.0, description="that one busy draft should hold at most")
    delays: Delays = Delays()


class TargetOptions(_Settings):
    """The target of a model."""

    checkpoint: Folder = Field(description="folder of the checkpoint")
    engine: Literal["paceline", "vllm"] = Field(
        "paceline", description="what runs it; vllm needs pip install -e '.[vllm]'"
    )
    dtype: Dtype = Field("auto", description="auto: bfloat16 where it is faster, else float32")
    invariant: bool = Field(False, description="bits that don't depend on how tokens are batched")
    kv_tokens: KVTokens = Field(32768, description="tokens that the KV pool of a replica holds")
    max_batch: int = Field(64, ge=1, le=1024, description="requests that run together on a replica")
    window: Literal["goodput", "chain", "tree", "heuristic", "threshold", "bandit"] = "goodput"
    window_size: int = Field(
        31,
        ge=1,
        le=512,
        description="draft tokens verified per step: of goodput at most so many of all requests together, and three of each "
        "of many; else of each, of chain and tree exactly; 63 of one request at most",
    )
    lookup: int = Field(
        8, ge=0, le=64, description="tokens looked up after each step, in the text and in earlier outputs; 0: none"
    )
    drafter: LocalName | None = Field(
        None,
        description="what guesses in the target's own process, beside its draft and lookup: heads; early-exit, its first "
        "layers; jacobi, its choices behind wrong guesses; ngram, suffix, retrieval: as of the draft",
    )
    heads: Folder | None = Field(None, description="folder of what 'paceline heads' trained, for heads")
    documents: File | None = Field(None, description="text file, or folder of them, for retrieval")
    flush_s: Seconds = Field(0.05, description="tokens are handed out at most this often, per request")
    compile: bool = Field(
        False,
        description="the model, by torch.compile: on GPUs a seventh less for a pass, a quarter of a minute at the start",
    )
    tensor_parallel_size: PositiveInt = Field(1, description="engine vllm: GPUs that share a replica's model")
    draft_tokens: int = Field(5, ge=1, le=64, description="engine vllm: of a draft, per request and step, at most")
    engine_args: dict[str, Any] = Field(default_factory=dict, description="engine vllm: of its own, by their names")
    replicas: Resources = Resources()
    scaling: TargetScaling = TargetScaling()

    @model_validator(mode="after")
    def _usable(self) -> Self:
        check_local(self.drafter, self.heads, self.documents)
        return self

    @model_validator(mode="after")
    def _of_one_engine(self) -> Self:
        others = _OWN_ENGINE if self.engine == "vllm" else _VLLM
        _refuse(self, others, f"the engine {self.engine}")
        if self.engine == "vllm" and self.replicas.gpus not in (0, self.tensor_parallel_size):
            raise ValueError(f"replicas.gpus must be tensor_parallel_size, {self.tensor_parallel_size}")
        if self.engine == "paceline" and self.replicas.gpus > 1:
            raise ValueError(f"replicas.gpus is {self.replicas.gpus:g}: of the engine paceline, a target is on one GPU")
        return self

    @model_validator(mode="after")
    def _cores_of_one(self) -> Self:
        _check_cores(self.replicas, self.scaling.max_replicas)
        return self

    def vllm(self, drafted: bool) -> VllmOptions | None:
        """How vLLM runs it; None: our own engine does."""
        if self.engine != "vllm":
            return None
        return VllmOptions(self.tensor_parallel_size, self.engine_args, drafted, self.draft_tokens)


# Settings of one engine that the other doesn't have.
_OWN_ENGINE = ("invariant", "kv_tokens", "window", "window_size", "lookup", "compile", "drafter", "heads", "documents")
_VLLM = ("tensor_parallel_size", "draft_tokens", "engine_args")


_OF_DRAFT_REPLICAS = ("host", "ports", "replicas", "scaling")


class DraftOptions(_Settings):
    """The draft of a model."""

    checkpoint: Folder | None = Field(None, description="folder of the checkpoint; none: drafting without a model")
    drafter: DrafterName = Field(
        "auto",
        description="auto: the model with lookup beside it, or without a checkpoint suffix; model: it alone; "
        "ngram, suffix, retrieval: what followed in the text, also in earlier outputs, in documents; "
        "merged: model, suffix and documents in one tree; cascade: lookup, or another draft, makes the model faster",
    )
    documents: File | None = Field(None, description="text file, or folder of them, for retrieval and merged")
    placement: Literal["auto", "separate", "shared"] = Field(
        "auto",
        description="separate: in replicas of its own; shared: in the target's process, where both take turns; "
        "auto: in both, and the target goes by whichever is faster, as it measures",
    )
    inner: Address | None = Field(
        None, description="HOST:PORT of a draft service that drafts for a cascade's model; none: lookup does"
    )
    dtype: Dtype = Field("auto", description="auto: bfloat16 where it is faster, else float32")
    kv_tokens: KVTokens = Field(65536, description="tokens that the KV pool of a replica holds")
    host: str | None = Field(None, description="address to listen on; none: the node's, as Ray knows it")
    ports: tuple[Port, Port] = Field((26500, 26599), description="first and last; each replica takes a free one")
    weights: Weights = Field(
        "auto", description="auto: 8 bits where that is faster; int8, on GPUs int4: that many; full: as they are"
    )
    compile: bool = Field(
        False,
        description="the model, by torch.compile: on GPUs a seventh less for a pass, a quarter of a minute at the start",
    )
    replicas: Resources = Resources()
    scaling: DraftScaling = DraftScaling()

    @model_validator(mode="after")
    def _usable(self) -> Self:
        if self.ports[0] > self.ports[1]:
            raise ValueError(f"ports: the first is {self.ports[0]}, the last {self.ports[1]}")
        if self.replicas.gpus > 1:
            raise ValueError(f"replicas.gpus is {self.replicas.gpus:g}: a draft is on one GPU")
        check_choice(self.drafter, self.checkpoint, self.documents, self.inner)
        if self.placement == "shared" and self.inner is not None:
            raise ValueError("placement shared: no inner draft service")
        if self.placement == "shared":
            _refuse(self, _OF_DRAFT_REPLICAS, "a draft that shares its target's process")
        else:
            check_weights(self.weights, self.checkpoint, self.replicas.gpus > 0, self.dtype, self.compile)
        return self


class ModelOptions(_Settings):
    """A model that clients can name, with deployments of its own."""

    name: Annotated[str, StringConstraints(pattern=_NAME)]
    target: TargetOptions
    draft: DraftOptions | None = Field(None, description="none: the target decodes alone")
    share_outputs: bool | None = Field(
        None,
        description="draft for one client from what others were answered, which only the time it takes can tell; "
        "none: where there are no API keys",
    )

    @property
    def _slug(self) -> str:
        """Its name where there may be no slash."""
        return self.name.replace("/", "--")

    @property
    def target_deployment(self) -> str:
        """Its name in Serve."""
        return f"{self._slug}-target"

    @property
    def draft_deployment(self) -> str:
        """Its name in Serve."""
        return f"{self._slug}-draft"

    @property
    def separate(self) -> DraftOptions | None:
        """The draft, if it has replicas of its own."""
        return self.draft if self.draft is not None and self.draft.placement != "shared" else None

    @property
    def shared(self) -> DraftOptions | None:
        """The draft, if it runs in the target's process, too or alone."""
        if self.draft is None or self.draft.placement == "separate" or self.draft.inner is not None:
            return None
        return self.draft if self.target.engine == "paceline" else None

    def draft_replicas(self, targets: int) -> int:
        """How many drafts so many targets have; none without one of their own."""
        return math.ceil(self.separate.scaling.ratio * targets) if self.separate is not None else 0

    @model_validator(mode="after")
    def _drafts_somewhere(self) -> Self:
        if self.draft is not None and self.separate is None:
            if self.target.engine == "vllm":
                raise ValueError("draft.placement: a draft shares no process with the engine vllm")
            gpu = self.target.replicas.gpus > 0
            check_weights(self.draft.weights, self.draft.checkpoint, gpu, self.draft.dtype, self.draft.compile)
        return self

    @model_validator(mode="after")
    def _room_for_drafts(self) -> Self:
        fewest = self.draft_replicas(self.target.scaling.min_replicas)
        if self.most_drafts < fewest:
            raise ValueError(f"draft.scaling: {self.most_drafts} drafts at most, {fewest} for the fewest targets")
        if self.separate is not None:
            _check_cores(self.separate.replicas, self.most_drafts, "draft.")
        return self

    @property
    def most_drafts(self) -> int:
        """The most draft replicas there may be."""
        chosen = self.separate.scaling.max_replicas if self.separate is not None else None
        return chosen or self.draft_replicas(self.target.scaling.max_replicas)


class HttpOptions(_Settings):
    """The HTTP API."""

    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0: all")
    port: Port = 8000
    cors_origins: tuple[str, ...] = Field((), description="web pages that may call the API; * for all")
    tls_certificate: File | None = Field(None, description="PEM file; with tls_key, HTTP is HTTPS")
    tls_key: File | None = None
    api_keys: tuple[SecretStr, ...] = Field((), description="clients need one of them; or 'sha256:' and hex digits")
    api_keys_file: File | None = Field(None, description="the same, one on a line")
    replicas: PositiveInt = Field(1, description="of the ingress, which turns text to tokens and back")
    resources: CustomResources = Field(
        default_factory=dict, description="custom resources of Ray's that each of them takes, by name"
    )

    @model_validator(mode="after")
    def _both_or_none(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key go together")
        return self

    @field_validator("api_keys")
    @classmethod
    def _are_keys(cls, keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        for key in keys:
            check_key(key.get_secret_value())
        return keys

    def keys(self) -> tuple[str, ...]:
        """All API keys; none: anybody may ask. Raises OSError when the file can't be read, ValueError for what is no key."""
        given = [key.get_secret_value() for key in self.api_keys]
        lines = self.api_keys_file.read_text().splitlines() if self.api_keys_file is not None else []
        read = [line.strip() for line in lines if line.strip()]
        if self.api_keys_file is not None and not read:  # else anybody might ask, until somebody has written it again
            raise ValueError("it holds no key")
        for key in read:
            check_key(key)
        return (*given, *read)


class GrpcOptions(_Settings):
    """The gRPC API. Serve's proxy has no TLS for it, and listens on all of a machine's addresses."""

    port: Port | None = Field(9000, description="none: no gRPC")


class Limits(_Settings):
    """What is refused, and what is given up."""

    body_bytes: PositiveInt = Field(
        4 * 1024 * 1024, description="largest HTTP body; and gRPC message, which never is above 4 MiB"
    )
    # Serve counts those that are being sent to a replica too: far below this, a burst would be refused that has room.
    queue: PositiveInt = Field(256, description="requests that may wait, per model and ingress replica; more: 429")
    request_timeout_s: PositiveFloat = Field(600.0, description="for a whole request, its stream included")
    drain_s: PositiveFloat = Field(
        630.0, description="for the streams of a replica that goes away; then others take them over"
    )


class ServeConfig(_Settings):
    """Everything that is served. Without arguments: the bundled pair."""

    models: tuple[ModelOptions, ...] = Field(default_factory=lambda: (bundled_model(),), min_length=1)
    http: HttpOptions = HttpOptions()
    grpc: GrpcOptions = GrpcOptions()
    limits: Limits = Limits()

    @model_validator(mode="after")
    def _no_clashes(self) -> Self:
        names = [model.name for model in self.models]
        if len(set(names)) < len(names):
            raise ValueError(f"models: two have the name {next(name for name in names if names.count(name) > 1)}")
        if len({model.target_deployment for model in self.models}) < len(names):
            raise ValueError("models: the names of two differ by / and -- alone, and so would their deployments'")
        if self.http.port == self.grpc.port:
            raise ValueError(f"grpc.port: {self.grpc.port} is the HTTP port")
        for model in self.models:
            first, last = model.separate.ports if model.separate is not None else (0, 0)
            if taken := [port for port in (self.http.port, self.grpc.port) if port and first <= port <= last]:
                raise ValueError(f"models: the draft ports of {model.name} include {taken[0]}, which the API has")
        return self

    def shares(self, model: ModelOptions) -> bool:
        """Whether one client may be drafted for from what others were answered."""
        return model.share_outputs if model.share_outputs is not None else not self.http.keys()

    def arguments(self) -> dict[str, Any]:
        """As plain values, for Serve, which logs and shows them: API keys are replaced by their digests."""
        values: dict[str, Any] = self.model_dump(mode="json")
        values["http"]["api_keys"] = [hidden(key.get_secret_value()) for key in self.http.api_keys]
        return values


def bundled_model() -> ModelOptions:
    """The bundled pair."""
    target, draft = MODELS / "code-target", MODELS / "code-draft"
    return ModelOptions(name="code", target=TargetOptions(checkpoint=target), draft=DraftOptions(checkpoint=draft))

"""The Serve application: validated arguments in, deployments out. For `serve run`, `serve deploy`, KubeRay and the CLI."""

import hashlib
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.deployment import Application

from cluster.actors import TargetConfig
from cluster.best_place import PLACES, Place
from cluster.drafters import DraftConfig, LocalConfig
from cluster.local import MACHINE_LOSS
from cluster.placement import Placement
from cluster.registry import RegistryName
from deployments.config import Delays, DraftOptions, ModelOptions, Resources, ServeConfig, TargetOptions
from deployments.config_load import check_config
from deployments.ingress import Ingress
from deployments.replicas import DraftDeployment, TargetDeployment
from engine.automatic import SHARED

INGRESS = "ingress"  # the deployment's name
NAMESPACE = "paceline"  # of the registries
_HEALTH_CHECK_S = 2.0
_START_ATTEMPTS = 3  # of all replicas of a deployment: what fails so often will not load the next time
_DRAIN_CHECK_S = 0.5  # how often a replica that goes away looks whether its streams have ended
# Our code and Serve's in the same loop of a replica; in two, with a thread each, every chunk crosses from one to the other.
_ONE_LOOP = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0", "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0"}
_INGRESS_STREAMS = 4096  # more would wait in Serve's proxy; what waits for a model is limited per model


def build(args: ServeConfig) -> Application:
    """An application of these models; raises ConfigError, before anything loads."""
    check_config(args)
    targets = {model.name: _target(model, args) for model in args.models}
    drafts = {model.name: _draft(model, model.separate, args) for model in args.models if model.separate is not None}
    ingress = serve.deployment(
        name=INGRESS,
        num_replicas=args.http.replicas,
        max_ongoing_requests=_INGRESS_STREAMS,
        **_lifecycle(args.limits.drain_s),
        max_surge_percent=100,  # else nobody would answer from when one is told to go until its last stream has ended
        ray_actor_options=_actor(Resources(resources=args.http.resources), MACHINE_LOSS),
    )(Ingress)
    registries = {model.name: registry_name(model) for model in args.models}
    return ingress.bind(args, targets, drafts, registries)


def _target(model: ModelOptions, args: ServeConfig) -> Application:
    """The target of a model.

    A replica has as many requests as run together and as many again, so that a place that gets free is filled without
    asking Serve. All others wait in Serve's handle for whichever replica is free first, and count for the scaling.
    """
    options, scaling = model.target, model.target.scaling
    deployment = serve.deployment(
        name=model.target_deployment,
        max_ongoing_requests=2 * options.max_batch,
        max_queued_requests=args.limits.queue,
        autoscaling_config=_autoscaling(
            scaling.delays,
            min_replicas=scaling.min_replicas,
            max_replicas=scaling.max_replicas,
            target_ongoing_requests=scaling.target_ongoing,
            policy=_policy("TargetPolicy"),
        ),
        **_lifecycle(args.limits.drain_s),
        max_surge_percent=scaling.max_surge_percent,
        ray_actor_options=_actor(options.replicas),
    )(TargetDeployment)
    shared = shared_tokens(model, args)
    draft = draft_config(model, model.shared, shared) if model.shared is not None else None
    places = PLACES if model.separate is not None else ("shared", "none", "off")
    config = target_config(model.name, options, shared, model.draft is not None, draft, places)
    return deployment.bind(config, _placement(options.replicas), registry_name(model))


def _draft(model: ModelOptions, options: DraftOptions, args: ServeConfig) -> Application:
    """The draft of a model. Serve sends it nothing: its targets find it by the registry."""
    scaling = options.scaling
    rule = {
        "target": model.target_deployment,
        "ratio": scaling.ratio,
        "busy": scaling.busy,
        "sessions": scaling.sessions,
    }
    deployment = serve.deployment(
        name=model.draft_deployment,
        autoscaling_config=_autoscaling(
            scaling.delays,
            min_replicas=model.draft_replicas(model.target.scaling.min_replicas),
            max_replicas=model.most_drafts,
            policy=_policy("DraftPolicy", rule),
        ),
        **_lifecycle(10.0),
        ray_actor_options=_actor(options.replicas),
    )(DraftDeployment)
    config = draft_config(model, options, shared_tokens(model, args))
    return deployment.bind(config, _placement(options.replicas), registry_name(model))


def target_config(
    name: str,
    options: TargetOptions,
    shared: int = SHARED,
    drafted: bool = True,
    draft: DraftConfig | None = None,
    places: tuple[Place, ...] = PLACES,
) -> TargetConfig:
    """The options that a target replica itself has.

    drafted: by our drafts. draft: the one that shares its process. places: where drafts may run.
    """
    return TargetConfig(
        options.checkpoint,
        options.dtype,
        options.invariant,
        options.kv_tokens,
        options.max_batch,
        options.window,
        options.window_size,
        options.lookup,
        options.flush_s,
        options.compile,
        name,
        LocalConfig(options.drafter, options.heads, options.documents, shared),
        options.vllm(drafted),
        shared,
        draft,
        places,
    )


def shared_tokens(model: ModelOptions, args: ServeConfig) -> int:
    """Tokens of earlier outputs that may be drafted from; 0 where clients must not learn of each other."""
    return SHARED if args.shares(model) else 0


def draft_config(model: ModelOptions, options: DraftOptions, shared: int = SHARED) -> DraftConfig:
    """The options that a draft replica itself has."""
    return DraftConfig(
        options.checkpoint,
        options.dtype,
        options.kv_tokens,
        options.host,
        options.ports,
        compile=options.compile,
        served_as=model.name,
        weights=options.weights,
        drafter=options.drafter,
        documents=options.documents,
        tokenizer=model.target.checkpoint,
        shared=shared,
        chains=model.target.engine == "vllm",
        inner=options.inner,
    )


def registry_name(model: ModelOptions) -> RegistryName:
    """Where the replicas of a model meet. Another model of the same name, in another application, meets elsewhere."""
    draft = (model.draft.checkpoint, model.draft.documents) if model.draft is not None else None
    pair = hashlib.blake2b(f"{model.target.checkpoint} {draft}".encode(), digest_size=4).hexdigest()
    return RegistryName(f"registry-{model.name}-{pair}", NAMESPACE, detached=True)


def _placement(resources: Resources) -> Placement:
    return Placement(resources.cores, resources.threads, resources.gpus)


def _actor(resources: Resources, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    variables = {"OMP_NUM_THREADS": str(resources.threads), **_ONE_LOOP, **(environment or {})}
    return {
        "num_cpus": resources.cpus,
        "num_gpus": resources.gpus,
        "resources": resources.resources,
        "runtime_env": {"env_vars": variables},
    }


def _lifecycle(drain_s: float) -> dict[str, Any]:
    return {
        "graceful_shutdown_timeout_s": drain_s,
        "graceful_shutdown_wait_loop_s": _DRAIN_CHECK_S,
        "health_check_period_s": _HEALTH_CHECK_S,
        "health_check_timeout_s": 5 * _HEALTH_CHECK_S,
        "max_constructor_retry_count": _START_ATTEMPTS,
    }


def _policy(name: str, arguments: dict[str, Any] | None = None) -> AutoscalingPolicy:
    return AutoscalingPolicy(  # type: ignore[no-untyped-call]
        policy_function=f"deployments.scaling:{name}", policy_kwargs=arguments or {}
    )


def _autoscaling(delays: Delays, **options: Any) -> AutoscalingConfig:
    return AutoscalingConfig(
        upscale_delay_s=delays.up_s,
        downscale_delay_s=delays.down_s,
        downscale_to_zero_delay_s=delays.to_zero_s,
        metrics_interval_s=delays.interval_s,
        look_back_period_s=delays.look_back_s,
        **options,
    )

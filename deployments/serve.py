"""`paceline serve`: starts Ray, deploys the configured models through Serve's config schema, and drains them at the end.

The schema rather than `serve.run`, since the policy that sees targets and drafts together belongs to the application.
"""

import logging
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, ServeDeploySchema
from rich.console import Console

from cluster.address import parse_address
from cluster.local import start_ray
from deployments.app import INGRESS, registry_name
from deployments.config import HttpOptions, ServeConfig
from deployments.config_load import BUILDER, ConfigError
from deployments.ingress import GRPC_SERVICERS

APPLICATION = "paceline"
_POLL_S = 0.2
_ASK_S = 5.0  # for an answer of all ingress replicas
_LEAVE_S = 10.0  # for replicas without streams
_CONNECT_S = 5.0  # to a Ray cluster, which would try it for minutes
_LOOPBACK = "127.0.0.1"
Progress = Callable[[str], None]


class DeployError(RuntimeError):
    """The application could not be started; the message says why in one line."""


def serve_schema(config: ServeConfig) -> ServeDeploySchema:
    """The configuration as Serve takes it, also from `serve deploy` and KubeRay."""
    http = config.http
    tls = {"ssl_certfile": http.tls_certificate, "ssl_keyfile": http.tls_key}
    application = {
        "name": APPLICATION,
        "route_prefix": "/",
        "import_path": BUILDER,
        "autoscaling_policy": {"policy_function": "deployments.scaling:ApplicationPolicy"},
        "args": config.arguments(),
    }
    values: dict[str, Any] = {
        "http_options": {
            "host": http.host,
            "port": http.port,
            "request_timeout_s": None,  # the application has limits of its own, and names them in its errors
            **{name: str(path) for name, path in tls.items() if path is not None},
        },
        "grpc_options": {"port": config.grpc.port, "grpc_servicer_functions": list(GRPC_SERVICERS)}
        if config.grpc.port
        else {},
        "applications": [application],
    }
    return ServeDeploySchema.model_validate(values)


def check_ports(config: ServeConfig) -> None:
    """Raises ConfigError when a port of the API can't be had on this machine."""
    for name, host, port in (("http", config.http.host, config.http.port), ("grpc", "0.0.0.0", config.grpc.port)):
        if port is None:
            continue
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that linger are no hindrance
            try:
                probe.bind((host, port))
            except OSError as error:
                raise ConfigError(f"{name}.port: {port} can't be had on {host}: {error.strerror}") from None


def run_server(config: ServeConfig, address: str | None, console: Console) -> None:
    """Serves until it is interrupted, then drains. address: of a Ray cluster to join; None: starts Ray here.

    Raises DeployError, or what Ray raises.
    """
    with console.status("starting Ray") as status:
        started = _join(address)
        _let_interrupt()  # Ray has set handlers of its own
        ours = False
        try:
            schema = prepare(config if address is not None else _local(config), lambda text: status.update(text))
            ours = True
            deploy(schema, lambda text: status.update(text))
            status.stop()
            print_ready(config, console)
            _sleep()
        except KeyboardInterrupt:
            pass
        finally:
            status.start()
            status.update("finishing what runs; interrupt again to cut it short")
            with suppress(KeyboardInterrupt, RayServeException):  # interrupted again, or Serve is gone
                if ours:
                    withdraw(config)
            if started:
                ray.shutdown()  # and Serve with it
    console.print("stopped")


def prepare(config: ServeConfig, progress: Progress) -> ServeDeploySchema:
    """What is to be deployed to the Ray cluster that this process is connected to, in which Serve runs from now on.

    Raises DeployError where that would end what others serve, or be elsewhere than the configuration says.
    """
    schema = serve_schema(config)
    progress("starting Ray Serve")
    serve.start(
        proxy_location=schema.proxy_location,
        http_options=schema.http_options.model_dump(),
        grpc_options=schema.grpc_options.model_dump(),
    )
    found, deadline = _deployed(), time.monotonic() + _LEAVE_S
    while found.get(APPLICATION, {}).get("status") == ApplicationStatus.DELETING and time.monotonic() < deadline:
        progress("waiting for what is being ended there")
        time.sleep(_POLL_S)
        found = _deployed()
    if APPLICATION in found:
        told = "the cluster serves models like this already: end that where it runs, or with 'serve shutdown'"
        raise DeployError(f"{told}; or change it by 'serve deploy' and what 'paceline config export' prints")
    if others := ", ".join(sorted(name for name, details in found.items() if details.get("source") != "imperative")):
        told = f"the cluster serves {others} by a configuration, of which ours would take the place"
        raise DeployError(f"{told}; add what 'paceline config export' prints to it")
    _check_where(schema)
    return schema


def _check_where(schema: ServeDeploySchema) -> None:
    """Serve, where it ran before, stays at the addresses that it was started with. Raises DeployError for others."""
    client = _client()
    http, grpc = client.http_config, ray.get(client._controller.get_grpc_config.remote())
    differing = [
        f"http.{name} is {there}"
        for name in ("host", "port", "ssl_certfile", "ssl_keyfile")
        if (there := getattr(http, name)) != schema.http_options.model_dump().get(name)
    ]
    wanted = schema.grpc_options
    if wanted.grpc_servicer_functions != grpc.grpc_servicer_functions or (
        wanted.grpc_servicer_functions and wanted.port != grpc.port
    ):
        differing.append(f"grpc.port is {grpc.port if grpc.grpc_servicer_functions else 'none'}")
    if differing:
        told = f"Serve runs on that cluster already, and its addresses stay: {', '.join(differing)}"
        raise DeployError(f"{told}; say the same here, or end it there with 'serve shutdown'")


def deploy(schema: ServeDeploySchema, progress: Progress) -> None:
    """Deploys what was prepared, and waits until it runs. Raises DeployError."""
    _client().deploy_apps(schema)
    while True:
        application = serve.status().applications.get(APPLICATION)
        if application is not None:
            if application.status == ApplicationStatus.RUNNING:
                return
            if application.status == ApplicationStatus.DEPLOY_FAILED:
                raise DeployError(
                    _reason([application.message, *(d.message for d in application.deployments.values())])
                )
            waiting = [name for name, found in application.deployments.items() if found.status != "HEALTHY"]
            progress(f"loading {', '.join(waiting)}" if waiting else "building the application")
        time.sleep(_POLL_S)


def _deployed() -> dict[str, dict[str, Any]]:
    """The applications, and what Serve says of each. It ends those of a configuration that the next one doesn't name."""
    found: dict[str, dict[str, Any]] = _client().get_serve_details()["applications"]
    return found


def withdraw(config: ServeConfig) -> None:
    """Takes the application back: no new requests, what runs ends by itself, at most `limits.drain_s` later."""
    deadline = time.monotonic() + config.limits.drain_s
    try:
        _finish_streams(deadline)
    finally:  # interrupted, too: an ingress that was drained admits nothing any more
        _client().delete_apps([APPLICATION], blocking=False)
    deadline += _LEAVE_S
    while APPLICATION in serve.status().applications:
        if time.monotonic() > deadline:
            return  # it still ends, or is another's by now, who needs the registries
        time.sleep(_POLL_S)
    for model in config.models:
        with suppress(ValueError):  # it never was
            name = registry_name(model)
            ray.kill(ray.get_actor(name.name, name.namespace))


def _finish_streams(deadline: float) -> None:
    """Lets the ingress end what runs and refuse the rest: without an application, Serve would answer in its own way."""
    found = serve.status().applications.get(APPLICATION)
    if found is None or found.status != ApplicationStatus.RUNNING:
        return
    ingress: Any = serve.get_deployment_handle(INGRESS, APPLICATION)
    with suppress(RayError, TimeoutError):
        quiet = 0  # looks in a row; between its preparation and its first step a request is not counted
        while quiet < 2 and time.monotonic() < deadline:
            quiet = 0 if sum(ingress.broadcast("drain").results(timeout_s=_ASK_S)) else quiet + 1
            time.sleep(_POLL_S)


def print_ready(config: ServeConfig, console: Console) -> None:
    """Where it is, and what to try."""
    name, url = config.models[0].name, base_url(config.http)
    names, grpc = ", ".join(model.name for model in config.models), config.grpc.port
    console.print(f"[bold]ready[/bold]  {url}{f', gRPC on port {grpc}' if grpc else ''}  ({names})")
    key = " -H 'Authorization: Bearer KEY'" if config.http.keys() else ""
    body = f'{{"model": "{name}", "prompt": "def fibonacci(n):", "max_tokens": 64, "stream": true}}'
    console.print(
        f"\n  curl {url}/v1/completions{key} -H 'Content-Type: application/json' \\\n    -d '{body}'\n", soft_wrap=True
    )
    reached = [f"{config.http.host}:{config.http.port}"] if not _only_here(config.http.host) else []
    reached += [f"gRPC on port {grpc}, which listens on all addresses"] if grpc else []
    if reached and not config.http.keys():
        told = f"everybody who reaches {' or '.join(reached)} may ask; --api-keys-file FILE asks for keys"
        console.print(f"[yellow]{told}[/yellow]", soft_wrap=True)
    console.print("[dim]Ctrl-C ends it[/dim]")


def _only_here(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def base_url(http: HttpOptions) -> str:
    """Of the HTTP API, from this machine."""
    host = {"0.0.0.0": _LOOPBACK, "::": "[::1]"}.get(http.host, f"[{http.host}]" if ":" in http.host else http.host)
    return f"{'https' if http.tls_certificate else 'http'}://{host}:{http.port}"


def gcs_address(address: str) -> tuple[str, int] | None:
    """Where a Ray cluster of this address listens, unless Ray has to find it. Raises ValueError for what is no address."""
    if address in ("auto", "local") or address.startswith("ray://"):
        return None
    return parse_address(address, "--address")


def _join(address: str | None) -> bool:
    """Connects to Ray; whether it was started here."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    if address is None:
        try:
            return start_ray()
        except Exception as error:  # noqa: BLE001  Ray has no class of its own for it; a busy machine is the usual cause
            raise DeployError(f"Ray could not be started: {str(error).splitlines()[0]}") from None
    try:
        if (listening := gcs_address(address)) is not None:
            socket.create_connection(listening, _CONNECT_S).close()
        ray.init(address=address, log_to_driver=False)
    except RuntimeError as error:  # of another version, of Python's or its own
        raise DeployError(f"Ray at {address} can't be joined: {' '.join(str(error).split())[:300]}") from None
    except OSError:
        raise DeployError(
            f"no Ray at {address} that takes us in: is it there, is this one of its machines, and, if it asks for a token, "
            "are RAY_AUTH_MODE=token and the token here?"
        ) from None
    return False


def _local(config: ServeConfig) -> ServeConfig:
    """The same with drafts that only this machine can reach: all replicas are on it."""
    models = tuple(
        model.model_copy(update={"draft": model.separate.model_copy(update={"host": model.separate.host or _LOOPBACK})})
        if model.separate is not None
        else model
        for model in config.models
    )
    return config.model_copy(update={"models": models})


def _client() -> Any:
    return _get_global_client()


def _reason(messages: list[str]) -> str:
    """The line of Serve's messages, tracebacks among them, that says what was wrong."""
    lines = [line.strip() for message in messages for line in message.splitlines() if line.strip()]
    named = [line for line in lines if any(f"{name}:" in line for name in ("ConfigError", "ModelError", "LinkError"))]
    return (named or lines or ["the application did not start"])[-1]


def _sleep() -> NoReturn:
    while True:
        time.sleep(3600)


def _let_interrupt() -> None:
    """Has SIGTERM do what Ctrl-C does, and both in whatever shell this runs."""

    def interrupt(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, interrupt)

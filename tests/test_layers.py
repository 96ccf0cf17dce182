"""Imports point downward only: deployments -> cluster -> engine, and the engine knows no network."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NETWORK = {"ray", "grpc", "grpc_health", "grpc_reflection", "grpc_tools", "h2"}
OUTSIDE = {"benchmarks", "tests"}
FORBIDDEN = {
    "engine": {"cluster", "deployments"} | NETWORK | OUTSIDE,
    "cluster": {"deployments"} | OUTSIDE,
    "deployments": OUTSIDE,
}
DYNAMIC_IMPORTS = {"import_module", "__import__"}


def imported_modules(source: str) -> Iterator[tuple[int, str]]:
    """Yields (line, absolute module name) of every import in `source`, at any depth, dynamic or not."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield node.lineno, module
            case ast.Call(
                func=ast.Name(id=name) | ast.Attribute(attr=name), args=[ast.Constant(value=str(module)), *_]
            ) if name in DYNAMIC_IMPORTS:
                yield node.lineno, module


def violations(layer: str, source: str) -> list[str]:
    """Imports in `source` that a file of `layer` may not make, as "line: module"."""
    return [
        f"{line}: {module}" for line, module in imported_modules(source) if module.partition(".")[0] in FORBIDDEN[layer]
    ]


@pytest.mark.parametrize("layer", FORBIDDEN)
def test_a_layer_imports_only_what_lies_below(layer: str) -> None:
    files = sorted((ROOT / layer).rglob("*.py"))
    assert files, f"{layer} holds no code"
    found = [
        f"{path.relative_to(ROOT)}:{text}" for path in files for text in violations(layer, path.read_text("utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("engine", "import ray"),
        ("engine", "import numpy, ray.util as util"),
        ("engine", "from grpc import aio"),
        ("engine", "from grpc_health.v1 import health"),
        ("engine", "def late():\n    from cluster.wire import encode"),
        ("engine", "if TYPE_CHECKING:\n    import deployments.cli"),
        ("engine", "import importlib\nimportlib.import_module('ray.serve')"),
        ("engine", "__import__('grpc')"),
        ("cluster", "from deployments import cli"),
        ("cluster", "import tests.helpers"),
    ],
)
def test_the_checker_catches(layer: str, source: str) -> None:
    assert violations(layer, source)


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("engine", "import torch\nfrom engine.types import Commit\nfrom . import noise\nfrom .drafters import ngram"),
        ("engine", "import rayon, grpcx\nname = 'ray'\n# import ray"),
        ("cluster", "import ray, grpc\nfrom engine import tree"),
        ("deployments", "from cluster import target\nfrom engine import types\nfrom ray import serve"),
    ],
)
def test_the_checker_allows(layer: str, source: str) -> None:
    assert violations(layer, source) == []

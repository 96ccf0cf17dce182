"""The committed protobuf code is what the .proto files generate."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROTO = ROOT / "proto"
SOURCES = PROTO / "paceline" / "v1"
GENERATED = Path("cluster") / "pb"


def generate(out: Path) -> None:
    """Runs the command of `make proto`, writing below `out`."""
    names = sorted(path.name for path in SOURCES.glob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{GENERATED.as_posix()}={SOURCES}"]
    command += [f"--python_out={out}", f"--pyi_out={out}", *((GENERATED / name).as_posix() for name in names)]
    subprocess.run(command, check=True, cwd=ROOT)


def generated_files(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((root / GENERATED).glob("*_pb2*")) if path.is_file()}


def test_generated_code_is_up_to_date(tmp_path: Path) -> None:
    generate(tmp_path)
    fresh, committed = generated_files(tmp_path), generated_files(ROOT)
    assert len(fresh) == 2 * len(list(SOURCES.glob("*.proto"))) > 0
    stale = [name for name in sorted(fresh | committed) if fresh.get(name) != committed.get(name)]
    assert not stale, f"run `make proto`; these differ: {stale}"


def test_proto_directory_is_no_python_package() -> None:
    """A top-level package called `proto` would hide proto-plus, which ray needs."""
    others = [path for path in PROTO.rglob("*") if path.is_file() and path.suffix != ".proto"]
    assert not others

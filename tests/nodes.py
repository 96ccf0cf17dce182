"""Machines on this one: namespaces with addresses of their own on a switch, which run raylets and can be lost.

Nothing of it outlives the process that made it, however that ends: a machine is a process that dies with its parent, and
all others on it die with that one. Its network goes with the last of them, and takes its cables along.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

# Dies with this process' main thread. Its processes see each other only.
_MACHINE = (
    *("setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"),
    *("sh", "-c", "ip link set lo up && echo up && exec sleep infinity"),
)
# Ray gives a machine 30 s to start; a busy one needs more.
_AGAIN = ("sh", "-c", 'until "$@"; do sleep 1; done', "again")
_RAY_FOLDER = Path("/tmp/ray")  # where Ray keeps its sessions
_STORE_BYTES = 80 * 1024 * 1024  # of Ray's objects, which nothing here is
GCS_PORT = 6379  # of the head, where nobody else has any


class Machine:
    """Processes, a network and folders of Ray's own. To be made in the main thread."""

    def __init__(self, name: str, address: str) -> None:
        """Raises OSError where machines can't be made."""
        self.name, self.address = name, address
        self._started: list[subprocess.Popen[bytes]] = []
        self._outside = subprocess.Popen(_MACHINE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self._outside.stdout is not None
        with self._outside.stdout as said:
            up = said.readline() == b"up\n"
        if not up:
            self._outside.wait()
            raise OSError("no namespaces")
        children = Path(f"/proc/{self._outside.pid}/task/{self._outside.pid}/children")
        self.pid = int(children.read_text())  # of its first process, which is all that `_MACHINE` ends as

    def run(self, *command: str) -> str:
        """Runs a command on it; what it says. Raises CalledProcessError."""
        return subprocess.run(self._on_it(command), check=True, capture_output=True, text=True).stdout

    def start(self, command: tuple[str, ...], log: Path, environment: Mapping[str, str]) -> None:
        """Has a command run on it, again whenever it fails."""
        with log.open("ab") as out:
            self._started.append(
                subprocess.Popen(
                    self._on_it((*_AGAIN, *command)), stdout=out, stderr=out, env={**os.environ, **environment}
                )
            )

    def start_raylet(
        self, head: "Machine", resources: Mapping[str, float], environment: Mapping[str, str], logs: Path
    ) -> None:
        """Joins the cluster of a head, or is that head. logs: a folder for what Ray writes."""
        own = logs / self.name
        own.mkdir()
        _RAY_FOLDER.mkdir(exist_ok=True)
        self.run("mount", "--bind", str(own), str(_RAY_FOLDER))
        self.run("mount", "-t", "tmpfs", "shm", "/dev/shm")
        join = ("--address", f"{head.address}:{GCS_PORT}")
        found = ("--head", "--port", str(GCS_PORT), "--include-dashboard", "false")
        command = (
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"),
            *(found if head is self else join),
            *("--node-ip-address", self.address, "--num-cpus", "0", "--resources", json.dumps(resources)),
            *("--object-store-memory", str(_STORE_BYTES), "--include-log-monitor", "false"),
        )
        self.start(command, own / "start.log", environment)

    def joined(self, logs: Path) -> bool:
        """Whether its raylet is one of the cluster's."""
        return "Ray runtime started" in (logs / self.name / "start.log").read_text()

    def runs(self, part: str) -> bool:
        """Whether one of its processes has this in its command line."""
        here = os.readlink(f"/proc/{self.pid}/ns/pid")
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(path / "ns" / "pid") == here and part in (path / "cmdline").read_text():
                    return True
            except OSError:
                continue  # it has just ended
        return False

    def ports_at(self, address: str) -> set[int]:
        """The ports of an address to which it has connections."""
        found = self.run("ss", "-Htn", "state", "established", "dst", address)
        return {int(line.split()[3].rpartition(":")[2]) for line in found.splitlines()}

    def kill(self) -> None:
        """All its processes at once. May be repeated."""
        self._outside.kill()
        for process in (self._outside, *self._started):
            process.wait()

    def _on_it(self, command: tuple[str, ...]) -> list[str]:
        return ["nsenter", "--target", str(self.pid), "--net", "--pid", "--mount", "--", *command]


class Network:
    """Machines on one switch, and a cable to it from here; a context manager that takes all of it down."""

    def __init__(self) -> None:
        """Raises OSError or CalledProcessError where there can be none."""
        process = os.getpid()
        self._subnet = f"10.{100 + process // 250 % 150}.{process % 250}"
        self._own_end = f"pace{process}"
        self._machines: list[Machine] = []
        try:
            self._switch = self._make("switch", 253)
            self._switch.run("ip", "link", "add", "switch", "type", "bridge")
            self._switch.run("ip", "link", "set", "dev", "switch", "up")
            self._cable(self._own_end, process, "here", 254)
        except BaseException:
            self.close()
            raise

    def add(self, name: str) -> Machine:
        """Another machine. name: at most 15 letters, and neither "switch" nor "here"."""
        number = len(self._machines)
        machine = self._make(name, number)
        self._cable("eth0", machine.pid, name, number)
        return machine

    def lose(self, machine: Machine) -> None:
        """A machine is gone without a farewell: what is sent to it vanishes, and nothing comes from it."""
        self._switch.run("ip", "link", "set", "dev", machine.name, "down")
        machine.kill()

    def close(self) -> None:
        """Ends all machines, and takes the cable away at once: the kernel takes its time with it."""
        for machine in self._machines:
            machine.kill()
        subprocess.run(["ip", "link", "delete", "dev", self._own_end], capture_output=True, check=False)

    def __enter__(self) -> "Network":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _make(self, name: str, number: int) -> Machine:
        machine = Machine(name, f"{self._subnet}.{number}")
        self._machines.append(machine)
        return machine

    def _cable(self, near: str, process: int, port: str, number: int) -> None:
        """From the network of a process to the switch. near, port: the names of its ends."""
        at_switch = ("peer", "name", port, "netns", str(self._switch.pid))
        _run("ip", "link", "add", near, "netns", str(process), "type", "veth", *at_switch)
        there = ("nsenter", "--target", str(process), "--net", "--", "ip")
        _run(*there, "address", "add", f"{self._subnet}.{number}/24", "dev", near)
        _run(*there, "link", "set", "dev", near, "up")
        self._switch.run("ip", "link", "set", "dev", port, "master", "switch", "up")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def why_no_machines() -> str | None:
    """Why there can be no machines here; None where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with Network() as network:
            network.add("machine").ports_at("127.0.0.1")
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces here: {error}"
    return None

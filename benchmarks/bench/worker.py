"""A contender's process that answers questions, a line of JSON each; between two of them it is stopped."""

import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from benchmarks.bench.streams import Ask, Stream

SETTLE_S = 1.5  # vLLM's servers look for work without a pause for a second before they sleep
_IDLE_S = 1.0
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


class WorkerError(RuntimeError):
    """A worker ended; the text says which, and the end of its log."""


def idle_share(pid: int) -> float:
    """Share of a core that a process and its descendants take while nothing is asked of them; takes seconds to tell."""
    time.sleep(SETTLE_S)
    before, started = cpu_s(pid), time.monotonic()
    time.sleep(_IDLE_S)
    return (cpu_s(pid) - before) / (time.monotonic() - started)


def cpu_s(pid: int) -> float:
    """CPU time of a process and its descendants, those that have ended apart."""
    times, parents = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended meanwhile
            fields = path.read_text().rpartition(")")[2].split()
            parents[int(path.parent.name)] = int(fields[1])
            times[int(path.parent.name)] = int(fields[11]) + int(fields[12])
    family, before = {pid}, 0
    while len(family) > before:
        before = len(family)
        family |= {child for child, parent in parents.items() if parent in family}
    return sum(times.get(member, 0) for member in family) / os.sysconf("SC_CLK_TCK")


def _end_with_parent() -> None:
    """In a child: the kernel kills it when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Worker:
    """A process, started by the constructor; `wait_ready` before the first question."""

    def __init__(self, name: str, command: Sequence[str], environment: dict[str, str], folder: Path) -> None:
        """folder: where its log goes."""
        self.name = name
        self._log = folder / f"{name}.log"
        self._output: TextIO = self._log.open("w")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,
            text=True,
            env={**os.environ, **environment},
            preexec_fn=_end_with_parent,  # a stopped one never hears that its pipe was closed
        )

    def wait_ready(self) -> None:
        """Raises WorkerError when it ended instead."""
        self._line()

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Its answer. Raises WorkerError."""
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the next line says it better
        answer: dict[str, Any] = json.loads(self._line())
        self._process.send_signal(signal.SIGSTOP)
        return answer

    def run(self, asks: Sequence[Ask]) -> list[Stream]:
        """All prompts at the same time. They share temperature and length."""
        answer = self.ask(
            {
                "prompts": [list(ask.prompt) for ask in asks],
                "seeds": [ask.seed for ask in asks],
                "temperature": asks[0].temperature,
                "tokens": asks[0].tokens,
            }
        )
        return [
            Stream(tuple((float(seconds), int(number)) for seconds, number in each["arrivals"]), tuple(each["tokens"]))
            for each in answer["streams"]
        ]

    def close(self) -> None:
        """Ends it."""
        self._process.terminate()
        self._process.send_signal(signal.SIGCONT)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._output):
            if pipe is not None:
                with suppress(BrokenPipeError):  # what was written to one that ended is still buffered
                    pipe.close()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._output.flush()
            tail = " | ".join(line for line in self._log.read_text().splitlines()[-40:] if "Error" in line)[-400:]
            raise WorkerError(f"{self.name} ended: {tail or 'see its log'}")
        return line

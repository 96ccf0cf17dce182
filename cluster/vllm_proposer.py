"""Drafts from a draft service for an unmodified vLLM: `--speculative-config '{"method": "custom_class", ...}'`.

    PACELINE_DRAFT=host:port[,host:port...] vllm serve MODEL --speculative-config '{"method": "custom_class",
        "model": "cluster.vllm_proposer.RemoteProposer", "num_speculative_tokens": 12}'

vLLM calls `propose` after each step with what it sampled. The answer comes from the mirrors at once; what was committed goes
to the draft service, whose growth comes while vLLM runs its next step. A service that is dead, slow or missing means no
drafts. Needs grpcio, protobuf and numpy only, which vLLM has.
"""

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from cluster.address import parse_address
from cluster.content import ContentSessions
from cluster.grpcio_link import connect
from cluster.kept_links import CONNECT_TIMEOUT_S, KeptLinks
from cluster.link import Link
from cluster.linked import LinkedDrafts
from cluster.speculate import LinkOptions
from cluster.target_state import RENEW_EVERY_S, TargetState
from cluster.trace import Trace
from cluster.vllm_mended import mend
from cluster.vllm_options import FOLLOWED
from cluster.wire import decode_up, encode_down, encode_up
from engine.types import Commit, Down, Growth, IntArray, Up

logger = logging.getLogger(__name__)
ADDRESSES = "PACELINE_DRAFT"  # draft services, several separated by commas
WAIT_MS = "PACELINE_DRAFT_WAIT_MS"  # for growth, when no row has a proposal
_TIMES = 4096  # that are kept
_LONGEST_WAIT_MS = 1000
_PATIENT = 8  # waits in vain, in a row, before fewer misses are waited for
_RARER = 6  # times at most that they become half as many


@dataclass(frozen=True, slots=True)
class ProposerOptions:
    """How drafts are asked for."""

    addresses: tuple[str, ...]
    most: int  # tokens of a proposal
    vocab_size: int
    wait_s: float = 0.003  # the longest stall of a step: for growth, when no row has a proposal
    least: float = 0.1  # probability of a path; what is less probable is not proposed


class RemoteProposer:
    """The class that vLLM loads; see the top. Configured by the environment, which is all that `vllm serve` hands on."""

    def __init__(self, vllm_config: Any) -> None:
        """vllm_config: vllm.config.VllmConfig. Raises ValueError, which names the variable, where one can't be used."""
        options = ProposerOptions(
            () if vllm_config.additional_config.get(FOLLOWED) else _addresses(os.environ.get(ADDRESSES, "")),
            int(vllm_config.speculative_config.num_speculative_tokens),
            int(vllm_config.model_config.get_vocab_size()),
            _milliseconds(os.environ.get(WAIT_MS, "3")) / 1000,
        )
        _lift_limit(vllm_config.speculative_config)
        self._proposals = Proposals(options) if _answers() else None
        mend()

    def load_model(self, *arguments: Any, **more: Any) -> None:
        """For vLLM; there is nothing to load."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: "np.typing.NDArray[np.int32]",
        token_ids_cpu: "np.typing.NDArray[np.int32]",
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """For each row, up to `num_speculative_tokens` tokens; none where the row sampled nothing, and after any failure.

        sampled_token_ids: of this step, empty for rows that prefill. num_tokens_no_spec [rows]: tokens of each row with
        them. token_ids_cpu [rows, longest]: the tokens.
        """
        if self._proposals is None:
            return [[] for _ in sampled_token_ids]
        try:
            lengths = num_tokens_no_spec[: len(sampled_token_ids)].tolist()
            rows = [np.asarray(token_ids_cpu[i, :length], np.int32) for i, length in enumerate(lengths)]
            return self._proposals.propose(rows, [bool(sampled) for sampled in sampled_token_ids])
        except Exception:  # whatever it is, vLLM goes on without drafts
            logger.exception("no drafts from now on")
            failed, self._proposals = self._proposals, None
            threading.Thread(target=failed.close, name="paceline-close", daemon=True).start()  # no step waits for that
            return [[] for _ in sampled_token_ids]

    def follow(self, addresses: Sequence[str] | None) -> dict[str, int]:
        """From now on drafts come from these services; how many are linked, and what cluster.target_state.Counters hold.

        Links to others stay as long as those live; None: all links end.
        """
        if self._proposals is None:
            return {}
        return self._proposals.follow(addresses)

    def take_times(self) -> list[tuple[float, float]]:
        """Of the latest calls of `propose`: (seconds, of them waiting for growth). They are forgotten here."""
        if self._proposals is None:
            return []
        times = list(self._proposals.times)
        self._proposals.times.clear()
        return times


class WorkerAccess:
    """Mixed into vLLM's workers by `worker_extension_cls`: how others reach the proposer, by `collective_rpc`."""

    model_runner: Any

    def paceline_follow(self, addresses: list[str] | None) -> dict[str, int]:
        """See RemoteProposer.follow. Nothing where no drafter is: of pipeline-parallel stages, all but the last."""
        proposer: RemoteProposer | None = getattr(self.model_runner, "drafter", None)
        return proposer.follow(addresses) if proposer is not None else {}

    def paceline_times(self) -> list[tuple[float, float]]:
        """See RemoteProposer.take_times."""
        proposer: RemoteProposer = self.model_runner.drafter
        return proposer.take_times()


def _addresses(text: str) -> tuple[str, ...]:
    found = tuple(filter(None, (part.strip() for part in text.split(","))))
    for address in found:
        parse_address(address, ADDRESSES)
    if not found:
        raise ValueError(f"{ADDRESSES} names no draft service: set it to host:port")
    return found


def _milliseconds(text: str) -> float:
    with suppress(ValueError):
        if 0 <= float(text) <= _LONGEST_WAIT_MS:
            return float(text)
    raise ValueError(f"{WAIT_MS}: {text!r} is no number of milliseconds from 0 to {_LONGEST_WAIT_MS}")


def _lift_limit(speculative_config: Any) -> None:
    """Lets vLLM ask for drafts whatever the lengths of its rows are; it reads the limit after it has made the class.

    As soon as one row comes near the limit of the draft's context, which is the target's here, no row gets drafts, but all
    zeros to verify. Proposals that lead beyond the target's context are cut where they are scheduled.
    """
    if speculative_config.draft_model_config is not None:
        config = copy(speculative_config.draft_model_config)
        config.max_model_len += speculative_config.num_speculative_tokens
        speculative_config.draft_model_config = config


def _answers() -> bool:
    """Whether vLLM takes this process' proposals: of tensor-parallel ranks, the first one's."""
    from vllm.distributed.parallel_state import (  # type: ignore[import-not-found,unused-ignore]
        get_tensor_model_parallel_rank,
    )

    return int(get_tensor_model_parallel_rank()) == 0


def _warm_up(options: ProposerOptions) -> None:
    """A session's life: its loops are compiled, which takes seconds, or loaded. Steps of vLLM would wait for that else.

    Not cluster.warm's, which needs torch and our engine.
    """
    state = TargetState(options.vocab_size)
    state.draft_joined(0)
    sessions, text = ContentSessions(state), np.zeros(3, np.int32)
    for length in range(1, len(text) + 1):
        [session] = sessions.follow([text[:length]], 0.0)
        said = state.take_messages()[0]
        encode_down(said)
        if isinstance(committed := said[-1], Commit):
            nodes = np.asarray([-1, 0], np.int32), text[:2], np.ones(2, np.float32)
            for growth in decode_up(encode_up([Growth(session, committed.handle, *nodes)])[0]):
                state.received(0, growth)
            assert len(state.mirror(session).chain(options.most, options.least))


class Proposals:
    """Sessions by content, links to draft services, and what the mirrors hold. One thread calls `propose`.

    Another one takes growth in when it comes, while the engine's step runs: `propose` finds the mirrors ready.
    """

    def __init__(self, options: ProposerOptions) -> None:
        """Connects in the background, again and again as services come and go; what steps run is compiled before."""
        _warm_up(options)
        self._options = options
        self._addresses: Sequence[str] | None = options.addresses
        self.times: deque[tuple[float, float]] = deque(maxlen=_TIMES)  # see RemoteProposer.take_times
        self._state = TargetState(options.vocab_size, replica=int.from_bytes(os.urandom(2)))
        self._sessions = ContentSessions(self._state)
        self._drafts = LinkedDrafts(self._state, Trace(), None)
        # Each row's last proposal, until it goes on: how many tokens it had, and the first that was proposed.
        self._proposed: dict[int, tuple[int, int]] = {}  # by session
        self._next_renewal = time.monotonic() + RENEW_EVERY_S
        self._failed: Exception | None = None  # of the thread that receives
        self._changed = threading.Condition()  # guards all but the threads; told when something was received
        self._made: queue.SimpleQueue[Link[Down, Up]] = queue.SimpleQueue()
        self._arrived = threading.Event()  # something can be received
        self._in_vain = 0  # waits in a row
        self._passed_by = 0  # misses that are not waited for any more
        self._closing = threading.Event()
        link_options = LinkOptions(vocab_size=options.vocab_size)
        links = KeptLinks(lambda address: connect(address, CONNECT_TIMEOUT_S, link_options), self._linked)
        keep = partial(links.keep, lambda: self._addresses, self._closing)
        self._threads = [
            threading.Thread(target=keep, name="paceline-connect", daemon=True),
            threading.Thread(target=self._keep_receiving, name="paceline-receive", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def propose(self, rows: Sequence[IntArray], sampled: Sequence[bool]) -> list[list[int]]:
        """rows: all tokens of each sequence, committed now. sampled: whether it decodes; others get no proposal."""
        started = time.monotonic()
        with self._changed:
            if self._failed is not None:
                raise RuntimeError("what drafts said could not be taken in") from self._failed
            if self._arrived.is_set():
                self._receive()
            sessions = self._sessions.follow(rows, started)
            self._learn(any(sampled))
            if started > self._next_renewal:
                self._next_renewal = started + RENEW_EVERY_S
                self._state.renewal_due()
            self._drafts.send()
            wanted = [session for session, decodes in zip(sessions, sampled, strict=True) if decodes and session >= 0]
            waited_s = self._wait(wanted)
            proposals = [
                self._proposal(session) if decodes and session >= 0 else []
                for session, decodes in zip(sessions, sampled, strict=True)
            ]
        self.times.append((time.monotonic() - started, waited_s))
        return proposals

    def follow(self, addresses: Sequence[str] | None) -> dict[str, int]:
        """See RemoteProposer.follow."""
        self._addresses = tuple(addresses) if addresses is not None else None
        with self._changed:
            return {"drafts": self.drafts, **asdict(self._state.counters)}

    @property
    def drafts(self) -> int:
        """Services that are linked."""
        return len(self._drafts)

    def close(self) -> None:
        """Ends all links."""
        self._closing.set()
        self._arrived.set()
        for thread in self._threads:
            thread.join()
        self._join_new()
        self._drafts.close()

    def _proposal(self, session: int) -> list[int]:
        """A mirror's probabilities say how sure the draft is; verifying what hardly ever holds costs the engine a row."""
        mirror = self._state.mirror(session)
        tokens: list[int] = mirror.token[mirror.chain(self._options.most, self._options.least)].tolist()
        if tokens:
            self._proposed[session] = len(self._state.tokens(session)), tokens[0]
        return tokens

    def _learn(self, decoded: bool) -> None:
        """What became of the proposals. A draft that is never right is left alone for a while.

        decoded: whether any row did in the step that ended.
        """
        for session, (length, first) in list(self._proposed.items()):
            if not self._sessions.holds(session):
                del self._proposed[session]
            elif len(tokens := self._state.tokens(session)) > length:  # else its row waits
                del self._proposed[session]
                self._drafts.accepted(session, int(tokens[length] == first))
        if decoded:
            self._drafts.stepped()

    def _wait(self, sessions: Sequence[int]) -> float:
        """A bounded time for growth where nothing at all could be proposed: one row's miss holds up no other's hit.

        Where drafts are too slow for that, it waits more and more seldom. Returns the seconds it took.
        """
        if not sessions or any(self._state.hit(session) or not self._state.attached(session) for session in sessions):
            return 0.0
        if self._passed_by:
            self._passed_by -= 1
            return 0.0
        started = time.monotonic()
        arrived = self._changed.wait_for(lambda: any(map(self._state.hit, sessions)), self._options.wait_s)
        self._in_vain = 0 if arrived else min(self._in_vain + 1, _PATIENT + _RARER)
        self._passed_by = 2 ** max(0, self._in_vain - _PATIENT) - 1
        return time.monotonic() - started

    def _linked(self, link: Link[Down, Up]) -> None:
        self._made.put(link)
        self._arrived.set()

    def _join_new(self) -> None:
        with suppress(queue.Empty):
            while True:
                link = self._made.get_nowait()
                link.set_notify(self._arrived.set)
                self._in_vain = self._passed_by = 0  # it may be a faster one
                self._drafts.join(link)

    def _keep_receiving(self) -> None:
        while self._arrived.wait() and not self._closing.is_set():
            with self._changed:
                try:
                    self._receive()
                    self._drafts.send()
                except Exception as error:  # noqa: BLE001 - the edge of the thread: `propose` says it
                    self._failed = error
                    return
                self._changed.notify_all()

    def _receive(self) -> None:
        self._arrived.clear()  # before looking: what comes meanwhile is told again
        self._join_new()
        self._drafts.receive()

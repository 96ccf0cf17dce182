"""Drafts for an engine that shows rows of tokens and nothing else: sessions by content, proposals from the mirror."""

import random
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cluster import kept_links, vllm_proposer
from cluster.address import parse_address
from cluster.draft import DraftReplica
from cluster.grpc_server import DraftServer
from cluster.link import Link, LinkError, memory_link
from cluster.target_state import TargetState
from cluster.vllm_mended import spread
from cluster.vllm_proposer import ADDRESSES, WAIT_MS, Proposals, ProposerOptions, RemoteProposer
from cluster.vllm_target import binding
from cluster.warm import warm_up_drafter
from engine.decode import decode
from engine.drafters.model import ModelDrafter
from engine.prefix import HandleChain
from engine.runner import ModelRunner
from engine.tree import ROOT, TokenTree
from engine.types import Close, Down, Growth, IntArray, Open, Renew, Up
from tests import exact
from tests.cluster_fixtures import PATIENCE_S, row, until

VOCAB, MOST, TOKENS = 4096, 5, 48


def test_a_proposal_follows_the_likeliest_children_as_long_as_it_may_hold() -> None:
    tree = TokenTree(0)
    parents = np.asarray([-1, -1, 1, 2], np.int32)
    tree.graft([], parents, row(7, 8, 9, 10), np.asarray([0.2, 0.7, 0.5, 0.1], np.float32))
    assert tree.token[ROOT] == 0
    assert tree.token[tree.chain(5, 0.3)].tolist() == [8, 9]
    assert tree.token[tree.chain(5)].tolist() == [8, 9, 10]
    assert tree.token[tree.chain(1)].tolist() == [8]
    assert tree.token[tree.chain(5, start=2)].tolist() == [9, 10]


@pytest.mark.parametrize("text", ["9100", ":9100", "host:", "host:x", "host:70000", "host:0", "http://host:80"])
def test_an_address_that_is_none_is_told(text: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        parse_address(text)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        (ADDRESSES, "nonsense", "PACELINE_DRAFT: 'nonsense' is not HOST:PORT"),
        (ADDRESSES, "127.0.0.1:9100, http://host:80", "PACELINE_DRAFT: 'http://host:80' is not HOST:PORT"),
        (ADDRESSES, " , ", "PACELINE_DRAFT names no draft service"),
        (WAIT_MS, "3ms", "PACELINE_DRAFT_WAIT_MS: '3ms' is no number of milliseconds"),
        (WAIT_MS, "nan", "PACELINE_DRAFT_WAIT_MS: 'nan' is no number of milliseconds"),
    ],
)
def test_a_setting_that_cannot_be_used_is_told(
    name: str, value: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADDRESSES, "127.0.0.1:9100")
    monkeypatch.setenv(name, value)
    config = SimpleNamespace(
        additional_config={},
        speculative_config=SimpleNamespace(num_speculative_tokens=5),
        model_config=SimpleNamespace(get_vocab_size=lambda: VOCAB),
    )
    with pytest.raises(ValueError, match=told):
        RemoteProposer(config)


def test_vllm_is_not_kept_from_asking_by_the_length_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADDRESSES, "127.0.0.1:9100")
    monkeypatch.setattr(vllm_proposer, "_answers", lambda: False)
    monkeypatch.setattr(vllm_proposer, "mend", lambda: None)
    target = SimpleNamespace(get_vocab_size=lambda: VOCAB, max_model_len=512)
    speculation = SimpleNamespace(num_speculative_tokens=5, draft_model_config=target)
    RemoteProposer(SimpleNamespace(additional_config={}, speculative_config=speculation, model_config=target))
    assert speculation.draft_model_config.max_model_len == 512 + 5
    assert target.max_model_len == 512


def test_a_service_that_is_not_there_is_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, closing: ExitStack
) -> None:
    tried = threading.Semaphore(0)

    def refused(address: str, timeout_s: float, options: object) -> None:
        tried.release()
        raise UnicodeError("no name")

    monkeypatch.setattr(vllm_proposer, "connect", refused)
    monkeypatch.setattr(kept_links, "_LOOK_EVERY_S", 0.01)
    proposals = Proposals(options("127.0.0.1:1"))
    closing.callback(proposals.close)
    for _ in range(3):
        assert tried.acquire(timeout=PATIENCE_S)
    told = [record.getMessage() for record in caplog.records if record.name == kept_links.__name__]
    assert told == ["no drafts from 127.0.0.1:1 until it is there: no name"]


class Broken:
    """Proposals that say what they were asked, and fail on the second call."""

    def __init__(self, options: ProposerOptions) -> None:
        self.options = options
        self.asked: list[tuple[list[list[int]], list[bool]]] = []
        self.times = deque([(0.5, 0.25)])
        self.closed = threading.Event()

    def propose(self, rows: Sequence[IntArray], sampled: Sequence[bool]) -> list[list[int]]:
        self.asked.append(([each.tolist() for each in rows], list(sampled)))
        if len(self.asked) == 2:
            raise RuntimeError("what drafts said could not be taken in")
        return [[7] if each else [] for each in sampled]

    def follow(self, addresses: Sequence[str] | None) -> dict[str, int]:
        return {"drafts": len(addresses or ())}

    def close(self) -> None:
        self.closed.set()


def test_vllm_gets_proposals_for_its_rows_until_they_fail_and_goes_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Broken] = []

    def make(options: ProposerOptions) -> Broken:
        made.append(Broken(options))
        return made[0]

    monkeypatch.setenv(ADDRESSES, "127.0.0.1:9100, localhost:9101")
    monkeypatch.setenv(WAIT_MS, "2")
    monkeypatch.setattr(vllm_proposer, "Proposals", make)
    monkeypatch.setattr(vllm_proposer, "_answers", lambda: True)
    monkeypatch.setattr(vllm_proposer, "mend", lambda: None)
    speculation = SimpleNamespace(num_speculative_tokens=MOST, draft_model_config=None)
    model = SimpleNamespace(get_vocab_size=lambda: VOCAB)
    proposer = RemoteProposer(SimpleNamespace(additional_config={}, speculative_config=speculation, model_config=model))
    [proposals] = made
    assert proposals.options == ProposerOptions(("127.0.0.1:9100", "localhost:9101"), MOST, VOCAB, 0.002)
    assert proposer.follow(["127.0.0.1:9100"]) == {"drafts": 1}
    assert proposer.take_times() == [(0.5, 0.25)]
    assert proposer.take_times() == []
    tokens = np.asarray([[1, 2, 3, 0, 0], [4, 5, 6, 7, 8], [9, 9, 9, 9, 9]], np.int32)  # the last row is no request's
    lengths = np.asarray([3, 4, 5], np.int32)
    assert proposer.propose([[3], []], lengths, tokens) == [[7], []]
    assert proposals.asked == [([[1, 2, 3], [4, 5, 6, 7]], [True, False])]
    for _ in range(2):
        assert proposer.propose([[3], []], lengths, tokens) == [[], []]
    assert len(proposals.asked) == 2, "what failed is not asked again"
    assert proposals.closed.wait(PATIENCE_S)
    assert proposer.follow(None) == {}
    assert proposer.take_times() == []


def fed(proposals: Proposals, rows: Sequence[IntArray]) -> bool:
    """Whether the mirrors of all rows that a draft works for hold something that may come next."""
    state = proposals._state
    with proposals._changed:
        sessions = proposals._sessions.follow(rows, time.monotonic())
        return all(state.hit(session) or not state.attached(session) for session in sessions if session >= 0)


class Engine:
    """Does with proposals what vLLM does: takes what its own greedy text confirms, in rows whose order changes."""

    def __init__(self, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> None:
        self._prompts, self._texts = prompts, texts
        self._done = [0] * len(texts)  # tokens of each text that are committed
        self.proposed = self.accepted = 0
        self._dice = random.Random(0)

    def run(self, proposals: Proposals) -> None:
        """Until all texts are written. The first rows are prefills: they sampled nothing."""
        waiting: dict[int, list[int]] = {}
        prefilled: set[int] = set()
        while order := [i for i in range(len(self._texts)) if self._done[i] < len(self._texts[i])]:
            self._dice.shuffle(order)
            rows, sampled = [], []
            for i in order:
                if i in prefilled:
                    self._step(i, waiting.pop(i, []))
                rows.append(row(*self._prompts[i], *self._texts[i][: self._done[i]]))
                sampled.append(i in prefilled)
                prefilled.add(i)
            answers = proposals.propose(rows, sampled)
            assert all(len(answer) <= MOST for answer in answers)
            assert all(not answer for answer, decodes in zip(answers, sampled, strict=True) if not decodes)
            waiting = dict(zip(order, answers, strict=True))
            until(lambda: fed(proposals, rows), "growth is there, which came while the target stepped")  # noqa: B023

    def _step(self, i: int, proposal: list[int]) -> None:
        text = self._texts[i][self._done[i] :]
        right = next((at for at, (a, b) in enumerate(zip(proposal, text, strict=False)) if a != b), len(proposal))
        self.proposed += len(proposal)
        self.accepted += min(right, len(text))
        self._done[i] = min(len(self._texts[i]), self._done[i] + right + 1)


def options(*addresses: str, wait_s: float = 0.003) -> ProposerOptions:
    return ProposerOptions(addresses, MOST, VOCAB, wait_s)


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    """Ends what a test started also when it fails: threads that are left keep pytest from ending."""
    with ExitStack() as stack:
        yield stack


def test_proposals_over_grpc_are_mostly_right_also_after_the_service_was_replaced(
    target: ModelRunner, draft: ModelRunner, closing: ExitStack
) -> None:
    prompts = exact.load_prompts(3)
    requests = exact.make_requests(prompts, 0.0, TOKENS)
    texts = [generation.tokens for generation in decode(target, requests)]
    address = ""
    proposals = None
    for _ in range(2):  # the second service takes the first one's place
        with ExitStack() as service:
            drafter = ModelDrafter(draft)
            warm_up_drafter(drafter)
            replica = DraftReplica(drafter)
            service.callback(replica.close)
            server = DraftServer("127.0.0.1", int(address.rpartition(":")[2] or 0), replica.add_link)
            service.callback(server.stop)
            address = server.address
            if proposals is None:
                proposals = Proposals(options(address))
                closing.callback(proposals.close)
            until(lambda: connected(proposals, 1), "the service is found")  # noqa: B023
            until(lambda: any(proposals.propose([row(*prompts[0])], [True])), "it drafts")  # noqa: B023
            engine = Engine(prompts, texts)
            engine.run(proposals)
            assert engine.accepted > 0.5 * engine.proposed > 0
        until(lambda: connected(proposals, 0), "its end is noticed")  # noqa: B023
        Engine(prompts, texts).run(proposals)  # without any service: no drafts, no error


@pytest.fixture
def address(draft: ModelRunner, closing: ExitStack) -> str:
    """Of a service."""
    replica = DraftReplica(ModelDrafter(draft))
    closing.callback(replica.close)
    server = DraftServer("127.0.0.1", 0, replica.add_link)
    closing.callback(server.stop)
    return server.address


@pytest.fixture
def linked(address: str, closing: ExitStack) -> Proposals:
    """Linked to the service, and never waiting for it."""
    proposals = Proposals(options(address, wait_s=0.0))
    closing.callback(proposals.close)
    until(lambda: connected(proposals, 1), "the service is found")
    return proposals


def test_growth_is_taken_in_while_the_engine_steps(linked: Proposals, address: str) -> None:
    assert linked.propose([row(1, 2, 3)], [True]) == [[]]  # asked, and not waited for
    until(lambda: linked.follow([address])["grown"] > 0, "growth is in the mirror")
    [proposal] = linked.propose([row(1, 2, 3)], [True])
    assert proposal


def connected(proposals: Proposals | None, services: int) -> bool:
    assert proposals is not None
    proposals.propose([], [])
    return proposals.drafts == services


def test_a_service_that_never_answers_stalls_a_step_no_longer_than_told(closing: ExitStack) -> None:
    silent = DraftServer("127.0.0.1", 0, lambda link: None)  # takes streams, and says nothing
    closing.callback(silent.stop)
    proposals = Proposals(options(silent.address, wait_s=0.05))
    closing.callback(proposals.close)
    until(lambda: connected(proposals, 1), "the service is found")
    started = time.monotonic()
    assert proposals.propose([row(1, 2, 3), row(4, 5)], [True, True]) == [[], []]
    assert 0.05 <= time.monotonic() - started < PATIENCE_S
    assert proposals.propose([row(1, 2, 3), row(4, 5)], [False, False]) == [[], []]


def test_a_service_that_is_too_slow_is_waited_for_more_and_more_seldom(closing: ExitStack) -> None:
    silent = DraftServer("127.0.0.1", 0, lambda link: None)
    closing.callback(silent.stop)
    proposals = Proposals(options(silent.address, wait_s=0.001))
    closing.callback(proposals.close)
    until(lambda: connected(proposals, 1), "the service is found")
    proposals.times.clear()
    for end in range(500):
        proposals.propose([row(1, 2, *range(end))], [True])
    waited = [waited_s > 0 for _, waited_s in proposals.times]
    assert all(waited[:8])
    assert sum(waited) < 25
    assert any(waited[-100:]), "it may have become faster"


class Told:
    """Proposals with a draft that is no service: this object, which guesses what it is told to."""

    def __init__(self, proposals: Proposals, link: Link[Up, Down]) -> None:
        self._proposals, self._link = proposals, link
        self.heard: list[Down] = []
        self._sessions: dict[int, int] = {}  # by a text's first token

    def propose(self, text: list[int], sampled: bool = True) -> list[int]:
        [proposal] = self._proposals.propose([row(*text)], [sampled])
        new = self._link.receive()
        self._sessions |= {message.tokens[0]: message.session for message in new if isinstance(message, Open)}
        self.heard += new
        return proposal

    def guess(self, text: list[int], token: int) -> None:
        chain = HandleChain()
        chain.extend(text[:-1])  # the last token is told with the next proposal
        below = row(-1, 0), row(text[-1], token), np.ones(2, np.float32)
        self._link.send([Growth(self._sessions[text[0]], chain.handle, *below)])

    def step(self, text: list[int], guess: int, sampled: bool = True) -> None:
        """The text goes on by the token 5, when it was shown with a guess."""
        self.guess(text, guess)
        proposal = self.propose(text, sampled)
        assert proposal == ([guess] if sampled else [])
        if sampled:
            text.append(5)

    def left_alone(self) -> bool:
        return any(isinstance(message, Close) for message in self.heard)


@pytest.fixture
def told(closing: ExitStack, monkeypatch: pytest.MonkeyPatch) -> Told:
    ours, theirs = memory_link()
    monkeypatch.setattr(vllm_proposer, "connect", lambda address, timeout_s, options: ours)
    proposals = Proposals(options("127.0.0.1:1", wait_s=0.0))
    proposals._sessions.lease_s = 10 * PATIENCE_S
    closing.callback(proposals.close)
    until(lambda: connected(proposals, 1), "the draft is linked")
    return Told(proposals, theirs)


def test_a_draft_that_is_never_right_is_left_alone_and_asked_again(told: Told) -> None:
    text = [1, 2]
    told.propose(text)
    for _ in range(127):
        told.step(text, 6)
    assert not told.left_alone()
    told.step(text, 6)
    assert told.left_alone()
    told.heard.clear()
    for _ in range(300):
        assert told.propose(text) == []
        text.append(5)
    assert [type(message) for message in told.heard].count(Open) == 1


def test_a_draft_that_is_right_now_and_then_is_always_asked(told: Told) -> None:
    text = [1, 2]
    told.propose(text)
    for number in range(500):
        told.step(text, 6 if number % 100 else 5)
    assert not told.left_alone()


def test_a_guess_is_judged_when_its_row_goes_on(told: Told) -> None:
    texts = [1, 2], [3, 4]
    for text in texts:
        told.propose(text)
    for number in range(300):
        told.step(texts[number % 2], 5)  # the other one waits
    assert not told.left_alone()


def test_a_draft_is_not_blamed_for_steps_that_only_read_prompts(told: Told) -> None:
    text = [1, 2]
    told.propose(text)
    for _ in range(300):
        told.step(text, 6, sampled=False)
    assert not told.left_alone()


def test_proposals_of_texts_that_ended_are_forgotten(told: Told) -> None:
    told._proposals._sessions.lease_s = told._proposals._sessions._due = 0.0
    for first in range(100):
        told.propose([first, 2])
        told.step([first, 2], 5)
    assert len(told._proposals._proposed) < 3


def test_a_row_whose_prompt_is_read_for_long_keeps_its_session_on_the_draft(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_proposer, "RENEW_EVERY_S", 0.01)
    told._proposals._next_renewal = 0.0

    def renewed() -> int:
        told.propose([1, 2], sampled=False)
        return sum(message == Renew((told._sessions[1],)) for message in told.heard)

    until(lambda: renewed() > 1, "its lease is renewed")


def test_a_failure_while_receiving_ends_the_drafts_with_its_reason(
    linked: Proposals, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: TargetState, draft: int, message: object) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(TargetState, "received", broken)

    def failed() -> bool:
        try:
            assert linked.propose([row(1, 2, 3)], [True]) == [[]], "nothing can have been taken in"
        except (RuntimeError, ValueError) as error:  # of the thread that receives, or of this one, whichever was first
            return "broken" in f"{error}{error.__cause__}"
        return False

    until(failed, "the failure is told")


WITHOUT_NUMBA = """
import sys
sys.modules["numba"] = None
import numpy as np
from cluster.target_state import TargetState
from cluster.wire import decode_down, encode_down
from engine.types import Commit, Growth, SamplingParams
state = TargetState(100)
state.draft_joined(0)
session = state.session_opened([1, 2, 3], SamplingParams())
[opened] = decode_down(encode_down(state.take_messages()[0])[0])
base = state._sessions[session].chain.handle
ids = lambda *values: np.array(values, np.int32)
state.received(0, Growth(session, base, ids(-1, 0, 1), ids(4, 5, 6), np.array([0.9, 0.8, 0.7], np.float32)))
tree = state.mirror(session)
assert tree.token[tree.chain(5, 0.05)].tolist() == [4, 5, 6], tree.token[tree.chain(5, 0.05)]
assert state.tokens_committed(session, [4]) is True
[commit] = decode_down(encode_down(state.take_messages()[0])[0])
assert isinstance(commit, Commit) and commit.mirrored
assert state.tokens_committed(session, [9]) is False
state.check()
assert type(state.counters.grown) is int
"""


def test_the_proposer_needs_nothing_that_is_slow_to_import() -> None:
    """Whatever cluster.linked, which it shares with targets, names."""
    slow = "print(sorted({'torch', 'transformers', 'ray', 'h2'} & set(sys.modules)))"
    said = subprocess.run(
        [sys.executable, "-c", f"import sys, cluster.vllm_proposer; {slow}"], check=True, capture_output=True, text=True
    )
    assert said.stdout == "[]\n"


def test_without_numba_the_mirror_does_the_same() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_NUMBA], check=True)


def test_a_port_that_is_taken_is_told(closing: ExitStack) -> None:
    held = DraftServer("127.0.0.1", 0, lambda link: None)
    closing.callback(held.stop)
    with pytest.raises(LinkError, match="cannot listen"):
        DraftServer("127.0.0.1", int(held.address.rpartition(":")[2]), lambda link: None)


def test_vllm_is_told_of_cores_by_rank() -> None:
    assert binding((0, 1, 2, 3), 2) == "0,1|2,3"
    assert binding((4, 5), 1) == "4,5"
    assert binding((0, 1, 2), 2) == "0|1"
    assert binding((0,), 2) == binding((), 1) == "nobind"


def test_what_requests_want_is_spread_over_their_rows() -> None:
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)  # the second request has no drafts
    temperatures = spread(torch.tensor([0.7, 9.0, 0.0]), ends, 5, replace_from=0, replace_to=1)
    assert torch.equal(temperatures, torch.tensor([0.7, 0.7, 1.0, 1.0, 1.0]))
    top_k = spread(torch.tensor([50, 9, 4096], dtype=torch.int32), ends, 5)
    assert top_k.dtype == torch.int32
    assert top_k.tolist() == [50, 50, 4096, 4096, 4096]
    assert len(spread(torch.tensor([0.7]), torch.tensor([0], dtype=torch.int32), 0)) == 0

"""Multi-token heads: small blocks on the target's last hidden state guess the next few tokens at once. No second model.

Medusa (Cai et al. 2024, https://arxiv.org/abs/2401.10774). Head i is a residual block, x + silu(W x + b), before the
target's own output layer. From the hidden state that the target chose its last token from, head 0 guesses the token after
that one, head 1 the next, and so on. A head does not know what the others guess: the tree holds the likeliest combinations.
"""

import heapq
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file

from engine import noise, sampling
from engine.checkpoint import ModelError
from engine.local_choice import HEADS_FILE, check_heads
from engine.runner import ModelRunner
from engine.tree import Moved, TokenTree
from engine.types import FloatArray, IntArray, SamplingParams

_CHILDREN = 6  # guesses of each head
_NODES = 24  # of a tree, its root not counted: the most probable ones


class TokenHeads(torch.nn.Module):
    """The blocks of all heads. A new head is the identity, the target's own guess at the token before the one it is for."""

    def __init__(self, heads: int, hidden_size: int) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(hidden_size, hidden_size) for _ in range(heads))
        for parameter in self.parameters():
            torch.nn.init.zeros_(parameter)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [..., hidden_size]; what the output layer is to be given, [heads, ..., hidden_size]."""
        return torch.stack([hidden + F.silu(block(hidden)) for block in self.blocks])


def load_heads(path: Path, target: ModelRunner) -> TokenHeads:
    """The heads that `paceline heads` wrote to a folder, on the target's device in its dtype.

    Raises ModelError when they can't be read or were made for a target of another size.
    """
    check_heads(path, target.hidden_size, target.path)
    file = path / HEADS_FILE
    try:
        weights = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} can't be read: {' '.join(str(error).split())}") from error
    heads = TokenHeads(len(weights) // 2, target.hidden_size)
    try:
        heads.load_state_dict(weights)
    except RuntimeError as error:
        raise ModelError(f"{file} can't be used: {' '.join(str(error).split())[:300]}") from error
    if not all(bool(torch.isfinite(weight).all()) for weight in weights.values()):
        raise ModelError(f"{file} holds values that are not finite")
    return heads.to(target.device, target.dtype).eval().requires_grad_(False)


class _Session:
    def __init__(self, tokens: Sequence[int], params: SamplingParams, target: ModelRunner) -> None:
        self.params = params
        self.length = len(tokens)
        self.tree = TokenTree(tokens[-1], _NODES + 1, params.temperature == 0)
        self.seen: torch.Tensor | None = None  # the state behind the tokens that are about to be committed
        self.state: torch.Tensor | None = None  # the state behind the root, until the tree is grown from it


class HeadsDrafter:
    """Implements Drafter and ReadsStates. Guesses know nothing of penalties and grammars, the target's choices do."""

    def __init__(self, target: ModelRunner, heads: TokenHeads) -> None:
        self._target = target
        self._heads = heads
        self._sessions: dict[int, _Session] = {}

    def open(self, session: int, tokens: Sequence[int], params: SamplingParams, prompt: int | None = None) -> None:
        """See Drafter."""
        self._sessions[session] = _Session(tokens, params, self._target)

    def see(self, session: int, state: torch.Tensor) -> None:
        """See ReadsStates."""
        self._sessions[session].seen = state

    def commit(self, session: int, tokens: Sequence[int]) -> Moved:
        """See Drafter. What was guessed before knew less than what the heads will say: the tree begins anew."""
        held = self._sessions[session]
        held.length += len(tokens)
        held.state, held.seen = held.seen, None
        moved = held.tree.commit(tokens)
        if held.state is not None:
            held.tree.reset(tokens[-1])
        return moved

    def grow(self) -> list[int]:
        """See Drafter."""
        fresh = {session: held for session, held in self._sessions.items() if held.state is not None}
        if fresh:
            tokens, confidences = self._guess(list(fresh.values()))
            for index, held in enumerate(fresh.values()):
                held.state = None
                combine(held.tree, tokens[index], confidences[index], _NODES)
        return list(fresh)

    def tree(self, session: int) -> TokenTree:
        """See Drafter."""
        return self._sessions[session].tree

    def close(self, session: int) -> None:
        """See Drafter."""
        self._sessions.pop(session, None)

    def check(self) -> None:
        """See Drafter."""
        for held in self._sessions.values():
            held.tree.check()

    @torch.inference_mode()
    def _guess(self, sessions: Sequence[_Session]) -> tuple[IntArray, FloatArray]:
        """Every head's best tokens for each session, and their confidences: both [sessions, heads, children]."""
        states = torch.stack([held.state for held in sessions if held.state is not None])
        hidden = self._heads(states.to(self._target.dtype)).transpose(0, 1)  # [sessions, heads, hidden_size]
        heads = hidden.shape[1]
        places = [(held.params.seed, held.length + head) for held in sessions for head in range(heads)]
        params = [held.params for held in sessions for _ in range(heads)]
        logits = self._target.logits(hidden.flatten(0, 1))
        tokens, confidences = sampling.propose(logits, params, noise.keys_of(places), _CHILDREN)
        return tokens.reshape(-1, heads, _CHILDREN), confidences.reshape(-1, heads, _CHILDREN)


def combine(tree: TokenTree, tokens: IntArray, confidences: FloatArray, nodes: int) -> None:
    """Hangs the `nodes` most probable paths below the root; tokens and confidences are [depth, children].

    A path's probability is the product of its tokens' confidences: the heads guess independently of each other.
    """
    parents: list[int] = []
    guessed: list[int] = []
    trust: list[float] = []
    waiting = [(-float(share), 0, -1, rank) for rank, share in enumerate(confidences[0])]  # and depth, parent, rank
    heapq.heapify(waiting)
    while waiting and len(parents) < nodes:
        negative, depth, parent, rank = heapq.heappop(waiting)
        node = len(parents)
        parents.append(parent)
        guessed.append(int(tokens[depth, rank]))
        trust.append(float(confidences[depth, rank]))
        if depth + 1 < len(tokens):
            for below, share in enumerate(confidences[depth + 1]):
                heapq.heappush(waiting, (negative * float(share), depth + 1, node, below))
    tree.graft([], np.asarray(parents, np.int32), np.asarray(guessed, np.int32), np.asarray(trust, np.float32))

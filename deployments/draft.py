"""`paceline draft`: one draft service by itself, for people who have an engine already. No Ray is started."""

import signal
import threading
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from cluster.actors import works
from cluster.address import parse_address
from cluster.draft import DraftReplica
from cluster.drafters import DraftConfig, make_drafter
from cluster.grpc_server import DraftServer, listen
from cluster.placement import Placement
from cluster.speculate import LinkOptions
from engine.checkpoint import ModelError, check_checkpoint
from engine.choice import DrafterName, Weights, check_choice, check_documents, check_weights
from engine.runner import Dtype

_LOOK_EVERY_S = 1.0
_CLOSE_S = 5.0


class DraftFailed(RuntimeError):
    """The draft's loop failed or hangs."""


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """What `paceline draft` runs."""

    model: Path | None
    host: str
    port: int
    drafter: DrafterName = "auto"
    documents: Path | None = None
    tokenizer: Path | None = None  # folder with the target's; none: the model's
    dtype: Dtype = "auto"
    kv_tokens: int = 65536
    threads: int = 1
    gpu: bool = False
    weights: Weights = "auto"
    inner: str | None = None  # "host:port" of another draft service, which drafts for a cascade's model

    @property
    def config(self) -> DraftConfig:
        """The options that a draft replica itself has."""
        return DraftConfig(
            self.model,
            self.dtype,
            self.kv_tokens,
            drafter=self.drafter,
            documents=self.documents,
            tokenizer=self.tokenizer,
            weights=self.weights,
            chains=True,
            inner=self.inner,
        )


def check_options(options: DraftOptions) -> None:
    """What can be told without loading anything; raises ModelError, ValueError for an address, or LinkError for a port."""
    if options.inner is not None:
        parse_address(options.inner, "--inner")
    check_choice(options.drafter, options.model, options.documents, options.inner)
    if options.model is not None:
        check_checkpoint(options.model)
    check_weights(options.weights, options.model, options.gpu, options.dtype)
    if options.tokenizer is not None and not (options.tokenizer / "tokenizer.json").is_file():
        raise ModelError(f"--tokenizer: {options.tokenizer} has no tokenizer.json")
    listen(options.host, options.port).close()
    if options.documents is not None:
        check_documents(options.documents)
        known = options.tokenizer or options.model
        if known is None or not (known / "tokenizer.json").is_file():
            raise ModelError("--documents are read in the target's tokens: name its folder by --tokenizer")


def run_draft(options: DraftOptions, console: Console) -> None:
    """Serves until it is interrupted. Raises ModelError, LinkError when the port can't be had, or DraftFailed."""
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    placement = Placement(threads=options.threads, gpus=float(options.gpu))
    placement.apply_to_process()
    with console.status("loading the draft"):
        drafter = make_drafter(options.config, placement)
    replica = DraftReplica(drafter, placement)
    server = DraftServer(options.host, options.port, replica.add_link, LinkOptions(vocab_size=_vocab_size(options)))
    console.print(
        f"[bold]ready[/bold]  drafts at {server.address}\n\n  {_HINT.format(server.address)}\n", soft_wrap=True
    )
    console.print("[dim]Ctrl-C ends it[/dim]")
    while not stopping.wait(_LOOK_EVERY_S):
        if not works(replica):
            raise DraftFailed("the draft failed or hangs")  # closing it would wait for a turn that never ends
    server.stop()
    closing = threading.Thread(target=replica.close, name="paceline-close", daemon=True)
    closing.start()
    closing.join(_CLOSE_S)  # a turn that hangs never ends
    console.print("stopped")


def _vocab_size(options: DraftOptions) -> int:
    """Of the tokens that it guesses; 0 where it guesses what it is told, or translates."""
    if options.model is None or options.tokenizer is not None:
        return 0
    return int(check_checkpoint(options.model)["vocab_size"])


_HINT = (
    "PYTHONPATH=CHECKOUT PACELINE_DRAFT={} vllm serve TARGET --speculative-config "
    '\'{{"method": "custom_class", "model": "cluster.vllm_proposer.RemoteProposer", "num_speculative_tokens": 12}}\''
)

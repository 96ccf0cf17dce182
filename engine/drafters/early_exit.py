"""Self-speculation: the target's own first layers, then its final norm and output layer, are the draft model.

Draft & Verify (Zhang et al. 2023, https://arxiv.org/abs/2309.08168) and LayerSkip (Elhoushi et al. 2024,
https://arxiv.org/abs/2404.16710), whose targets are trained to exit early; others guess worse.
"""

from transformers import PreTrainedTokenizerFast

from engine.drafters.model import Growing, ModelDrafter
from engine.runner import ModelRunner

_NODES = 64  # per session: their KV takes room in the target's pool


class EarlyExitDrafter(ModelDrafter):
    """Implements Drafter and TakesPages with the first layers of the target, and with its weights and its pool of KV.

    Pages that the target has sealed are shared, but for those of tenants with keys of their own: the first layers' part of
    them is what is needed here. Pages written here hold nothing for the target's other layers, so they are never sealed.
    """

    def __init__(
        self,
        target: ModelRunner,
        layers: int | None = None,
        growing: Growing | None = None,
        tokenizer: PreTrainedTokenizerFast | None = None,
        patient: bool = True,
    ) -> None:
        """layers: of the target, two thirds of them by default; tokenizer, patient: see ModelDrafter. Raises ModelError."""
        runner = target.first_layers(layers or max(1, target.layers * 2 // 3))
        super().__init__(runner, growing or Growing(max_nodes=_NODES), tokenizer, seals=False, patient=patient)

    def pages(self) -> set[int]:
        """See TakesPages."""
        leases = [lease for held in self._sessions.values() for lease in (held.lease, held.tree_lease)]
        return {page for lease in leases for page in lease.pages}

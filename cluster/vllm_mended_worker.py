"""vLLM's workers, mended where no draft of ours does it: see cluster.vllm_mended.

    vllm serve MODEL --worker-extension-cls cluster.vllm_mended_worker.MendedWorker

vLLM imports this in each worker's process, before it makes the worker.
"""

from cluster.vllm_mended import mend

mend()


class MendedWorker:
    """Adds nothing to a worker: importing it is what counts."""

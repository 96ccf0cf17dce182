"""vLLM's workers with their sampling mended where no draft of ours does it: see cluster.vllm_mended.

    vllm serve MODEL --worker-extension-cls cluster.vllm_mended_worker.MendedWorker

vLLM imports this in each worker's process, once its own replacements of kernels are in place.
"""

from cluster.vllm_mended import mend_sampling

mend_sampling()


class MendedWorker:
    """Adds nothing to a worker: importing it is what counts."""

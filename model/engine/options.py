"""The options of an engine that a user may set, and their defaults."""

from dataclasses import dataclass
from typing import NamedTuple


class Batch(NamedTuple):
    """The most that a step computes."""

    requests: int
    tokens: int


BATCHES = {"cpu": Batch(64, 1024), "cuda": Batch(256, 8192)}
"""Where nothing is set, by device. A GPU reads its weights for few tokens in the time that it needs to multiply hundreds."""
REQUESTS_PER_THREAD = 4
"""On a CPU with more than 16 threads. A step reads the weights once, however many requests share it: where more threads
multiply, as many more requests take about as long. Not measured on such a machine."""
FLUSH_SECONDS = 10.0
"""How long draining waits for KV blocks to be written to disk."""
MAX_REQUESTS = 256
"""However many threads there are: the KV cache is shared among the requests, and each has its own context to read."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What a user may set; None and "auto" are chosen for the checkpoint and the machine."""

    device: str = "auto"
    dtype: str = "auto"
    backend: str = "auto"
    load_format: str = "auto"
    """`dummy` draws the weights and reads config.json alone, for measurements; no setting of the service."""
    quantize: str = "none"
    """Weight-only quantisation: int8 or int4."""
    max_model_len: int | None = None
    max_batch_requests: int | None = None
    max_batch_tokens: int | None = None
    max_queued_requests: int = 256
    max_queued_tokens: int = 1 << 19
    block_size: int = 32
    kv_cache_memory: int | None = None
    """Size of the KV cache in bytes; None: see `cache.py`."""
    kv_dtype: str = "auto"
    """`auto` is the dtype of the weights; int8 takes about half of the memory of bfloat16, see `KVCache`."""
    prefix_caching: bool = True
    kv_disk_folder: str = ""
    """Folder of KV blocks that the cache has evicted, also for the next process; empty: they are dropped."""
    kv_disk_bytes: int = 10 << 30
    """Bytes of all files in `kv_disk_folder`, at most."""
    state_cache_share: float = 0.25
    """Of the memory for the cache, for snapshots of recurrent states, by which prefixes are reused; 0: they are not."""
    draft_tokens: int = 0
    """Guessed tokens of a step, see `lookup.py`; refused where a token's scores depend on the other rows of a step."""
    adapters: bool = False
    """Compute requests that have LoRA adapters."""
    deterministic: bool = False
    """Refuse to start where a request's tokens would depend on the other requests of a step."""
    kernel_check: str = "replace"
    """What becomes of kernels that differ from torch at the start, or fail: `replace`, `fail`, or `off`, see `fallback.py`."""
    num_threads: int = 0
    """CPU threads of the step thread; 0 leaves torch's own choice."""

    def batch(self, device: str) -> Batch:
        """What is set, else what is usual on the device, `cpu` or `cuda`, and for the threads of a CPU."""
        requests, tokens = BATCHES[device]
        if device == "cpu":
            requests = max(requests, min(REQUESTS_PER_THREAD * self.num_threads, MAX_REQUESTS))
        return Batch(
            requests if self.max_batch_requests is None else self.max_batch_requests,
            tokens if self.max_batch_tokens is None else self.max_batch_tokens,
        )

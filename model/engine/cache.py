"""How large the KV cache is: as many blocks as the memory given to it holds, and no more than could be used."""

import os
from pathlib import Path

import torch

from model.config import ModelConfig
from model.errors import SettingError

CGROUP = Path("/sys/fs/cgroup")
CPU_SHARE = 0.25
"""Of the machine's free memory, where nothing is set: other replicas and processes live there too."""
CUDA_SHARE = 0.90
"""Of the device's free memory after the weights are loaded."""


def free_memory(device: str) -> int:
    """Bytes that the KV cache may take by default."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0] * CUDA_SHARE)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(min(free, container_memory(free)) * CPU_SHARE)


def container_memory(otherwise: int) -> int:
    """Bytes left under the container's own limit (cgroup v2); `otherwise` where there is no limit."""
    try:
        limit, used = ((CGROUP / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return otherwise
    return otherwise if limit == "max" else max(0, int(limit) - int(used))


def count_blocks(config: ModelConfig, dtype: torch.dtype, block_size: int, memory: int, useful_tokens: int) -> int:
    """Blocks that `memory` bytes hold beside the reserved one, up to what `useful_tokens` tokens need."""
    block_bytes = config.kv_bytes_per_token(dtype.itemsize) * block_size
    fitting = memory // block_bytes - 1
    if fitting < 1:
        raise SettingError(
            f"kv_cache_memory is {memory} bytes, but two KV blocks of {block_size} tokens need {2 * block_bytes}: raise it"
        )
    return min(fitting, -(-useful_tokens // block_size))

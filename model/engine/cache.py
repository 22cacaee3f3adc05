"""How large the KV cache is: as many blocks as the memory given to it holds, and no more than could be used."""

import torch

from model.config import ModelConfig
from model.errors import SettingError
from model.machine import available_memory

CPU_SHARE = 0.25
"""Of the memory that is available, where nothing is set: other replicas and processes live there too."""
CUDA_SHARE = 0.90
"""Of the device's free memory after the weights are loaded."""


def free_memory(device: str) -> int:
    """Bytes that the KV cache may take by default."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0] * CUDA_SHARE)
    return int(available_memory() * CPU_SHARE)


def count_blocks(config: ModelConfig, dtype: torch.dtype, block_size: int, memory: int, useful_tokens: int) -> int:
    """Blocks that `memory` bytes hold beside the reserved one, up to what `useful_tokens` tokens need."""
    block_bytes = config.kv_bytes_per_token(dtype.itemsize) * block_size
    fitting = memory // block_bytes - 1
    if fitting < 1:
        raise SettingError(
            f"kv_cache_memory is {memory} bytes, but two KV blocks of {block_size} tokens need {2 * block_bytes}: raise it"
        )
    return min(fitting, -(-useful_tokens // block_size))

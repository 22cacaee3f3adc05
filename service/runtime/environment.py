"""Environment variables of processes that load a model, set before torch is imported."""

import os

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The variable of torch's allocators, and its older name."""


def allocator() -> dict[str, str]:
    """On a GPU memory grows where it lies: chunks of prompts of any size leave no holes that none of the next ones fits in.
    Nothing where the user has set one of the variables.
    """
    return {} if any(name in os.environ for name in ALLOCATOR) else {ALLOCATOR[0]: "expandable_segments:True"}

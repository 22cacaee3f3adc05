"""The native backend: our C++ decoder (net/native) in bfloat16 on a CPU, a step in one call."""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from attend.model.backends.backend import Backend, Form, Placement, Refusal, lacking, name_of, wide_heads
from attend.model.config import ModelConfig
from attend.model.engine.adapters import Adapters
from attend.model.engine.native_runner import NativeRunner
from attend.model.engine.options import EngineOptions
from attend.model.engine.runner import DrawTokens, LogProbs, ModelRunner
from attend.model.net.adapters import targets_of
from attend.model.net.features import NATIVE
from attend.model.net.native.adapters import NativeAdapters
from attend.model.net.native.build import absence
from attend.model.net.native.decoder import BLOCK, MAX_DELTA, MAX_GROUP, MAX_HEAD, MAX_KERNEL, NativeBackend, NativeDecoder
from attend.model.net.native.drawing import draw_tokens
from attend.model.net.native.drawing import logprobs as native_logprobs
from attend.model.net.native.library import load_library, variant
from attend.model.net.transformer import Decoder


class Native(Backend):
    """The fastest on a CPU, unless the library has nothing better than portable vectors there. All its sums are exact in the
    sense of `engine/startup.py`, so drafts change no answer.
    """

    name = "native"
    computes = NATIVE
    slowness = "slower than the native decoder"
    is_checked = True

    @cached_property
    def attention(self) -> NativeBackend:
        """See Backend."""
        return NativeBackend(self.config.attention_variants)

    @classmethod
    def absence(cls) -> Refusal | None:
        """See Backend."""
        return None if load_library() is not None else Refusal(*absence())

    @classmethod
    def refusal(cls, config: ModelConfig, at: Placement) -> Refusal | None:
        """See Backend."""
        if at.is_sharded:
            return Refusal("tensor_parallel", "it does not support this model with tensor_parallel")
        if at.device != "cpu":
            return Refusal("device", "it needs a CPU")
        refused = lacking(config, cls.computes) or wide_heads(config, MAX_GROUP, MAX_HEAD) or _long_kernel(config)
        if refused is not None:
            return refused
        if at.block_size % BLOCK:
            return Refusal("block_size", f"block_size is {at.block_size}, and it takes multiples of {BLOCK}")
        if at.dtype != torch.bfloat16:  # last: where none is set it follows from the others
            return Refusal("dtype", f"dtype is {name_of(at.dtype)}, and it computes in bfloat16")
        return None

    @classmethod
    def serves(cls, config: ModelConfig, device: str, block_size: int) -> bool:
        """True if it would compute this model in bfloat16, with better than portable vectors."""
        placed = Placement(torch.bfloat16, device, block_size)
        return variant() not in ("", "portable") and cls.refusal(config, placed) is None

    def load_options(self) -> dict[str, Any]:
        """See Backend."""
        return {"keep_codes": True, "keep_floats": False, "keep_mapped": True}

    def decoder(self, net: Decoder, report: Callable[[int, int], None] = lambda num_bytes, total: None) -> NativeDecoder:
        """See Backend."""
        return NativeDecoder(net, spend=True, report=report)

    def runner(self) -> type[ModelRunner]:
        """See Backend."""
        return NativeRunner

    def draw(self, dtype: torch.dtype, device: str, *, exact: bool) -> DrawTokens:
        """See Backend."""
        return draw_tokens

    def logprobs(self) -> LogProbs:
        """See Backend."""
        return native_logprobs

    def adapters(self, form: Form, folder: Path, device: str, *, exact: bool) -> Adapters:
        """See Backend."""
        assert isinstance(form, NativeDecoder)
        return Adapters(targets_of(folder), NativeAdapters(form))

    def check_drafts(self, options: EngineOptions, dtype: torch.dtype) -> None:
        """See Backend."""
        return


def _long_kernel(config: ModelConfig) -> Refusal | None:
    """Sizes of recurrent layers that its kernels do not take."""
    delta, kernels = config.delta, [size for size in (config.conv_kernel, config.delta and config.delta.kernel) if size]
    if delta is not None and (size := max(delta.key_size, delta.value_size)) > MAX_DELTA:
        return Refusal("model", f"the model's recurrent layers have heads of {size}, and it takes at most {MAX_DELTA}")
    if kernels and max(kernels) > MAX_KERNEL:
        return Refusal("model", f"the model has convolutions over {max(kernels)} tokens, and it takes at most {MAX_KERNEL}")
    return None

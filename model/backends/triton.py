"""The Triton backend: kernels (net/triton) on a GPU, in steps that CUDA graphs replay. Not run on a GPU yet: see net/triton."""

from collections.abc import Callable
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from attend.model.backends.backend import (
    Backend,
    Form,
    Placement,
    Refusal,
    lacking,
    no_int8_cache,
    no_quantized_experts,
    wide_heads,
)
from attend.model.config import ModelConfig
from attend.model.devices import BFLOAT16, capability, capability_text
from attend.model.engine.config import EngineConfig
from attend.model.engine.cuda_recorder import CudaRecorder
from attend.model.engine.graphs import DecodeGraphs
from attend.model.engine.options import EngineOptions
from attend.model.engine.piecewise_graphs import PiecewiseGraphs
from attend.model.engine.runner import DrawTokens
from attend.model.errors import SettingError
from attend.model.net.features import TRITON
from attend.model.net.formats.codes import KINDS, Kind
from attend.model.net.kv_cache import KVCache
from attend.model.net.native.decoder import NativeDecoder
from attend.model.net.transformer import Decoder

if TYPE_CHECKING:
    from attend.model.net.triton.backend import TritonBackend
    from attend.model.net.triton.decoder import TritonDecoder


class Triton(Backend):
    """The fastest on a GPU. Its modules are imported where they are needed: triton is not there on every machine."""

    name = "triton"
    computes = TRITON
    slowness = "slower than Triton's kernels"
    is_checked = True

    @cached_property
    def attention(self) -> "TritonBackend":
        """See Backend."""
        from attend.model.net.triton.backend import TritonBackend

        return TritonBackend(self.config.attention_variants)

    @classmethod
    def absence(cls) -> Refusal | None:
        """Triton is installed only with the wheels of torch for CUDA."""
        return None if find_spec("triton") is not None else Refusal("not_built", "triton is not installed")

    @classmethod
    def refusal(cls, config: ModelConfig, at: Placement) -> Refusal | None:
        """See Backend."""
        from attend.model.net.triton.backend import INTERPRETED, MAX_GROUP, MAX_HEAD

        if at.is_sharded and (config.num_experts or config.qk_norm == "all"):
            return Refusal("tensor_parallel", "it does not support this model with tensor_parallel")
        if not (at.device.startswith("cuda") or INTERPRETED):
            return Refusal("device", "it needs a CUDA device")
        if not INTERPRETED and (found := capability()) < BFLOAT16:
            why = f"this GPU has compute capability {capability_text(found)}, and it needs {capability_text(BFLOAT16)}"
            return Refusal("capability", why)
        refused = lacking(config, cls.computes) or wide_heads(config, MAX_GROUP, MAX_HEAD)
        if refused is None and at.block_size & (at.block_size - 1):
            return Refusal("block_size", f"block_size is {at.block_size}, and it takes powers of two")
        return refused

    def load_options(self) -> dict[str, Any]:
        """See Backend."""
        floats = not self.config.num_experts  # it multiplies all codes but those of experts
        return {"keep_codes": floats, "keep_floats": floats, "keep_mapped": False}

    def quantized_kind(self, quantize: str, device: str) -> Kind | None:
        """See Backend."""
        if quantize == "none":
            return None
        if self.config.num_experts:
            raise no_quantized_experts(quantize, device)
        return KINDS[quantize]

    def kv_dtype(self, kv_dtype: str, dtype: torch.dtype, device: str) -> torch.dtype:
        """See Backend."""
        if kv_dtype == "auto":
            return dtype
        raise no_int8_cache(kv_dtype, "the triton backend" if device == "cpu" else device)

    def decoder(self, net: Decoder, report: Callable[[int, int], None] = lambda num_bytes, total: None) -> "TritonDecoder":
        """See Backend."""
        from attend.model.net.triton.decoder import TritonDecoder

        return TritonDecoder(net)

    def draw(self, dtype: torch.dtype, device: str, *, exact: bool) -> DrawTokens:
        """See Backend."""
        if device != "cuda":
            return super().draw(dtype, device, exact=exact)
        from attend.model.engine.sampler import TokenSampler

        sampler = TokenSampler(self.config.vocab_size, device)
        sampler.warm_up(dtype)
        return sampler

    def record(
        self, form: Form, cache: KVCache, config: EngineConfig, *, is_sharded: bool = False
    ) -> tuple[DecodeGraphs | None, PiecewiseGraphs | None]:
        """A step that moves states on is recorded only where each request has one token."""
        if not cache.keys[0].is_cuda:
            return None, None
        assert not isinstance(form, NativeDecoder)
        recorder = CudaRecorder()
        sizes = (config.max_model_len, config.max_batch_requests)
        graphs = DecodeGraphs(form, self.attention, cache, *sizes, recorder, scores=not is_sharded)
        if cache.states:
            return graphs, None
        return graphs, PiecewiseGraphs(form, self.attention, cache, config.max_batch_tokens, recorder.in_pieces)

    def check_drafts(self, options: EngineOptions, dtype: torch.dtype) -> None:
        """See Backend."""
        if self.config.state_bytes:
            raise SettingError(
                "draft_tokens is set, but the triton backend would leave a rejected draft token in a recurrent state"
            )
        super().check_drafts(options, dtype)

"""What computes a model on this machine: the attention backend, and the form of the decoder that goes with it."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from attend.model.config import ModelConfig
from attend.model.engine.adapters import Adapters
from attend.model.engine.config import EngineConfig
from attend.model.engine.graphs import DecodeGraphs
from attend.model.engine.native_runner import NativeRunner
from attend.model.engine.options import EngineOptions
from attend.model.engine.pieces import StepPieces
from attend.model.engine.recorder import CudaRecorder
from attend.model.engine.runner import DrawTokens, LogProbs, ModelRunner
from attend.model.errors import SettingError
from attend.model.net.adapters import AdaptedDecoder, targets_of
from attend.model.net.backends import BACKENDS, AttentionBackend, BackendKind
from attend.model.net.features import ALL, NATIVE, TRITON, features
from attend.model.net.kv_cache import KVCache
from attend.model.net.native.adapters import NativeAdapters
from attend.model.net.native.decoder import NativeBackend, NativeDecoder
from attend.model.net.native.drawing import draw_tokens
from attend.model.net.native.drawing import logprobs as native_logprobs
from attend.model.net.native.library import load as load_native
from attend.model.net.packed import pack
from attend.model.net.transformer import Decoder
from attend.model.sampling import logprobs, sample, sample_by_row

if TYPE_CHECKING:  # triton is not there on every machine
    from attend.model.net.triton.decoder import TritonDecoder

FASTEST_FIRST = ("native", "triton", "torch")
COMPUTED = {"native": NATIVE, "triton": TRITON}
"""The backends that do not compute every feature."""
NEEDS = {
    "native": "it needs bfloat16 on a CPU, a head size of at most 512, at most 16 query heads per KV head, "
    "KV blocks of 32 tokens, and convolutions over at most 16 tokens",
    "triton": "it needs a CUDA device of compute capability 8.0 or more, a head size of at most 512, and at most 32 query "
    "heads per KV head",
}
OTHER_NEEDS = "this model has a feature that it does not support"
ABSENT = {"native": "it was not built: run python -P -m attend.model.net.native", "triton": "triton is not installed"}


def choose_backend(
    wanted: str, config: ModelConfig, dtype: torch.dtype, device: str, block_size: int, *, shared: bool = False
) -> AttentionBackend:
    """`auto` is the fastest that fits. A backend that cannot compute this model is refused with SettingError.

    `shared`: several ranks compute the model, and `config` is what each of them has of it.
    """
    for name in FASTEST_FIRST if wanted == "auto" else (wanted,):
        kind = kind_of(name)
        if kind is None or (shared and not computes_parts(name, config)):
            continue
        if kind.supports(config, dtype, device, block_size):
            return kind(config.attention_variants)
    if shared and not computes_parts(wanted, config):
        raise SettingError(f"backend is {wanted}, but it does not support this model with tensor_parallel")
    kind = kind_of(wanted)
    raise SettingError(f"backend is {wanted}, but {ABSENT[wanted] if kind is None else _lack(wanted, config)}")


def computes_parts(name: str, config: ModelConfig) -> bool:
    """Whether the decoder of a backend computes one rank's part of a model."""
    if name == "triton":  # its kernels have neither some of the experts nor a norm over the heads of all ranks
        return not config.num_experts and config.qk_norm != "all"
    return name in BACKENDS


def _lack(name: str, config: ModelConfig) -> str:
    """Why a backend is refused for a model: the features that it does not compute, or else what it needs besides."""
    lacking = sorted(features(config) - COMPUTED.get(name, ALL))
    if lacking:
        return f"it does not support {', '.join(lacking)}, which this model needs"
    return NEEDS.get(name, OTHER_NEEDS)


def kind_of(name: str) -> BackendKind | None:
    """The backend of this name; None for one that was not built or is not installed."""
    if name == "native":
        return None if load_native() is None else NativeBackend
    if name == "triton":
        if find_spec("triton") is None:  # it comes with the wheels of torch for CUDA
            return None
        from attend.model.net.triton.backend import TritonBackend

        return TritonBackend
    return BACKENDS[name]


def prepare_decoder(
    net: Decoder, backend: AttentionBackend, report: Callable[[int, int], None] = lambda done, total: None
) -> "Decoder | NativeDecoder | TritonDecoder":
    """The decoder that computes fastest beside this backend; the plain one is spent. `report`: see `checkpoint.load`."""
    if isinstance(backend, NativeBackend):
        return NativeDecoder(net, spend=True, report=report)
    if backend.name == "triton":
        from attend.model.net.triton.decoder import TritonDecoder

        return TritonDecoder(net)
    pack(net)
    return net


def runner_kind(form: "Decoder | NativeDecoder | TritonDecoder") -> type[ModelRunner]:
    """What runs the steps of this form."""
    return NativeRunner if isinstance(form, NativeDecoder) else ModelRunner


def choose_kv_dtype(options: EngineOptions, dtype: torch.dtype, device: str, backend: str) -> torch.dtype:
    """The dtype of the KV cache; int8 is refused where no backend computes with it."""
    if options.kv_dtype == "auto":
        return dtype
    if device != "cpu" or backend == "triton":
        who = "the triton backend" if device == "cpu" else device
        raise SettingError(f"kv_dtype is {options.kv_dtype}, but {who} has no int8 KV cache yet: it needs device = cpu")
    return torch.int8


def choose_draw(form: "Decoder | NativeDecoder | TritonDecoder", dtype: torch.dtype, device: str, *, exact: bool) -> DrawTokens:
    """How tokens are drawn from scores of this type: by Triton beside its decoder on a GPU. `exact`: see `sample_by_row`."""
    if isinstance(form, NativeDecoder):
        return draw_tokens
    if isinstance(form, Decoder) or device != "cuda":
        return sample_by_row if exact else sample
    from attend.model.engine.sampler import TokenSampler

    sampler = TokenSampler(form.config.vocab_size, device)
    sampler.warm_up(dtype)
    return sampler


def choose_logprobs(form: "Decoder | NativeDecoder | TritonDecoder") -> LogProbs:
    """How log probabilities are made of scores."""
    return native_logprobs if isinstance(form, NativeDecoder) else logprobs


def open_adapters(form: "Decoder | NativeDecoder | TritonDecoder", folder: Path, device: str, *, exact: bool) -> Adapters:
    """What reads adapters of the model in `folder` and applies them beside its matrices. Raises SettingError."""
    if isinstance(form, NativeDecoder):
        return Adapters(targets_of(folder), NativeAdapters(form))
    if device != "cpu" or not isinstance(form, Decoder):
        raise SettingError(f"adapters are set, but LoRA is not supported on {device}: it needs device = cpu")
    if exact:
        raise SettingError("adapters and deterministic are both set, which needs the native backend: bfloat16 on a CPU")
    return Adapters(targets_of(folder), AdaptedDecoder(form))


def record_steps(
    net: "Decoder | NativeDecoder | TritonDecoder",
    backend: AttentionBackend,
    cache: KVCache,
    config: EngineConfig,
    *,
    shared: bool = False,
) -> tuple[DecodeGraphs | None, StepPieces | None]:
    """Steps of one token a request as CUDA graphs, and others in pieces, where the backend can be recorded: Triton's, on a GPU.

    A step that moves states on is recorded only where each request has one token. `shared`: by several ranks, which exchange
    scores only where a draw asks for all of them.
    """
    if backend.name != "triton" or isinstance(net, NativeDecoder) or not cache.keys[0].is_cuda:
        return None, None
    recorder = CudaRecorder()
    sizes = (config.max_model_len, config.max_batch_requests)
    graphs = DecodeGraphs(net, backend, cache, *sizes, recorder, scores=not shared)
    if cache.states:
        return graphs, None
    return graphs, StepPieces(net, backend, cache, config.max_batch_tokens, recorder.in_pieces)


def check_guesses(config: ModelConfig, options: EngineOptions, dtype: torch.dtype, backend: str) -> None:
    """Refuse guesses where sums that depend on the number of rows are rounded more coarsely than to float32, and where a state
    would keep a wrong guess: SettingError.
    """
    if backend == "triton" and config.state_bytes:
        raise SettingError(
            "draft_tokens is set, but the triton backend would leave a rejected draft token in a recurrent state"
        )
    how = f"in {name_of(dtype)}" if options.kv_dtype == "auto" else f"with kv_dtype = {options.kv_dtype}"
    if (dtype, options.kv_dtype) != (torch.float32, "auto"):
        why = f"speculative decoding could change an answer of the {backend} backend {how}"
        raise SettingError(f"draft_tokens is set, but {why}: it needs float32, or the native backend")


def name_of(dtype: torch.dtype) -> str:
    """As callers read it."""
    return str(dtype).removeprefix("torch.")

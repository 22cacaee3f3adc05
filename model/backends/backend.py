"""The interface of a backend: which models it computes, and how it loads, decodes, draws and records."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

import torch

from attend.model.config import ModelConfig
from attend.model.engine.adapters import Adapters
from attend.model.engine.config import EngineConfig
from attend.model.engine.graphs import DecodeGraphs
from attend.model.engine.options import EngineOptions
from attend.model.engine.piecewise_graphs import PiecewiseGraphs
from attend.model.engine.runner import DrawTokens, LogProbs, ModelRunner
from attend.model.errors import SettingError
from attend.model.net.adapters import AdaptedDecoder, targets_of
from attend.model.net.features import ALL, features
from attend.model.net.formats.codes import KINDS, Kind
from attend.model.net.kv_cache import KVCache
from attend.model.net.packed_linears import pack_linears
from attend.model.net.paged_attention import AttentionBackend
from attend.model.net.transformer import Decoder
from attend.model.sampling import row_logprobs, sample, sample_by_row

if TYPE_CHECKING:  # triton is not there on every machine
    from attend.model.net.native.decoder import NativeDecoder
    from attend.model.net.triton.decoder import TritonDecoder

log = logging.getLogger("attend.engine")

Form: TypeAlias = "Decoder | NativeDecoder | TritonDecoder"
"""A decoder as a backend computes it."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Dtype, device, block size and ranks with which a model is to be computed: they decide whether a backend can."""

    dtype: torch.dtype
    device: str
    """The device's type: "cpu" or "cuda"."""
    block_size: int
    """Tokens in a block of the KV cache."""
    is_sharded: bool = False
    """True if several ranks compute the model; the config is then what each of them has of it."""


class Refusal(NamedTuple):
    """Why a backend does not compute a model."""

    reason: str
    """A label of the metric: `model`, `heads`, `dtype`, `device`, `block_size`, `tensor_parallel`, `not_built`, ..."""
    why: str
    """A clause that goes on from the backend's name: "it takes ..."."""


class Backend:
    """torch's way, from which the others differ: the equations of `net/transformer.py`, layer by layer.

    An instance belongs to one model.
    """

    name: ClassVar[str]
    """The backend's name in the setting `backend`."""
    computes: ClassVar[frozenset[str]] = ALL
    """The features (net/features.py) that it computes."""
    slowness: ClassVar[str] = ""
    """What is said of a slower backend where this one was meant to serve: "slower than the native decoder"."""
    is_checked: ClassVar[bool] = False
    """True if it is compared with torch's way at the start: `engine/startup.py`."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    @cached_property
    def attention(self) -> AttentionBackend:
        """What writes and reads the KV caches of this model's layers."""
        raise NotImplementedError

    @classmethod
    def absence(cls) -> Refusal | None:
        """Why it is not on this machine; None where it is."""
        return None

    @classmethod
    def refusal(cls, config: ModelConfig, at: Placement) -> Refusal | None:
        """The first reason why it does not give this model the reference's answers there; None where it does."""
        return lacking(config, cls.computes)

    # Loading.

    def load_options(self) -> dict[str, Any]:
        """What `checkpoint.load_decoder` is told: which weights stay quantized, and whether matrices may lie in a mapped
        file."""
        return {"keep_codes": False, "keep_floats": False, "keep_mapped": False}

    def quantized_kind(self, quantize: str, device: str) -> Kind | None:
        """The kind of codes of quantized weights; None for plain ones. Raises SettingError."""
        if quantize == "none":
            return None
        if self.config.num_experts and device != "cpu":
            raise no_quantized_experts(quantize, device)
        if device != "cpu":
            raise SettingError(
                f"quantize is {quantize}, but the {self.name} backend does not multiply quantised weights on {device}"
            )
        if not self.load_options()["keep_codes"]:
            log.warning(
                "quantize is %s without the native backend: each matrix product first dequantises its weights, which is slow",
                quantize,
            )
        return KINDS[quantize]

    def kv_dtype(self, kv_dtype: str, dtype: torch.dtype, device: str) -> torch.dtype:
        """The dtype of the KV cache. Raises SettingError for int8 where it is not computed."""
        if kv_dtype == "auto":
            return dtype
        if device != "cpu":
            raise no_int8_cache(kv_dtype, device)
        return torch.int8

    # Computing.

    def decoder(self, net: Decoder, report: Callable[[int, int], None] = lambda num_bytes, total: None) -> Form:
        """The form that computes fastest; the plain decoder is spent. `report`: see `checkpoint.load_decoder`."""
        pack_linears(net)
        return net

    def runner(self) -> type[ModelRunner]:
        """What runs the steps of that form."""
        return ModelRunner

    def draw(self, dtype: torch.dtype, device: str, *, exact: bool) -> DrawTokens:
        """How tokens are drawn from scores of this type. `exact`: see `sample_by_row`."""
        return sample_by_row if exact else sample

    def logprobs(self) -> LogProbs:
        """How log probabilities are made of scores."""
        return row_logprobs

    def adapters(self, form: Form, folder: Path, device: str, *, exact: bool) -> Adapters:
        """What reads LoRA adapters of the model in `folder` and applies them beside its matrices. Raises SettingError."""
        if device != "cpu":
            raise SettingError(f"adapters are set, but LoRA is not supported on {device}: it needs device = cpu")
        if exact:
            raise SettingError("adapters and deterministic are both set, which needs the native backend: bfloat16 on a CPU")
        assert isinstance(form, Decoder)
        return Adapters(targets_of(folder), AdaptedDecoder(form))

    def record(
        self, form: Form, cache: KVCache, config: EngineConfig, *, is_sharded: bool = False
    ) -> tuple[DecodeGraphs | None, PiecewiseGraphs | None]:
        """Steps of one token a request as CUDA graphs, and others piecewise, where they can be recorded.

        `is_sharded`: by several ranks, which exchange scores only where a draw asks for all of them.
        """
        return None, None

    def check_drafts(self, options: EngineOptions, dtype: torch.dtype) -> None:
        """Refuse speculative decoding where an answer could change: SettingError.

        It could where sums that depend on the number of rows are rounded more coarsely than to float32.
        """
        how = f"in {name_of(dtype)}" if options.kv_dtype == "auto" else f"with kv_dtype = {options.kv_dtype}"
        if (dtype, options.kv_dtype) != (torch.float32, "auto"):
            why = f"speculative decoding could change an answer of the {self.name} backend {how}"
            raise SettingError(f"draft_tokens is set, but {why}: it needs float32, or the native backend")


def lacking(config: ModelConfig, computes: frozenset[str]) -> Refusal | None:
    """The features that a model asks for and nobody of these computes."""
    names = sorted(features(config) - computes)
    return Refusal("model", f"it does not support {', '.join(names)}, which this model needs") if names else None


def wide_heads(config: ModelConfig, most_group: int, most_size: int) -> Refusal | None:
    """Query heads per KV head, or numbers in a head, that are more than a kernel takes."""
    layers = [layer for layer in config.layers if layer.recurrence is None]
    if (group := max((layer.num_heads // layer.num_kv_heads for layer in layers), default=0)) > most_group:
        return Refusal("heads", f"the model has {group} query heads per KV head, and it takes at most {most_group}")
    if (size := max((layer.head_size for layer in layers), default=0)) > most_size:
        return Refusal("heads", f"the model's head size is {size}, and it takes at most {most_size}")
    return None


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype in the settings: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def no_quantized_experts(quantize: str, who: str) -> SettingError:
    """The refusal of quantized experts where they are not multiplied."""
    needs = "it needs device = cpu and another backend than triton"
    return SettingError(f"quantize is {quantize}, but {who} does not multiply quantised experts: {needs}")


def no_int8_cache(kv_dtype: str, who: str) -> SettingError:
    """The refusal of an int8 KV cache where it is not computed."""
    return SettingError(f"kv_dtype is {kv_dtype}, but {who} has no int8 KV cache yet: it needs device = cpu")

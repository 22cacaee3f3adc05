"""Tensors in GGUF files. Sources: docs/gguf.md of ggml, and llama.cpp's converters for what they do to a checkpoint's tensors.

Rows of queries and keys may lie so that neighbours rotate together; norms of Gemma have the 1 added; experts are one tensor.
"""

import math
import mmap
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from attend.model.config import ModelConfig
from attend.model.gguf.common import CLASSIFIER, CONVOLVING, FREQUENCIES, LONG, SHORT, classifier_labels
from attend.model.gguf.config import read_config
from attend.model.gguf.container import StoredTensor
from attend.model.gguf.documents import container
from attend.model.gguf.keys import Keys
from attend.model.gguf.vocabulary import vocabulary_of
from attend.model.net.families.family import MTP, Family, in_block, pairs
from attend.model.net.families.llama import from_neighbours
from attend.model.net.formats import gguf_delta
from attend.model.net.formats.blocks import SLICE, Blocks
from attend.model.net.formats.codes import GROUP, CodeLayout, Codes
from attend.model.net.formats.ggml import CODED, FORMS, NATIVE, codes_of, numbers_of
from attend.model.net.formats.weights import Place, Weights

Names = dict[str, tuple[str, ...]]
Adapt = Callable[[ModelConfig, str, Tensor], Tensor]
PLAIN = {Type.F32: torch.float32, Type.F16: torch.float16, Type.BF16: torch.bfloat16}
"""GGUF's types that torch has as a dtype."""
READ = (*PLAIN, *FORMS)
NEIGHBOURS = ("llama", "granite", "granitehybrid", "granitemoe", "smollm3", "cohere2", "glm4", "ernie4_5-moe")
NEIGHBOURS += ("arcee", "command-r", "ernie4_5", "mistral3", "olmo")
"""Architectures whose queries and keys rotate neighbour with neighbour."""

OUTSIDE = pairs("embedding.tokens", "token_embd") | pairs("norm", "output_norm") | pairs("head", "output")
OUTSIDE |= pairs("per_layer.tokens", "per_layer_token_embd") | pairs("per_layer.projection", "per_layer_model_proj")
OUTSIDE |= pairs("per_layer.norm", "per_layer_proj_norm")
IN_BLOCK = {
    "attention_norm": ("attn_norm",),
    "attention.qkv": ("attn_q", "attn_k", "attn_v"),
    "attention.q_norm": ("attn_q_norm",),
    "attention.k_norm": ("attn_k_norm",),
    "attention.out": ("attn_output",),
    "attention.inputs": ("shortconv.in_proj",),
    "attention.merge": ("shortconv.out_proj",),
    "attention.query": ("attn_q",),
    "attention.query.q_down": ("attn_q_a",),
    "attention.query.q_norm": ("attn_q_a_norm",),
    "attention.query.q_up": ("attn_q_b",),
    "attention.kv_down": ("attn_kv_a_mqa",),
    "attention.kv_norm": ("attn_kv_a_norm",),
    "attention.kv_up": ("attn_k_b[{e}]", "attn_v_b[{e}]"),
    "attention_post_norm": ("post_attention_norm",),
    "mlp_norm": ("ffn_norm",),
    "mlp.gate_up": ("ffn_gate", "ffn_up"),
    "mlp.up": ("ffn_up",),
    "mlp.down": ("ffn_down",),
    "mlp_post_norm": ("post_ffw_norm",),
    "mlp.router": ("ffn_gate_inp",),
    "mlp.experts.gate_up": ("ffn_gate_exps[{e}]", "ffn_up_exps[{e}]"),
    "mlp.experts.down": ("ffn_down_exps[{e}]",),
    "mlp.shared.gate_up": ("ffn_gate_shexp", "ffn_up_shexp"),
    "mlp.shared.down": ("ffn_down_shexp",),
    "mlp.shared_gate": ("ffn_gate_inp_shexp",),
}
"""Our parts of a block -> theirs. What a matrix of experts is called stands before the expert's number, and so for heads."""
ALONE = {
    "attention.sinks": "attn_sinks.weight",
    "attention.convolution": "shortconv.conv.weight",
    "attention.convolution_bias": "shortconv.conv.bias",
    "mlp.correction": "exp_probs_b.bias",
    "layer_scale": "layer_output_scale.weight",
    "mlp.router_norm.weight": "ffn_gate_inp.scale",
    "mlp.expert_scale": "ffn_down_exps.scale",
}
WEIGHTS = OUTSIDE | in_block("blk", IN_BLOCK) | {f"blocks.{{}}.{ours}": (f"blk.{{}}.{name}",) for ours, name in ALONE.items()}
LFM2 = pairs("norm", "token_embd_norm")
"""The last norm has the name that other architectures give to a norm of the embedding."""
ADAPTED = ("deepseek2", "gemma4")
"""Architectures whose tensors are turned as in their checkpoints; rows of the first one's latent vectors lie as there too."""
OTHERS = {
    **{name: {"mlp_norm": ("post_attention_norm",)} for name in ("gpt-oss", "glm4moe", "seed_oss")},
    "gemma4": {
        "mlp.shared_norm": ("ffn_norm",),
        "mlp.shared_post_norm": ("post_ffw_norm_1",),
        "mlp.experts_norm": ("pre_ffw_norm_2",),
        "mlp.experts_post_norm": ("post_ffw_norm_2",),
        "mlp.shared.gate_up": ("ffn_gate", "ffn_up"),
        "mlp.shared.down": ("ffn_down",),
        "per_layer.gate": ("inp_gate",),
        "per_layer.projection": ("proj",),
        "per_layer.post_norm": ("post_norm",),
    },
}
"""By architecture: tensors whose names differ from those above."""
ROPE = re.compile("|".join(map(re.escape, (FREQUENCIES, LONG, SHORT))))
"""Tensors that the config was read from."""
SPARE = re.compile(rf"{ROPE.pattern}|\.attn_(k|v|k_norm)\.")
"""Those, and what layers of Gemma 4 have that share keys and values."""
_TURNED = ".attn_k_b["
_EXPERT = re.compile(r"(?P<start>.+)\[(?P<expert>\d+)\](?P<end>\..+)")


class Gguf(Weights):
    """The tensors of a GGUF file, or of all its parts, under their names in it."""

    title = "GGUF"

    def __init__(self, path: Path) -> None:
        self._container = container(path)
        super().__init__(path, self._container.files)
        self._arch: str = self._container.metadata["general.architecture"]
        config, keys, ids = read_config(self._container), Keys(self._container), vocabulary_of(self._container).ids
        self._head = _rows_of_heads(config)
        """Rows that no change of their order takes apart."""
        self._layers: tuple[int, int] = config["num_hidden_layers"], keys.size("block_count")
        """Layers of the model, and of the file: the last ones may be there for multi-token prediction."""
        self._columns_I = gguf_delta.columns(self._arch, config)
        """Which column of the matrix that reads value heads stands in each place."""
        self._labels = [ids.get(label, -1) for label in classifier_labels(keys) or []]
        """The tokens that the rows of a reranker's head score; -1 for one that the vocabulary lacks."""
        self._maps: dict[Path, mmap.mmap] = {}
        self.where = {name: stored.file.name for name, stored in self._container.tensors.items()}

    def close(self) -> None:
        """Let go of the files; tensors that are still held keep theirs."""
        self._maps.clear()

    def dtypes(self) -> set[str]:
        """The types of the tensors, as llama.cpp names them."""
        return {stored.kind.name for stored in self._container.tensors.values()}

    def resolve_names(self, family: Family) -> Family:
        """The family with GGUF's names, and with what the converters do to its tensors."""
        changes: Names = OTHERS.get(self._arch, {})
        weights: Names = WEIGHTS | (LFM2 if self._arch in CONVOLVING else {})
        adapt: Adapt | None = family.adapt if self._arch in ADAPTED else None
        if self._arch in NEIGHBOURS:
            adapt = from_neighbours
        if self._arch in gguf_delta.ARCHITECTURES:
            weights = WEIGHTS | gguf_delta.weights(self.where)
            adapt = partial(gguf_delta.adapt_value_heads, self._columns_I is not None)
        elif "blk.0.attn_qkv.weight" in self.where:
            changes = changes | {"attention.qkv": ("attn_qkv",)}
        if "blk.0.ffn_gate.weight" not in self.where:
            changes = changes | {"mlp.gate_up": ("ffn_up",)}
        if self._labels:
            weights = weights | {"head.weight": (CLASSIFIER,)}
        if "blk.0.ffn_gate_up_exps.weight" in self.where:
            changes = changes | {"mlp.experts.gate_up": ("ffn_gate_up_exps[{e}]",)}
        return replace(
            family,
            weights=weights | in_block("blk", changes),
            adapt=adapt,
            transposed_weights=None,
            rows=None,
            gain_offset=None if family.gain_offset is None else 0.0,
            prefix="",
            fused_tensors={},
            left_out={f"blk.{layer}.": MTP for layer in range(*self._layers)},
            ignored_tensors=SPARE if self._arch == "gemma4" else ROPE,
        )

    def form(self, name: str) -> CodeLayout | None:
        """See `Weights`."""
        stored = self._find_stored(name)
        return None if stored is None or name == CLASSIFIER else FORMS.get(stored.kind)

    def find(self, name: str, shape: tuple[int, ...]) -> list[Place] | None:
        """The tensor of this name, or that of all experts: NAME[7] is the part of the eighth."""
        stored, whole = self._find_stored(name), shape
        if (match := _EXPERT.fullmatch(name)) is not None and stored is not None:
            if int(match["expert"]) >= stored.shape[0]:
                stored = None
            else:
                whole = (stored.shape[0], *shape)
        if _TURNED in name:
            whole = (*whole[:-2], *whole[:-3:-1])
        if name == CLASSIFIER:
            whole, self._rows = (len(self._labels), shape[-1]), shape[0]
        if stored is None:
            self.problems.append(f"tensor {name} is missing")
            return None
        self.used.add(_base(name))
        known_kinds = READ if len(stored.shape) > 1 else tuple(PLAIN)
        if stored.kind not in known_kinds:
            known = ", ".join(kind.name for kind in known_kinds)
            self.problems.append(f"{stored.file.name}: tensor {name} is {stored.kind.name}, expected one of {known}")
        elif _solid(stored.shape) != _solid(whole):
            self.problems.append(f"{stored.file.name}: tensor {name} has shape {list(stored.shape)}, expected {list(whole)}")
        elif stored.kind not in PLAIN and self._cuts_groups(name):
            self.problems.append(f"{stored.file.name}: tensor {name} is {stored.kind.name}, and its heads end within a block")
        else:
            return [(name, stored.file.name)]
        return None

    def _order(self, name: str) -> Tensor | None:
        """Which column of a matrix stands in each place [I]; None: each stands in its own."""
        return self._columns_I if f".{gguf_delta.MERGE}." in name else None

    def _cuts_groups(self, name: str) -> bool:
        """True if the columns of one group go to places of several."""
        order_I = self._order(name)
        return order_I is not None and bool((order_I.view(-1, GROUP).diff() != 1).any())

    def _find_stored(self, name: str) -> StoredTensor | None:
        return self._container.tensors.get(_base(name))

    def _map_tensor(self, name: str) -> Tensor:
        """The bytes [rows, bytes in a row] of a tensor, or of the part of an expert."""
        stored = self._container.tensors[_base(name)]
        if stored.file not in self._maps:
            with stored.file.open("rb") as file:
                self._maps[stored.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        match, start, size = _EXPERT.fullmatch(name), stored.start, stored.size
        if match is not None:
            size //= stored.shape[0]
            start += int(match["expert"]) * size
        held = torch.frombuffer(self._maps[stored.file], dtype=torch.uint8, count=size, offset=start)
        return held.view(-1, size * stored.shape[-1] // math.prod(stored.shape[1:] if match else stored.shape))

    def _numbers(self, name: str, held: list[Tensor]) -> Iterator[Tensor | Blocks]:
        """The numbers, where torch has their type; else the blocks."""
        [bytes_RB], stored = held, self._container.tensors[_base(name)]
        if _TURNED in name or name == CLASSIFIER:
            numbers = bytes_RB.view(PLAIN[stored.kind]) if stored.kind in PLAIN else _meaning(stored.kind, bytes_RB)
            numbers = numbers.dense() if isinstance(numbers, Codes) else numbers
            yield from self._whole_head(numbers) if name == CLASSIFIER else [numbers.T]
            return
        columns_I = self._order(name)
        if stored.kind not in PLAIN:
            number = stored.kind.value if stored.kind in NATIVE else None
            groups_G = None if columns_I is None else columns_I[::GROUP] // GROUP
            yield Blocks(number, bytes_RB, stored.shape[-1], partial(_meaning, stored.kind), groups_G)
            return
        numbers = bytes_RB.view(PLAIN[stored.kind])
        if columns_I is not None:
            yield from (some_RI[:, columns_I] for some_RI in numbers.split(max(1, SLICE // len(columns_I))))
        else:
            yield numbers if len(stored.shape) > 1 else numbers[0]

    def _whole_head(self, rows_LI: Tensor) -> Iterator[Tensor]:
        """The head of a whole vocabulary whose rows are 0, but for those of the labels."""
        first = 0
        for token, label in sorted((token, label) for label, token in enumerate(self._labels) if token >= 0):
            if token > first:
                yield rows_LI.new_zeros(1, 1).expand(token - first, rows_LI.shape[1])
            yield rows_LI[label : label + 1].clone()
            first = token + 1
        if first < self._rows:
            yield rows_LI.new_zeros(1, 1).expand(self._rows - first, rows_LI.shape[1])


def _rows_of_heads(config: Mapping[str, Any]) -> int:
    """Rows of a head; with latent attention a number of rows that is one of whole queries, and of whole cached keys."""
    if "kv_lora_rank" not in config:
        return int(config["head_dim"])
    return math.lcm(*(config[name] + config["qk_rope_head_dim"] for name in ("qk_nope_head_dim", "kv_lora_rank")))


def _meaning(kind: Type, bytes_RB: Tensor) -> Tensor | Codes:
    """The numbers of rows: as codes where there are such, else float32."""
    codes = codes_of(kind, bytes_RB) if kind in CODED else None
    if codes is not None and (codes.kind.bits == 4 or codes.codes_OI.min() > -128):
        return codes
    return numbers_of(kind, bytes_RB)


def _base(name: str) -> str:
    """The name of the tensor that holds what `name` means."""
    return _EXPERT.sub(r"\g<start>\g<end>", name)


def _solid(shape: Sequence[int]) -> list[int]:
    """A shape without its sizes of 1: converters leave them out."""
    return [size for size in shape if size > 1]

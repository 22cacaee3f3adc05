"""Multi-LoRA: adapters beside a decoder's matrices (Hu et al. 2021): y = x Wᵀ + scale (x Aᵀ) Bᵀ, each row with an adapter or
none.

An adapter is read from a folder in PEFT's layout. The tokens of a step are grouped by adapter: rows without one are computed
as if there were none.

Shapes: T tokens · I numbers that go into a matrix · O that come out · R ranks of all its parts together.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from attend.model.config import ModelConfig
from attend.model.errors import CheckpointError
from attend.model.net.checkpoint import read_config as read_model_config
from attend.model.net.families.family import Family
from attend.model.net.families.table import family_of, part_shapes, spelling_of, their_names, with_prefix
from attend.model.net.linear import ABSORBED, ExpertLinear, Linear, replace_linears
from attend.model.net.peft import CONFIG, LoraConfig, read_config
from attend.model.net.transformer import Decoder
from attend.model.weights import MAX_JSON, check_header, check_links, read_json

WEIGHTS, PICKLE = "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."


class Part(NamedTuple):
    """Rows of one matrix that have a module's name in the files, and the ranks that belong to it."""

    rows: range
    ranks: range


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to one matrix: x Aᵀ Bᵀ."""

    down_RI: Tensor
    """Matrices A of all parts, one below the other, float32 [R, I]."""
    up_OR: Tensor
    """Matrices B times their scales, float32 [O, R]: zeros where row and rank belong to different parts."""
    parts: tuple[Part, ...]


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter in memory. Whoever computes with it holds it; it goes with the last holder."""

    digest: str
    """SHA-256 of its files: two adapters of one content are one to the prefix cache."""
    matrices: Mapping[str, LowRank] = field(repr=False)
    """By our name of the matrix; empty where a decoder keeps them in a form of its own."""


class AdapterBatch(NamedTuple):
    """The tokens of a step that have one adapter."""

    adapter: Adapter
    tokens: Sequence[int]
    """Places in T, ascending."""


class SupportsAdapters(Protocol):
    """A decoder that computes adapters."""

    def prepare(self, adapter: Adapter) -> Adapter:
        """The adapter as steps want it. Raises CheckpointError where this decoder does not compute it, or MemoryError."""
        ...

    def use(self, groups: Sequence[AdapterBatch], num_tokens: int) -> None:
        """Set the adapters of the next step's tokens; without groups no token has one."""
        ...


# --- reading


class _Module(NamedTuple):
    """A linear module of the model as its files name it: rows of one of our matrices."""

    matrix: str
    rows: range
    size_in: int


class Targets:
    """The modules of a model that adapters may change: the matrices of its blocks, by the names of its family's files."""

    def __init__(self, config: ModelConfig, family: Family) -> None:
        self.config, self.family = config, family
        with torch.device("meta"):
            net = Decoder(config, context=0)
        self.modules = dict(self._modules(net))

    def _with_names(self, names: Iterable[str]) -> "Targets":
        """The same under the names that the model had when it was adapted: with its prefix, or as a model without its head."""
        spelled = copy(self)
        spelled.family = with_prefix(self.family, spelling_of(self.family, names))

        def other(name: str) -> str:
            return spelled.family.prefix + name.removeprefix(self.family.prefix)

        spelled.modules = {other(name): module for name, module in self.modules.items()}
        return spelled

    def _modules(self, net: Decoder) -> Iterator[tuple[str, _Module]]:
        for name, linear in net.named_modules():
            matrix = isinstance(linear, Linear) and not isinstance(linear, ExpertLinear)
            if not matrix or not name.startswith("blocks.") or name.endswith(ABSORBED):
                continue
            names, first = their_names(self.family, self.config, f"{name}.weight"), 0
            for theirs, shape in zip(names, part_shapes(self.config, f"{name}.weight", linear.whole, len(names)), strict=True):
                yield theirs.removesuffix(".weight"), _Module(name, range(first, first + shape[0]), linear.in_features)
                first += shape[0]

    def read(self, folder: Path) -> Adapter:
        """An adapter folder. Raises CheckpointError with one sentence that names the file and the tensor."""
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder: an adapter is a folder with {CONFIG} and {WEIGHTS} in it")
        config = read_config(folder)
        check_links(folder)
        path = folder / WEIGHTS
        if not path.is_file():
            pickle = f"; {PICKLE} is a pickle, which Attend never opens" if (folder / PICKLE).exists() else ""
            raise CheckpointError(f"{path} is missing{pickle}")
        try:
            check_header(path)
            names = _names(path)
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error
        try:
            spelled = self._with_names(names)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error
        return spelled._read(config, path)

    def _read(self, config: LoraConfig, path: Path) -> Adapter:
        """Read an adapter whose file names modules as our decoder does."""
        wanted = {module: self._sizes(config, module) for module in self.modules if config.changes(module)}
        if not wanted:
            named = str(config.targets)[:64]
            raise CheckpointError(
                f"{config.folder / CONFIG}: target_modules {named} match no weight matrix of this model's layers"
            )
        try:
            content = _content(path, sum(sum(map(math.prod, sizes)) for sizes in wanted.values()))
            tensors = safetensors.torch.load(content)
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error
        factors = {module: self._factors(path, tensors, module, sizes) for module, sizes in wanted.items()}
        if tensors:
            raise CheckpointError(f"{path}: tensor {min(tensors)} matches no weight matrix of this model that {CONFIG} names")
        digest = hashlib.sha256(repr(replace(config, folder=Path())).encode() + hashlib.sha256(content).digest())
        return Adapter(digest.hexdigest(), self._join_factors(config, factors))

    def _sizes(self, config: LoraConfig, module: str) -> tuple[tuple[int, int], tuple[int, int]]:
        """The shapes of a module's A and B."""
        place, rank = self.modules[module], config.rank_of(module)
        return (rank, place.size_in), (len(place.rows), rank)

    def _factors(
        self, path: Path, tensors: dict[str, Tensor], module: str, sizes: tuple[tuple[int, int], tuple[int, int]]
    ) -> tuple[Tensor, Tensor]:
        """A and B of a module, which leave `tensors`."""
        down, up = (
            _take_tensor(path, tensors, f"{PREFIX}{module}.{factor}.weight", size)
            for factor, size in zip(("lora_A", "lora_B"), sizes, strict=True)
        )
        return down, up

    def _join_factors(self, config: LoraConfig, factors: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, LowRank]:
        by_matrix: dict[str, list[str]] = {}
        for module in factors:
            by_matrix.setdefault(self.modules[module].matrix, []).append(module)
        return {matrix: self._low_rank(config, modules, factors) for matrix, modules in by_matrix.items()}

    def _low_rank(self, config: LoraConfig, modules: Sequence[str], factors: Mapping[str, tuple[Tensor, Tensor]]) -> LowRank:
        matrix = self.modules[modules[0]].matrix
        height = max(module.rows.stop for module in self.modules.values() if module.matrix == matrix)
        down = torch.cat([factors[module][0] for module in modules])
        up, parts, first = torch.zeros(height, len(down)), [], 0
        for module in modules:
            rows, rank = self.modules[module].rows, config.rank_of(module)
            mine = factors[module][1] * config.scale_of(module)
            if self.family.adapt is not None:
                mine = self.family.adapt(self.config, f"{module}.weight", mine).reshape(mine.shape)
            up[rows.start : rows.stop, first : first + rank] = mine
            parts.append(Part(rows, range(first, first + rank)))
            first += rank
        return LowRank(down, up, tuple(parts))


def targets_of(folder: Path) -> Targets:
    """What adapters of the model in a checkpoint folder may change. Raises CheckpointError."""
    return Targets(read_model_config(folder), family_of(read_json(folder, "config.json")))


def _names(path: Path) -> list[str]:
    """Names of the modules in the header of a safetensors file."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(min(size, MAX_JSON)))
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    return [name.removeprefix(PREFIX) for name in header if name.startswith(PREFIX)]


def _content(path: Path, numbers: int) -> bytes:
    """A file's bytes. It is not mapped: one that is written over while it is read would end the process."""
    most = 8 * numbers + MAX_JSON
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has {path.stat().st_size} bytes, but what {CONFIG} names has at most {most}")
    return content


def _take_tensor(path: Path, tensors: dict[str, Tensor], name: str, size: tuple[int, int]) -> Tensor:
    """A tensor of this size, in float32 and in memory of its own, which leaves `tensors`."""
    tensor = tensors.pop(name, None)
    if tensor is None:
        raise CheckpointError(f"{path}: tensor {name} is missing, though {CONFIG} names its module")
    if tensor.shape != size:
        raise CheckpointError(f"{path}: tensor {name} has shape {list(tensor.shape)}, expected {list(size)}")
    if not tensor.dtype.is_floating_point:
        raise CheckpointError(f"{path}: tensor {name} is {tensor.dtype}, expected floating point numbers")
    tensor = tensor.to(torch.float32, copy=True)
    if not tensor.isfinite().all():
        raise CheckpointError(f"{path}: tensor {name} holds NaN or infinity")
    return tensor


# --- computing, in PyTorch


class AdaptedLinear(Linear):
    """A matrix of any form, and beside it what the step's adapters add."""

    name: str
    base: Linear
    step: "AdaptedDecoder"

    @classmethod
    def around(cls, name: str, base: Linear, step: "AdaptedDecoder") -> "AdaptedLinear":
        """`name` is the matrix's; `step` knows which tokens have which adapter."""
        form = cls.of(base)
        form.name, form.base, form.step, form.bias = name, base, step, base.bias
        return form

    def forward(self, x_TI: Tensor) -> Tensor:
        """x Wᵀ + b + x Aᵀ Bᵀ, the latter for tokens that have an adapter for this matrix. Sums in float32, rounded again."""
        y_TO = self.base(x_TI)
        for adapter, tokens_N in self.step.groups:
            low = adapter.matrices.get(self.name)
            if low is not None:
                update_NO = x_TI.index_select(0, tokens_N).float() @ low.down_RI.T @ low.up_OR.T
                y_TO.index_add_(0, tokens_N, update_NO.to(y_TO.dtype))
        return y_TO

    def dense(self) -> Tensor:
        """The matrix without its adapters, float32 [O, I]."""
        return self.base.dense()

    def slices(self, rows: int, expert: int | None = None) -> Iterator[Tensor]:
        """See Linear. The slices are of the matrix without its adapters."""
        return self.base.slices(rows, expert)


class AdaptedDecoder:
    """Puts adapters beside every matrix of the blocks of a decoder in PyTorch, on a CPU."""

    def __init__(self, net: Decoder) -> None:
        self.groups: list[tuple[Adapter, Tensor]] = []

        def form(name: str, linear: Linear) -> Linear:
            plain = isinstance(linear, ExpertLinear) or not name.startswith("blocks.") or name.endswith(ABSORBED)
            return linear if plain else AdaptedLinear.around(name, linear, self)

        replace_linears(net, form)

    def prepare(self, adapter: Adapter) -> Adapter:
        """The adapter unchanged: it is computed in the form in which it was read."""
        return adapter

    def use(self, groups: Sequence[AdapterBatch], num_tokens: int) -> None:
        """See Adapted."""
        self.groups = [(adapter, torch.tensor(tokens)) for adapter, tokens in groups]

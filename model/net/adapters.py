"""LoRA adapters beside a decoder's matrices (Hu et al. 2021): y = x Wᵀ + scale (x Aᵀ) Bᵀ, each row with an adapter or none.

An adapter is read from a folder in PEFT's layout. The tokens of a step are grouped by adapter: rows without one are computed
as if there were none.

Shapes: T tokens · I numbers that go into a matrix · O that come out · R ranks of all its parts together.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model.config import ModelConfig
from model.errors import CheckpointError
from model.net.checkpoint import read_config as read_model_config
from model.net.families.reading import Family
from model.net.families.table import family_of, part_shapes, their_names
from model.net.linear import ExpertLinear, Linear, reform
from model.net.peft import CONFIG, LoraConfig, read_config
from model.net.transformer import Decoder
from model.weights import check_header, check_links, read_json

WEIGHTS, PICKLE = "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."
FACTORS = ("lora_A", "lora_B")


class Part(NamedTuple):
    """Rows of one matrix that have a module's name in the files, and the ranks that belong to it."""

    rows: range
    ranks: range


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to one matrix: x Aᵀ Bᵀ."""

    down_RI: Tensor
    """A of all parts under each other, float32."""
    up_OR: Tensor
    """B with its scale, float32: zeros but where rows and ranks belong to the same part."""
    parts: tuple[Part, ...]


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter in memory. Whoever computes with it holds it; it goes with the last holder."""

    digest: str
    """SHA-256 of its files: two adapters of one content are one to the prefix cache."""
    matrices: Mapping[str, LowRank] = field(repr=False)
    """By our name of the matrix."""


class Group(NamedTuple):
    """The tokens of a step that have one adapter."""

    adapter: Adapter
    tokens: Sequence[int]
    """Places in T, in rising order."""


class Adapted(Protocol):
    """A decoder that computes adapters."""

    def prepare(self, adapter: Adapter) -> None:
        """Do beforehand what the first step with an adapter would have to do."""
        ...

    def use(self, groups: Sequence[Group], num_tokens: int) -> None:
        """From now on the tokens of a step have these adapters; without groups none."""
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

    def _modules(self, net: Decoder) -> Iterator[tuple[str, _Module]]:
        for name, linear in net.named_modules():
            if not isinstance(linear, Linear) or isinstance(linear, ExpertLinear) or linear is net.head:
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
            with safe_open(str(path), framework="pt", device="cpu") as file:
                factors = self._factors(config, path, file)
            digest = hashlib.sha256((folder / CONFIG).read_bytes())
            with path.open("rb") as weights:
                digest.update(hashlib.file_digest(weights, "sha256").digest())
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error
        return Adapter(digest.hexdigest(), self._joined(config, factors))

    def _factors(self, config: LoraConfig, path: Path, file: Any) -> dict[str, tuple[Tensor, Tensor]]:
        """A and B of each module that the adapter changes, of its own rank."""
        left = set(file.keys())
        found = {}
        for module, place in self.modules.items():
            if config.changes(module):
                rank = config.rank_of(module)
                sizes = ((rank, place.size_in), (len(place.rows), rank))
                names = [f"{PREFIX}{module}.{factor}.weight" for factor in FACTORS]
                found[module] = tuple(_taken(path, file, name, size) for name, size in zip(names, sizes, strict=True))
                left.difference_update(names)
        if left:
            raise CheckpointError(f"{path}: tensor {min(left)} belongs to no matrix that this model has and {CONFIG} names")
        if not found:
            raise CheckpointError(f"{path.with_name(CONFIG)}: target_modules name no matrix of this model's layers")
        return found

    def _joined(self, config: LoraConfig, factors: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, LowRank]:
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


def _taken(path: Path, file: Any, name: str, size: tuple[int, int]) -> Tensor:
    """A tensor of this size, in float32 and in memory of its own."""
    if name not in file.keys():  # noqa: SIM118 - not a dict
        raise CheckpointError(f"{path}: tensor {name} is missing, though {CONFIG} names its module")
    found = tuple(file.get_slice(name).get_shape())
    if found != size:
        raise CheckpointError(f"{path}: tensor {name} has shape {list(found)}, expected {list(size)}")
    tensor: Tensor = file.get_tensor(name)
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
        form.name, form.base, form.step = name, base, step
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
        """The matrix without adapters."""
        return self.base.dense()


class AdaptedDecoder:
    """Puts adapters beside every matrix of the blocks of a decoder in PyTorch, on a CPU."""

    def __init__(self, net: Decoder) -> None:
        self.groups: list[tuple[Adapter, Tensor]] = []

        def form(name: str, linear: Linear) -> Linear:
            plain = isinstance(linear, ExpertLinear) or not name.startswith("blocks.")
            return linear if plain else AdaptedLinear.around(name, linear, self)

        reform(net, form)

    def prepare(self, adapter: Adapter) -> None:
        """Nothing is to be done."""

    def use(self, groups: Sequence[Group], num_tokens: int) -> None:
        """From now on the tokens of a step have these adapters; without groups none."""
        self.groups = [(adapter, torch.tensor(tokens)) for adapter, tokens in groups]

"""The part of a decoder that one of N ranks has: some heads, some columns of each MLP, some experts, some of the vocabulary.

The embedding, the norms and the routers are whole on every rank. Shapes: T tokens · V vocabulary · E model width.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig
from model.errors import SettingError
from model.net.attention import MultiHeadAttention
from model.net.checkpoint import fill
from model.net.experts import Mixture
from model.net.linear import Linear, reform
from model.net.transformer import Decoder
from model.parallel.group import Group


class SummedLinear(Linear):
    """A matrix whose columns the ranks share: their products are summed. Rank 0 alone adds the bias."""

    ATTRIBUTES = (*Linear.ATTRIBUTES, "group")
    group: Group

    def forward(self, x: Tensor) -> Tensor:
        """[T, I] of this rank to [T, O] of all."""
        return self.group.sum(F.linear(x, self.weight, self.bias))


class GatheredHead(Linear):
    """The head, with some rows of the vocabulary on each rank. The scores of all are put side by side."""

    ATTRIBUTES = (*Linear.ATTRIBUTES, "group")
    group: Group

    def share(self, other: nn.Module) -> None:
        """Have this rank's rows of the embedding, without a copy."""
        weight = other.weight
        assert isinstance(weight, Tensor)
        self.weight = nn.Parameter(weight[self.rows[0].start : self.rows[0].stop], requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[T, E] to the scores [T, V] of the whole vocabulary."""
        size, ranks = self.whole[0], self.group.ranks
        scores = F.linear(x, self.weight)
        widest = -(-size // ranks)  # the collective takes parts of one size
        parts = self.group.gather(F.pad(scores, (0, widest - scores.shape[-1])))
        return torch.cat([part[..., : len(_share(size, rank, ranks))] for rank, part in enumerate(parts)], dim=-1)


class GatheredNorm(nn.Module):
    """A norm over all heads side by side, where each rank has some of them."""

    def __init__(self, norm: nn.Module, group: Group, copies: int) -> None:
        """`copies`: ranks that have the same heads."""
        super().__init__()
        self.norm, self.group, self.copies = norm, group, copies

    def forward(self, x: Tensor) -> Tensor:
        """[T, Q] of this rank, normed over the columns of all ranks."""
        whole = self.norm(torch.cat(self.group.gather(x)[:: self.copies], dim=-1))
        own: Tensor = whole.split(x.shape[-1], dim=-1)[self.group.rank // self.copies]
        return own


def check(config: ModelConfig, ranks: int) -> None:
    """Refuse by name what so many ranks cannot share: SettingError."""
    shared = config.num_kv_heads % ranks == 0 or ranks % config.num_kv_heads == 0
    sizes = [("heads", config.num_heads), ("columns of the MLP", config.mlp_size)]
    for layer in config.layers:
        if layer.delta is not None:
            raise SettingError(f"tensor_parallel is {ranks}, but this model keeps states, which ranks do not share yet")
        if layer.experts is not None and layer.experts.shared_expert_size is not None:
            sizes.append(("columns of the shared expert", layer.experts.shared_expert_size))
    for name, size in sizes:
        if size % ranks:
            raise SettingError(f"tensor_parallel is {ranks}, but {ranks} ranks cannot share {size} {name} evenly")
    if not shared:
        raise SettingError(f"tensor_parallel is {ranks}, but {ranks} ranks cannot share {config.num_kv_heads} key/value heads")


def config_of(config: ModelConfig, ranks: int) -> ModelConfig:
    """What a rank keeps keys and values of: its own heads. Where there are fewer than ranks, several have the same."""
    return replace(config, num_heads=config.num_heads // ranks, num_kv_heads=max(1, config.num_kv_heads // ranks))


def load_shard(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    group: Group,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Decoder:
    """The decoder of one rank, in inference mode. Memory is taken for its own parts alone. Raises CheckpointError.

    SettingError, before weights are read, where the ranks cannot share the model.
    """
    check(config, group.ranks)
    with torch.device("meta"):
        net = Decoder(config, 0)
    shard(net, group)
    fill(net, folder, dtype, group.device, report=report)
    for module in net.modules():
        if isinstance(module, MultiHeadAttention):
            _share_heads(module, config, group)
    return net.to(group.device).eval().requires_grad_(False)


def shard(net: Decoder, group: Group) -> None:
    """Leave this rank's part of a decoder without numbers."""
    rank, ranks = group.rank, group.ranks

    def part(name: str, linear: Linear) -> Linear:
        if name == "head":
            rows = _share(net.config.vocab_size, rank, ranks)
            return GatheredHead.of(linear, rows=[rows], parts=(len(rows),), out_features=len(rows), group=group)
        piece = linear.shard(rank, ranks)
        return SummedLinear.of(piece, group=group) if linear.cut == "columns" else piece

    reform(net, part)
    for module in net.modules():
        if isinstance(module, Mixture):
            _share_experts(module, group)


def _share_heads(module: MultiHeadAttention, config: ModelConfig, group: Group) -> None:
    """Sinks and norms of all heads side by side, which are read whole."""
    if module.sinks is not None:
        module.sinks = nn.Parameter(module.sinks.chunk(group.ranks)[group.rank].clone())
    if config.qk_norm == "all":
        module.q_norm = GatheredNorm(module.q_norm, group, 1)
        module.k_norm = GatheredNorm(module.k_norm, group, max(1, group.ranks // config.num_kv_heads))


def _share_experts(mixture: Mixture, group: Group) -> None:
    mine = _share(mixture.mixture.num_experts, group.rank, group.ranks)
    mixture.mine, mixture.summed = mine, group.sum
    for name in ("gate_up", "down"):
        matrix = getattr(mixture.experts, name)
        setattr(mixture.experts, name, matrix.some(mine))


def _share(size: int, rank: int, ranks: int) -> range:
    """What a rank has of so many: no rank has two more than another one."""
    return range(rank * size // ranks, (rank + 1) * size // ranks)

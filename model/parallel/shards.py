"""Sharded weights: the part of a decoder that one of N ranks of tensor parallelism has: some heads, some columns of each MLP,
some experts, some of the vocabulary.

The embedding, the norms and the routers are whole on every rank. Shapes: T tokens · V vocabulary · E model width.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attend.model.config import ModelConfig
from attend.model.errors import SettingError
from attend.model.net.attention import MultiHeadAttention
from attend.model.net.checkpoint import fill, forms_of
from attend.model.net.experts import Mixture
from attend.model.net.features import features
from attend.model.net.linear import Linear, replace_linears
from attend.model.net.transformer import Decoder
from attend.model.net.weight_memory import check_weight_memory
from attend.model.parallel.group import ProcessGroup

NOT_SHARED = {"heads_by_layer", "keys_are_values", "kv_shared_layers", "per_layer_inputs", "experts_beside_mlp"}
"""Features of models that one rank alone computes."""


class SummedLinear(Linear):
    """A matrix whose columns the ranks share: their products are summed. Rank 0 alone adds the bias."""

    ATTRIBUTES = (*Linear.ATTRIBUTES, "group")
    group: ProcessGroup

    def forward(self, x: Tensor) -> Tensor:
        """[T, I] of this rank to [T, O] of all."""
        return self.group.sum(F.linear(x, self.weight, self.bias))


class SplitEmbedding(Linear):
    """The vectors of tokens as the rows of a matrix, with some of the vocabulary on each rank."""

    ATTRIBUTES = (*Linear.ATTRIBUTES, "group")
    group: ProcessGroup

    def forward(self, tokens_T: Tensor) -> Tensor:
        """Token ids [T] to vectors [T, E]. Exact: all ranks but one add zeros."""
        mine = self.rows[0]
        here_T = (tokens_T >= mine.start) & (tokens_T < mine.stop)
        rows_TE = F.embedding((tokens_T - mine.start).clamp(0, len(mine) - 1), self.weight)
        return self.group.sum(rows_TE.masked_fill(~here_T[:, None], 0))


class SplitHead(Linear):
    """The head, with some rows of the vocabulary on each rank."""

    ATTRIBUTES = (*Linear.ATTRIBUTES, "group")
    group: ProcessGroup

    def forward(self, x: Tensor) -> Tensor:
        """[T, E] to the scores [T, V] of the whole vocabulary: the parts of all ranks side by side."""
        size, ranks = self.whole[0], self.group.ranks
        scores = F.linear(x, self.weight)
        widest = -(-size // ranks)  # the collective takes parts of one size
        parts = self.group.gather(F.pad(scores, (0, widest - scores.shape[-1])))
        return torch.cat([part[..., : len(_share(size, rank, ranks))] for rank, part in enumerate(parts)], dim=-1)


class GatheredNorm(nn.Module):
    """A norm over all heads side by side, where each rank has some of them."""

    def __init__(self, norm: nn.Module, group: ProcessGroup, copies: int) -> None:
        """`copies`: ranks that have the same heads."""
        super().__init__()
        self.norm, self.group, self.copies = norm, group, copies

    def forward(self, x: Tensor) -> Tensor:
        """[T, Q] of this rank, normed over the columns of all ranks."""
        whole = self.norm(torch.cat(list(self.group.gather(x)[:: self.copies]), dim=-1))
        own: Tensor = whole.split(x.shape[-1], dim=-1)[self.group.rank // self.copies]
        return own


def check_shards(config: ModelConfig, ranks: int) -> None:
    """Refuse by name what so many ranks cannot share, with the name of the setting: SettingError."""
    if ranks > 1 and (lacking := sorted(features(config) & NOT_SHARED)):
        raise SettingError(
            f"tensor_parallel is {ranks}, but {', '.join(lacking)} are not supported with tensor parallelism yet"
        )
    shared = config.num_kv_heads % ranks == 0 or ranks % config.num_kv_heads == 0
    sizes = [("heads", config.num_heads), ("columns of the MLP", config.mlp_size)]
    for layer in config.layers:
        if config.head_gate and ranks > 1:
            raise SettingError(f"tensor_parallel is {ranks}, but gates of heads are not supported with tensor parallelism yet")
        if layer.recurrence is not None and ranks > 1:
            raise SettingError(
                f"tensor_parallel is {ranks}, but a recurrent state is not supported with tensor parallelism yet"
            )
        if layer.experts is not None and layer.experts.shared_expert_size is not None:
            sizes.append(("columns of the shared expert", layer.experts.shared_expert_size))
    for name, size in sizes:
        if size % ranks:
            raise SettingError(f"tensor_parallel is {ranks}, but {size} {name} are not divisible by it")
    if not shared:
        raise SettingError(
            f"tensor_parallel is {ranks}, but {config.num_kv_heads} key/value heads cannot be divided among {ranks} ranks"
        )


def config_of(config: ModelConfig, ranks: int) -> ModelConfig:
    """The model as a rank computes it, with its own heads. Where there are fewer key/value heads than ranks, several ranks have
    the same.
    """
    return replace(config, num_heads=config.num_heads // ranks, num_kv_heads=max(1, config.num_kv_heads // ranks))


def load_shard(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    group: ProcessGroup,
    report: Callable[[int, int], None] = lambda num_bytes, total: None,
) -> Decoder:
    """The decoder of one rank, in inference mode; its `config` has the rank's own heads. Memory is taken for its own parts
    alone. Raises CheckpointError.

    SettingError, before weights are read, where the ranks cannot share the model.
    """
    check_shards(config, group.ranks)
    with torch.device("meta"):
        net = Decoder(config, 0)
    if group.rank == 0:
        forms_of(net, folder)  # it logs what of the files is not carried out
    shard(net, group)
    check_weight_memory(net, folder, dtype, group.device, group.ranks if group.device == "cpu" else 1)
    fill(net, folder, dtype, group.device, report=report)
    for module in net.modules():
        if isinstance(module, MultiHeadAttention):
            _share_heads(module, config, group)
    net.config = config_of(config, group.ranks)
    return net.to(group.device).eval().requires_grad_(False)


def shard(net: Decoder, group: ProcessGroup) -> None:
    """Leave this rank's part of a decoder without numbers."""
    rank, ranks = group.rank, group.ranks

    def part(name: str, linear: Linear) -> Linear:
        if name == "head":
            return _some_rows(SplitHead, linear, group)
        piece = linear.shard(rank, ranks)
        return SummedLinear.of(piece, group=group) if linear.shard_dim == "columns" else piece

    replace_linears(net, part)
    with torch.device("meta"):
        table = Linear(net.config.hidden_size, [net.config.vocab_size], bias=False)
    net.embedding.tokens = _some_rows(SplitEmbedding, table, group)
    for module in net.modules():
        if isinstance(module, Mixture):
            _share_experts(module, group)


def _some_rows(form: type[SplitEmbedding] | type[SplitHead], linear: Linear, group: ProcessGroup) -> Linear:
    """This rank's part of the vocabulary, without numbers."""
    rows = _share(linear.whole[0], group.rank, group.ranks)
    return form.of(linear, rows=[rows], parts=(len(rows),), out_features=len(rows), group=group)


def _share_heads(module: MultiHeadAttention, config: ModelConfig, group: ProcessGroup) -> None:
    """Sinks and norms of all heads side by side, which are read whole."""
    if module.sinks is not None:
        module.sinks = nn.Parameter(module.sinks.chunk(group.ranks)[group.rank].clone())
    if config.qk_norm == "all":
        module.q_norm = GatheredNorm(module.q_norm, group, 1)
        module.k_norm = GatheredNorm(module.k_norm, group, max(1, group.ranks // config.num_kv_heads))


def _share_experts(mixture: Mixture, group: ProcessGroup) -> None:
    mine = _share(mixture.mixture.num_experts, group.rank, group.ranks)
    mixture.mine, mixture.summed = mine, group.sum
    for name in ("gate_up", "down"):
        matrix = getattr(mixture.experts, name)
        setattr(mixture.experts, name, matrix.some(mine))


def _share(size: int, rank: int, ranks: int) -> range:
    """What a rank has of so many: no rank has two more than another one."""
    return range(rank * size // ranks, (rank + 1) * size // ranks)

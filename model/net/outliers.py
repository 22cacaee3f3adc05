"""Puts outliers into a model without changing its function, to measure how a form of weights copes with them.

Large models have a few channels that are many times larger than the others behind every norm (Dettmers et al. 2022);
small ones have none.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from attend.model.errors import SettingError
from attend.model.net.checkpoint import load_decoder, save
from attend.model.net.experts import ExpertsBesideMLP
from attend.model.net.families.table import FAMILIES
from attend.model.net.linear import Linear
from attend.model.net.transformer import Block, Decoder

CHANNELS = 4
"""Columns that are made large in each norm: evenly spread, so that no two share a quantisation group of a wide matrix."""
READERS = ("qkv", "query", "q_down", "kv_down", "inputs", "gates", "gate_up", "up", "router", "shared_gate")
"""Matrices that read the norm before their sublayer."""


def write_with_outliers(folder: Path, target: Path, factor: float) -> None:
    """Write a model with outliers, in bfloat16 and without its tokenizer. Raises CheckpointError or SettingError."""
    net = load_decoder(folder, torch.float32, "cpu", context=0)
    if FAMILIES[net.config.family].write is None:
        raise SettingError(f"outliers cannot be put into a model of the family {net.config.family}: it is read only")
    put_outliers(net, factor)
    save(net, target, torch.bfloat16)


@torch.no_grad()
def put_outliers(net: Decoder, factor: float) -> None:
    """Multiply some channels of the norms before sublayers by `factor`, and divide the columns that read them by it.

    A power of two changes no bit of the weights but their exponents. Raises SettingError where no sublayer begins with a norm.
    """
    size = net.config.hidden_size
    channels = torch.arange(CHANNELS) * size // CHANNELS + size // CHANNELS // 2
    norms = [(norm, readers) for block in net.blocks for norm, readers in _norms(block) if not isinstance(norm, nn.Identity)]
    if net.config.norm_place == "post" or not norms:
        raise SettingError("outliers cannot be put into this model: it has no norms before its sublayers")
    for norm, readers in norms:
        for gain in norm.parameters():  # and its bias, where it has one
            gain[channels] *= factor
        for reader in readers:
            reader.weight[..., channels] /= factor


def _norms(block: Block) -> Iterator[tuple[nn.Module, list[Linear]]]:
    """Each norm before a sublayer with the matrices that read it."""
    attention, mlp = _readers(block.attention), _readers(block.mlp)
    if isinstance(block.mlp, ExpertsBesideMLP):
        yield block.attention_norm, attention
        yield block.mlp.shared_norm, _readers(block.mlp.shared)
        yield block.mlp.experts_norm, _readers(block.mlp.experts)
        yield block.mlp.router_norm, [block.mlp.router]
    elif isinstance(block.mlp_norm, nn.Identity):  # one norm may serve both
        yield block.attention_norm, attention + mlp
    else:
        yield block.attention_norm, attention
        yield block.mlp_norm, mlp


def _readers(sublayer: nn.Module) -> list[Linear]:
    matrices = ((name, module) for name, module in sublayer.named_modules() if isinstance(module, Linear))
    return [matrix for name, matrix in matrices if name.rpartition(".")[2] in READERS]

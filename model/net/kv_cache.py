"""The keys and values of all tokens in all layers, as numbers or in 8 bits.

In 8 bits the numbers of a head lie in groups of 32, the last of which may be shorter: signed codes, and one scale for each
group, x = code * scale. A few columns of keys are far larger than the others in some models: they cost no more than the
precision of their own group. Scales are bfloat16, rounded up, so that no number lies beyond the largest code: they have the
range of float32, and take a coarser step than it by less than 1 %. A group with a number that is not finite has the scale
NaN: it reads as NaN, so that its request ends, as it does where numbers are kept as they are.

A model with latent attention keeps one vector of a token in each layer, which is its key and its value.

Shapes: T tokens · S slots · K key/value heads · D head size · G groups of a head · W bytes of a head, its D codes and then
its G scales.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from attend.model.config import ModelConfig
from attend.model.net.mapped_memory import bytes_in_memory, large_pages
from attend.model.net.states import State, allocate
from attend.model.sublayers import KV_GROUP

LARGEST = 127
"""The largest code of int8 keys and values: codes are -127 to 127."""
_FRACTION = (1 << 16) - 1
"""The bits of float32 that bfloat16 does not have."""
_NAN = 0x7FC0
"""The bits of NaN in bfloat16."""


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of all layers, each a tensor [slots, K, D], or int8 [slots, K, W].

    Layers of one group have as many slots.
    """

    keys: list[Tensor]
    """Empty for a layer with a recurrent state; the other layer's tensor for one that shares its keys and values."""
    values: list[Tensor]
    """With latent attention the same tensors as the keys."""
    block_size: int
    group_of_layer: Sequence[int] = ()
    """Which of the layout's groups each layer belongs to; empty: there is one."""
    states: dict[int, State] = field(default_factory=dict)
    """Recurrent states of the layers that have them in place of keys and values: tensors [slots, ...]."""
    kv_layers: Sequence[int | None] = ()
    """The layer whose keys and values each reads, None: its own; empty: all have their own."""

    @classmethod
    def allocate(
        cls, config: ModelConfig, num_blocks: int | Sequence[int], block_size: int, dtype: torch.dtype, device: str
    ) -> "KVCache":
        """Room for `num_blocks` blocks, of each group or of all, beside the reserved one: zeros.

        On a CPU a page of it is taken where a step writes to it first, and on a GPU all of it now. With the dtype int8 it is in
        8 bits. Raises MemoryError.
        """
        groups, of_layer, layers = config.memory_groups, config.group_of_layer, config.layers
        counts = [num_blocks] * len(groups) if isinstance(num_blocks, int) else num_blocks
        slots = [0 if group.has_state else (count + 1) * block_size for group, count in zip(groups, counts, strict=True)]
        parts = 1 if config.latent is not None else 2
        widths = [layer.head_bytes(dtype.itemsize) // dtype.itemsize for layer in layers]
        sizes = [
            0 if layer.kv_layer is not None else slots[group] * layer.num_kv_heads * width
            for layer, group, width in zip(layers, of_layer, widths, strict=True)
        ]
        numbers = parts * sum(sizes)
        memory = large_pages(numbers, dtype) if device == "cpu" else torch.zeros(numbers, dtype=dtype, device=device)
        held = [
            part.view(-1, layer.num_kv_heads, width)
            for part, layer, width in zip(memory.split(sizes * parts), layers * parts, widths * parts, strict=True)
        ]
        kv_layers = [layer.kv_layer for layer in layers]
        owners = [number if owner is None else owner for number, owner in enumerate(kv_layers)]
        keys, values = ([half[owner] for owner in owners] for half in (held[: len(layers)], held[-len(layers) :]))
        return cls(keys, values, block_size, of_layer, allocate(config, counts[-1], device), kv_layers)

    @property
    def nbytes(self) -> int:
        """Bytes of all keys, values and states, taken or not."""
        states = sum(part.nbytes for state in self.states.values() for part in state)
        own = [layer for layer in range(len(self.keys)) if not self._shares(layer)]
        halves = (self.keys,) if self.values_are_keys else (self.keys, self.values)
        return states + sum(held[layer].nbytes for held in halves for layer in own)

    def resident_bytes(self, ranks: int = 1) -> int:
        """Bytes that are in memory, of all ranks, which have as much each. For any thread."""
        tensors = (*self.keys, *self.values, *(part for state in self.states.values() for part in state))
        if tensors[0].is_cuda:
            return self.nbytes * ranks
        storages = {held.data_ptr(): held.nbytes() for held in (each.untyped_storage() for each in tensors)}
        return ranks * sum(bytes_in_memory(start, size) for start, size in storages.items())

    @property
    def values_are_keys(self) -> bool:
        """True if keys and values are the same numbers, which are kept once."""
        return self.values[0] is self.keys[0]

    @property
    def num_groups(self) -> int:
        """Groups of layers that keep keys and values."""
        return 1 + max((group for layer, group in enumerate(self.group_of_layer) if layer not in self.states), default=0)

    @property
    def in_8_bits(self) -> bool:
        """True if it holds codes and scales."""
        return self.keys[0].dtype == torch.int8

    def write(self, layer: int, k_TKD: Tensor, v_TKD: Tensor, slots_T: Tensor) -> None:
        """Put keys and values into their slots; those of a layer that reads another one's are there."""
        if self._shares(layer):
            return
        pairs = ((self.keys[layer], k_TKD), (self.values[layer], v_TKD))
        for held, new_TKD in pairs[: 1 if self.values_are_keys else 2]:
            held.index_copy_(0, slots_T, encode(new_TKD) if self.in_8_bits else new_TKD)

    def _shares(self, layer: int) -> bool:
        return bool(self.kv_layers) and self.kv_layers[layer] is not None

    def read(self, layer: int, slots_S: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The keys and values [S, K, D] of some slots."""
        keys_SKD = self._numbers(self.keys[layer], slots_S, dtype)
        return keys_SKD, keys_SKD if self.values_are_keys else self._numbers(self.values[layer], slots_S, dtype)

    def _numbers(self, held: Tensor, slots_S: Tensor, dtype: torch.dtype) -> Tensor:
        found = held.index_select(0, slots_S)
        return (decode(found) if self.in_8_bits else found).to(dtype)


def encode(x_TKD: Tensor) -> Tensor:
    """Codes and scales, int8 [T, K, W]."""
    size = x_TKD.shape[-1]
    x_TKGN = F.pad(x_TKD.float(), (0, -size % KV_GROUP)).unflatten(-1, (-1, KV_GROUP))
    highest_TKG = x_TKGN.abs().amax(-1)  # NaN where there is one
    upwards_TKG = ((highest_TKG / LARGEST).view(torch.int32) + _FRACTION) >> 16
    scales_TKG = upwards_TKG.where(highest_TKG.isfinite(), _NAN).to(torch.int16).view(torch.bfloat16)
    codes = (x_TKGN / scales_TKG.float()[..., None]).round().nan_to_num(0).clamp(-LARGEST, LARGEST)  # 0 / 0 is 0 here
    codes_TKD = codes.flatten(-2)[..., :size].to(torch.int8)
    return torch.cat((codes_TKD, scales_TKG.view(torch.int8)), dim=-1)


def decode(held_SKW: Tensor) -> Tensor:
    """The numbers [S, K, D] of codes and scales: float32 holds them exactly."""
    width = held_SKW.shape[-1]
    size = width - 2 * -(-width // (KV_GROUP + 2))
    scales_SKG = held_SKW[..., size:].clone(memory_format=torch.contiguous_format).view(torch.bfloat16).float()
    return held_SKW[..., :size] * scales_SKG.repeat_interleave(KV_GROUP, dim=-1)[..., :size]

"""Copies the matrices of a decoder into a native one, from memory or straight from the mapped files that hold them.

Shapes: R rows · I columns.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from attend.model.config import LayerSpec, ModelConfig
from attend.model.errors import CheckpointError
from attend.model.net.experts import Mixture
from attend.model.net.formats.blocks import Blocks, MappedFiles, MappedRows
from attend.model.net.formats.weights import NOT_FINITE
from attend.model.net.linear import Linear, replace_linears
from attend.model.net.mapped_memory import read_ahead, read_now, release
from attend.model.net.native.unpacked_linear import Holder, UnpackedLinear
from attend.model.net.quantised import QuantisedLinear
from attend.model.net.transformer import Decoder
from attend.model.sublayers import ConvSpec, DeltaSpec

NO_ROOM = "out of memory: the native decoder's packed weights do not fit"
NO_MEMORY, BROKEN = 1, 2
"""What the library returns; BROKEN + n where part n is not finite."""
MATRICES = {type(None): ("qkv", "out"), DeltaSpec: ("inputs", "gates", "merge"), ConvSpec: ("inputs", "merge")}
"""Names of the matrices of attention, and of the recurrences that stand in its place."""


class _PlainRows(ctypes.Structure):
    """The struct PlainRows of matrix.h."""

    _fields_ = (("numbers", ctypes.c_void_p), ("rows", ctypes.c_int64))


class _BlockRows(ctypes.Structure):
    """The struct BlockRows of blocks.h."""

    _fields_ = (
        ("bytes", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("groups", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("type", ctypes.c_int64),
    )


def pack_decoder(holder: Holder, net: Decoder, *, spend: bool, report: Callable[[int, int], None]) -> None:
    """Copy all matrices of a decoder. `report`: see `checkpoint.load_decoder`.

    With `spend` each is freed as soon as it is copied, and an UnpackedLinear stands in its place. Raises CheckpointError where
    one is not finite, and MemoryError.
    """
    matrices, mapped, number, left = list(_matrices(net)), net.mapped_files, 0, {}
    read = 0 if mapped is None else mapped.read
    if spend and net.config.tied_head:
        net.embedding.tokens = None  # it is the head
    for parts, following in zip_longest(matrices, matrices[1:], fillvalue=()):
        firsts = accumulate((part.out_features for part in parts), initial=0)
        left |= {part: UnpackedLinear.inside(holder, part, number, first) for part, first in zip(parts, firsts, strict=False)}
        unread = [each for part in parts for each in part.mapped_rows]
        for each in unread:
            read_now(each.memory)
        for each in (rows for part in following for rows in part.mapped_rows):  # the system begins with them meanwhile
            read_ahead(each.memory)
        linear = _join_linears(parts)
        for function, arguments, origins in _pieces(linear):
            _check(getattr(holder.library, function)(holder.handle, number, *arguments), origins, mapped)
            number += 1
        for each in unread:
            release(each.memory)
        if mapped is not None:
            read += sum(each.memory.nbytes for each in unread)
            report(read, mapped.size)
        if spend:
            for spent in (linear, *parts):
                spent.drop()
            holder.library.attend_trim()
    if spend:
        replace_linears(net, lambda _, linear: left.get(linear, linear))  # vectors for each layer stay where they are


def _check(result: int, origins: Sequence[str], mapped: MappedFiles | None) -> None:
    if result == NO_MEMORY:
        raise MemoryError(NO_ROOM)
    if mapped is not None and result >= BROKEN and (origin := origins[result - BROKEN]):
        raise CheckpointError(f"{mapped.path}: {origin} {NOT_FINITE}")


def numbers_of_matrices(config: ModelConfig) -> dict[str, int]:
    """The matrices that adapters may change, by our names, as `attend_pack` numbers them."""
    numbers, next_number = {}, 1  # behind the head
    for layer, spec in enumerate(config.layers):
        names = [f"attention.{part}" for part in _mixing(config, spec)]
        if (experts := spec.experts) is None:
            names += ["mlp.gate_up" if config.gated_mlp else "mlp.up", "mlp.down"]
        else:
            names += [""] * (1 + 2 * experts.num_experts)
            names += ["mlp.shared.gate_up", "mlp.shared.down"] if experts.experts_beside_mlp else []
            names += [""] * (2 * (experts.shared_expert_size is not None))
        names += ["per_layer.gate", "per_layer.projection"] if config.per_layer_input_size else []
        numbers |= {f"blocks.{layer}.{name}": next_number + at for at, name in enumerate(names) if name}
        next_number += len(names)
    return numbers


def _mixing(config: ModelConfig, layer: LayerSpec) -> tuple[str, ...]:
    """The matrices of a layer's attention, or of what is in its place."""
    gated = layer.recurrence is None and config.head_gate
    return ("qkv", "gates", "out") if gated else MATRICES[type(layer.recurrence)]


def _matrices(net: Decoder) -> Iterator[tuple[Linear, ...]]:
    """In the order in which `attend_pack` numbers them; those of all experts are one module, and some lie under each other."""
    yield (net.head,)
    for block, layer in zip(net.blocks, net.config.layers, strict=True):
        attention, mlp = block.attention, block.mlp
        for name in _mixing(net.config, layer):
            yield (getattr(attention, name),)
        if isinstance(mlp, Mixture):
            yield (mlp.router,) if mlp.shared_gate is None else (mlp.router, mlp.shared_gate)
            yield from ((mlp.experts.gate_up,), (mlp.experts.down,))
            mlp = mlp.shared
        if mlp is not None:
            yield from ((mlp.gate_up if net.config.gated_mlp else mlp.up,), (mlp.down,))
        if block.per_layer is not None:
            yield from ((block.per_layer.gate,), (block.per_layer.projection,))
    if net.per_layer is not None:
        yield (net.per_layer.projection,)
    if not net.config.tied_head and isinstance(net.embedding.tokens, QuantisedLinear):
        yield (net.embedding.tokens,)


def _join_linears(parts: Sequence[Linear]) -> Linear:
    """Matrices under each other as one: a router, and the gate of the shared expert, which has no bias."""
    if len(parts) == 1:
        return parts[0]
    router, gate = parts
    with torch.device("meta"):
        both = Linear(router.in_features, [router.out_features, 1], bias=router.bias is not None)
    both.weight = nn.Parameter(torch.cat((router.dense(), gate.dense())), requires_grad=False)
    if router.bias is not None:
        both.bias = nn.Parameter(torch.cat((router.bias, router.bias.new_zeros(1))), requires_grad=False)
    return both


def _pieces(linear: Linear) -> Iterator[tuple[str, list[Any], list[str]]]:
    """What packs each matrix of a module, one or one for each expert: function, arguments, and where its parts are from."""
    if not isinstance(linear, QuantisedLinear):
        unread = linear.mapped_rows or (MappedRows(linear.dense(), ""),)
        for expert, parts in _of_experts(linear, unread):
            assert all(each.memory.dtype == torch.bfloat16 for each in parts)
            rows = [_PlainRows(each.memory.data_ptr(), each.num_rows) for each in parts]
            arguments = [(_PlainRows * len(rows))(*rows), _pointer(linear.bias, expert)]
            yield "attend_pack", arguments, [each.origin for each in parts]
        return
    table, experts = (ctypes.c_int8 * 16)(*linear.kind.values), range(linear.whole[0]) if len(linear.whole) > 2 else [...]
    if not linear.mapped_rows:
        for expert in experts:
            codes = (_pointer(part, expert) for part in (linear.codes, linear.scales, linear.minima, linear.units))
            yield "attend_pack_codes", [linear.kind.bits, *codes, table, _pointer(linear.bias, expert)], [""]
        return
    for expert, parts in _of_experts(linear, linear.mapped_rows):
        orders = [each.rows.order() for each in parts]  # alive until the next is asked for
        rows = [_block_rows(each.rows, order) for each, order in zip(parts, orders, strict=True)]
        coding = [linear.kind.bits, linear.has_minima, table, _pointer(linear.bias, expert)]
        yield "attend_pack_blocks", [*coding, (_BlockRows * len(rows))(*rows)], [each.origin for each in parts]


def _of_experts(linear: Linear, unread: Sequence[MappedRows]) -> Iterator[tuple[Any, list[MappedRows]]]:
    """Each expert and the parts of its rows; `...` and all parts of a matrix that is none of experts."""
    if len(linear.whole) < 3:
        yield ..., list(unread)
        return
    parts: list[MappedRows] = []
    expert = 0
    for whole in unread:
        for part in _split(whole, linear):
            parts.append(part)
            if sum(each.num_rows for each in parts) == linear.out_features:
                yield expert, parts
                parts, expert = [], expert + 1


def _split(part: MappedRows, linear: Linear) -> list[MappedRows]:
    """The rows of each expert, where a part has those of several."""
    if isinstance(part.rows, Blocks):
        return [part]
    return [MappedRows(some, part.origin) for some in part.rows.view(-1, linear.in_features).split(linear.out_features)]


def _block_rows(blocks: Blocks, order_R: Tensor | None) -> _BlockRows:
    rows, stride = blocks.bytes_RB.shape
    order, groups = (None if each is None else each.data_ptr() for each in (order_R, blocks.groups_G))
    return _BlockRows(blocks.bytes_RB.data_ptr(), order, groups, rows, stride, blocks.number)


def _pointer(tensor: Tensor | None, expert: Any) -> int | None:
    return None if tensor is None else tensor[expert].data_ptr()

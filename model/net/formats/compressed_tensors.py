"""compressed-tensors, what llm-compressor writes: weights in integers or floats, in one of several formats.

| format | a matrix [out, in] |
| pack-quantized | weight_packed int32 [out, in * bits / 32, rounded up], numbers from 0 on; weight_shape |
| int-quantized | weight int8 [out, in] |
| float-quantized | weight e4m3 [out, in] |
| naive-quantized | one of the latter two |
| mxfp4-pack-quantized | weight_packed bytes [out, in / 2], weight_scale bytes [out, in / 32]: see mxfp4.py |

weight_scale has a scale for the matrix [1], each row [out, 1], a group [out, groups], or a block; so has weight_zero_point, if
it is there, in packed words along the rows for the first format. `config_groups` say which modules have which of these, by
their names, by expressions that begin with `re:`, or by their class; `ignore` says which are plain.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from attend.model.net.formats import fp8, mxfp4
from attend.model.net.formats.codes import GROUP, INT8, MXFP4, CodeLayout, Codes
from attend.model.net.formats.format import (
    KINDS,
    SCALES,
    WORDS,
    DtypeOf,
    Find,
    Format,
    Part,
    Settings,
    Tensors,
    as_values,
    bits_of,
    check_order,
    count_groups,
    flat,
    group_of,
    has_minima,
    in_groups,
    module_of,
    not_supported,
    read_integer,
    regroup,
    unpack_words,
)

CLASSES = ("Linear", "Embedding")
"""Targets that name all matrices."""
PACKED, BYTES, FLOATS, MX = "pack-quantized", "int-quantized", "float-quantized", "mxfp4-pack-quantized"
NAIVE = {"int": BYTES, "float": FLOATS}
FORMATS = (PACKED, BYTES, FLOATS, MX)
SPARE = (*fp8.SPARE, ".input_zero_point", ".output_zero_point", ".input_global_scale")
SPARE += (".k_zero_point", ".v_zero_point", ".q_zero_point", ".kv_scale")
ORDERED = (
    "its columns were sorted by their activations (actorder {!r}), which is not supported; known: null, 'weight', 'static'"
)


class Scheme(NamedTuple):
    """How the matrices of one group of the config are quantised."""

    layout: str
    bits: int
    group: int
    """Columns that share a scale; -1: a row, or the matrix."""
    symmetric: bool
    block: tuple[int, int] | None
    """Rows and columns of floats that share a scale; None: `group` says it."""


class CompressedTensors(Format):
    """All matrices that are targets, and are there in the format of their group."""

    def __init__(self, settings: Settings) -> None:
        groups = settings.get("config_groups")
        if not groups and settings.get("kv_cache_scheme"):
            groups = {}  # weights are plain, and only the cache was to be rounded
        elif not isinstance(groups, dict) or not groups or not all(isinstance(group, dict) for group in groups.values()):
            raise not_supported(f"config_groups must be an object of groups; got {str(groups)[:64]}")
        _refuse(settings)
        self.ignored = _names(settings, "ignore")
        self.schemes: dict[str, Scheme] = {}
        self._known: dict[str, Scheme | None] = {}
        self._prefix, self._prefixes = "", [""]
        for group in groups.values():
            if group.get("weights") is not None:
                self.schemes |= dict.fromkeys(_names(group, "targets"), _scheme(group, str(settings.get("format"))))
        kinds = dict.fromkeys(map(_in_words, self.schemes.values()))
        self.title = f"compressed-tensors, {' and '.join(kinds) or 'plain weights'}"
        self.notes = tuple(dict.fromkeys(_notes(settings, groups.values(), self.schemes.values())))

    def spell(self, prefix: str, prefixes: Sequence[str]) -> None:
        """Modules of these files begin with `prefix`; the config may name them with any of `prefixes`."""
        self._prefix, self._prefixes = prefix, prefixes

    def scheme_of(self, name: str) -> Scheme | None:
        """The scheme of a matrix; None: it is not quantised."""
        if name not in self._known:
            self._known[name] = self._scheme_of(module_of(name))
        return self._known[name]

    def _scheme_of(self, module: str) -> Scheme | None:
        """Targets that are its name come first, then expressions, then its class."""
        names = [module]
        if module.startswith(self._prefix):
            names += [prefix + module.removeprefix(self._prefix) for prefix in self._prefixes]
        if any(_matches(each, name) for each in self.ignored for name in names):
            return None
        found = [target for target in self.schemes if any(_matches(target, name) for name in names)]
        found.sort(key=lambda each: each.startswith("re:"))
        found += [target for target in self.schemes if target in CLASSES]
        return self.schemes[found[0]] if found else None

    def holds(self, name: str, dtype_of: DtypeOf) -> bool:
        """True if it is a target, and is stored as its group says."""
        scheme = self.scheme_of(name)
        if scheme is None:
            return False
        if scheme.layout in (PACKED, MX):
            return dtype_of(f"{name}_packed") is not None or (dtype_of(name) is None and dtype_of(f"{name}_scale") is not None)
        return dtype_of(name) == ("I8" if scheme.layout == BYTES else "F8_E4M3")

    def parts(self, name: str, shape: Sequence[int], dtype_of: DtypeOf) -> dict[str, Part]:
        """The matrix and what belongs to it."""
        scheme = self._need_scheme(name)
        if scheme.layout == FLOATS:
            return fp8.matrix_parts(name, f"{name}_scale", shape, scheme.block)
        rows, columns = flat(shape)
        if scheme.layout == MX:
            groups = (rows, count_groups(columns, GROUP))
            return {
                "weight": Part(f"{name}_packed", mxfp4.BYTES, ((rows, columns // 2),)),
                "scale": Part(f"{name}_scale", mxfp4.BYTES, (groups,)),
            }
        groups = count_groups(columns, scheme.group)
        shapes: tuple[tuple[int, ...], ...] = ((rows, groups),)
        if scheme.group == -1:
            shapes = ((rows, 1), (rows,), (1,), ())
        found = {"scale": Part(f"{name}_scale", SCALES, shapes)}
        if scheme.layout == BYTES:
            zero = Part(f"{name}_zero_point", ("I8",), shapes, optional=scheme.symmetric)
            return {"weight": Part(name, ("I8",), ((rows, columns),))} | found | {"zero": zero}
        words = (-(-rows * scheme.bits // 32), groups)
        return {
            "weight": Part(f"{name}_packed", WORDS, ((rows, -(-columns * scheme.bits // 32)),)),
            **found,
            "zero": Part(f"{name}_zero_point", WORDS, (words,), optional=scheme.symmetric),
            "shape": Part(f"{name}_shape", ("I64", "I32"), ((2,),)),
            "order": Part(f"{name}_g_idx", ("I32", "I64"), ((columns,),), optional=True),
        }

    def form(self, name: str, tensor: Find) -> CodeLayout | None:
        """Codes of whole numbers, or of floats."""
        scheme = self._need_scheme(name)
        if scheme.layout == FLOATS:
            return fp8.form_of(scheme.block)
        kind = {MX: MXFP4, BYTES: INT8}.get(scheme.layout) or KINDS[scheme.bits]
        zeros, weight = tensor(f"{name}_zero_point"), tensor(f"{name}_packed")
        if scheme.layout == BYTES:
            return CodeLayout(kind, zeros is not None and bool(zeros.any()))
        return CodeLayout(
            kind, weight is not None and has_minima(zeros, lambda words: _unpack_zeros(words, scheme.bits, len(weight)))
        )

    def read(self, name: str, shape: Sequence[int], tensors: Tensors) -> Iterator[Tensor | Codes]:
        """Read all rows of a matrix as one piece."""
        scheme, weight, scale = self._need_scheme(name), tensors["weight"], tensors["scale"]
        if scheme.layout == FLOATS:
            yield fp8.to_codes(weight, scale, scheme.block)
            return
        if scheme.layout == MX:
            yield mxfp4.codes_of(weight, scale)
            return
        kind, zeros_OG = KINDS[scheme.bits], _zeros(scheme, tensors, shape[0])
        if scheme.layout == PACKED:
            _check(shape, tensors, scheme.group)
            weight = unpack_words(weight, scheme.bits)[:, : shape[1]]
            weight = weight if kind.values else as_values(weight, scheme.bits)
        yield regroup(INT8 if scheme.layout == BYTES else kind, weight, _by_rows(scale, shape[0]), zeros_OG)

    def is_spare(self, name: str, tensor: Callable[[], Tensor]) -> bool:
        """Scales of activations are, and zero points that are zero."""
        return name.endswith(SPARE)

    def _need_scheme(self, name: str) -> Scheme:
        scheme = self.scheme_of(name)
        assert scheme is not None, f"{name} is no target"
        return scheme


def _matches(target: str, module: str) -> bool:
    return re.match(target[3:], module) is not None if target.startswith("re:") else target == module


def _names(settings: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Names and expressions, which are tried here."""
    names = settings.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise not_supported(f"{key} must be a list of names; got {str(names)[:64]}")
    for name in names:
        try:
            re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
        except re.error as error:
            raise not_supported(f"{key} has {name!r}, which is no regular expression: {error}") from error
    return tuple(names)


def _refuse(settings: Settings) -> None:
    """Raise CheckpointError for what changes the weights in a way that is not built."""
    for key, named in (("sparsity_config", "format"), ("transform_config", "config_groups")):
        value = settings.get(key)
        found = value.get(named) if isinstance(value, dict) else value
        if found and found != "dense":
            raise not_supported(f"{key} is not supported: take a checkpoint without it")


def _scheme(group: Mapping[str, Any], layout: str) -> Scheme:
    weights = group["weights"]
    if not isinstance(weights, dict):
        raise not_supported(f"weights must be an object; got {str(weights)[:64]}")
    layout = group.get("format") or layout
    layout = NAIVE.get(weights.get("type", "int"), layout) if layout == "naive-quantized" else layout
    if layout not in FORMATS:
        raise not_supported(f"compressed-tensors in the format {layout!r} is not supported; known: {', '.join(FORMATS)}")
    order = weights.get("actorder")
    if order not in (None, False, "weight", "static"):
        raise not_supported(ORDERED.format(order))
    block = weights.get("block_structure")
    if weights.get("strategy") == "block" and (layout != FLOATS or not fp8.is_block(block)):
        raise not_supported(f"blocks {block!r} of {layout} weights are not supported; known: blocks of float-quantized weights")
    grouped_ = weights.get("strategy") in ("group", "tensor_group") or read_integer(weights, "group_size", default=-1) > 0
    if layout == FLOATS and grouped_:
        raise not_supported("float-quantized weights in groups are not supported; known: of a matrix, of rows, of blocks")
    bits = bits_of(weights, "num_bits", supported_bits={PACKED: (4, 8), MX: (4,)}.get(layout, (8,)))
    group_ = group_of(weights, "group_size") if grouped_ else -1
    return Scheme(layout, bits, group_, weights.get("symmetric", True) is not False, tuple(block) if block else None)


def _in_words(scheme: Scheme) -> str:
    if scheme.layout == FLOATS:
        return "float-quantized: FP8, scales of " + (
            "blocks of {} x {}".format(*scheme.block) if scheme.block else "rows or of matrices"
        )
    return f"{scheme.layout}: {in_groups(scheme.bits, scheme.group)}"


def _notes(settings: Settings, groups: Any, schemes: Any) -> Iterator[str]:
    if any(scheme.layout == FLOATS for scheme in schemes):
        yield fp8.PLAIN
    if any(group.get(key) for group in groups for key in ("input_activations", "output_activations")):
        yield "the activation quantisation of config_groups is ignored: activations keep their precision"
    if settings.get("kv_cache_scheme"):
        yield "kv_cache_scheme is ignored: --kv-dtype sets the type of the KV cache"


def _by_rows(part: Tensor, rows: int) -> Tensor:
    """[rows, groups], also where one number is for all rows."""
    return part.reshape(-1, 1).expand(rows, 1) if part.dim() < 2 else part


def _zeros(scheme: Scheme, tensors: Tensors, rows: int) -> Tensor | None:
    """Zero points as values, [rows, groups]; None where there are none."""
    zeros = tensors.get("zero")
    if zeros is None:
        return None
    return _by_rows(zeros, rows) if scheme.layout == BYTES else _unpack_zeros(zeros, scheme.bits, rows)


def _unpack_zeros(words: Tensor, bits: int, rows: int) -> Tensor:
    """Packed zero points [rows * bits / 32, groups] as values [rows, groups]."""
    return as_values(unpack_words(words.T, bits)[:, :rows].T, bits)


def _check(shape: Sequence[int], tensors: Tensors, group: int) -> None:
    if tensors["shape"].tolist() != list(shape):
        raise ValueError(f"its weight_shape is {tensors['shape'].tolist()}, expected {list(shape)}")
    if "order" in tensors:
        check_order(tensors["order"], group)

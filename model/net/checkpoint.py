"""Checkpoint folders in the Hugging Face layout: config.json, model.safetensors (or shards), tokenizer.json.

Only safetensors are read: a pickle can run code. Loading is strict: every tensor that is missing, unexpected,
misshapen or not finite is named, with the file it should be in.
"""

import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from model import generation_config
from model.config import ModelConfig
from model.errors import CheckpointError
from model.net import mxfp4
from model.net.families.reading import Family
from model.net.families.table import FAMILIES, family_of, part_shapes, their_names
from model.net.formats.codes import Kind
from model.net.linear import Linear
from model.net.mapped import release
from model.net.quantised import quantise_matrices
from model.net.transformer import Decoder
from model.weights import INDEX, check_header, check_links, read_index, read_json, weight_files

log = logging.getLogger("attend.model")

STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
"""What weights may be stored in, under safetensors' names; an eight-bit float needs scales that are not read."""

SHOWN = 5
"""At most so many bad tensors are named in one message."""


def read_config(folder: Path) -> ModelConfig:
    """The model that a folder holds, without touching its weights."""
    raw = read_json(folder, "config.json")
    check_links(folder)
    config = _guarded(family_of(raw), raw)
    return replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *generation_config.stop_tokens(folder)))))


def load(
    folder: Path,
    dtype: torch.dtype,
    device: str,
    context: int | None = None,
    *,
    quantize: Kind | None = None,
    mapped: bool = False,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Decoder:
    """The decoder of a folder, in inference mode on `device`, with tables for `context` positions. Raises CheckpointError.

    With `quantize`, matrices are kept in whole numbers of that kind.
    With `mapped`, matrices that are as the file has them stay in the mapped file: for a caller who copies them at once.
    `report` is told, again and again, the bytes that are read, and those that there are.
    """
    with torch.device("meta"):
        net = Decoder(read_config(folder), context)
        if quantize is not None:
            quantise_matrices(net, quantize)
    fill(net, folder, dtype, device, mapped=mapped, report=report)
    return net.to(device).eval().requires_grad_(False)


def fill(
    net: Decoder,
    folder: Path,
    dtype: torch.dtype,
    device: str,
    *,
    mapped: bool = False,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Read the weights of a folder into a decoder on the meta device, whatever the forms of its matrices. See `load`."""
    family, tied = family_of(read_json(folder, "config.json")), net.config.tied_head
    with _Weights(folder) as weights:
        family = weights.spelled(family)
        for slot in _slots(net):
            first, copied = 0, not mapped or (slot.ours.startswith("embedding.") and not tied)
            for tensor in _pieces(net.config, family, weights, slot):
                stays = not copied and tensor.dim() > 1 and tensor.dtype == dtype and weights.owns(tensor)
                _put(slot, first, tensor, torch.float32 if _has_offset(family, slot) else dtype, device, stays=stays)
                first += tensor.numel() // (slot.shape[-1] if slot.kind == "weight" else 1)
                weights.release()
                report(weights.read, weights.size)
        if tied:
            weights.check_tied(family, net.config)
        weights.check(family, tied=tied)
        for start, lacking in family.left_out.items():
            if any(name.startswith(start) for name in weights.where):
                log.info("the tensors %s* are left out: %s", start, lacking)
    if tied:
        net.head.share(net.embedding.tokens)
    net.mapped = mapped


def inspect(folder: Path) -> ModelConfig:
    """Check names and shapes of a folder's tensors without reading their values. Raises CheckpointError."""
    config = read_config(folder)
    family = family_of(read_json(folder, "config.json"))
    with torch.device("meta"):
        net = Decoder(config, context=0)
    with _Weights(folder) as weights:
        family = weights.spelled(family)
        for slot in _slots(net):
            for name, shape in _their_shapes(net.config, family, slot):
                weights.find(name, shape, family.optional_part)
        weights.check(family, tied=config.tied_head)
    return config


def save(net: Decoder, folder: Path, dtype: torch.dtype) -> None:
    """Write config.json and model.safetensors, so that `load`, and `transformers` for its families, read them."""
    family = FAMILIES[net.config.family]
    assert family.write is not None, f"{net.config.family} checkpoints are read only"
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for ours, parameter in net.named_parameters():
        theirs = their_names(family, net.config, ours)
        rows = [shape[0] for shape in part_shapes(net.config, ours, parameter.shape, len(theirs))]
        pieces = parameter.detach().to(dtype).split(rows)
        tensors |= {name: piece.contiguous().clone() for name, piece in zip(theirs, pieces, strict=True)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes for the owner alone
    document = family.write(net.config) | {"dtype": str(dtype).removeprefix("torch.")}
    if family.weights is None:
        del document["dtype"]
    (folder / "config.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _guarded(family: Family, raw: Mapping[str, Any]) -> ModelConfig:
    """A value of the wrong type deep in a config is the file's fault, not ours."""
    try:
        return family.read(raw)
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise CheckpointError(f"config.json has a value of the wrong type: {error}") from error


class _Weights:
    """The safetensors files of a folder as one mapping, which remembers what was asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = {path.name: _open(path) for path in weight_files(folder)}
        self.where: dict[str, str] = {}
        self.used: set[str] = set()
        self.problems: list[str] = []
        self.size = sum((folder / file).stat().st_size for file in self.files)
        self.read = 0
        self._taken: list[Tensor] = []
        for file, handle in self.files.items():
            for name in handle.keys():  # noqa: SIM118 - not a dict
                if self.where.setdefault(name, file) != file:
                    self.problems.append(f"tensor {name} is in {self.where[name]} and in {file}")
        for name, file in (read_index(folder) or {}).items():
            if self.where.get(name) != file:
                self.problems.append(f"{INDEX} says that tensor {name} is in {file}, which lacks it")

    def __enter__(self) -> "_Weights":
        return self

    def __exit__(self, *_: object) -> None:
        self.files.clear()

    def spelled(self, family: Family) -> Family:
        """The family with the fused tensors that are there."""
        fused = {}
        for ours, (theirs, *_) in family.fused.items():
            start, end = theirs.split("{}")
            starts = (start, start.replace(family.optional_part, "", 1))
            if any(name.startswith(starts) and name.endswith(end) for name in self.where):
                fused[ours] = (theirs,)
        return replace(family, weights={**(family.weights or {}), **fused}) if fused else family

    def find(self, name: str, shape: tuple[int, ...], optional: str) -> list[tuple[str, str]] | None:
        """(name, file) of what holds a tensor of this shape, itself or its MXFP4 parts; None after noting what is wrong."""
        parts = {name: shape}
        if name not in self.where and f"{name}_blocks" in self.where:
            parts = mxfp4.parts(name, shape)
        stored = STORED if name in parts else mxfp4.STORED
        places = [self._find(part, size, optional, stored) for part, size in parts.items()]
        found = [place for place in places if place is not None]
        return found if len(found) == len(places) else None

    def _find(self, name: str, shape: tuple[int, ...], optional: str, dtypes: Collection[str]) -> tuple[str, str] | None:
        short = name.replace(optional, "", 1)
        name = name if name in self.where or short not in self.where else short
        if name not in self.where:
            self.problems.append(f"tensor {name} is missing")
            return None
        self.used.add(name)
        file = self.where[name]
        tensor = self.files[file].get_slice(name)
        found, stored = tensor.get_shape(), tensor.get_dtype()
        if stored not in dtypes:
            self.problems.append(f"{file}: tensor {name} is {stored}, expected one of {', '.join(dtypes)}")
            return None
        if found != list(shape):
            self.problems.append(f"{file}: tensor {name} has shape {found}, expected {list(shape)}")
            return None
        return name, file

    def take(self, name: str, shape: tuple[int, ...], optional: str) -> Iterator[Tensor]:
        """A tensor in the mapped file, or the experts of one in MXFP4, one after the other. Ends after noting what is wrong."""
        places = self.find(name, shape, optional)
        if places is None:
            return
        held = [self.files[file].get_tensor(part) for part, file in places]
        self._taken += held
        self.read += sum(tensor.nbytes for tensor in held)
        name, file = places[0]
        for tensor in held if len(held) == 1 else _unpacked(*held):
            if not all(bound.isfinite() for bound in tensor.aminmax()):  # each of which is NaN where there is one
                self.problems.append(f"{file}: tensor {name} holds NaN or infinity")
                return
            yield tensor

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor lies where one does that was taken since the last `release`."""
        return any(tensor.untyped_storage().data_ptr() == taken.untyped_storage().data_ptr() for taken in self._taken)

    def release(self) -> None:
        """Let the pages go of the tensors that were taken."""
        for tensor in self._taken:
            release(tensor)
        self._taken.clear()

    def check_tied(self, family: Family, config: ModelConfig) -> None:
        """Note a head that is not the embedding, though the config ties them: whoever trained it did not."""
        [name], [head] = (their_names(family, config, ours) for ours in ("embedding.tokens.weight", "head.weight"))
        name = name if name in self.where else name.replace(family.optional_part, "", 1)
        if name in self.where and head in self.where:
            pair = [self.files[self.where[each]].get_tensor(each) for each in (name, head)]
            if not torch.equal(*pair):
                told = f"tensor {head} is not {name}, but config.json has tie_word_embeddings"
                self.problems.append(f"{self.where[head]}: {told}")
            self._taken += pair
            self.release()

    def check(self, family: Family, *, tied: bool) -> None:
        """Raise if anything was wrong, or if there are tensors that nobody asked for."""
        heads = (family.weights or {}).get("head.weight", ("lm_head.weight",))
        left_out = tuple(family.left_out)
        for name, file in self.where.items():
            ignored = family.ignored.search(name) or name.startswith(left_out) or (tied and name in heads)
            if name not in self.used and not ignored:
                self.problems.append(f"{file}: tensor {name} is unexpected")
        if self.problems:
            more = len(self.problems) - SHOWN
            tail = f"; and {more} more" if more > 0 else ""
            raise CheckpointError(f"{self.folder}: " + "; ".join(self.problems[:SHOWN]) + tail)


def _open(path: Path) -> Any:
    try:
        check_header(path)  # and safe_open calls a file that it may not read a missing one
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def _unpacked(blocks: Tensor, scales: Tensor) -> Iterator[Tensor]:
    """Experts [1, in, out]: all of them at once would take their room twice."""
    for expert in range(len(blocks)):
        yield mxfp4.unpack(blocks[expert : expert + 1], scales[expert : expert + 1]).mT


class _Slot(NamedTuple):
    """A parameter that the files fill."""

    ours: str
    module: nn.Module
    kind: str
    """Its name in the module."""
    shape: tuple[int, ...]
    """That of the whole, whatever part of it is here."""


def _slots(net: Decoder) -> Iterator[_Slot]:
    """Each parameter once: a tied head is the embedding."""
    for path, module in net.named_modules():
        if isinstance(module, Linear):
            shapes = {} if net.config.tied_head and module is net.head else module.shapes()
        else:
            shapes = {kind: tuple(parameter.shape) for kind, parameter in module.named_parameters(recurse=False)}
        for kind, shape in shapes.items():
            yield _Slot(f"{path}.{kind}", module, kind, shape)


def _pieces(config: ModelConfig, family: Family, weights: _Weights, slot: _Slot) -> Iterator[Tensor]:
    """What the files have of a parameter, rows first and as our equations want it: pieces in the order of the rows."""
    for name, shape in _their_shapes(config, family, slot):
        for tensor in weights.take(name, shape, family.optional_part):
            mine = tensor.mT if _is_transposed(family, slot) else tensor
            mine = mine if family.adapt is None else family.adapt(config, name, mine)
            if not weights.problems:  # or rows are missing before it
                yield mine if not _has_offset(family, slot) else mine.float() + family.gain_offset


def _put(slot: _Slot, first: int, tensor: Tensor, dtype: torch.dtype, device: str, *, stays: bool) -> None:
    """Fill rows of a parameter from `first` on; with `stays` a whole matrix stays where it lies, if its form allows it."""
    module, kind = slot.module, slot.kind
    if isinstance(module, Linear):
        if not (stays and module.adopt(tensor)):
            if first == 0:
                module.make_room(kind, dtype, device)
            module.fill(kind, first, tensor)
        return
    if not stays:
        tensor = tensor.to(device=device, dtype=dtype, copy=True)
    setattr(module, kind, nn.Parameter(tensor, requires_grad=False))


def _has_offset(family: Family, slot: _Slot) -> bool:
    return bool(family.gain_offset) and slot.ours.endswith("norm.weight")


def _their_shapes(config: ModelConfig, family: Family, slot: _Slot) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names and shapes that a checkpoint should hold for our parameter."""
    theirs = their_names(family, config, slot.ours)
    for name, shape in zip(theirs, part_shapes(config, slot.ours, slot.shape, len(theirs)), strict=True):
        yield name, (*shape[:-2], *shape[:-3:-1]) if _is_transposed(family, slot) else shape


def _is_transposed(family: Family, slot: _Slot) -> bool:
    return family.transposed is not None and len(slot.shape) > 1 and family.transposed.search(slot.ours) is not None

"""Loading and saving of checkpoint folders in the Hugging Face layout: config.json, model.safetensors (or shards),
tokenizer.json.

Only safetensors are read: a pickle can run code. Loading is strict: every tensor that is missing, unexpected,
misshapen or not finite is named, with the file it should be in.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from attend.model import generation_config
from attend.model.config import ModelConfig
from attend.model.errors import SettingError
from attend.model.gguf.paths import is_gguf
from attend.model.net.families.family import Family
from attend.model.net.families.table import FAMILIES, config_of, family_of, named_layers, part_shapes, read_checked, their_names
from attend.model.net.filling import Filler, Slot
from attend.model.net.formats.blocks import Blocks, MappedFiles
from attend.model.net.formats.codes import FP8, CodeLayout, Codes, Kind
from attend.model.net.formats.safetensors_files import Safetensors
from attend.model.net.formats.table import format_of
from attend.model.net.formats.weights import Weights
from attend.model.net.linear import Linear, replace_linears
from attend.model.net.quantised import PLAIN, QuantisedLinear, quantise_matrices, quantised_embedding
from attend.model.net.transformer import Decoder
from attend.model.net.weight_memory import check_weight_memory
from attend.model.pooling import read_rules
from attend.model.text.tokenizer_files import end_tokens
from attend.model.weights import check_links, read_json

log = logging.getLogger("attend.model")


def open_weights(folder: Path) -> Weights:
    """The tensors of a checkpoint. Raises CheckpointError."""
    if is_gguf(folder):
        from attend.model.net.formats.gguf import Gguf  # it needs the package gguf, and a folder does not

        return Gguf(folder)
    return Safetensors(folder)


def read_config(folder: Path) -> ModelConfig:
    """The model that a folder holds, without touching its weights. One that lacks its head has the embedding in its place."""
    raw = read_json(folder, "config.json")
    check_links(folder)
    config = config_of(folder)
    format_of(raw)
    of_tokenizer = [token for token in end_tokens(folder) if token < config.vocab_size]
    ends = (*config.eos_token_ids, *generation_config.stop_tokens(folder), *of_tokenizer)
    tied_head = lacks_head(folder) if not config.tied_head else not _brings_head(folder)
    return replace(config, tied_head=tied_head, eos_token_ids=tuple(dict.fromkeys(ends)))


def lacks_head(folder: Path) -> bool:
    """True if a folder holds a model of embeddings alone: its files say how they are made, and there is neither a head nor a
    tied one. Raises CheckpointError.
    """
    if is_gguf(folder) or read_rules(folder).pooling is None:
        return False
    raw = read_json(folder, "config.json")
    family = family_of(raw)
    config = read_checked(family, raw)
    return not config.tied_head and not _has_head(folder, family, config)


def makes_text(folder: Path) -> bool:
    """True if a folder has the head of a text: neither none, nor that of a reranker's labels alone. Raises CheckpointError."""
    if is_gguf(folder):
        from attend.model.gguf.documents import has_labels  # it needs numpy, and a folder does not

        return not has_labels(folder)
    return not lacks_head(folder)


def _brings_head(folder: Path) -> bool:
    """True if a folder has a head of its own, though its config.json does not say so. Raises CheckpointError."""
    raw = read_json(folder, "config.json")
    family = family_of(raw)
    if not family.head_if_there or raw.get("tie_word_embeddings") is not None or not any(folder.glob("*.safetensors")):
        return False
    return _has_head(folder, family, read_checked(family, raw))


def _has_head(folder: Path, family: Family, config: ModelConfig) -> bool:
    with open_weights(folder) as weights:
        [head] = their_names(weights.resolve_names(family), config, "head.weight")
        return any(name.startswith(head.removesuffix("weight")) for name in weights.where)


def load_decoder(
    folder: Path,
    dtype: torch.dtype,
    device: str,
    context: int | None = None,
    *,
    quantize: Kind | None = None,
    keep_codes: bool = False,
    keep_floats: bool = False,
    keep_mapped: bool = False,
    dummy: bool = False,
    report: Callable[[int, int], None] = lambda num_bytes, total: None,
) -> Decoder:
    """The decoder of a folder, in inference mode on `device`, with tables for `context` positions. Raises CheckpointError.

    With `quantize`, matrices are quantised to that kind; with `keep_codes`, the codes that the files have are kept, if any,
    and with `keep_floats` beside it in floats of 8 bits too.
    SettingError where the files have codes, and `quantize` asks for others.
    With `keep_mapped`, matrices that are as the file has them stay in the mapped file: for a caller who copies them at once.
    With `dummy` only config.json is read: see `draw_weights`.
    `report` is told, again and again, the bytes that are read, and those that there are.
    """
    with torch.device("meta"):
        net = Decoder(read_config(folder), context)
    forms = {} if dummy else forms_of(net, folder)
    if not keep_floats or quantize is not None:
        forms = whole_numbers(forms)
    if quantize is not None and forms:
        raise SettingError(
            f"quantize is {quantize.name}, but {folder} is already quantised: leave quantize out to keep its weights"
        )
    if quantize is not None:
        quantise_matrices(net, quantize)
    elif keep_codes:
        adopt_forms(net, forms)
    check_weight_memory(net, folder, dtype, device)
    if dummy:
        draw_weights(net, dtype, device)
    else:
        fill(net, folder, dtype, device, keep_mapped=keep_mapped, report=report)
    return net.to(device).eval().requires_grad_(False)


def fill(
    net: Decoder,
    folder: Path,
    dtype: torch.dtype,
    device: str,
    *,
    keep_mapped: bool = False,
    report: Callable[[int, int], None] = lambda num_bytes, total: None,
) -> None:
    """Read the weights of a folder into a decoder on the meta device, whatever the forms of its matrices. See
    `load_decoder`."""
    family, tied_head = family_of(read_json(folder, "config.json")), net.config.tied_head
    with open_weights(folder) as weights:
        family, plain, unread = named_layers(weights.resolve_names(family), net.config), False, 0
        rounded: set[torch.dtype] = set()
        for slot in _slots(net):
            filler = Filler(slot, weights, _parameter_dtype(family, slot, dtype), device)
            for piece in _pieces(net.config, family, weights, slot):
                if keep_mapped and filler.leave(piece, tied_head=tied_head):
                    continue
                for _ in filler.fill(piece):
                    weights.release()
                    report(weights.read - unread - filler.unread, weights.size)
                del piece  # before the next is made
            unread, plain = unread + filler.unread, plain or filler.dequantised
            rounded |= filler.rounded
        if tied_head:
            weights.check_tied(family, net.config)
        weights.check(family, tied_head=tied_head)
        for lacking in dict.fromkeys(family.left_out.values()):
            starts = [start for start, said in family.left_out.items() if said == lacking]
            if left := [f"{start}*" for start in starts if any(name.startswith(start) for name in weights.where)]:
                log.info("the tensors %s are left out: %s", ", ".join(left), lacking)
    if rounded:
        names, held = " and ".join(sorted(map(str, rounded))).replace("torch.", ""), str(dtype).removeprefix("torch.")
        log.info("weights in %s are rounded to %s; dtype = float32 is exact, and slower", names, held)
    if plain:
        log.info("quantised weights of the checkpoint are dequantised in memory")
    if tied_head:
        net.head.share(net.embedding.tokens)
    net.mapped_files = MappedFiles(folder, weights.read - unread, weights.size) if keep_mapped else None


def draw_weights(net: Decoder, dtype: torch.dtype, device: str) -> None:
    """Draw the weights of a decoder on the meta device, on `device` itself: a CPU would take minutes for 8B.

    They are the same each time. Matrices are normal with variance 1 / width, so that scores differ; gains are 1, biases 0.
    """
    family, dice = FAMILIES[net.config.family], torch.Generator(device).manual_seed(0)
    for slot in _slots(net):
        kept = _parameter_dtype(family, slot, dtype)
        numbers = torch.full(slot.shape, 1.0 if slot.kind == "weight" else 0.0, dtype=kept, device=device)
        if len(slot.shape) > 1 and slot.kind == "weight":
            numbers.normal_(0.0, slot.width**-0.5, generator=dice)
        if isinstance(slot.module, Linear) and not slot.module.adopt(numbers):
            slot.module.make_room(slot.kind, kept, device)
            slot.module.fill(slot.kind, 0, numbers)
        elif not isinstance(slot.module, Linear):
            setattr(slot.module, slot.kind, nn.Parameter(numbers, requires_grad=False))
    if net.config.tied_head:
        net.head.share(net.embedding.tokens)


def forms_of(net: Decoder, folder: Path, say: Callable[..., None] = log.info) -> dict[str, CodeLayout]:
    """What keeps each matrix that the files have in codes, by our names. Says in the log what of them is not carried out."""
    family, forms = family_of(read_json(folder, "config.json")), {}
    with open_weights(folder) as weights:
        family = weights.resolve_names(family)
        for slot in _slots(net):
            path = slot.ours.removesuffix(".weight")
            parts = [weights.form(name) for name, _ in _their_shapes(net.config, family, slot, weights)]
            coded = [form for form in parts if form is not None]
            alike = len({form.kind == FP8 for form in coded}) == 1  # no codes hold whole numbers and floats
            if alike and len(coded) == len(parts) and not path.endswith(PLAIN):
                forms[path] = reduce(CodeLayout.common_layout, coded)
        for note in weights.notes:
            say("%s: %s", folder, note)
    return forms


def whole_numbers(forms: Mapping[str, CodeLayout]) -> dict[str, CodeLayout]:
    """The forms whose codes are integers: all but float8."""
    return {path: form for path, form in forms.items() if form.kind != FP8}


def adopt_forms(net: Decoder, forms: Mapping[str, CodeLayout]) -> None:
    """Give matrices of a decoder without numbers these forms. A tied head has that of the embedding."""
    embedding = forms.get("embedding.tokens")
    if rounded := [form.rounded_types for form in forms.values() if form.rounded_types]:
        types = ", ".join(sorted(set().union(*rounded)))
        words = "%d weight matrices are requantised to int8, 8.5 bits per weight: no form of codes is exact for their types, %s"
        log.info(words, len(rounded), types)

    def to_stored_form(path: str, linear: Linear) -> Linear:
        form = embedding if path == "head" and net.config.tied_head else forms.get(path)
        return linear if form is None else QuantisedLinear.form(linear, form.kind, has_minima=form.has_minima)

    replace_linears(net, to_stored_form)
    for holder, form in ((net.embedding, embedding), (net.per_layer, forms.get("per_layer.tokens"))):
        if holder is not None and form is not None:
            holder.tokens = quantised_embedding(holder.tokens, form)


def quantised_decoder(folder: Path) -> Decoder:
    """A decoder without numbers, whose matrices have forms that keep the files' whole numbers. Raises CheckpointError."""
    with torch.device("meta"):
        net = Decoder(read_config(folder), context=0)
    adopt_forms(net, whole_numbers(forms_of(net, folder)))
    return net


def kinds_of(folder: Path) -> list[Kind]:
    """The kinds of codes that matrices of a folder are in, those of the fewest bits first."""
    with torch.device("meta"):
        net = Decoder(read_config(folder), context=0)
    kinds = {form.kind for form in forms_of(net, folder, log.debug).values()}
    return sorted(kinds, key=lambda kind: (kind.bits, kind.name))


def has_codes(folder: Path) -> bool:
    """True if matrices of a folder are quantised already, so that `load_decoder` makes no other codes of them."""
    return any(kind != FP8 for kind in kinds_of(folder))


def inspect(folder: Path) -> ModelConfig:
    """Check names and shapes of a folder's tensors without reading their values. Raises CheckpointError."""
    config = read_config(folder)
    family = family_of(read_json(folder, "config.json"))
    with torch.device("meta"):
        net = Decoder(config, context=0)
    with open_weights(folder) as weights:
        family = named_layers(weights.resolve_names(family), config)
        for slot in _slots(net):
            for name, shape in _their_shapes(net.config, family, slot, weights):
                weights.find(name, shape)
        weights.check(family, tied_head=config.tied_head)
    return config


def save(net: Decoder, folder: Path, dtype: torch.dtype) -> None:
    """Write config.json and model.safetensors, so that `load_decoder`, and `transformers` for its families, read them."""
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


def _slots(net: Decoder) -> Iterator[Slot]:
    """Each parameter once: a tied head is the embedding."""
    for path, module in net.named_modules():
        if isinstance(module, Linear):
            shapes = {} if net.config.tied_head and module is net.head else module.shapes()
        else:
            shapes = {kind: tuple(parameter.shape) for kind, parameter in module.named_parameters(recurse=False)}
        for kind, shape in shapes.items():
            yield Slot(f"{path}.{kind}", module, kind, shape)


def _pieces(config: ModelConfig, family: Family, weights: Weights, slot: Slot) -> Iterator[Tensor | Codes | Blocks]:
    """What the files have of a parameter, rows first and as our equations want it: pieces in the order of the rows.

    None is held when the next is made. A gain that the files do not have is 1.
    """
    if _is_gainless(family, slot):
        yield torch.ones(slot.shape)
    for name, shape in _their_shapes(config, family, slot, weights):
        pieces = weights.take(name, shape)
        yield from (_ours(config, family, slot, name, piece) for piece in pieces if not weights.problems)  # or rows are missing


def _ours(
    config: ModelConfig, family: Family, slot: Slot, name: str, piece: Tensor | Codes | Blocks
) -> Tensor | Codes | Blocks:
    """A piece with its rows first, in our order."""
    if isinstance(piece, (Codes, Blocks)):
        return piece if family.adapt is None else piece.each(partial(family.adapt, config, name))
    same = family.transposed_by_shape and piece.shape[-1] == slot.shape[-1]
    mine = piece.mT if _is_transposed(family, slot) and not same else piece
    mine = mine if family.adapt is None else family.adapt(config, name, mine)
    return mine if not _has_offset(family, slot) else mine.float() + family.gain_offset


def _parameter_dtype(family: Family, slot: Slot, dtype: torch.dtype) -> torch.dtype:
    """What a parameter is kept in: sums of gains, and what corrects a router's scores, in float32."""
    return torch.float32 if _has_offset(family, slot) or slot.kind == "correction" else dtype


def _has_offset(family: Family, slot: Slot) -> bool:
    return family.gain_offset is not None and family.offset_gains.search(slot.ours) is not None


def _is_gainless(family: Family, slot: Slot) -> bool:
    return family.gainless is not None and family.gainless.search(slot.ours) is not None


def _their_shapes(config: ModelConfig, family: Family, slot: Slot, weights: Weights) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names and shapes that a checkpoint should hold for our parameter."""
    if _is_gainless(family, slot):
        return
    theirs = their_names(family, config, slot.ours)
    shapes = part_shapes(config, slot.ours, slot.shape, len(theirs))
    if slot.kind == "convolution" and len(theirs) > 1:
        shapes = _split_conv(slot.shape, shapes, weights.shape(theirs[0]))
    for name, shape in zip(theirs, shapes, strict=True):
        same = family.transposed_by_shape and weights.shape(name) == tuple(shape)
        turned = _is_transposed(family, slot) and not same and weights.form(name) is None  # codes have their rows first
        if family.rows is not None and family.rows.search(slot.ours):
            shape = (1, *shape)
        yield name, (*shape[:-2], *shape[:-3:-1]) if turned else shape


def _split_conv(whole: tuple[int, ...], parts: list[tuple[int, ...]], first: tuple[int, ...] | None) -> list[tuple[int, ...]]:
    """The parts of a convolution. `transformers` writes three with as many rows each, as `torch.chunk` makes them, and lays
    them under each other when it reads them. `first`: the shape of the first part in the files.
    """
    rows = -(-whole[0] // len(parts))
    even = [(min(rows, whole[0] - begin), *whole[1:]) for begin in range(0, whole[0], rows)]
    return even if first is not None and first[0] == rows and len(even) == len(parts) else parts


def _is_transposed(family: Family, slot: Slot) -> bool:
    return (
        family.transposed_weights is not None
        and len(slot.shape) > 1
        and family.transposed_weights.search(slot.ours) is not None
    )

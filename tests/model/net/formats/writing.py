"""Tiny quantised checkpoints beside plain ones with the same numbers, and the writers of some layouts, by what is published."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from attend.model.net.checkpoint import load_decoder
from attend.model.net.formats.codes import Codes
from attend.model.net.formats.safetensors_files import Safetensors
from attend.model.net.linear import Linear
from attend.model.net.quantised import QuantisedLinear
from attend.model.net.transformer import Decoder
from attend.model.train.loss import hidden_states
from tests.model.checkpoints import edit_config, shaped, spread

TOKENS = torch.tensor([[5, 17, 80, 3, 44, 61, 9, 2, 33, 70, 12]])
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 2}


class Packed(NamedTuple):
    """A matrix in a layout."""

    tensors: dict[str, Tensor]
    """By what takes the place of `.weight` in its name."""
    numbers: Tensor
    """Float32: what it means."""


Pack = Callable[[Tensor], Packed]


def plain_folder(folder: Path, family: str = "Llama", **more: Any) -> Path:
    """A checkpoint by `transformers`, float32."""
    torch.manual_seed(3)
    net = shaped(family, **{"tie_word_embeddings": False} | SIZES | more)
    spread(net)
    net.save_pretrained(folder)
    return folder


def is_matrix(name: str, tensor: Tensor) -> bool:
    """What quantisers change by themselves: the matrices of the blocks."""
    return (
        tensor.dim() == 2
        and ".weight" in name
        and not any(part in name for part in ("embed", "lm_head", "router", "wte", "wpe"))
    )


def pack_folder(
    plain: Path,
    pack: Pack,
    settings: dict[str, Any],
    chosen: Callable[[str, Tensor], bool] = is_matrix,
    *,
    turned: bool = False,
) -> Path:
    """The folder with its matrices in a layout; those of the plain folder become what it means. `turned`: it has [in, out]."""
    folder = plain.with_name("packed")
    shutil.copytree(plain, folder)
    given = load_file(plain / "model.safetensors")
    numbers, tensors = dict(given), {}
    for name, tensor in given.items():
        if not chosen(name, tensor):
            tensors[name] = tensor
            continue
        packed = pack(tensor.T if turned else tensor)
        numbers[name] = (packed.numbers.T if turned else packed.numbers).contiguous()
        tensors |= {name.removesuffix(".weight") + ending: part.contiguous() for ending, part in packed.tensors.items()}
    save_file(numbers, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, quantization_config=settings)
    return folder


def logits(net: Decoder) -> Tensor:
    """Scores of a text."""
    return net.logits(hidden_states(net, TOKENS))


def assert_means(folder: Path, plain: Path, *, coded: bool = True) -> Decoder:
    """A folder's decoder has the numbers of the plain one, to the bit."""
    small, large = (load_decoder(each, torch.float32, "cpu", keep_codes=True) for each in (folder, plain))
    assert coded == any(isinstance(module, QuantisedLinear) for module in small.modules())
    for name, matrix in large.named_modules():
        if isinstance(matrix, Linear):
            assert torch.equal(small.get_submodule(name).dense(), matrix.weight), name
    expected = logits(large)
    assert (logits(small) - expected).abs().max() <= 1e-5 * expected.abs().max()
    return small


def codes_of(folder: Path, name: str, shape: tuple[int, ...]) -> Codes:
    """The codes of a matrix as the files have it."""
    with Safetensors(folder) as weights:
        [codes] = weights.take(name, shape)
        assert not weights.problems
    assert isinstance(codes, Codes)
    return codes


def assert_codes_mean(folder: Path, plain: Path) -> None:
    """Every matrix of codes is that of the plain folder, to the bit."""
    given, count = load_file(plain / "model.safetensors"), 0
    with Safetensors(folder) as weights:
        for name, tensor in given.items():
            if weights.form(name) is not None:
                count += 1
                [codes] = weights.take(name, tuple(tensor.shape))
                assert torch.equal(codes.dense(), tensor), name
    assert count


# --- layouts, number by number


def rounded(
    matrix_OI: Tensor, bits: int, group: int, *, zeros: bool, fine: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Numbers q from 0 on, int64 [out, in]; zeros and float16 scales [out, groups]; and (q - z) s, float32, exact.

    Beside zeros scales have so few bits that float16 holds z s, too, unless they are `fine`.
    """
    dice, (rows, columns) = torch.Generator().manual_seed(5), matrix_OI.shape
    group = columns if group == -1 else group
    middle, groups = 1 << bits - 1, columns // group
    scales_OG = torch.rand(rows, groups, generator=dice) * 0.5 + 0.5
    steps = 1 << (10 - bits if zeros and not fine else 10)
    scales_OG = (scales_OG * steps).round() / steps / middle
    zeros_OG = torch.randint(0, 2 * middle, (rows, groups), generator=dice) if zeros else torch.full((rows, groups), middle)
    of_OI = torch.arange(columns) // group
    q_OI = (matrix_OI / scales_OG[:, of_OI] + zeros_OG[:, of_OI]).round().long().clamp(0, 2 * middle - 1)
    q_OI[0, 0], q_OI[0, 1] = 0, 2 * middle - 1
    numbers = (q_OI - zeros_OG[:, of_OI]) * scales_OG[:, of_OI].double()
    return q_OI, zeros_OG, scales_OG.half(), numbers.float()


def words(numbers: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """int32 [..., N * bits / 32]: each word holds some of the numbers from its lowest bits on, in this order."""
    each = 32 // bits
    found = []
    for row in numbers.reshape(-1, numbers.shape[-1]).tolist():
        for first in range(0, len(row), each):
            places = order or tuple(range(each))
            word = sum((row[first + places[place]] & (1 << bits) - 1) << bits * place for place in range(each))
            found.append(word - (1 << 32) if word >= 1 << 31 else word)
    return torch.tensor(found, dtype=torch.int32).view(*numbers.shape[:-1], -1)


def awq(group: int, *, zeros: bool = True, fine: bool = False) -> Pack:
    """AutoAWQ's gemm."""

    def pack(matrix_OI: Tensor) -> Packed:
        q_OI, zeros_OG, scales_OG, numbers = rounded(matrix_OI, 4, group, zeros=zeros, fine=fine)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        tensors = {".qweight": words(q_OI.T, 4, order), ".qzeros": words(zeros_OG.T, 4, order), ".scales": scales_OG.T}
        return Packed(tensors, numbers)

    return pack


def gptq(bits: int, group: int, *, zeros: bool = True, version: int = 1) -> Pack:
    """AutoGPTQ's; the first version has zeros less 1, as one number of all of a row's bits."""

    def pack(matrix_OI: Tensor) -> Packed:
        q_OI, zeros_OG, scales_OG, numbers = rounded(matrix_OI, bits, group, zeros=zeros)
        size = matrix_OI.shape[1]
        tensors = {
            ".qweight": words(q_OI, bits).T,
            ".qzeros": words(zeros_OG.T, bits) - (version == 1) * sum(1 << bits * place for place in range(32 // bits)),
            ".scales": scales_OG.T,
            ".g_idx": (torch.arange(size) // (size if group == -1 else group)).int(),
        }
        return Packed(tensors, numbers)

    return pack


AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "desc_act": False, "sym": False, "checkpoint_format": "gptq"}

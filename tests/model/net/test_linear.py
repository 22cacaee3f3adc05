"""The one class of matrices: filled part by part without a second copy, open to other forms, and shared by shards."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import attend.model
from attend.model.net.checkpoint import fill, read_config
from attend.model.net.linear import Linear, replace_linears
from attend.model.net.native import library
from attend.model.net.transformer import Decoder
from attend.model.train.loss import hidden_states
from tests.model.checkpoints import tiny_config, tiny_decoder, write_checkpoint
from tests.model.net.native.test_native import run_native, shaped

TOKENS = torch.tensor([[5, 17, 80, 3, 44, 61, 9, 2]])
needs_library = pytest.mark.skipif(library.load_library() is None, reason="the native decoder is not built")


def test_every_matrix_of_a_decoder_is_a_linear_of_this_one_file():
    root = Path(attend.model.__file__).parent
    for path in sorted((root / "net").rglob("*.py")):
        names = {ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert "nn.Linear" not in names or path.name == "linear.py", path
    for switches in ({}, {"gated_mlp": False}, {"num_experts": 4, "experts_per_token": 2, "shared_expert_size": 20}):
        matrices = [module for module in tiny_decoder(tiny_config(**switches)).modules() if isinstance(module, nn.Linear)]
        assert matrices and all(isinstance(matrix, Linear) for matrix in matrices)


# --- filled without a second copy


class Allocations(TorchDispatchMode):
    """Counts the bytes that live tensors own, and how many there were at most. Those of a mapped checkpoint are the file's."""

    def __init__(self) -> None:
        super().__init__()
        self.living: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                known = storage._cdata in self.living and not self.living[storage._cdata][0].expired()
                if not known and not in_file(tensor):
                    self.living[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, self.now())
        return result

    def now(self) -> int:
        self.living = {key: each for key, each in self.living.items() if not each[0].expired()}
        return sum(size for _, size in self.living.values())


def in_file(tensor: Tensor) -> bool:
    address = tensor.untyped_storage().data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(".safetensors"):
            first, last = (int(end, 16) for end in line.split()[0].split("-"))
            if first <= address < last:
                return True
    return False


def empty_decoder(folder: Path) -> Decoder:
    with torch.device("meta"):
        return Decoder(read_config(folder))


def filling(net: Decoder, folder: Path) -> tuple[int, int]:
    """Bytes owned after the weights are read as bfloat16, and what was owned beside them at most."""
    with Allocations() as owned:
        fill(net, folder, torch.bfloat16, "cpu")
        return owned.now(), owned.most - owned.now()


FUSED = ["llama-biased", "phi3", "gpt2", "gpt_neox", "glm4", "gpt_oss", "mixtral", "qwen3_moe", "gemma2"]
"""Parts that are joined, matrices that lie the other way or in another order, experts one by one and all at once."""


@pytest.mark.parametrize("kind", FUSED)
def test_loading_never_holds_a_fused_matrix_twice(tmp_path, kind):
    """Whatever the files hold: here numbers twice as large as those that are kept."""
    net = empty_decoder(write_checkpoint(kind, tmp_path))
    owned, beside = filling(net, tmp_path)
    fused = [module.weight for module in net.modules() if isinstance(module, Linear) and module is not net.head]
    assert sum(parameter.nbytes for parameter in net.parameters()) <= owned
    assert beside < max(weight.nbytes for weight in fused)


# --- other forms


class FourBits(Linear):
    """A toy form: sixteen levels a row, two numbers a byte."""

    codes: Tensor
    scales: Tensor

    def make_room(self, kind: str, dtype: torch.dtype, device: str | torch.device) -> None:
        if kind == "bias":
            super().make_room(kind, dtype, device)
        else:
            self.dtype = dtype
            self.codes = torch.empty(self.out_features, self.in_features // 2, dtype=torch.uint8, device=device)
            self.scales = torch.empty(self.out_features, 1, device=device)

    def store(self, kind: str, first: int, tensor: Tensor) -> None:
        if kind == "bias":
            return super().store(kind, first, tensor)
        rows = tensor.reshape(-1, self.in_features).float()
        scales = rows.abs().amax(dim=1, keepdim=True) / 7
        levels = (rows / scales).round().to(torch.uint8) + 8  # of -7 to 7, modulo 256
        self.codes[first : first + len(rows)] = levels[:, ::2] | levels[:, 1::2] << 4
        self.scales[first : first + len(rows)] = scales

    def dense(self) -> Tensor:
        levels = torch.stack((self.codes & 15, self.codes >> 4), dim=-1).flatten(1).float() - 8
        return (levels * self.scales).to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.dense(), self.bias)


class Adapted(Linear):
    """A toy adapter: a matrix of any form, and a product of two thin ones beside it."""

    base: Linear

    @classmethod
    def around(cls, base: Linear) -> "Adapted":
        form = cls.of(base)
        form.base = base
        generator = torch.Generator().manual_seed(base.out_features)
        form.down = torch.randn(3, base.in_features, generator=generator) / 8
        form.up = torch.randn(base.out_features, 3, generator=generator) / 8
        return form

    def dense(self) -> Tensor:
        base = self.base.dense()
        return (base.float() + self.up @ self.down).to(base.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x.float() @ self.down.T @ self.up.T).to(x.dtype)


def blocks_of(form: type[Linear]) -> Any:
    """The form for the matrices of blocks, and none for the head."""
    return lambda name, linear: form.of(linear) if name.startswith("blocks.") else linear


def densely(net: Decoder) -> Decoder:
    """The same numbers in plain form."""
    plain = Decoder(net.config).to(net.head.weight.dtype).requires_grad_(False)
    for path, module in net.named_modules():
        if path.endswith(".base"):
            continue
        twin = plain.get_submodule(path)
        if isinstance(module, Linear):
            twin.weight.copy_(module.dense())
            if module.bias is not None:
                twin.bias.copy_(module.bias)
        else:
            for name, parameter in module.named_parameters(recurse=False):
                twin.get_parameter(name).copy_(parameter)
    return plain.eval()


@pytest.mark.parametrize("kind", ["llama-biased", "gpt2", "gpt_neox", "phi3"])
def test_a_new_form_is_one_class_that_the_loader_fills_from_the_files(tmp_path, kind):
    """It computes what its matrices say, and they are those of the files up to half a level."""
    plain, net = (empty_decoder(write_checkpoint(kind, tmp_path)) for _ in range(2))
    replace_linears(net, blocks_of(FourBits))
    for each in (plain, net):
        fill(each, tmp_path, torch.float32, "cpu")
    pairs = [pair for pair in zip(net.modules(), plain.modules(), strict=True) if isinstance(pair[0], FourBits)]
    assert len(pairs) == 4 * net.config.num_layers
    for small, large in pairs:
        assert ((small.dense() - large.weight).abs() <= small.scales * 0.501).all()
    assert torch.equal(hidden_states(net, TOKENS), hidden_states(densely(net), TOKENS))


def test_a_smaller_form_is_filled_without_the_whole_in_plain_numbers(tmp_path):
    net = empty_decoder(write_checkpoint("llama", tmp_path))
    fused = 2 * max(module.out_features * module.in_features for module in net.blocks.modules() if isinstance(module, Linear))
    plain, _ = filling(empty_decoder(tmp_path), tmp_path)
    replace_linears(net, blocks_of(FourBits))
    owned, beside = filling(net, tmp_path)
    assert owned < 0.6 * plain
    assert beside < 8 * fused  # the toy's own work on one part in float32


@needs_library
@pytest.mark.parametrize("form", ["four bits", "adapted"])
@torch.inference_mode()
def test_the_native_decoder_takes_a_form_that_it_does_not_know(form):
    """To the bit what it makes of the same numbers in plain form."""
    net = tiny_decoder(shaped(4, 2, 32)).bfloat16()
    if form == "four bits":
        replace_linears(net, lambda name, linear: four_bits(linear) if name.startswith("blocks.") else linear)
    else:
        replace_linears(net, lambda name, linear: Adapted.around(linear) if name.startswith("blocks.") else linear)
    plain = densely(net)
    assert torch.equal(run_native(net, 32, 32), run_native(plain, 32, 32))


def four_bits(linear: Linear) -> FourBits:
    form = FourBits.of(linear)
    form.make_room("weight", linear.weight.dtype, "cpu")
    form.fill("weight", 0, linear.weight)
    return form


# --- shards

"""The one class of matrices: filled part by part without a second copy, open to other forms, and shared by shards."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import attend.model
from attend.model.net.checkpoint import fill, read_config
from attend.model.net.linear import Linear
from attend.model.net.transformer import Decoder
from tests.model.checkpoints import tiny_config, tiny_decoder, write_checkpoint


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


# --- shards

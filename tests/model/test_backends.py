"""A way of computing is a class: what it can, how it loads, decodes, draws and records. The engine asks, and tests no names."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attend.model.backends.backend import Backend, Placement
from attend.model.backends.choice import BACKENDS, choose_backend, fastest
from attend.model.errors import SettingError
from tests.model.checkpoints import tiny_config

ROOT = Path(__file__).parents[2]
AT = Placement(torch.bfloat16, "cpu", 32)
MET = {  # what each refusal is for, with what to change
    "native": [
        ("dtype", {"dtype": torch.float16}, {}, "dtype is float16, and it computes in bfloat16"),
        ("block_size", {"block_size": 16}, {}, "block_size is 16, and it takes multiples of 32"),
        ("device", {"device": "cuda"}, {}, "it needs a CPU"),
        ("tensor_parallel", {"is_sharded": True}, {}, "it does not support this model with tensor_parallel"),
        ("heads", {}, {"head_size": 1024}, "head size is 1024, and it takes at most 512"),
        ("heads", {}, {"num_heads": 34, "num_kv_heads": 2}, "17 query heads per KV head, and it takes at most 16"),
        ("model", {}, {"conv_kernel": 17, "conv_layers": (0,)}, "convolutions over 17 tokens, and it takes at most 16"),
    ],
    "triton": [
        ("block_size", {"device": "cuda", "block_size": 24}, {}, "block_size is 24, and it takes powers of two"),
        ("heads", {"device": "cuda"}, {"head_size": 1024}, "head size is 1024, and it takes at most 512"),
        ("heads", {"device": "cuda"}, {"num_heads": 66, "num_kv_heads": 2}, "33 query heads per KV head, and it takes at most"),
    ],
}
CASES = [(name, *case) for name, cases in MET.items() for case in cases]


@pytest.mark.parametrize(("name", "reason", "placed", "changes", "why"), CASES)
def test_a_refusal_names_what_is_in_the_way(monkeypatch, name, reason, placed, changes, why):
    if name == "triton":
        pytest.importorskip("triton")
    kind = BACKENDS[name]
    good = replace(AT, device="cuda" if name == "triton" else "cpu")
    assert kind.refusal(tiny_config(), good) is None
    found = kind.refusal(tiny_config(**changes), replace(AT, **placed))
    assert found.reason == reason
    assert why in found.why
    monkeypatch.setattr(kind, "absence", lambda: None)
    with pytest.raises(SettingError, match=f"^backend is {name}, but .*{why}"):
        choose_backend(name, tiny_config(**changes), replace(AT, **placed))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_torch_computes_every_model_on_every_device(device):
    for changes in ({"head_size": 1024}, {"num_heads": 66, "num_kv_heads": 2}, {"conv_kernel": 17, "conv_layers": (0,)}):
        config = tiny_config(**changes)
        for placed in (replace(AT, device=device), Placement(torch.float16, device, 24, is_sharded=True)):
            assert choose_backend("torch", config, placed).name == "torch"
    assert (
        choose_backend("auto", tiny_config(head_size=1024), Placement(torch.float16, device, 8, is_sharded=True)).name
        == "torch"
    )


def test_each_class_is_named_as_the_setting_names_it():
    from attend.service.settings import Settings

    words = set(Settings.model_fields["backend"].annotation.__args__) - {"auto"}
    assert words == set(BACKENDS) == {kind.name for kind in BACKENDS.values()}
    assert {fastest("cpu").name, fastest("cuda").name} == {"native", "triton"}
    assert all(issubclass(kind, Backend) and kind.__doc__ for kind in BACKENDS.values())


def names_compared(source: str) -> list[str]:
    """Comparisons of anything with the name of a backend."""
    names = set(BACKENDS)
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Compare) and "__module__" not in ast.unparse(node)
        for side in (node.left, *node.comparators)
        for each in (side.elts if isinstance(side, ast.Tuple | ast.Set | ast.List) else [side])
        if isinstance(each, ast.Constant) and each.value in names
    ]


def test_nothing_in_the_model_tests_the_name_of_a_backend():
    found = {
        str(path.relative_to(ROOT)): tests
        for path in sorted((ROOT / "model").rglob("*.py"))
        if (tests := names_compared(path.read_text(encoding="utf-8")))
    }
    assert found == {}
    assert names_compared("backend.name == 'triton' or name in ('native', 'torch')") != []

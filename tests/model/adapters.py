"""LoRA adapters for tests, written with plain safetensors and json in PEFT's layout, and the models that they make merged."""

import json
from collections.abc import Sequence
from pathlib import Path
from shutil import copytree
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "some/model",
    "inference_mode": True,
    "r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.1,
    "bias": "none",
    "use_rslora": False,
    "use_dora": False,
    "modules_to_save": None,
    "fan_in_fan_out": False,
    "init_lora_weights": True,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layers_to_transform": None,
    "layers_pattern": None,
}


def linears(folder: Path, ends: Sequence[str], lies: bool = False) -> dict[str, tuple[int, int]]:
    """(in, out) of the modules of a checkpoint whose names end so. `lies`: its matrices are [in, out]."""
    tensors = load_file(folder / "model.safetensors")
    sizes = {name.removesuffix(".weight"): tensor.shape for name, tensor in tensors.items() if tensor.dim() == 2}
    chosen = {name: size for name, size in sizes.items() if name.endswith(tuple(f".{end}" for end in ends))}
    return {name: (size[0], size[1]) if lies else (size[1], size[0]) for name, size in chosen.items()}


def write_adapter(
    folder: Path, modules: dict[str, tuple[int, int]], seed: int = 0, *, ranks: dict[str, int] | None = None, **config: Any
) -> Path:
    """An adapter of random numbers for these modules, strong enough to change every answer."""
    generator, folder = torch.Generator().manual_seed(seed), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIG | {"target_modules": sorted({name.rpartition(".")[2] for name in modules})} | config
    tensors = {}
    for name, (size_in, size_out) in modules.items():
        rank = (ranks or {}).get(name, config["r"])
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, size_in, generator=generator) * 0.2
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(size_out, rank, generator=generator) * 0.2
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def merge(model: Path, adapter: Path, folder: Path, scales: dict[str, float], lies: bool = False) -> Path:
    """The checkpoint with an adapter added to its matrices: W + scale B A, by module."""
    copytree(model, folder)
    tensors: dict[str, Tensor] = load_file(folder / "model.safetensors")
    factors = load_file(adapter / "adapter_model.safetensors")
    for name, scale in scales.items():
        down, up = (factors[f"base_model.model.{name}.{factor}.weight"] for factor in ("lora_A", "lora_B"))
        update = scale * up.double() @ down.double()
        whole = tensors[f"{name}.weight"].double() + (update.T if lies else update)
        tensors[f"{name}.weight"] = whole.float().contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder

"""adapter_config.json as PEFT means it: which modules of a model an adapter changes, and how strongly.

Source: `peft.tuners.lora.LoraConfig` and `peft.tuners.tuners_utils.check_target_module_exists` of PEFT 0.18. What is not
carried out is refused by its key.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attend.model.errors import CheckpointError
from attend.model.weights import read_json

CONFIG = "adapter_config.json"
MAX_RANK = 512
CARRIED = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "use_rslora", "bias", "rank_pattern", "alpha_pattern", "init_lora_weights"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    }
)
HARMLESS = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "lora_dropout", "peft_version"),
        *("fan_in_fan_out", "loftq_config", "eva_config", "corda_config", "runtime_config", "megatron_core"),
        *("arrow_config", "qalora_group_size", "ensure_weight_tying", "lora_ga_config"),
    }
)
"""Keys that change nothing of what a trained adapter computes."""
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of `init_lora_weights` after which the adapter belongs to other weights than the model's own."""
ALL = "all-linear"


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """The entries of an adapter_config.json: rank, alpha, and the modules that the adapter changes."""

    folder: Path
    rank: int
    alpha: float
    root: bool
    """Divide alpha by the root of the rank, not by the rank (rsLoRA)."""
    targets: str | tuple[str, ...]
    excluded_modules: str | tuple[str, ...] = ()
    layers: tuple[int, ...] | None = None
    layers_pattern: tuple[str, ...] = ()
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)

    def changes(self, module: str) -> bool:
        """True if a linear module of the model's blocks, by its full name, has a product beside it."""
        if self.excluded_modules and (
            _full(self.excluded_modules, module)
            if isinstance(self.excluded_modules, str)
            else _ends(self.excluded_modules, module)
        ):
            return False
        if isinstance(self.targets, str):
            return self.targets == ALL or _full(self.targets, module)
        if module in self.targets:
            return True
        return _ends(self.targets, module) and (self.layers is None or self._layer(module) in self.layers)

    def rank_of(self, module: str) -> int:
        """The rank of a module's product."""
        return self.ranks.get(_pattern(self.ranks, module), self.rank)

    def scale_of(self, module: str) -> float:
        """The scale of a module's product: alpha / rank, or alpha / sqrt(rank)."""
        alpha, rank = self.alphas.get(_pattern(self.alphas, module), self.alpha), self.rank_of(module)
        return alpha / (rank**0.5 if self.root else rank)

    def _layer(self, module: str) -> int | None:
        patterns = self.layers_pattern or (r"[^.]*",)
        found = (re.match(rf".*\.{pattern}\.(\d+)\.", module) for pattern in patterns)
        return next((int(match[1]) for match in found if match), None)


def read_config(folder: Path) -> LoraConfig:
    """The config of an adapter folder. Raises CheckpointError that names the file and the key."""
    raw = read_json(folder, CONFIG)
    _refuse(folder, raw)
    rank, alpha = _rank(folder, "r", raw.get("r", 8)), _number(folder, "lora_alpha", raw.get("lora_alpha", 8))
    layers = raw.get("layers_to_transform")
    layers = [layers] if isinstance(layers, int) else layers
    ranks, alphas = (_table(folder, key, raw.get(key)) for key in ("rank_pattern", "alpha_pattern"))
    targets = _names(folder, "target_modules", raw.get("target_modules"))
    if not targets:
        raise _bad(folder, "target_modules", raw.get("target_modules"), "a name, a regular expression, or names")
    if layers is not None and (isinstance(targets, str) or not all(type(each) is int for each in layers)):
        raise _bad(folder, "layers_to_transform", layers, "numbers of layers, beside a list of target_modules")
    return LoraConfig(
        folder=folder,
        rank=rank,
        alpha=alpha,
        root=bool(raw.get("use_rslora")),
        targets=targets,
        excluded_modules=_names(folder, "exclude_modules", raw.get("exclude_modules")),
        layers=tuple(layers) if layers else None,
        layers_pattern=_to_names(_names(folder, "layers_pattern", raw.get("layers_pattern"))),
        ranks={key: _rank(folder, "rank_pattern", value) for key, value in ranks.items()},
        alphas={key: _number(folder, "alpha_pattern", value) for key, value in alphas.items()},
    )


def _refuse(folder: Path, raw: Mapping[str, Any]) -> None:
    if raw.get("peft_type") != "LORA":
        raise _bad(folder, "peft_type", raw.get("peft_type"), "LORA")
    if raw.get("bias", "none") != "none":
        raise _bad(folder, "bias", raw["bias"], "none")
    start = raw.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(CHANGES_BASE):
        raise CheckpointError(
            f"{folder / CONFIG}: init_lora_weights {start!r} is not supported, for it changes the model's own weights: "
            "convert the adapter with PEFT's path_initial_model_for_weight_conversion"
        )
    for key, value in raw.items():
        if key not in CARRIED | HARMLESS and value not in (None, False, [], {}, ""):
            raise CheckpointError(f"{folder / CONFIG}: {key} = {str(value)[:64]} is not supported")


def _bad(folder: Path, key: str, value: object, wanted: str) -> CheckpointError:
    return CheckpointError(f"{folder / CONFIG}: {key} must be {wanted}; got {str(value)[:64]!r}")


def _rank(folder: Path, key: str, value: object) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise _bad(folder, key, value, f"a rank from 1 to {MAX_RANK}")
    return value


def _number(folder: Path, key: str, value: object) -> float:
    if type(value) not in (int, float) or not abs(float(value)) < 1e9:  # type: ignore[arg-type]  # its type was looked at
        raise _bad(folder, key, value, "a number")
    return float(value)  # type: ignore[arg-type]  # its type was looked at


def _table(folder: Path, key: str, value: object) -> Mapping[str, Any]:
    value = value or {}
    if not isinstance(value, dict):
        raise _bad(folder, key, value, "an object of names")
    for pattern in value:
        _check_pattern(folder, key, pattern)
    return value


def _names(folder: Path, key: str, value: object) -> str | tuple[str, ...]:
    """A regular expression, or module names. Raises CheckpointError for anything else."""
    if value is None:
        return ()
    if isinstance(value, str):
        return value if value == ALL or key == "layers_pattern" else _check_pattern(folder, key, value)
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise _bad(folder, key, value, "a regular expression, or a list of names")
    return tuple(value)


def _to_names(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return names if isinstance(names, tuple) else (names,)


def _check_pattern(folder: Path, key: str, pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise CheckpointError(f"{folder / CONFIG}: {key} {pattern[:64]!r} is no regular expression: {error}") from error
    return pattern


def _full(pattern: str, module: str) -> bool:
    return re.fullmatch(pattern, module) is not None


def _ends(names: Iterable[str], module: str) -> bool:
    return any(module == name or module.endswith(f".{name}") for name in names)


def _pattern(patterns: Iterable[str], module: str) -> str:
    """The first pattern that a module's name ends with, or the name itself."""
    return next((each for each in patterns if re.match(rf"(.*\.)?({each})$", module)), module)

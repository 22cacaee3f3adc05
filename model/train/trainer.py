"""Trains a decoder on token ids: Muon and AdamW, warm-up and linear decay, checkpoints that resume exactly."""

import ctypes
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from attend.model.config import ModelConfig
from attend.model.errors import SettingError
from attend.model.net.transformer import Decoder
from attend.model.train.batches import TrainingText, batch_at
from attend.model.train.loss import backward, bits_per_byte


@dataclass(frozen=True, slots=True)
class Recipe:
    """Size and speed of a training run. Tokens are counted over all epochs."""

    tokens: int = 16_000_000
    context: int = 1024
    batch: int = 8
    learning_rate: float = 3e-3
    warmup: float = 0.02
    """Share of the steps over which the rate rises to its peak; it then falls linearly to zero."""
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    evaluate_every: int = 100
    """Steps between two looks at the held-out text, and between two saved states."""

    @property
    def steps(self) -> int:
        """Number of optimiser steps."""
        return max(1, self.tokens // (self.batch * self.context))

    def rate(self, step: int) -> float:
        """Learning rate of a step counted from 0."""
        rising = (step + 1) / max(1, int(self.steps * self.warmup))
        falling = (self.steps - step) / self.steps
        return self.learning_rate * min(rising, falling)


@dataclass(slots=True)
class Progress:
    """What a run has seen so far; written beside the weights."""

    step: int = 0
    seconds: float = 0.0
    """Time spent training, over all sittings."""
    losses: list[tuple[int, float]] = field(default_factory=list)
    """(tokens seen, mean training loss in nats since the last entry)."""
    held_out: list[tuple[int, float]] = field(default_factory=list)
    """(tokens seen, bits per byte on a fixed part of the held-out text)."""


def keep_large_blocks() -> None:
    """Tell glibc to keep freed memory: else each step maps and unmaps gigabytes, page fault by page fault."""
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return  # not glibc: another allocator, without this habit
    m_mmap_max, m_trim_threshold = -4, -1
    mallopt(m_mmap_max, 0)
    mallopt(m_trim_threshold, 2**31 - 1)


MOMENTS = {torch.optim.Muon: ("momentum_buffer",), torch.optim.AdamW: ("exp_avg", "exp_avg_sq", "step")}
"""What each optimiser keeps of a parameter."""


def build_optimizers(net: Decoder, recipe: Recipe) -> tuple[torch.optim.Optimizer, ...]:
    """Muon (Jordan 2024) for the blocks' matrices, AdamW for embeddings, head, gains and biases, with one rate for both.

    Muon's steps are scaled to the size of AdamW's (Liu et al. 2025), so a rate that suits one suits the other.
    """
    matrices = [p for p in net.blocks.parameters() if p.dim() == 2]
    tables = [p for name, p in net.named_parameters() if p.dim() == 2 and not name.startswith("blocks.")]
    vectors = [p for p in net.parameters() if p.dim() < 2]
    groups = [{"params": tables, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return (
        torch.optim.Muon(matrices, recipe.learning_rate, recipe.weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, recipe.learning_rate, betas=(0.9, 0.95), fused=True),
    )


class Trainer:
    """One run in one folder. `run` goes on from the folder's last saved state."""

    def __init__(self, config: ModelConfig, recipe: Recipe, folder: Path) -> None:
        self.recipe = recipe
        self.folder = folder
        self.progress = Progress()
        self.net = Decoder(config)
        self.net.initialise(torch.Generator().manual_seed(recipe.seed))
        self.optimizers = build_optimizers(self.net, recipe)
        self._owner = {
            p: optimizer for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]
        }
        if (folder / "state.safetensors").is_file():
            self._load()

    def run(self, train: TrainingText, held_out: Tensor, num_bytes: int, report: Callable[[Progress], None]) -> Progress:
        """Train to the end of the recipe. `held_out` are the tokens of a text of `num_bytes` bytes."""
        recipe, progress = self.recipe, self.progress
        since: list[float] = []
        while progress.step < recipe.steps:
            started = time.perf_counter()
            since.append(self._step(*batch_at(train, recipe, progress.step)))
            progress.step += 1
            seen = progress.step * recipe.batch * recipe.context
            if progress.step % 10 == 0:
                progress.losses.append((seen, sum(since) / len(since)))
                since.clear()
            if progress.step % recipe.evaluate_every == 0 or progress.step == recipe.steps:
                progress.held_out.append((seen, self.evaluate(held_out, num_bytes)))
                self._save()
            progress.seconds += time.perf_counter() - started
            report(progress)
        return progress

    def evaluate(self, held_out: Tensor, num_bytes: int) -> float:
        """Bits per byte on a held-out text, in the training's own precision."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return bits_per_byte(self.net, held_out, num_bytes, self.recipe.context)

    def _step(self, tokens_BL: Tensor, targets_BL: Tensor) -> float:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=False)
            for group in optimizer.param_groups:
                group["lr"] = self.recipe.rate(self.progress.step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = backward(self.net, tokens_BL, targets_BL)
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.recipe.clip)
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def _save(self) -> None:
        """Weights and moments go to new files first: a run that dies while it saves loses nothing."""
        self.folder.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.net.named_parameters():
            moments = self._owner[parameter].state[parameter]
            tensors |= {f"net.{name}": parameter} | {f"{key}.{name}": value for key, value in moments.items()}
        run = {"progress": asdict(self.progress), "recipe": asdict(self.recipe), "config": asdict(self.net.config)}
        state = {name: value.detach().contiguous() for name, value in tensors.items()}
        save_file(state, self.folder / "state.new", metadata={"run": json.dumps(run)})
        (self.folder / "state.new").replace(self.folder / "state.safetensors")

    def _load(self) -> None:
        with safe_open(str(self.folder / "state.safetensors"), framework="pt") as file:
            document = json.loads(file.metadata()["run"])
        self._check_same_run(document)
        self.progress = Progress(**document["progress"])
        tensors = load_file(self.folder / "state.safetensors")
        try:
            for name, parameter in self.net.named_parameters():
                parameter.data.copy_(tensors[f"net.{name}"])
                optimizer = self._owner[parameter]
                optimizer.state[parameter] = {key: tensors[f"{key}.{name}"] for key in MOMENTS[type(optimizer)]}
        except KeyError as missing:
            raise SettingError(f"{self.folder} holds a run of another optimiser: {missing} is not in it") from missing

    def _check_same_run(self, document: dict[str, Any]) -> None:
        """Length and rate may change between sittings; the network and the order of the data may not."""
        now = json.loads(json.dumps({**asdict(self.net.config), **asdict(self.recipe)}))
        then = {**document["config"], **document["recipe"]}
        free = {"tokens", "learning_rate", "warmup", "evaluate_every"}
        for name in now.keys() - free:
            if now[name] != then[name]:
                raise SettingError(f"{self.folder} holds a run with {name} = {then[name]}; this one has {now[name]}")

"""`attend train`: corpus, tokenizer, training with a progress bar, and a finished checkpoint folder."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer as RawTokenizer

from attend.model.config import ModelConfig
from attend.model.errors import SettingError
from attend.model.machine import usable_cores
from attend.model.net.checkpoint import save
from attend.model.text.tokenizer import Tokenizer
from attend.model.train import batches, corpus
from attend.model.train.trainer import Progress as Run
from attend.model.train.trainer import Recipe, Trainer, keep_large_blocks

VOCAB_SIZE = 8192
QUICK_TOKENS = 40_000
"""Held-out tokens that are looked at during training; all of them are at the end."""
CHAT_TEMPLATE = """\
{%- for tool in tools | default([], true) %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}
{%- for message in messages %}{% if not loop.first %}{{ '\\n' }}{% endif %}{{ message.content }}
{%- for call in message.tool_calls | default([], true) %}{{ '\\n<tool_call>\\n' }}
{{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}{{ '\\n</tool_call>' }}
{%- endfor %}{% endfor %}"""
"""The messages, each on a line of its own, so that chat calls work: the answer goes on where the last one ends. Tools and their
calls are written as Hermes and Qwen do. The model has never seen a dialogue, nor a tool."""


def default_config(max_positions: int) -> ModelConfig:
    """The shipped model: 12.6M parameters in the shape of Qwen3."""
    return ModelConfig(
        family="qwen3",
        vocab_size=VOCAB_SIZE,
        hidden_size=384,
        num_layers=6,
        num_heads=6,
        num_kv_heads=2,
        head_size=64,
        mlp_size=1024,
        max_positions=max_positions,
        norm_eps=1e-6,
        qk_norm="head",
        bos_token_id=0,
        eos_token_ids=(0,),
    )


def original_config(max_positions: int) -> ModelConfig:
    """The same size with the choices of 2017: sinusoidal positions, Add & Norm, LayerNorm, ReLU, no shared heads."""
    return replace(
        default_config(max_positions),
        family="attend",
        num_kv_heads=6,
        mlp_size=1280,
        norm="layernorm",
        norm_eps=1e-5,
        norm_place="post",
        positions="sinusoidal",
        qk_norm="none",
        activation="relu",
        gated_mlp=False,
        out_bias=True,
        mlp_bias=True,
        embedding_scale=math.sqrt(384),
    )


def run_training(recipe: Recipe, out: Path, root: Path | None, *, original: bool, threads: int) -> None:
    """Train into `out`, or go on there; leaves a checkpoint folder that `attend serve` takes."""
    console = Console(stderr=True)
    keep_large_blocks()
    torch.set_num_threads(threads or usable_cores())
    root = root or corpus.standard_library()
    out.mkdir(parents=True, exist_ok=True)
    texts, held_out = (corpus.read_texts(root, held_out=side) for side in (False, True))
    if not texts or not held_out:
        raise SettingError(f"{root} has {len(texts)} Python files to train on and {len(held_out)} to hold out: both are needed")
    tokenizer = _tokenizer(out, texts)
    train, held_row = batches.read_texts(tokenizer, texts, recipe.context), corpus.encode_texts(tokenizer, held_out)
    if len(train.row) < 3 * recipe.context:
        raise SettingError(f"{root} has {len(train.row)} tokens: too few for sequences of {recipe.context}; lower --context")
    num_bytes = sum(len(text.encode()) for text in held_out)
    console.print(f"{len(texts)} files of {root} to train on, {len(train.row):,} tokens; {len(held_out)} files held out")
    config = (original_config if original else default_config)(recipe.context)
    trainer = Trainer(config, recipe, out)
    quick = held_row[:QUICK_TOKENS]
    quick_bytes = len(tokenizer.decode(quick.tolist()).encode())
    columns = ("{task.description} {task.completed}/{task.total}", "{task.fields[note]}")
    with Progress(TextColumn(columns[0]), BarColumn(), TextColumn(columns[1]), TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("training", total=recipe.steps, completed=trainer.progress.step, note="")

        def report(progress: Run) -> None:
            bar.update(task, completed=progress.step, note=_note(progress, recipe))

        trainer.run(train, torch.from_numpy(quick.astype(np.int64)), quick_bytes, report)
    console.print("Measuring all of the held-out text ...")
    bits = trainer.evaluate(torch.from_numpy(held_row.astype(np.int64)), num_bytes)
    save(trainer.net, out, torch.bfloat16)
    _write_tokenizer_config(out, recipe.context)
    console.print(f"{bits:.4f} bits per byte on {num_bytes:,} held-out bytes; the checkpoint is in {out}")


def _tokenizer(out: Path, texts: list[str]) -> Tokenizer:
    path = out / "tokenizer.json"
    if not path.is_file():
        corpus.train_tokenizer(texts, VOCAB_SIZE).raw.save(str(path))
    raw = RawTokenizer.from_file(str(path))
    return Tokenizer(raw, raw.token_to_id(corpus.END_OF_TEXT))


def _note(progress: Run, recipe: Recipe) -> str:
    speed = progress.step * recipe.batch * recipe.context / max(progress.seconds, 1e-9)
    loss = f"  loss {progress.losses[-1][1]:.3f}" if progress.losses else ""
    bits = f"  held-out {progress.held_out[-1][1]:.3f} bits/byte" if progress.held_out else ""
    return f"{speed:,.0f} tokens/s{loss}{bits}"


def _write_tokenizer_config(out: Path, max_length: int) -> None:
    document = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": corpus.END_OF_TEXT,
        "eos_token": corpus.END_OF_TEXT,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")

"""Quality of quantised weights, beside other engines' forms of the same checkpoint: attend bench quality [FOLDER]

Every form reads the same windows of the same text, and is compared with our bfloat16, or float32. See `attend quality`.
A peer takes part where `--python NAME=PATH` gives an interpreter that has it: llamacpp (llama_cpp, gguf, numpy) or
openvino (openvino, optimum-intel, nncf).
"""

import argparse
import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attend.model.config import DEFAULT_MODEL
from attend.model.net.checkpoint import read_config
from attend.model.net.outliers import write_with_outliers
from attend.service.commands.quality import CONTEXT, FORMS, measure_quality, open_forms, read_text, table
from attend.service.runtime.checkpoint import read_tokenizer
from attend.service.settings import Settings
from loadtest.bench.contestant import PACKAGES, TREE, PeerError, is_installed
from loadtest.bench.machine import threads
from loadtest.provenance import provenance

PEERS = {
    "llamacpp": ("llama.cpp", ("bfloat16", "Q8_0", "Q4_0", "Q4_K_M")),
    "openvino": ("OpenVINO", ("float32", "int8", "int4, groups of 128", "int4, groups of 32")),
}
"""The name of each peer, and its forms."""
BYTES = 100_000


class Peer:
    """A `Form` of quality.py in a process of its own."""

    def __init__(self, peer: str, python: str, folder: Path, form: str) -> None:
        self.log, script = folder / f"{peer} {form}.log", TREE / "loadtest/bench/peers/scores.py"
        with self.log.open("wb") as errors:
            self.process = subprocess.Popen(
                [python, script, peer, folder, form, str(threads())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.facts: dict[str, Any] = json.loads(self._line())
        self.vocab_size: int = self.facts["vocab_size"]

    def read(self, tokens: Sequence[int], first: int) -> Callable[[int, int], Tensor]:
        self.stdin.write(json.dumps({"tokens": list(tokens), "first": first}).encode() + b"\n")
        self.stdin.flush()
        size = 4 * (len(tokens) - first) * self.vocab_size
        found = bytearray(self.stdout.read(size))
        if len(found) < size:
            raise self._peer_error()
        scores = torch.frombuffer(found, dtype=torch.float32).view(-1, self.vocab_size)
        return lambda begin, end: scores[begin:end]

    def _line(self) -> bytes:
        line = self.stdout.readline()
        if not line:
            raise self._peer_error()
        return line

    def _peer_error(self) -> PeerError:
        return PeerError(f"a peer ended with {self.process.wait()}: see {self.log}")

    def close(self) -> None:
        """End the process."""
        self.stdin.close()
        self.process.wait(60)


def copy_checkpoint(folder: Path, outliers: float | None, work: Path) -> Path:
    """A copy of the checkpoint that peers may put files into, with outliers if they are asked for."""
    target = work / f"{folder.resolve().name}-{outliers or 1:g}"
    if not target.is_dir():
        part = target.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(folder, part, ignore=shutil.ignore_patterns("*.md", "*.png", "*.gguf", "openvino *"))
        if outliers is not None:
            write_with_outliers(folder, part, outliers)
        part.rename(target)
    return target


def open_peers(words: Sequence[str], folder: Path) -> dict[str, Peer]:
    """All forms of the peers that are installed, by name."""
    found: dict[str, Peer] = {}
    for peer, python in (word.split("=", 1) for word in words):
        if not is_installed(peer, python):
            raise SystemExit(f"{python} has no {PACKAGES[peer]}")
        name, forms = PEERS[peer]
        found |= {f"{name} {form}": Peer(peer, python, folder, form) for form in forms}
    return found


def main(words: list[str] | None = None) -> None:
    """Measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder", type=Path, nargs="?", default=DEFAULT_MODEL, help="a checkpoint in the shape of Llama or Qwen3"
    )
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH", help="a peer's interpreter")
    parser.add_argument("--outliers", type=float, metavar="FACTOR", help="put outliers into the model first")
    parser.add_argument("--text", type=Path, help="a UTF-8 file; default: the standard library's held-out files")
    parser.add_argument("--bytes", type=int, default=BYTES, help=f"how much of it is read (default {BYTES})")
    parser.add_argument("--work", type=Path, default=Path("loadtest/out/quality"), help="where checkpoints are converted")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args(words)
    options.work.mkdir(parents=True, exist_ok=True)
    folder = copy_checkpoint(options.folder, options.outliers, options.work.resolve())
    config = read_config(folder)
    tokenizer = read_tokenizer(folder, config.vocab_size)
    context = min(CONTEXT, config.max_positions)
    ours = open_forms(Settings.model_validate({"model": str(folder)}), folder, list(FORMS), context)
    peers = open_peers(options.python, folder)
    try:
        text = read_text(options.text).truncate(options.bytes)
        found = measure_quality({**ours, **peers}, text, tokenizer, tokenizer.bos_token_id, context)
    finally:
        for peer in peers.values():
            peer.close()
    print(
        f"{found['bytes']:,} bytes of {found['text']}, {found['positions']:,} positions, outliers of {options.outliers or 1:g}"
    )
    info = ours[next(iter(ours))].info
    print(f"{info.backend}; " + "; ".join(f"{name}: {peer.facts}" for name, peer in peers.items()))
    print(f"\n{table(found)}")
    if options.json is not None:
        facts = {name: peer.facts for name, peer in peers.items()}
        making = provenance(0, {"Attend": {"model": str(folder), "fingerprint": info.fingerprint}})
        options.json.write_text(json.dumps(found | {"provenance": making, "peers": facts}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

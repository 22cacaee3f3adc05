"""A rank of an engine in a process of its own: `python -m tests.model.parallel.rank RANK RANKS PORT LATE KIND FOLDER`.

`odd` as one more word: from its first step on it computes other numbers than the others.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

from attend.model.engine.build import build_runner
from attend.model.engine.options import EngineOptions
from attend.model.engine.ranks import run_worker_ranks
from attend.model.errors import DeviceFailed
from attend.model.parallel.group import ProcessGroup

OPTIONS = EngineOptions(
    device="cpu", dtype="float32", backend="torch", block_size=8, num_threads=1, kv_cache_memory=1 << 18, max_batch_requests=8
)
OPTIONS_OF = {
    "plain": OPTIONS,
    "guesses": replace(OPTIONS, draft_tokens=4),
    "keys in 8 bits": replace(OPTIONS, kv_dtype="int8"),
    "cuda": replace(OPTIONS, device="cuda", backend="auto", block_size=32),
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank, ranks, port, late, kind, folder, *odd = sys.argv[1:]
    options = OPTIONS_OF[kind]
    group = ProcessGroup(int(rank), int(ranks), options.device, int(port), late=float(late))
    runner = build_runner(Path(folder), options, group=group).runner
    if odd:
        runner._digest.add_(1)
    try:
        run_worker_ranks(runner)
    except DeviceFailed:
        os._exit(4)  # see shares.py

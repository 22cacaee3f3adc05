"""Time and peak memory of loading a checkpoint, beside a warm read of its bytes: attend bench loading

Each turn is a child process that reads the weight files into fresh memory, of pages of the size that the path's own memory
has (large ones on the native path), and then loads them. Memory is sampled every few milliseconds while it loads: what the
process owns, which only it can give back, and what is resident, where pages of the mapped files count too. Both are shown
without what was there before, as parts of the weights' bytes. With --gguf the same shape is loaded from GGUF files of random
blocks, twice in a process: the second time pages are at hand, and the rate is that of the work itself.
"""

import argparse
import json
import mmap
import subprocess
import sys
import threading
import time
from pathlib import Path

from attend.model.shapes import SHAPES
from loadtest.bench.figures import Figure, file, options_of, show
from loadtest.bench.gguf_shapes import KINDS, write_gguf
from loadtest.bench.shapes import FOLDER, write_shape

SAMPLE_SECONDS = 0.003
PATHS = ("native", "torch")
GOALS = {"seconds": 2.0, "owned": 1.15}
"""Load over read; peak over the weights' bytes."""


class Memory(threading.Thread):
    """Samples this process's memory until `stop`: the most that it owned, and the most that was resident, in bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.most = self.now()
        self._done = threading.Event()
        self.start()

    @staticmethod
    def now() -> tuple[int, int]:
        """(owned, resident) bytes."""
        text = Path("/proc/self/status").read_text(encoding="ascii")
        sizes = dict(line.split(":", 1) for line in text.splitlines())
        owned, resident = (int(sizes[name].split()[0]) << 10 for name in ("RssAnon", "VmRSS"))
        return owned, resident

    def run(self) -> None:
        while not self._done.wait(SAMPLE_SECONDS):
            self.look()

    def look(self) -> None:
        """Sample once."""
        owned, resident = self.now()
        self.most = max(self.most[0], owned), max(self.most[1], resident)

    def stop(self) -> tuple[int, int]:
        """What was added at most."""
        self._done.set()
        self.join()
        self.look()
        return self.most[0] - self.before[0], self.most[1] - self.before[1]


def read(folder: Path, *, large: bool) -> float:
    """Seconds of a read of the weight files into fresh memory, the second of two: the first one warms the page cache."""
    for _ in range(2):
        started = time.perf_counter()
        for path in sorted(folder.glob("*.safetensors")):
            with mmap.mmap(-1, path.stat().st_size, flags=mmap.MAP_PRIVATE) as memory, path.open("rb", buffering=0) as source:
                if large:
                    memory.madvise(mmap.MADV_HUGEPAGE)
                left = memoryview(memory)
                while left:
                    left = left[source.readinto(left) :]
                del left
        seconds = time.perf_counter() - started
    return seconds


def measure(folder: Path, path: str) -> dict[str, float]:
    """What one load takes, in this process."""
    import torch

    from attend.model.backends.backend import Placement
    from attend.model.backends.choice import choose_backend
    from attend.model.net.checkpoint import load_decoder, read_config

    size, reading = sum(each.stat().st_size for each in folder.glob("*.safetensors")), read(folder, large=path == "native")
    config = read_config(folder)
    memory, started = Memory(), time.perf_counter()
    net = load_decoder(folder, torch.bfloat16, "cpu", context=0, keep_mapped=path == "native")
    form = choose_backend(path, config, Placement(torch.bfloat16, "cpu", 32)).decoder(net)
    seconds = time.perf_counter() - started
    owned, resident = memory.stop()
    del form
    return {"read": reading, "load": seconds, "seconds": seconds / reading, "owned": owned / size, "resident": resident / size}


def measure_gguf(path: Path) -> dict[str, float]:
    """GB/s of two loads by the native decoder, in this process."""
    import torch

    from attend.model.backends.backend import Placement
    from attend.model.backends.choice import choose_backend
    from attend.model.net.checkpoint import load_decoder, read_config

    rates = []
    for _ in range(2):
        started, config = time.perf_counter(), read_config(path)
        net = load_decoder(path, torch.bfloat16, "cpu", context=0, keep_codes=True, keep_mapped=True)
        form = choose_backend("native", config, Placement(torch.bfloat16, "cpu", 32)).decoder(net)
        rates.append(path.stat().st_size / 1e9 / (time.perf_counter() - started))
        del net, form
    return dict(zip(("first", "second"), rates, strict=True))


def figures(path: str, turns: list[dict[str, float]]) -> list[Figure]:
    """The rows of one path."""
    names = {
        "read": ("warm read of the bytes", "s"),
        "load": ("load", "s"),
        "seconds": ("load / read", "ratio"),
        "owned": ("memory owned at the peak / weights", "ratio"),
        "resident": ("memory resident at the peak / weights", "ratio"),
    }
    return [
        Figure(f"{path}: {what}", unit, tuple(turn[name] for turn in turns), GOALS.get(name))
        for name, (what, unit) in names.items()
    ]


def main(words: list[str] | None = None) -> None:
    """Measure, print the table."""
    parser = options_of(__doc__, turns=3)
    parser.add_argument("--shape", choices=SHAPES, default="1B", help="sizes of the model (default 1B)")
    parser.add_argument(
        "--gguf", nargs="+", choices=KINDS, metavar="KIND", help=f"of {', '.join(KINDS)}, in place of safetensors"
    )
    parser.add_argument("--child", nargs=2, metavar=("FOLDER", "PATH"), help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if "Q4_K_M" in (options.gguf or ()) and SHAPES[options.shape]["hidden_size"] % 256:
        parser.error(f"rows of {options.shape} are no whole blocks of 256: Q4_K_M needs another shape")
    if options.child:
        path, way = Path(options.child[0]), options.child[1]
        print(json.dumps(measure_gguf(path) if way == "gguf" else measure(path, way)))
        return

    def turns(path: Path, way: str) -> list[dict[str, float]]:
        command = [sys.executable, "-m", "loadtest.bench.loading", "--child", str(path), way]
        done = (subprocess.run(command, check=True, capture_output=True, text=True) for _ in range(options.turns))
        return [json.loads(turn.stdout) for turn in done]

    found, rates = [], {kind: turns(write_gguf(options.shape, kind), "gguf") for kind in options.gguf or ()}
    for kind, times in rates.items():
        found += [Figure(f"{kind}: {nth} load", "GB/s", tuple(turn[nth] for turn in times)) for nth in ("first", "second")]
    for way in () if options.gguf else PATHS:
        found += figures(way, turns(write_shape(options.shape, FOLDER), way))
    file(options.json, show(found), found, bench="loading", shape=options.shape)


if __name__ == "__main__":
    main()

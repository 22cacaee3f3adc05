"""What the device itself does in a second: bytes read and written, products in bfloat16; its clocks meanwhile. A line of JSON.

Of random numbers: ones take less power, and so are faster.
"""

import json
import sys
import time
from collections.abc import Callable

import torch

from loadtest.bench.on_gpu.clocks import Clocks

TURNS = 10
WATCHED = 2
"""Seconds of products after those that count, while the driver is asked."""


def main() -> None:
    """speed.py DEVICE SIZE: of square matrices of so many rows."""
    device, size = sys.argv[1], int(sys.argv[2])
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def seconds(work: Callable[[], object]) -> float:
        for _ in range(3):
            work()
        wait()
        begun = time.perf_counter()
        for _ in range(TURNS):
            work()
        wait()
        return (time.perf_counter() - begun) / TURNS

    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    many = torch.randn(16 * size * size, device=device, dtype=torch.bfloat16)
    copy = torch.empty_like(many)
    each = seconds(lambda: a @ b)
    facts = {"bytes": 2 * many.nbytes / seconds(lambda: copy.copy_(many)), "flops": 2 * size**3 / each}
    if device == "cuda":
        with Clocks() as clocks:
            for _ in range(round(WATCHED / each)):
                a @ b
            wait()
        facts["clocks"], facts["clocks shown"] = clocks.told, clocks.shown
    print(json.dumps(facts))


if __name__ == "__main__":
    main()

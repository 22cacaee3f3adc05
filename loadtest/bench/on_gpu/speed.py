"""What the device itself does in a second: bytes read and written, products in bfloat16; its clocks meanwhile. A line of JSON.

Of random numbers: ones take less power, and so are faster.
"""

import json
import sys
from typing import Any

import torch

from attend.model.devices import rates
from loadtest.bench.on_gpu.clocks import Clocks


def main() -> None:
    """speed.py DEVICE SIZE: of square matrices of so many rows."""
    device, size = sys.argv[1], int(sys.argv[2])
    facts: dict[str, Any] = dict(rates(device, size))
    if device == "cuda":
        a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
        with Clocks() as clocks:
            for _ in range(round(facts["flops"] / size**3)):  # two seconds of work, while the driver is asked
                a @ a
            torch.cuda.synchronize()
        facts["clocks"], facts["clocks shown"] = clocks.told, clocks.summary
    print(json.dumps(facts))


if __name__ == "__main__":
    main()

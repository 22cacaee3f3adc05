"""Estimates what the choice of candidates costs on an H200, and without one: by the instructions of the machine code. Exit code
1 if a step's limits take more than MAX_SECONDS.

    python -m tests.model.net.triton.work

The kernels are compiled as `TokenSampler` launches them; the instructions of a loop count as often as it is run. Nothing runs.
"""

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from math import ceil

import torch

from attend.model.engine import sampler
from attend.model.engine.sampler import TokenSampler
from attend.model.net.triton import limits, sampling
from attend.model.params import SamplingParams
from attend.model.sampling_plan import Draw, SamplingPlan
from tests.model.net.triton.compiles import OBJDUMP, Compiled

CAPABILITY, PROCESSORS, CYCLES, BANDWIDTH = 90, 132, 1.75e9, 3e12
"""Of an H200: cycles and bytes a second."""
ALONE, TOGETHER = 2.0, 3.0
"""Instructions that a processor issues in a cycle, of the four that it could: of a program alone on it, and of several."""
LATENCY, LAUNCH = 2e-6, 1.5e-6
"""Seconds of a kernel's first loads and last stores, and from one kernel's end to the next one's beginning."""
VOCAB = 128256
MAX_SECONDS = {1: 50e-6, 32: 120e-6, 256: 600e-6}
"""By rows, for top-k and top-p of each."""


@dataclass(frozen=True)
class Code:
    """A kernel's machine code."""

    places: tuple[int, ...]
    loops: tuple[tuple[int, int], ...]
    """Places of the first instruction of each loop, and of the branch back to it."""
    warps: int

    @classmethod
    def of(cls, cubin: bytes, warps: int) -> "Code":
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            text = subprocess.run([OBJDUMP, "-sass", file.name], capture_output=True, text=True, check=True).stdout
        found = [(int(at, 16), code) for at, code in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", text)]
        branches = [(at, re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", code)) for at, code in found]
        back = [(int(to[1], 16), at) for at, to in branches if to and int(to[1], 16) < at]
        size = found[-1][0]
        loops = [(begin, end) for begin, end in back if end - begin < size / 2]  # else one from a block that stands at the end
        return cls(tuple(at for at, _ in found), tuple(loops), warps)

    def count(self, begin: int, end: int) -> int:
        """Instructions from one place to another."""
        return sum(begin <= at <= end for at in self.places)

    def straight(self) -> int:
        """Those in no loop."""
        return sum(not any(begin <= at <= end for begin, end in self.loops) for at in self.places)

    def turn(self) -> tuple[int, int]:
        """Of the longest loop with another in it: without that one, and of that one."""
        nests = [
            (self.count(*loop), self.count(*inner))
            for loop in self.loops
            for inner in self.loops
            if loop[0] <= inner[0] and inner[1] <= loop[1] and loop != inner
        ]
        whole, inner = max(nests)
        return whole - inner, inner


class Kept(Compiled):
    """Keeps the machine code of the last launch."""

    def measure(self, built, num_warps):
        self.code = Code.of(built.asm["cubin"], num_warps)
        return super().measure(built, num_warps)


def seconds(code: Code, programs: int, instructions: int) -> float:
    """Of a launch: that of the processor with the most programs."""
    most = ceil(programs / PROCESSORS)
    return LATENCY + most * instructions * code.warps / (ALONE if most == 1 else TOGETHER) / CYCLES


def estimate(codes: dict[str, Code], rows: int, num_limits: int, searched: int) -> float:
    """Seconds that a step's limits add: each row has so many, and searches among so many scores."""
    chunks = ceil(VOCAB / sampler.CHUNK)
    around, tile = codes["limit_kernel"].turn()
    tiles = ceil(searched / sampler.TILE) - 1
    search = codes["limit_kernel"].straight() + num_limits * limits.TURNS.value * (around + tiles * tile)
    read = 2 * rows * VOCAB * 2 / BANDWIDTH
    cut = max(
        read, sum(seconds(codes[name], rows * chunks, codes[name].straight()) for name in ("count_kernel", "collect_kernel"))
    )
    return cut + seconds(codes["limit_kernel"], rows, search) + 3 * LAUNCH


@torch.inference_mode()
def main() -> int:
    kept = {}
    for module in (sampling, limits):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            kept[name] = Kept(getattr(module, name), CAPABILITY)
            setattr(module, name, kept[name])
    draws = [Draw(SamplingPlan(SamplingParams(top_k=50, top_p=0.9), seed=0), position=0)]
    TokenSampler(VOCAB, "cpu")(torch.zeros(1, VOCAB, dtype=torch.bfloat16), draws)
    codes = {name: kept[name].code for name in ("count_kernel", "collect_kernel", "limit_kernel")}
    for name, code in codes.items():
        print(f"{name}: {code.straight()} instructions outside of loops, {code.warps} warps")
    print(f"a turn of the search: {codes['limit_kernel'].turn()} instructions, and those of each tile after the first")
    late = False
    for rows, most in MAX_SECONDS.items():
        ways = ((1, sampler.TILE), (2, sampler.TILE), (2, sampler.ROOM))
        one, both, many = (f"{estimate(codes, rows, *way) * 1e6:.0f} us" for way in ways)
        late |= estimate(codes, rows, *ways[1]) > most
        print(f"{rows} rows: {one} for one limit, {both} for two, {many} among {sampler.ROOM} scores")
    return int(late)


if __name__ == "__main__":
    sys.exit(main())

"""A model on the `Device` with Triton's kernels standing in, its steps, and what each of them costs."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock
from weakref import WeakSet

import torch

from attend.model.engine.cuda_recorder import WARM_UPS, no_op
from attend.model.engine.graphs import DecodeGraphs
from attend.model.engine.piecewise_graphs import PiecewiseGraphs
from attend.model.engine.plan import Plan, ScheduledTokens
from attend.model.engine.runner import ModelRunner
from attend.model.net.paged_attention import KVCache
from attend.model.net.transformer import Decoder
from tests.gpu.device import Device, Kernel
from tests.model.engine.machines import ask, given

BLOCK = 32


class Recorder:
    """In place of `CudaRecorder`: a replay is one launch, and a recording is looked at as it is made."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def __call__(self, step):
        repeat = self.in_pieces(lambda between: step())
        return lambda: repeat(no_op)

    def in_pieces(self, step):
        places = []

        def cut(*place):
            places.append(place)

        for _ in range(WARM_UPS):
            step(no_op)
        self.device.recording = WeakSet()
        step(cut)
        self.device.recording = None

        def repeat(between):
            for place in places:
                self.device._launch("a recorded piece")
                between(*place)
            self.device._launch("a recorded piece")

        return repeat


@dataclass
class Machine:
    """A runner on the device."""

    device: Device
    runner: ModelRunner

    def step(self, *items: ScheduledTokens, result: bool = True, **plan) -> dict:
        """What the submission of one step cost; with `result`, what reading its result cost too."""
        self.device.drain()
        self.device.reset()
        before = self.device.allocated
        pending = self.runner.submit(given(Plan(tuple(items), **plan)))
        early = dict(self.device.waits)
        if result:
            pending.result()
        return {
            "launches": sum(self.device.launches.values()),
            "copies": self.device.launches["copy to the device"],
            "peak": self.device.peak - before,
            "waits": set(early),
            "late": set(self.device.waits) - set(early),
        }


@contextmanager
def standing_in(device: Device) -> Iterator[None]:
    """Triton's kernels count their launches and compute nothing."""
    from attend.model.net.triton import delta, fused_kernels, grouped_experts, kernels, limits, ranks, sampling

    with ExitStack() as stack:
        for module in (kernels, fused_kernels, grouped_experts, delta, limits, sampling, ranks):
            for name in [name for name in vars(module) if name.endswith("_kernel")]:
                stack.enter_context(mock.patch.object(module, name, Kernel(device, name)))
        yield


@contextmanager
def machine(config, *, requests: int = 0, tokens: int = 0, length: int = 256, num_blocks: int = 64) -> Iterator[Machine]:
    """A decoder of `config` in bfloat16, of sizes alone; with `requests`, steps of so many rows are recorded, with `tokens`
    steps of so many tokens in pieces.
    """
    from attend.model.engine.sampler import TokenSampler
    from attend.model.net.triton.backend import TritonBackend
    from attend.model.net.triton.decoder import TritonDecoder

    device = Device("meta")
    with torch.inference_mode(), device, standing_in(device):
        with torch.device("meta"):
            net = Decoder(config).to(torch.bfloat16).requires_grad_(False)
        device.adopt(net)
        form, backend = TritonDecoder(net), TritonBackend(config.attention_variants)
        cache = KVCache.allocate(config, num_blocks, BLOCK, torch.bfloat16, "cuda")
        recorder = Recorder(device)
        graphs = DecodeGraphs(form, backend, cache, length, requests, recorder) if requests else None
        pieces = PiecewiseGraphs(form, backend, cache, tokens, recorder.in_pieces) if tokens else None
        draw = TokenSampler(config.vocab_size, "cuda")
        yield Machine(device, ModelRunner(form, backend, cache, "cuda", graphs, draw, pieces=pieces))


def item(runner: ModelRunner, name: str, start: int, count: int, left: int = 0, draft=(), **asked) -> ScheduledTokens:
    """Tokens `start .. start + count - 1` of a request that has `left` more; without those it draws."""
    request = ask(name, [5] * (start + count + left), 8, **asked)
    num_groups = len(runner.net.config.memory_groups)
    blocks = list(range(1, -(-(start + count + len(draft)) // BLOCK) + 1))
    request.tables = [blocks] * (num_groups - runner.has_states) + [[1]] * runner.has_states
    return ScheduledTokens(request, start, count, draft)

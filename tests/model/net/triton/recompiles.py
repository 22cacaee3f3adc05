"""Serves requests with Triton's real compiler and a driver that launches nothing. Exit code 1 if a step after the warm-up
compiles a kernel: on a GPU that would stop all streams for a second. An error if the decoder reads a tensor on the host: it
would wait for the device, and could not be recorded.

    python -m tests.model.net.triton.recompiles

What a kernel is compiled for (types, constants, alignment) is found out at its launch, from the real arguments. Results mean
nothing here: no kernel runs.
"""

import sys
from dataclasses import replace
from functools import partial
from itertools import count

import torch
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from attend.model.engine.config import EngineConfig, GroupSize
from attend.model.engine.cuda_recorder import no_op
from attend.model.engine.engine import Engine, warm_up
from attend.model.engine.graphs import DecodeGraphs
from attend.model.engine.piecewise_graphs import PiecewiseGraphs
from attend.model.engine.request import Request
from attend.model.engine.runner import DrawTokens, ModelRunner
from attend.model.engine.sampler import TokenSampler
from attend.model.engine.scheduler import Scheduler
from attend.model.net.paged_attention import KVCache
from attend.model.net.transformer import Decoder
from attend.model.net.triton import delta, fused_kernels, grouped_experts, kernels, limits, sampling
from attend.model.net.triton.backend import TritonBackend
from attend.model.net.triton.decoder import TritonDecoder
from attend.model.params import NO_CHANGE, DecodingParams, SamplingParams
from attend.model.sublayers import DeltaSpec
from tests.model.checkpoints import tiny_config

MOST = 300
"""Requests at once: more than one round of `share_kernel`, and more than the largest graph."""
WAYS = [
    (SamplingParams(temperature=0), NO_CHANGE),
    (SamplingParams(), DecodingParams(frequency_penalty=0.5, logit_bias={3: 1.0})),
    (SamplingParams(top_p=0.9), NO_CHANGE),
    (SamplingParams(top_k=5), DecodingParams(repetition_penalty=1.2, allowed_token_ids=(0, 1, 2))),
]
"""How requests draw, in turn."""
WINDOW = {"sliding_window": 40, "window_layers": (1,)}
EXPERTS = {"num_experts": 5, "experts_per_token": 3, "shared_expert_size": 32, "mlp_bias": True, "sinks": True}
DELTA = {"delta": DeltaSpec(key_heads=2, value_heads=4, key_size=32, value_size=32, kernel=4), "delta_layers": (0,)}
MODELS = {
    "llama": (WINDOW, True),
    "experts and sinks": (WINDOW | EXPERTS, False),
    "states": (DELTA | {"attention_gate": True}, True),
    "convolutions": ({"conv_kernel": 3, "conv_layers": (0,)}, True),
}
"""What differs from `tiny_config`, and whether steps are recorded."""
READS = frozenset(
    {
        *("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"),
        *("bincount", "nonzero", "argwhere", "unique", "masked_select", "equal", "allclose"),
    }
)
"""Operations of torch whose result the host knows, or whose shape."""


class Driver:
    """An H200 that does nothing."""

    class utils:  # noqa: N801 - Triton's name
        @staticmethod
        def load_binary(name, kernel, shared, device):
            return 0, 1, 32, 0, 1024

        @staticmethod
        def get_device_properties(device):
            return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32, "max_num_regs": 65536}

    class launcher_cls:  # noqa: N801 - Triton's name
        def __init__(self, source, metadata):
            pass

        def __call__(self, *arguments, **more):
            Driver.launches += 1

    launches = 0

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self):
        return torch.device("cpu")


class NoReads(TorchFunctionMode):
    """In it no tensor is read on the host."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        assert name not in READS, f"{name} waits for the device"
        return function(*args, **kwargs or {})


class Watched(TritonDecoder):
    """Scores are noughts: what no kernel wrote may be anything."""

    def __init__(self, net):
        super().__init__(net)
        self.logits = lambda hidden_TE: torch.zeros(len(hidden_TE), net.config.vocab_size, dtype=torch.bfloat16)

    def __call__(self, *arguments):
        with NoReads():
            return super().__call__(*arguments)


def drawn(sampler: TokenSampler) -> DrawTokens:
    """Noughts: what no kernel wrote may be anything."""

    def draw(logits_RV, draws):
        with NoReads():
            return torch.zeros_like(sampler(logits_RV, draws))

    return draw


def engine(recorded: bool, **changes) -> Engine:
    config = tiny_config(num_heads=4, num_kv_heads=2, head_size=32, num_layers=2, **changes)
    form = Watched(Decoder(config).to(torch.bfloat16).requires_grad_(False))
    sizes = EngineConfig(max_model_len=128, num_blocks=4 * MOST, block_size=32, max_batch_requests=MOST, max_batch_tokens=1024)
    if config.state_bytes:
        sizes = replace(sizes, prefix_caching=False, groups=(*sizes.groups, GroupSize(MOST, has_state=True)))
    counts = [group.num_blocks for group in sizes.groups] if config.state_bytes else sizes.num_blocks
    cache = KVCache.allocate(config, counts, sizes.block_size, torch.bfloat16, "cpu")
    backend = TritonBackend(config.attention_variants)
    graphs = DecodeGraphs(form, backend, cache, 128, MOST, lambda step: (step(), step)[1]) if recorded else None
    pieces = None
    if recorded and not config.state_bytes:
        pieces = PiecewiseGraphs(form, backend, cache, sizes.max_batch_tokens, lambda step: (step(no_op), step)[1])
    sampler = TokenSampler(config.vocab_size, "cpu")
    sampler.warm_up(torch.bfloat16)
    clock = partial(next, count())  # each look takes a second, so that all runs plan the same steps
    return Engine(
        Scheduler(sizes, clock), ModelRunner(form, backend, cache, "cpu", graphs, drawn(sampler), pieces=pieces), clock
    )


def serve(machine: Engine, mixed: bool) -> int:
    """Steps with odd and even numbers of tokens and rows: prompts alone, beside streams, and streams alone; how many.

    If `mixed`, the requests draw in many ways, else the best token.
    """
    steps, asked = 0, 0
    for batch in (1, 2, 3, 4, 17, 64, 63, 255, 256, 257, MOST):
        for length in (1, 2, 7, 33, 64):
            while machine.scheduler.num_running + machine.scheduler.num_waiting < batch:
                params, decoding = WAYS[asked % len(WAYS)] if mixed else WAYS[0]
                machine.add(Request(f"{asked}", [5] * (length + asked % 2), 8, params, decoding=decoding))
                asked += 1
            for _ in range(3):
                machine.step()
                steps += 1
    while machine.has_work:
        machine.step()
        steps += 1
    return steps


def main() -> int:
    driver.set_active(Driver())
    compiled: list[str] = []
    knobs.runtime.jit_post_compile_hook = lambda **about: compiled.append(about["fn"].name)
    late = 0
    for name, (changes, recorded) in MODELS.items():
        for kernel in (
            kernel
            for module in (kernels, fused_kernels, grouped_experts, delta, limits, sampling)
            for kernel in vars(module).values()
        ):
            if isinstance(kernel, JITFunction):
                kernel.device_caches.clear()  # as in a new process
        machine = engine(recorded, **changes)
        warm_up(machine)
        before = len(compiled)
        steps, launches = serve(machine, mixed=name == "llama"), Driver.launches
        late += len(compiled) - before
        print(f"{name}, graphs {recorded}: {steps} steps, {launches} launches, compiled late: {compiled[before:]}")
    assert compiled and Driver.launches > 1000, "nothing was compiled or launched: this check has lost its footing"
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())

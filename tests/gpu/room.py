"""What is left for keys and values on a GPU, and how many tokens that is, as a table: `python -m tests.gpu.room`.

Steps take what the counting device counts at their peak, on one GPU, with 256 requests and steps of 8192 tokens. Weights in
whole numbers have a bfloat16 scale for 32 of them. On N GPUs weights and keys and values are divided by N; what steps
take is not, which is more than they take. Of the device 95 % count: the rest is the driver's, the libraries' and the kernels'.
"""

from dataclasses import replace

import torch

from attend.model.config import ModelConfig
from attend.model.engine.cache import SHARE, memory_left
from attend.model.engine.config import EngineConfig
from attend.model.engine.graphs import DecodeGraphs
from attend.model.engine.piecewise_graphs import PiecewiseGraphs
from attend.model.engine.runner import ModelRunner
from tests.gpu.steps import Recorder, machine
from tests.gpu.test_steps import LLAMA_8B

GIB = 1 << 30
SHAPES: dict[str, ModelConfig] = {
    "8B": LLAMA_8B,
    "32B": replace(LLAMA_8B, vocab_size=151936, hidden_size=5120, num_layers=64, num_heads=64, mlp_size=25600),
    "70B": replace(LLAMA_8B, hidden_size=8192, num_layers=80, num_heads=64, mlp_size=28672),
}
SIZES = EngineConfig(max_model_len=8192, num_blocks=256, block_size=32, max_batch_requests=256, max_batch_tokens=8192)
BITS = {"bfloat16": 16.0, "int8": 8.5, "int4": 4.5}


def taken(config: ModelConfig) -> tuple[int, int]:
    """Bytes of the weights in bfloat16, and the most that steps take beside them."""
    with machine(config, num_blocks=1) as made:
        device, old = made.device, made.runner
        weights = sum(each.numel() * each.element_size() for each in old.net.net.state_dict().values())

        def runner(cache):
            recorder = Recorder(device)
            graphs = DecodeGraphs(old.net, old.backend, cache, 8192, SIZES.max_batch_requests, recorder)
            pieces = PiecewiseGraphs(old.net, old.backend, cache, SIZES.max_batch_tokens, recorder.in_pieces)
            return ModelRunner(old.net, old.backend, cache, "cuda", graphs, pieces=pieces)

        memory_left(config, SIZES, torch.bfloat16, "cuda", runner, lambda: 0)
        return weights, device.peak - weights


def main() -> None:
    print(
        "| model | weights | GPUs | 80 GB: GiB | tokens | 141 GB: GiB | tokens |\n| --- | --- | --- | --- | --- | --- | --- |"
    )
    for name, config in SHAPES.items():
        weights, steps = taken(config)
        token = 2 * config.num_layers * config.num_kv_heads * config.head_size * 2
        for kind, bits in BITS.items():
            for number in (1, 2, 4, 8):
                left = [(total * 1e9 * 0.95 - weights * bits / 16 / number - steps) * SHARE for total in (80, 141)]
                cells = [
                    f"{each / GIB:.1f} | {each * number / token / 1000:.0f}k" if each > 0 else "none | none" for each in left
                ]
                print(f"| {name} | {kind} | {number} | {' | '.join(cells)} |")
        print(f"{name}: weights {weights / GIB:.1f} GiB, steps {steps / GIB:.2f} GiB, {token} bytes a token")


if __name__ == "__main__":
    main()

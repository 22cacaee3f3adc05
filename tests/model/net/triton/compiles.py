"""Compiles every kernel for an H200, and without one, as it would be launched. Exit code 1 if one spills registers,
takes more shared memory than a program may have, or is not compiled into what makes it fast: keys and values on their way
while others are multiplied, in a decode by so many programs at once; a prompt's, and matrices in codes, multiplied by the wide
matrix units.

    python -m tests.model.net.triton.compiles

A kernel that compiles may still be wrong or slow; one that does not was never going to run.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attend.model.engine.sampler import TokenSampler
from attend.model.net.backends import BatchLayout, KVCache, Paged, Row
from attend.model.net.formats.codes import FP8, INT4, INT8, MXFP4
from attend.model.net.linear import Linear
from attend.model.net.quantised import QuantisedLinear
from attend.model.net.transformer import Decoder
from attend.model.net.triton import codes, delta, fused, grouped, kernels, limits, sampling, sums
from attend.model.net.triton.backend import TritonBackend
from attend.model.net.triton.codes import TOKENS, CodesLinear
from attend.model.net.triton.decoder import TritonDecoder
from attend.model.net.triton.processors import Processors
from attend.model.sublayers import AttentionVariant, DeltaSpec
from tests.model.checkpoints import tiny_config

H200 = GPUTarget("cuda", 90, 32)
SHARED = 227 * 1024
"""Bytes of shared memory that one program may have there."""
SPILT = 64
"""Bytes of registers that a thread may put aside: loops that do hold thousands."""
OBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
TYPES = {
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    int: "i32",
    float: "fp32",
}
SHAPES = [  # query heads, key/value heads, head size, dtype, variant
    (16, 8, 128, torch.bfloat16, AttentionVariant()),
    (7, 1, 80, torch.float16, AttentionVariant(window=1024)),
    (32, 1, 256, torch.bfloat16, AttentionVariant(window=4096, softcap=50.0)),
    (32, 1, 128, torch.float32, AttentionVariant()),
    (32, 4, 512, torch.bfloat16, AttentionVariant(scale=1.0)),
]
BIASED = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
LAYERS = {
    "GPT-NeoX-20B": {"num_heads": 64, "num_kv_heads": 64, "head_size": 96, "hidden_size": 6144, "rope_size": 24, **BIASED}
    | {"norm": "layernorm", "norm_place": "parallel", "gated_mlp": False, "activation": "gelu"},
    "gpt-oss-120b": {"num_heads": 64, "num_kv_heads": 8, "head_size": 64, "hidden_size": 2880, "sinks": True, **BIASED}
    | {"num_experts": 128, "experts_per_token": 4, "expert_size": 2880, "swiglu_limit": 7.0}
    | {"shared_expert_size": 64, "norm_place": "sandwich", "qk_norm": "all"},
    "Gemma-4-31B": {"num_heads": 32, "num_kv_heads": 4, "head_size": 512, "hidden_size": 5376, "norm_place": "sandwich"}
    | {"qk_norm": "head", "value_norm": True, "keys_are_values": True, "layer_scale": True, "mlp_size": 21504},
    "Hunyuan-7B": {"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "hidden_size": 4096, "qk_norm": "head"}
    | {"qk_norm_after_rope": True, "query_scale_beta": 0.1, "activation": "relu2", "gated_mlp": False},
    "Qwen3.5-27B": {
        "num_heads": 24,
        "num_kv_heads": 4,
        "head_size": 256,
        "hidden_size": 5120,
        "mlp_size": 17408,
        "rope_size": 64,
    }
    | {"delta": DeltaSpec(key_heads=16, value_heads=48, key_size=128, value_size=128, kernel=4), "delta_layers": (0,)}
    | {"num_layers": 2, "attention_gate": True, "qk_norm": "head"},
    "LFM3-1.7B": {"num_heads": 16, "num_kv_heads": 4, "head_size": 128, "hidden_size": 2048, "mlp_size": 7680}
    | {"conv_kernel": 7, "conv_layers": (0,), "num_layers": 2, "qk_norm": "head", "head_gate": True, "norm_place": "sandwich"},
}
"""What differs from `tiny_config`; gpt-oss and HunYuan beside what is their own with what makes their kernels larger."""


class Compiled:
    """Stands in a kernel's place: what would launch it compiles it instead."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.seen = set()
        self.too_large = False
        self.wrong = False
        """Not compiled into what makes it fast: see `report`."""

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, num_warps=4, num_stages=3, enable_fp_fusion=True, **constants):
        names = self.kernel.arg_names
        values = dict(zip(names, args, strict=False))
        signature = {name: "constexpr" if name in constants else _type(values[name]) for name in names}
        pairs = zip(self.kernel.params, args, strict=False)
        aligned = {(parameter.num,): [["tt.divisibility", 16]] for parameter, value in pairs if _aligned(parameter, value)}
        key = str((signature, constants, num_warps, num_stages))
        if key not in self.seen:
            self.seen.add(key)
            source = ASTSource(
                self.kernel, signature, {(names.index(name),): value for name, value in constants.items()}, aligned
            )
            options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": enable_fp_fusion}
            self.report(triton.compile(source, target=H200, options=options), constants, num_warps)

    def report(self, built, constants, num_warps):
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(built.asm["cubin"])
            file.flush()
            usage = subprocess.run([OBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
        self.too_large |= int(stack) > SPILT or built.metadata.shared > SHARED
        name, shared = self.kernel.fn.__name__, built.metadata.shared
        programs = Processors().programs(shared, int(registers), num_warps) // Processors().count
        graph = built.asm["ttgir"]
        waits = [int(wait) for wait in re.findall(r"async_wait [^{]*\{num = (\d+)", graph)]
        buffers = [int(count) for count in re.findall(r"local_alloc : \(\) -> !ttg.memdesc<(\d+)x", graph)]
        shown = f"{registers} registers, {stack} spilt, {shared} shared, {programs} programs a processor"
        print(f"{name} {constants}: {shown}, buffers {buffers}, waits {waits}")
        if name == "decode_kernel":
            least = 5 if (constants["D_P"], constants["GROUP_P"]) == (128, 16) else 2
            self.wrong |= max(waits) == 0 or min(buffers) < 2 or programs < least
        if name == "prefill_kernel" and constants["TILE"] >= 64:  # no matrix units keep float32
            self.wrong |= "warp_group_dot" not in graph or min(buffers) < 2 or max(waits) == 0
        if name == "codes_kernel":
            under_way = constants["TABLE"] or (max(waits) > 0 and min(buffers) >= 2)
            self.wrong |= "warp_group_dot" not in graph or not under_way or programs < (1 if constants["TOKENS"] >= 64 else 2)


def _type(value):
    return TYPES[value.dtype if isinstance(value, torch.Tensor) else type(value)]


def _aligned(parameter, value):
    """What a launch would find out, where it may: addresses and numbers that are multiples of 16."""
    if isinstance(value, torch.Tensor):
        return not parameter.do_not_specialize_on_alignment
    return isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize


def launch_attention(heads, kv_heads, size, dtype, variant):
    """A step with a decode and a prefill, beside sinks where there is a soft cap."""
    config = tiny_config(num_heads=heads, num_kv_heads=kv_heads, head_size=size, num_layers=1)
    cache = KVCache.allocate(config, 4, 32, dtype, "cpu")
    layout = BatchLayout.build([Row([1], 9, 1), Row([2, 3], 3, 40)], 32, "cpu")
    q, k, v = (torch.zeros(41, width, size, dtype=dtype) for width in (heads, kv_heads, kv_heads))
    TritonBackend([variant]).forward(0, q, k, v, cache, layout, torch.zeros(heads, dtype=dtype) if variant.softcap else None)


def launch_codes(kind, size_in, size_out):
    """A matrix in codes, at every tile of tokens."""
    with torch.device("meta"):
        form = CodesLinear.take(QuantisedLinear.form(Linear(size_in, [size_out], bias=False), kind))
        for count in TOKENS:
            form(torch.zeros(count, size_in, dtype=torch.bfloat16))


class NoAttention(TritonBackend):
    def attend(self, layer, q_THD, cache, layout, sinks_H=None, out_THD=None):
        return q_THD


def launch_layer(changes, dtype):
    """One layer without its attention; tensors without memory, since nothing is computed."""
    config = tiny_config(**{"head_size": 128, "num_layers": 1} | changes)
    cache = KVCache.allocate(config, 4, 32, dtype, "meta")
    with torch.device("meta"):
        net, numbers_T = Decoder(config).to(dtype), torch.zeros(1, dtype=torch.int64)
    layout = BatchLayout([Row([1], 9, 1)], numbers_T, numbers_T, numbers_T[None], 32, 1, (), numbers_T, numbers_T)
    TritonDecoder(net)(numbers_T, numbers_T, Paged(NoAttention(), cache, layout))


@torch.inference_mode()
def main():
    stands = []
    for module in (kernels, fused, grouped, delta, limits, sampling, codes, sums):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            stands.append(Compiled(getattr(module, name)))
            setattr(module, name, stands[-1])
    for shape in SHAPES:
        launch_attention(*shape)
    for changes in LAYERS.values():
        launch_layer(changes, torch.bfloat16)
    launch_layer(LAYERS["gpt-oss-120b"], torch.float32)
    for kind in (INT8, INT4, MXFP4, FP8):
        launch_codes(kind, 4096, 14336)
    TokenSampler(128256, "cpu").warm_up(torch.bfloat16)
    for ranks in (2, 8):
        sums.summed(torch.zeros(ranks, 8192, dtype=torch.bfloat16))
    assert all(stand.seen for stand in stands), "a kernel was not launched"
    return 1 if any(stand.too_large or stand.wrong for stand in stands) else 0


if __name__ == "__main__":
    sys.exit(main())

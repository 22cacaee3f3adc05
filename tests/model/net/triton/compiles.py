"""Compiles every kernel for GPUs of one architecture, and without one, as it would be launched. Exit code 1 if one spills
registers, takes more shared memory than a program may have, or is not compiled into what makes it fast: keys and values on
their way while others are multiplied, in a decode by so many programs at once; a prompt's, and matrices in codes, multiplied
by the wide matrix units where there are any. A line of JSON for each kernel.

    python -m tests.model.net.triton.compiles 90

A kernel that compiles may still be wrong or slow; one that does not was never going to run.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attend.model.engine.sampler import TokenSampler
from attend.model.net.formats.codes import FP8, INT4, INT8, MXFP4
from attend.model.net.linear import Linear
from attend.model.net.paged_attention import BatchLayout, KVCache, PagedAttention, Row
from attend.model.net.quantised import QuantisedLinear
from attend.model.net.transformer import Decoder
from attend.model.net.triton import backend, codes, delta, fused_kernels, grouped_experts, kernels, limits, ranks, sampling
from attend.model.net.triton.backend import TritonBackend
from attend.model.net.triton.codes import TOKENS, CodesLinear
from attend.model.net.triton.decoder import TritonDecoder
from attend.model.sublayers import AttentionVariant, DeltaSpec
from tests.model.checkpoints import tiny_config


class Architecture(NamedTuple):
    """A kind of GPU. Shared memory in bytes: `program` is what one may have, `processor` what its programs share."""

    cards: str
    program: int
    processor: int
    wide: str = ""
    """How its wide matrix units are called where Triton uses them; those of the others take operands from registers."""
    spilt: int = 0
    """Bytes of registers that a thread may put aside, of the worst kernel; loops that do hold thousands."""


KIB = 1024
ARCHITECTURES = {
    80: Architecture("A100, A30", 163 * KIB, 164 * KIB, spilt=16),
    86: Architecture("A10, A40, RTX 3090", 99 * KIB, 100 * KIB, spilt=16),
    89: Architecture("L4, L40S, RTX 4090", 99 * KIB, 100 * KIB, spilt=16),
    90: Architecture("H100, H200, GH200", 227 * KIB, 228 * KIB, "warp_group_dot", spilt=64),
    100: Architecture("B200, GB200", 227 * KIB, 228 * KIB, "tc_gen5_mma", spilt=64),
    120: Architecture("RTX 5090, RTX PRO 6000", 99 * KIB, 100 * KIB, spilt=16),
}
"""By compute capability, times ten."""
FLOAT32_SPILT = 256
"""The same in float32, which no matrix unit keeps."""
RESERVED = 1024
"""Bytes of shared memory of each program that the system takes."""
REGISTERS = 65536
"""Of a processor of the GPU, which programs share, as they share its shared memory."""
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
    (32, 8, 128, torch.bfloat16, AttentionVariant()),  # Llama 8B
    (64, 8, 128, torch.bfloat16, AttentionVariant()),  # Llama 70B
    (96, 8, 128, torch.bfloat16, AttentionVariant()),  # Command R+
    (128, 8, 128, torch.bfloat16, AttentionVariant()),  # Llama 405B
    (64, 8, 64, torch.bfloat16, AttentionVariant(window=128, softcap=30.0)),  # gpt-oss, with sinks
    (24, 4, 256, torch.bfloat16, AttentionVariant()),  # Qwen3.5
    (32, 4, 512, torch.bfloat16, AttentionVariant(scale=1.0)),  # Gemma 4
    (7, 1, 80, torch.float16, AttentionVariant(window=1024)),
    (32, 1, 256, torch.bfloat16, AttentionVariant(window=4096, softcap=50.0)),
    (32, 1, 128, torch.float32, AttentionVariant()),
]
BIASED = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
LAYERS = {
    "Llama-8B": {"num_heads": 32, "num_kv_heads": 8, "hidden_size": 4096, "mlp_size": 14336},
    "Llama-405B": {"num_heads": 128, "num_kv_heads": 8, "hidden_size": 16384, "mlp_size": 53248},
    "Command-R+": {"num_heads": 96, "num_kv_heads": 8, "hidden_size": 12288, "mlp_size": 33792, "norm": "layernorm"}
    | {"norm_place": "parallel", "qk_norm": "head"},
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
    """Stands in a kernel's place: what would launch it compiles it instead, for a GPU of one architecture."""

    def __init__(self, kernel, capability: int):
        self.kernel, self.capability, self.target = kernel, capability, ARCHITECTURES[capability]
        self.name = kernel.fn.__name__
        self.seen: set[str] = set()
        self.found: list[dict] = []

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
            built = triton.compile(source, target=GPUTarget("cuda", self.capability, 32), options=options)
            about = self.measure(built, num_warps) | {"constants": constants, "float32": signature[names[0]] == "*fp32"}
            about["faults"] = list(self.faults(about, built.asm["ttgir"]))
            self.found.append(about)

    def measure(self, built, num_warps: int) -> dict:
        """What the compiler made of it."""
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(built.asm["cubin"])
            file.flush()
            command = [OBJDUMP, "-res-usage", file.name]
            usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
        shared, graph = built.metadata.shared, built.asm["ttgir"]
        by_memory = self.target.processor // (shared + RESERVED)
        return {
            "kernel": self.name,
            "warps": num_warps,
            "registers": registers,
            "spilt": stack,
            "shared": shared,
            "programs": min(by_memory, REGISTERS // (registers * 32 * num_warps), 64 // num_warps),
            "waits": [int(wait) for wait in re.findall(r"async_wait [^{]*\{num = (\d+)", graph)],
            "buffers": [int(count) for count in re.findall(r"local_alloc : \(\) -> !ttg.memdesc<(\d+)x", graph)],
        }

    def faults(self, about: dict, graph: str) -> Iterator[str]:
        """Why it could not be launched, or would be slow."""
        constants, target = about["constants"], self.target
        if about["shared"] > target.program:
            yield f"{about['shared']} bytes of shared memory, and a program may have {target.program}"
        if about["spilt"] > (FLOAT32_SPILT if about["float32"] else target.spilt):
            yield f"{about['spilt']} bytes of registers are put aside"
        under_way = max(about["waits"], default=0) > 0 and min(about["buffers"], default=0) >= 2
        units = (target.wide or "nvidia_mma<") in graph
        if self.name == "decode_kernel":
            small = (constants["D_P"], constants["GROUP_P"]) == (128, 16)
            if about["programs"] < ((4 if target.wide else 2) if small else 1):
                yield f"{about['programs']} programs on a processor"
        elif self.name == "prefill_kernel":
            units = units or constants["LANES"] < 64  # float32, which no matrix units keep
        elif self.name == "codes_kernel":
            under_way = under_way or constants["TABLE"]
            if about["programs"] < (1 if constants["TOKENS"] >= 64 else 2):
                yield f"{about['programs']} programs on a processor"
        else:
            return
        if not under_way:
            yield f"nothing is on its way while others are multiplied: buffers {about['buffers']}, waits {about['waits']}"
        if not units and self.name != "decode_kernel":
            yield "the matrix units do not multiply"


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
    TritonDecoder(net)(numbers_T, numbers_T, PagedAttention(NoAttention(), cache, layout))


def compiled(capability: int) -> list[dict]:
    """All kernels as they would be launched on such a GPU."""
    stands = []
    with mock.patch.object(backend, "shared_memory", return_value=ARCHITECTURES[capability].program), ExitStack() as stack:
        for module in (kernels, fused_kernels, grouped_experts, delta, limits, sampling, codes, ranks):
            for name in [name for name in vars(module) if name.endswith("_kernel")]:
                stands.append(Compiled(getattr(module, name), capability))
                stack.enter_context(mock.patch.object(module, name, stands[-1]))
        for shape in SHAPES:
            launch_attention(*shape)
        for changes in LAYERS.values():
            launch_layer(changes, torch.bfloat16)
        launch_layer(LAYERS["gpt-oss-120b"], torch.float32)
        for kind in (INT8, INT4, MXFP4, FP8):
            launch_codes(kind, 4096, 14336)
        ranks.add_parts(torch.empty(4, 1, 8192, dtype=torch.bfloat16))
        TokenSampler(128256, "cpu").warm_up(torch.bfloat16)
    assert all(stand.seen for stand in stands), "a kernel was not launched"
    return [each for stand in stands for each in stand.found]


@torch.inference_mode()
def main() -> int:
    capability = int(sys.argv[1])
    found = compiled(capability)
    for each in found:
        print(json.dumps(each))
    for each in found:
        for fault in each["faults"]:
            print(f"sm_{capability}, {each['kernel']} {each['constants']}: {fault}", file=sys.stderr)
    return 1 if any(each["faults"] for each in found) else 0


if __name__ == "__main__":
    sys.exit(main())

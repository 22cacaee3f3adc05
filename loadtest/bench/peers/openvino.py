"""OpenVINO GenAI's continuous batching; the checkpoint is exported beside itself at the first use, in the form asked for."""

import os
import subprocess
import sys

FORMATS = {
    "bf16": ["--weight-format", "fp16"],
    "int8": ["--weight-format", "int8"],
    "int4": ["--weight-format", "int4", "--group-size", "32", "--ratio", "1.0"],
}
"""Those of optimum-cli; with bf16 the numbers between matrices are bfloat16."""


def export(folder, target, flags):
    """Convert a checkpoint, with flags for its weights; takes a minute or more. Raises CalledProcessError."""
    tool = os.path.join(os.path.dirname(sys.executable), "optimum-cli")
    command = [tool, "export", "openvino", "-m", folder, "--task", "text-generation-with-past", *flags]
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    subprocess.run([*command, target + ".part"], env={**os.environ, **offline}, check=True)
    os.rename(target + ".part", target)


def start(folder, threads):
    """Facts, and (prompts, output tokens) -> tokens made."""
    import numpy
    import openvino
    import openvino_genai as genai

    form = os.environ.get("BENCH_FORM", "bf16")
    exported = os.path.join(folder, "openvino" if form == "bf16" else f"openvino-{form}")
    if not os.path.isdir(exported):
        export(folder, exported, FORMATS[form])
    scheduler = genai.SchedulerConfig()
    keeps = os.environ.get("BENCH_CONTEXT", "0") != "0"
    scheduler.cache_size, scheduler.max_num_seqs = 0 if keeps else 2, 32  # GiB, 0: as it is needed; and requests at once
    scheduler.max_num_batched_tokens, scheduler.dynamic_split_fuse = 4096, True
    scheduler.enable_prefix_caching = keeps
    with open("/proc/cpuinfo", encoding="ascii") as file:
        words = set(file.read().split())
    # it is faster in float32 elsewhere, and on Intel's CPUs without AMX
    numbers = "bf16" if "amx_bf16" in words or {"avx512_bf16", "AuthenticAMD"} <= words else "f32"
    properties = {"INFERENCE_PRECISION_HINT": numbers, "KV_CACHE_PRECISION": numbers, "INFERENCE_NUM_THREADS": threads}
    pipeline = genai.ContinuousBatchingPipeline(exported, scheduler, "CPU", properties)

    def generate(prompts, output):
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = output
        config.ignore_eos, config.do_sample = True, False
        inputs = [openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)) for prompt in prompts]
        return sum(len(each.m_generation_ids[0]) for each in pipeline.generate(inputs, [config] * len(inputs)))

    return {"name": f"OpenVINO {form}", "version": genai.__version__, "dtype": numbers}, generate

"""transformers' generate with its dynamic cache; on a GPU with its static one, compiled."""

import os


def load(folder, device):
    """The checkpoint's net on the device; with BENCH_LOAD = dummy one with weights drawn there."""
    import torch
    import transformers

    auto = transformers.AutoModelForCausalLM
    if os.environ.get("BENCH_LOAD") != "dummy":
        return auto.from_pretrained(folder, dtype=torch.bfloat16).eval().to(device)
    with torch.device(device):
        return auto.from_config(transformers.AutoConfig.from_pretrained(folder), dtype=torch.bfloat16).eval()


def start(folder, threads):
    """Facts, and (prompts, output tokens) -> tokens made."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net = load(folder, device)
    cache = {"cache_implementation": "static"} if device == "cuda" else {}  # generate compiles the steps of a static cache

    @torch.inference_mode()
    def generate(prompts, output):
        tokens = torch.tensor(prompts, device=device)
        limits = {"min_new_tokens": output, "max_new_tokens": output, "do_sample": False, "pad_token_id": 0} | cache
        return (net.generate(tokens, attention_mask=torch.ones_like(tokens), **limits).shape[1] - tokens.shape[1]) * len(tokens)

    return {
        "name": "transformers",
        "version": transformers.__version__,
        "torch": torch.__version__,
        "dtype": "bfloat16",
    }, generate

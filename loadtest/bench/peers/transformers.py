"""transformers' generate with its dynamic cache; on a GPU with its static one, compiled."""


def start(folder, threads):
    """Facts, and (prompts, output tokens) -> tokens made."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval().to(device)
    cache = {"cache_implementation": "static"} if device == "cuda" else {}  # generate compiles the steps of a static cache

    @torch.inference_mode()
    def generate(prompts, output):
        tokens = torch.tensor(prompts, device=device)
        limits = {"min_new_tokens": output, "max_new_tokens": output, "do_sample": False, "pad_token_id": 0} | cache
        return (net.generate(tokens, attention_mask=torch.ones_like(tokens), **limits).shape[1] - tokens.shape[1]) * len(tokens)

    facts = {"version": transformers.__version__, "torch": torch.__version__, "dtype": "bfloat16"}
    return {"name": "transformers"} | facts, generate

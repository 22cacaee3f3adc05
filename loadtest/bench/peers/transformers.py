"""transformers' generate with its dynamic cache."""


def start(folder, threads):
    """Facts, and (prompts, output tokens) -> tokens made."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    net = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def generate(prompts, output):
        tokens = torch.tensor(prompts)
        limits = {"min_new_tokens": output, "max_new_tokens": output, "do_sample": False, "pad_token_id": 0}
        return (net.generate(tokens, attention_mask=torch.ones_like(tokens), **limits).shape[1] - tokens.shape[1]) * len(tokens)

    return {
        "name": "transformers",
        "version": transformers.__version__,
        "torch": torch.__version__,
        "dtype": "bfloat16",
    }, generate

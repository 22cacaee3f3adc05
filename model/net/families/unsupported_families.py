"""Kinds of checkpoint that are known and not served: which served kind is nearest, and what differs."""

IMAGES = "it is multimodal (images), and its text model is nested in config.json"
MAMBA = "most of its layers have a recurrent state (Mamba) in place of a KV cache"
CHUNKS = "most of its layers have chunked attention, and its router scales the experts' input by a sigmoid"
ENCODER = "it is an encoder, which generates no text"
DRAFT = "it proposes tokens to Gemma 4, whose keys and values it reads"
BOTH = "it is an encoder-decoder"

STRANGERS: dict[str, tuple[str | None, str]] = {
    "bamba": ("granite", MAMBA),
    "bart": (None, BOTH),
    "bert": (None, ENCODER),
    "bloom": ("gpt2", "its position encoding is ALiBi, and its embeddings are normed"),
    "dbrx": ("mixtral", "it clips queries, keys and values, and its norms are LayerNorms without bias"),
    "deepseek_v32": ("deepseek_v3", "its attention sees the tokens that an indexer chooses (DeepSeek sparse attention)"),
    "falcon": ("gpt_neox", "its query, key and value heads are interleaved in one matrix, and some models have ALiBi"),
    "falcon_h1": ("llama", MAMBA),
    "falcon_mamba": (None, "it has no attention: its layers have a recurrent state (Mamba)"),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), ("gemma4", DRAFT)),
    "gemma3n": ("gemma3_text", "it has per-layer embeddings, and several mixed residual streams (AltUp, LAuReL)"),
    "gpt_bigcode": ("gpt2", "it has multi-query attention (one key/value head)"),
    "gpt_neo": ("gpt2", "its attention scores are not scaled, and every other layer has a sliding window"),
    "gptj": ("gpt_neox", "attention and MLP share one norm, and its head has a bias"),
    "jamba": ("mixtral", MAMBA),
    "lfm2_vl": ("lfm2", IMAGES),
    "lfm3_vl": ("lfm3", IMAGES),
    "llama4": ("mixtral", f"{CHUNKS}, and it reads images"),
    "llama4_text": ("mixtral", CHUNKS),
    "llava": ("llama", IMAGES),
    "mamba": (None, "it has no attention: its layers have a recurrent state (Mamba)"),
    "mamba2": (None, "it has no attention: its layers have a recurrent state (Mamba)"),
    "mistral4": ("deepseek_v3", "its queries are scaled by their positions, and its router has a softmax"),
    "mllama": ("llama", IMAGES),
    "modernbert": (None, ENCODER),
    "mpt": ("gpt_neox", "its position encoding is ALiBi"),
    "mt5": (None, BOTH),
    "nemotron_h": ("llama", MAMBA),
    "opt": ("gpt2", "its positions start at 2, and its weights have other names"),
    "phi": ("gpt_neox", "attention and MLP share one norm, and its head has a bias"),
    "phimoe": ("mixtral", "its router chooses experts one after the other, with a threshold (SparseMixer)"),
    "recurrent_gemma": ("gemma2", "most of its layers have a recurrent state (a gated linear recurrence)"),
    "roberta": (None, ENCODER),
    "rwkv": (None, "it has no attention: its layers have a recurrent state"),
    "t5": (None, BOTH),
    "zamba2": ("llama", MAMBA),
}
"""By `model_type`: the family that is nearest to it (None: no family is near), and what differs."""


def introduce(kind: object) -> str:
    """What is known of a `model_type` that is not served, as the end of a sentence; empty where it is nothing."""
    if not isinstance(kind, str) or kind not in STRANGERS:
        return ""
    nearest, differs = STRANGERS[kind]
    near = "no similar model_type is supported" if nearest is None else f"the nearest supported model_type is {nearest}"
    return f" ({differs}; {near})"

"""Kinds of checkpoint that are known and not served: which served kind is nearest, and what differs."""

IMAGES = "it reads images beside text, and its text model lies nested in config.json"
MAMBA = "most of its layers keep a state for each sequence (Mamba) where ours keep keys and values"
CHUNKS = "most of its layers see only their own chunk of the text, and its experts scale what they read by a sigmoid"
ENCODER = "it reads text and does not continue it"
BOTH = "it has an encoder beside its decoder"

STRANGERS: dict[str, tuple[str | None, str]] = {
    "bamba": ("granite", MAMBA),
    "bart": (None, BOTH),
    "bert": (None, ENCODER),
    "bloom": ("gpt2", "its positions are a slope of the attention scores (ALiBi), and its embeddings are normed"),
    "cohere": ("cohere2", "all of its layers rotate, and some models norm queries and keys with a gain for each head"),
    "dbrx": ("mixtral", "it clips queries, keys and values, and its norms are LayerNorms without bias"),
    "deepseek_v2": ("qwen2_moe", "keys and values are kept in one compressed vector (latent attention)"),
    "deepseek_v3": (
        "qwen3_moe",
        "keys and values are kept in one compressed vector (latent attention), and experts are chosen by groups, "
        "by a sigmoid and a bias",
    ),
    "falcon": ("gpt_neox", "its heads lie grouped in one matrix, and some models have ALiBi for positions"),
    "falcon_h1": ("llama", MAMBA),
    "falcon_mamba": (None, "it has no attention: its layers keep a state for each sequence (Mamba)"),
    "gemma3": ("gemma3_text", IMAGES),
    "gemma3n": ("gemma3_text", "it has embeddings for each layer, and several residual streams that are mixed (AltUp, LAuReL)"),
    "glm": ("glm4", "it does not norm the outputs of its sublayers"),
    "glm4_moe": ("qwen3_moe", "its experts are chosen by a sigmoid and a bias, and a shared one has no gate"),
    "gpt_bigcode": ("gpt2", "its query heads share one key/value head"),
    "gpt_neo": ("gpt2", "its attention scores are not scaled, and every other layer has a window"),
    "gptj": ("gpt_neox", "one norm serves attention and MLP, and its head has a bias"),
    "granitemoe": ("granite", "its experts lie in one tensor for each projection under names of their own"),
    "granitemoehybrid": ("granite", MAMBA),
    "jamba": ("mixtral", MAMBA),
    "lfm2": ("llama", "most of its layers are short convolutions, which keep a state for each sequence"),
    "lfm2_moe": ("qwen3_moe", "most of its layers are short convolutions, which keep a state for each sequence"),
    "llama4": ("mixtral", f"{CHUNKS}, and {IMAGES}"),
    "llama4_text": ("mixtral", CHUNKS),
    "llava": ("llama", IMAGES),
    "mamba": (None, "it has no attention: its layers keep a state for each sequence (Mamba)"),
    "mamba2": (None, "it has no attention: its layers keep a state for each sequence (Mamba)"),
    "ministral3": ("mistral", "its queries are scaled by their positions"),
    "mistral3": ("mistral", IMAGES),
    "mllama": ("llama", IMAGES),
    "modernbert": (None, ENCODER),
    "mpt": ("gpt_neox", "its positions are a slope of the attention scores (ALiBi)"),
    "mt5": (None, BOTH),
    "nemotron": ("starcoder2", "its norms are LayerNorms with gains of 1 + w, and its MLP squares a ReLU"),
    "nemotron_h": ("llama", MAMBA),
    "olmo": ("olmo2", "its norms are LayerNorms without gain, before each sublayer"),
    "olmoe": ("qwen3_moe", "it norms queries and keys over all heads side by side, and some models clip them"),
    "opt": ("gpt2", "its positions are counted from 2, and its names of weights are others"),
    "phi": ("gpt_neox", "one norm serves attention and MLP, and its head has a bias"),
    "phimoe": ("mixtral", "its experts are chosen one after the other with a threshold (SparseMixer)"),
    "qwen2_5_vl": ("qwen2", IMAGES),
    "qwen2_vl": ("qwen2", IMAGES),
    "qwen3_vl": ("qwen3", IMAGES),
    "recurrent_gemma": ("gemma2", "most of its layers keep a state for each sequence (a gated linear recurrence)"),
    "roberta": (None, ENCODER),
    "rwkv": (None, "it has no attention: its layers keep a state for each sequence"),
    "stablelm": ("starcoder2", "its MLP is gated beside LayerNorms, and some models run attention and MLP side by side"),
    "t5": (None, BOTH),
    "zamba2": ("llama", MAMBA),
}
"""By `model_type`: the nearest that is served, None where none is near; and what differs."""


def introduce(kind: object) -> str:
    """What is known of a `model_type` that is not served, as the end of a sentence; empty where it is nothing."""
    if not isinstance(kind, str) or kind not in STRANGERS:
        return ""
    nearest, differs = STRANGERS[kind]
    return f" ({differs}; {'nothing near it is served' if nearest is None else f'the nearest that is served is {nearest}'})"

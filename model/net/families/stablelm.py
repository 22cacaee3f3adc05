"""StableLM 2: Llama with LayerNorm and a part of each head rotated; some models run attention and MLP in parallel."""

from attend.model.config import ModelConfig
from attend.model.net.families import llama
from attend.model.net.families.family import Family, Raw, decoder_sizes, flag, head_size_of, number, refuse
from attend.model.net.families.positions import rope


def read(raw: Raw) -> ModelConfig:
    """Read a StableLM config.json; the head size is hidden_size / num_heads, whatever `head_dim` says."""
    head = head_size_of(raw, "hidden_size", "num_attention_heads")
    refuse(raw, "qk_layernorm", None, False)
    refuse(raw, "head_dim", None, head)
    return ModelConfig(
        **decoder_sizes({"num_key_value_heads": 32, **raw})
        | rope(raw, head, partial=0.25)
        | {
            "norm": "layernorm",
            "norm_eps": number(raw, "layer_norm_eps", 1e-5),
            "norm_place": "shared" if flag(raw, "use_parallel_residual") else "pre",
            "qkv_bias": flag(raw, "use_qkv_bias"),
        }
    )


FAMILIES = {"stablelm": Family(read, llama.WEIGHTS)}

"""GGUF metadata of layers with the gated delta rule, as `config.py` has that of the others."""

from attend.model.gguf.keys import Keys, Raw


def delta_layers(keys: Keys, raw: Raw) -> Raw:
    """Layers of the delta rule among those of attention, and what positions of a text leave of those of images."""
    count, heads, inner = raw["num_hidden_layers"], keys.size("ssm.time_step_rank"), keys.size("ssm.inner_size")
    if inner % heads:
        raise keys.wrong(f"{keys.arch}.ssm.inner_size {inner} is not divisible by ssm.time_step_rank {heads}")
    every, named = keys.size("full_attention_interval", 4), keys.array("attention.recurrent_layers")
    recurrent = [(layer + 1) % every != 0 for layer in range(count)] if named is None else named[:count]
    if any((keys.array("rope.dimension_sections") or [])[3:]):  # positions of a text are the same but for the fourth
        raise keys.wrong(f"{keys.arch}.rope.dimension_sections has a fourth section, which is not supported")
    return {
        "layer_types": ["linear_attention" if each else "full_attention" for each in recurrent],
        "linear_num_key_heads": keys.size("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": keys.size("ssm.state_size"),
        "linear_value_head_dim": inner // heads,
        "linear_conv_kernel_dim": keys.size("ssm.conv_kernel"),
        "partial_rotary_factor": raw.get("partial_rotary_factor", 1.0),
        "attention_bias": any(keys.has(f"blk.{layer}.attn_q.bias") for layer in range(count)),
    }

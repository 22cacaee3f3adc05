"""What GGUF metadata of all architectures has, and parts that several have, as the keys of config.json."""

import math

from attend.model.gguf.keys import Keys, Raw

NO_TURN = 1e30
"""A factor of a wavelength that no position reaches."""
FREQUENCIES = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"


def common(keys: Keys) -> Raw:
    """What every architecture has, with the values of Llama where others differ."""
    embedding = keys.container.tensors.get("token_embd.weight")
    if embedding is None:
        raise keys.wrong("tensor token_embd.weight is missing")
    hidden, heads = keys.size("embedding_length"), keys.size("attention.head_count")
    if hidden % heads and keys.get("attention.key_length") is None:
        raise keys.wrong(f"{keys.arch}.embedding_length {hidden} is not divisible by {heads} heads")
    head = keys.size("attention.key_length", max(1, hidden // heads))
    if (values := keys.size("attention.value_length", head)) != head and keys.get("attention.value_length_mla") is None:
        raise keys.wrong(f"{keys.arch}.attention.value_length {values} differs from key_length {head}: not supported")
    for name, *harmless in (("attention.causal", True), ("pooling_type", *range(5)), ("use_parallel_residual", False)):
        keys.refuse(name, *harmless)
    for name in ("attention.clamp_kqv", "attention.max_alibi_bias"):
        keys.refuse(name, 0, 0.0)
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": keys.size("feed_forward_length", keys.get("expert_feed_forward_length")),
        "num_hidden_layers": _layers(keys),
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(keys, heads),
        "head_dim": head,
        "max_position_embeddings": keys.size("context_length"),
        "tie_word_embeddings": classifier_labels(keys) is None and not keys.has("output.weight"),
        "attention_bias": keys.has("blk.0.attn_q.bias"),
        "mlp_bias": keys.has("blk.0.ffn_up.bias"),
        **dict.fromkeys(EPS, keys.number(f"attention.layer_norm_{'' if keys.arch in LAYER_NORM else 'rms_'}epsilon")),
        **rope_keys(keys, head),
    }


EPS = ("rms_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_eps")
"""How families call the eps of their norms: each looks at its own."""
LAYER_NORM = ("cohere2", "command-r", "nemotron", "olmo", "starcoder2")
"""Architectures whose norms are LayerNorms."""


CLASSIFIER = "cls.output.weight"


def classifier_labels(keys: Keys) -> list[str] | None:
    """What the rows of a reranker's head score, yes and no: it has no others. None: the file has the head of a text."""
    labels = keys.array("classifier.output_labels")
    if labels is None:
        return None
    if sorted(map(str, labels)) != ["no", "yes"] or keys.get("pooling_type") != 4:
        raise keys.wrong(
            f"{keys.arch}.classifier.output_labels must be yes and no, with pooling_type 4; got {str(labels)[:100]}"
        )
    return labels if keys.has(CLASSIFIER) else None


CONVOLVING = ("lfm2", "lfm2moe")
"""Architectures whose layers without key/value heads have a short convolution."""


def _kv_heads(keys: Keys, heads: int) -> int:
    """Key/value heads of the layers with attention; those of a short convolution count as 0."""
    counts = keys.layers("attention.head_count_kv") if keys.arch in CONVOLVING else None
    if counts is None:
        return keys.size("attention.head_count_kv", heads)
    attending = {count for count in counts if count != 0}
    if len(attending) != 1 or not all(type(count) is int and count > 0 for count in attending):
        raise keys.wrong(f"{keys.arch}.attention.head_count_kv must be 0 or one positive integer; got {repr(counts)[:100]}")
    return int(attending.pop())


def _layers(keys: Keys) -> int:
    """Layers without those for multi-token prediction, which are the last ones of a file."""
    count, predicting = keys.size("block_count"), keys.get("nextn_predict_layers") or 0
    if type(predicting) is not int or not 0 <= predicting < count:
        raise keys.wrong(f"{keys.arch}.nextn_predict_layers must be below block_count {count}; got {repr(predicting)[:100]}")
    if count > (tensors := len(keys.container.tensors)):  # lists of so many values are made
        raise keys.wrong(f"{keys.arch}.block_count is {count}: the file has {tensors} tensors")
    return count - predicting


def rope_keys(keys: Keys, head: int) -> Raw:
    """Theta, how many columns turn, and how wavelengths are stretched."""
    raw: Raw = {"rope_theta": keys.number("rope.freq_base", 10000.0)}
    rotated = keys.size("rope.dimension_count", head)
    if rotated != head:
        raw["partial_rotary_factor"] = (rotated + 0.5) / head  # times `head` and rounded down it is `rotated` again
    scaling = scaling_of(keys)
    if keys.has(FREQUENCIES):
        if scaling is not None:
            raise keys.wrong(f"tensor {FREQUENCIES} beside {keys.arch}.rope.scaling.type is not supported")
        factors = keys.numbers(FREQUENCIES)
        scaling = {"rope_type": "longrope", "factor": 1.0, "attention_factor": 1.0}
        scaling |= {"short_factor": factors, "long_factor": factors}
        scaling |= {"original_max_position_embeddings": keys.size("context_length")}
    return raw | ({} if scaling is None else {"rope_scaling": scaling})


def scaling_of(keys: Keys) -> Raw | None:
    """`rope_scaling`, but for factors that lie in tensors."""
    kind = keys.get("rope.scaling.type")
    linear = keys.number("rope.scale_linear", 1.0)
    factor = keys.number("rope.scaling.factor", linear)
    keys.get("rope.scaling.finetuned")
    original = keys.get("rope.scaling.original_context_length")
    if kind == "yarn":
        keys.refuse("rope.scaling.yarn_ext_factor", 1.0, -1.0)  # below 0 it is not set
        fast, slow = keys.number("rope.scaling.yarn_beta_fast", 32.0), keys.number("rope.scaling.yarn_beta_slow", 1.0)
        raw = {"rope_type": "yarn", "factor": factor, "beta_fast": fast, "beta_slow": slow}
        raw |= _yarn_attention(keys, factor)
        if divisor := keys.number("rope.scaling.yarn_log_multiplier", 0.0):
            raw |= {"mscale": 1.0, "mscale_all_dim": divisor}
        return raw | {"original_max_position_embeddings": original or keys.size("context_length")}
    if kind in (None, "linear"):
        return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    if kind not in ("none", "longrope"):
        raise keys.wrong(f"{keys.arch}.rope.scaling.type {kind!r} is not supported; known: none, linear, longrope, yarn")
    return None


def _yarn_attention(keys: Keys, factor: float) -> Raw:
    """By how much YaRN sharpens attention. What follows from its factor is never said on top of itself: converters write the
    whole under both keys. `yarn_attn_factor` is the whole too where it is another; 1 says nothing.
    """
    learned = 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0
    said = {name: keys.number(f"rope.scaling.{name}", 1.0) for name in ("attn_factor", "yarn_attn_factor")}
    more, whole = (1.0 if math.isclose(value, learned, rel_tol=1e-4) else value for value in said.values())
    if whole < 1.0:  # no attention is made less sharp; and llama.cpp passes it over
        raise keys.wrong(f"{keys.arch}.rope.scaling.yarn_attn_factor = {whole} is not supported: it must be 1 or more")
    return {"attn_factor": more} if whole == 1.0 else {"attention_factor": whole * more}


def expert_keys(keys: Keys, *, norm_topk_prob: bool) -> Raw:
    """A mixture's sizes; `norm_topk_prob`: whether the chosen experts' weights are made to sum up to 1."""
    keys.refuse("expert_gating_func", 0, 1)  # softmax
    keys.refuse("expert_weights_scale", 0.0, 1.0)
    keys.refuse("expert_weights_norm", norm_topk_prob)
    keys.refuse("leading_dense_block_count", 0)
    keys.refuse("expert_group_count", 0, 1)
    count, chosen = keys.size("expert_count"), keys.size("expert_used_count")
    return {"num_experts": count, "num_local_experts": count, "num_experts_per_tok": chosen, "norm_topk_prob": norm_topk_prob}


def shared_experts(keys: Keys) -> Raw:
    """The mixture of DeepSeek-V2, V3 and GLM-4.5 as keys of config.json: the first layers are dense, the rest has experts."""
    return {
        "n_routed_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "n_shared_experts": keys.size("expert_shared_count"),
        "first_k_dense_replace": keys.get("leading_dense_block_count") or 0,
        "n_group": keys.get("expert_group_count") or 1,
        "topk_group": keys.get("expert_group_used_count") or 1,
        "norm_topk_prob": keys.get("expert_weights_norm") or False,
        "routed_scaling_factor": keys.number("expert_weights_scale", 0.0) or 1.0,
    }


def sliding_window_keys(keys: Keys, raw: Raw, pattern: int, window: int | None = None) -> Raw:
    """A window in all layers but every `pattern`-th, where the file does not name the layers."""
    window = keys.size("attention.sliding_window", window)
    named = keys.layers("attention.sliding_window_pattern")
    if named is None:
        every = keys.size("attention.sliding_window_pattern", pattern)
        named = [(layer + 1) % every != 0 for layer in range(raw["num_hidden_layers"])]
    return {"sliding_window": window, "layer_types": ["sliding_attention" if slides else "full_attention" for slides in named]}

"""MiniMax-M2: norms over all queries and over all keys, and sigmoids that a correction chooses from."""

from attend.model.config import ModelConfig
from attend.model.net.families import llama, mixtral
from attend.model.net.families.family import Family, Raw, decoder_sizes, head_size, in_block, refuse, size, with_ends
from attend.model.net.families.positions import rope


def read(raw: Raw) -> ModelConfig:
    """`rotary_dim` is the width of what is rotated, where no key says its share."""
    refuse(raw, "scoring_func", None, "sigmoid")
    refuse(raw, "use_qk_norm", None, True)
    raw = {"num_key_value_heads": 8, "head_dim": 128, "num_experts": 256, **with_ends(raw, 200034, 200020)}
    head = head_size(raw)
    partial = size(raw, "rotary_dim", head) / head
    return ModelConfig(
        **decoder_sizes(raw)
        | rope(raw, head, theta=5e6, partial=partial)
        | {
            "num_experts": size(raw, "num_local_experts", raw["num_experts"]),
            "experts_per_token": size(raw, "num_experts_per_tok", 8),
            "scoring_func": "sigmoid",
            "score_correction": True,
            "routing": "chosen",
            "qk_norm": "all",
        }
    )


CORRECTION = {"blocks.{}.mlp.correction": ("model.layers.{}.block_sparse_moe.e_score_correction_bias",)}
IN_BLOCK = llama.PRE_NORMS | llama.ATTENTION | mixtral.EXPERTS
FAMILIES = {"minimax_m2": Family(read, llama.OUTSIDE | in_block("model.layers", IN_BLOCK) | CORRECTION)}

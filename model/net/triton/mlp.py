"""A layer's MLP or experts, launched: torch multiplies the matrices of an MLP, Triton those of experts.

Shapes: T tokens · E model width · X experts · C experts that a token goes to · P = T C pairs of a token and an expert · M width
of the MLP · F width of one expert's MLP.
"""

from typing import Any

import torch
from torch import Tensor, nn
from triton import cdiv, next_power_of_2

from attend.model.config import ModelConfig
from attend.model.net.experts import ExpertsBesideMLP, Mixture, route
from attend.model.net.layers import GatedMLP
from attend.model.net.triton import fused_kernels, grouped_experts
from attend.model.net.triton.backend import COUNTED, INTERPRETED, Shares

AT_ONCE = 1024
"""Numbers of a vector that one program takes."""
PAIRS = 64
"""Pairs of one item of work, which has one expert. The same in any batch: a pair's result does not depend on its neighbours."""
UP_COLUMNS = 32
"""Columns of gates, and as many of ups, that one program computes; none of these sizes was timed."""
DOWN_COLUMNS = 64
ROW_BYTES = 128
"""Bytes of a row of weights that are loaded at once."""


def feed_forward(module: nn.Module, x_TE: Tensor, config: ModelConfig) -> Tensor:
    """The output of a block's `mlp` for x, [T, E]. Waits for nothing."""
    if isinstance(module, ExpertsBesideMLP):
        made_TE = module.shared_post_norm(feed_forward(module.shared, module.shared_norm(x_TE), config))
        chosen_TE = _sum_experts(module, module.experts_norm(x_TE), module.route(x_TE), config)
        return made_TE + module.experts_post_norm(chosen_TE)
    if isinstance(module, Mixture):
        return _mix(module, x_TE, config)
    gated = isinstance(module, GatedMLP)
    inner = (module.gate_up if gated else module.up)(x_TE)
    num_tokens, width = len(inner), inner.shape[1] // (2 if gated else 1)
    out_TM = inner.new_empty(num_tokens, width)
    size = min(AT_ONCE, next_power_of_2(width))
    grid = (num_tokens, cdiv(width, size))
    fused_kernels.activation_kernel[grid](inner, out_TM, M=width, SIZE=size, GATED=gated, **_activation(config))
    return module.down(out_TM)


def _activation(config: ModelConfig) -> dict[str, Any]:
    return {"ACTIVATION": config.activation, "LIMIT": config.swiglu_limit, "SLOPE": config.swiglu_slope}


def _mix(module: Mixture, x_TE: Tensor, config: ModelConfig) -> Tensor:
    """See `Mixture`. Waits for nothing."""
    routed = route(module.router(x_TE), module.mixture, module.correction)
    if module.shared is None:
        return _sum_experts(module, x_TE, routed, config)
    gates = () if module.shared_gate is None else (module.shared_gate(x_TE),)
    return _sum_experts(module, x_TE, routed, config, feed_forward(module.shared, x_TE, config), *gates)


def _sum_experts(module: Mixture, x_TE: Tensor, routed: tuple[Tensor, Tensor], config: ModelConfig, *shared: Tensor) -> Tensor:
    """The sum of what each token's experts make, and of the shared one's [T, E], with its gate [T, 1] or without, where there
    is one.
    """
    experts_TC, weights_TC = routed
    parts_PE = _compute_experts(module, x_TE, experts_TC, weights_TC, config)
    num_tokens, width = x_TE.shape
    out_TE = torch.empty_like(x_TE)
    shared_TE, gate_T1 = (*shared, x_TE, x_TE)[:2]
    chosen, size = experts_TC.shape[1], min(AT_ONCE, next_power_of_2(width))
    grouped_experts.sum_kernel[(num_tokens, cdiv(width, size))](
        parts_PE,
        experts_TC,
        shared_TE,
        gate_T1,
        out_TE,
        E=width,
        C=chosen,
        C_P=next_power_of_2(chosen),
        SIZE=size,
        SHARED=bool(shared),
        GATED=len(shared) == 2,
    )
    return out_TE


def _compute_experts(module: Mixture, x_TE: Tensor, experts_TC: Tensor, weights_TC: Tensor, config: ModelConfig) -> Tensor:
    """What each expert makes of each token that comes to it, times its weight, float32 [P, E]."""
    up, down, width = module.experts.gate_up, module.experts.down, x_TE.shape[1]
    num_experts, num_pairs, size = len(up.weight), experts_TC.numel(), down.weight.shape[2]
    pairs_P, (begin_X, last_X) = torch.empty_like(experts_TC), experts_TC.new_empty(2, num_experts)
    grouped_experts.group_kernel[(num_experts,)](experts_TC, pairs_P, begin_X, last_X, num_pairs, PAIRS=COUNTED)
    at_most = (num_pairs + min(num_pairs, num_experts) * (PAIRS - 1)) // PAIRS
    shares = Shares.split_rows(last_X, PAIRS, 0, at_most)
    places = (pairs_P, begin_X, last_X, shares.first_R, shares.rows_I)
    sizes = {
        "E": width,
        "F": size,
        "X": num_experts,
        "PAIRS": PAIRS,
        "INNER": ROW_BYTES // x_TE.element_size(),
        "BIASED": up.bias is not None,
        "UPCAST": INTERPRETED and x_TE.dtype == torch.bfloat16,
    }
    inner_PF, parts_PE = x_TE.new_empty(num_pairs, size), x_TE.new_empty(num_pairs, width, dtype=torch.float32)
    biases = [linear.weight if linear.bias is None else linear.bias for linear in (up, down)]
    grouped_experts.up_kernel[(at_most, cdiv(size, UP_COLUMNS))](
        *(x_TE, up.weight, biases[0], inner_PF, *places),
        **sizes,
        **_activation(config),
        C=experts_TC.shape[1],
        COLUMNS=UP_COLUMNS,
    )
    grouped_experts.down_kernel[(at_most, cdiv(width, DOWN_COLUMNS))](
        *(inner_PF, down.weight, biases[1], weights_TC, parts_PE, *places),
        **sizes,
        COLUMNS=DOWN_COLUMNS,
    )
    return parts_PE

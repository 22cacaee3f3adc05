"""The small parts of a decoder between its matrices, each one pass over memory: norms, rotation with the cache's write,
activations, the gate of heads.

All arithmetic is float32, whatever the tensors hold. In Triton's interpreter these run on the CPU, and they compile for an
H200; no GPU has run them yet.

Shapes: T tokens · E model width · H query heads · K key/value heads · D head size · R rotated columns of a head · M width of
the MLP · Q columns of all heads · P of attention's first product. A name that ends in _P is rounded up to a power of two, as
tl.arange needs.
"""

import triton
import triton.language as tl

from attend.model.net.triton.kernels import PLACES


@triton.jit
def _mean(x: tl.tensor, SIZE: tl.constexpr, WHOLE: tl.constexpr) -> tl.tensor:
    """The mean of each row of `x`, or of all its rows if WHOLE, of SIZE numbers that count. [rows or 1, 1]."""
    total = tl.sum(x, 1, keep_dims=True)
    if WHOLE:
        total = tl.sum(total, 0, keep_dims=True)
    return total / SIZE


@triton.jit
def _moments(
    x: tl.tensor, inside: tl.tensor, eps: tl.tensor, SIZE: tl.constexpr, WHOLE: tl.constexpr, CENTRED: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """What a norm takes from each number, which is 0 unless CENTRED, and what it multiplies the rest by."""
    mean = tl.zeros([1, 1], tl.float32)
    if CENTRED:
        mean = _mean(x, SIZE, WHOLE)
        x = tl.where(inside, x - mean, 0.0)
    return mean, tl.rsqrt(_mean(x * x, SIZE, WHOLE) + eps)


@triton.jit
def _scale_norm(
    x: tl.tensor,
    mean: tl.tensor,
    factor: tl.tensor,
    gain_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    BIASED: tl.constexpr,
) -> tl.tensor:
    """The rest of a norm: `at` says where the gain and the bias of each number are."""
    x = (x - mean) * factor * tl.load(gain_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if BIASED:
        x += tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def join_kernel(
    update_ptr: tl.tensor,  # [T, E]
    residual_ptr: tl.tensor,  # [T, E]
    normed_ptr: tl.tensor,  # [T, E]
    after_gain_ptr: tl.tensor,  # [E]
    after_bias_ptr: tl.tensor,
    gain_ptr: tl.tensor,  # [E]
    bias_ptr: tl.tensor,
    eps: tl.tensor,
    after_eps: tl.tensor,
    scale: tl.tensor,
    end_ptr: tl.tensor,  # [1]
    E: tl.constexpr,
    E_P: tl.constexpr,
    UPDATES: tl.constexpr,
    AFTER: tl.constexpr,
    ENDS: tl.constexpr,
    KEPT: tl.constexpr,
    NORM: tl.constexpr,
    CENTRED: tl.constexpr,
    BIASED: tl.constexpr,
) -> None:
    """x = residual + scale * update if UPDATES, the update under a norm of its own if AFTER; normed = norm(x) if NORM.

    If ENDS, x is multiplied by `end`, after its norm where the residual is not kept. The residual becomes x if KEPT.
    CENTRED: LayerNorm (Ba et al. 2016), else RMSNorm (Zhang & Sennrich 2019). Grid (T,).
    """
    at = tl.arange(0, E_P)[None, :]
    inside = at < E
    places = tl.program_id(0).to(tl.int64) * E + at
    x = tl.load(residual_ptr + places, mask=inside, other=0.0).to(tl.float32)
    if UPDATES:
        update = tl.load(update_ptr + places, mask=inside, other=0.0).to(tl.float32)
        if AFTER:
            mean, factor = _moments(update, inside, after_eps, E, False, CENTRED)
            update = _scale_norm(update, mean, factor, after_gain_ptr, after_bias_ptr, at, inside, BIASED)
        x += update * scale
        if ENDS and KEPT:
            x *= tl.load(end_ptr).to(tl.float32)
        if KEPT:
            tl.store(residual_ptr + places, x, mask=inside)
    if NORM:
        mean, factor = _moments(x, inside, eps, E, False, CENTRED)
        x = _scale_norm(x, mean, factor, gain_ptr, bias_ptr, at, inside, BIASED)
        if ENDS and not KEPT:
            x *= tl.load(end_ptr).to(tl.float32)
        tl.store(normed_ptr + places, x, mask=inside)


@triton.jit
def _rotate(
    x_ptr: tl.tensor,
    head: tl.tensor,
    gain_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    eps: tl.tensor,
    COUNT: tl.constexpr,
    D: tl.constexpr,
    D_P: tl.constexpr,
    R: tl.constexpr,
    NORM: tl.constexpr,
    AFTER: tl.constexpr,
    CENTRED: tl.constexpr,
    BIASED: tl.constexpr,
) -> tl.tensor:
    """COUNT heads of a token, [heads, D], under their norm and rotated: column i < R / 2 is paired with i + R / 2.

    AFTER: their norm comes after the rotation.
    """
    column = tl.arange(0, D_P)[None, :]
    inside = (head < COUNT) & (column < D)
    x = tl.load(x_ptr + head * D + column, mask=inside, other=0.0).to(tl.float32)
    if NORM != "none" and not AFTER:
        mean, factor = _moments(x, inside, eps, D * COUNT if NORM == "all" else D, NORM == "all", CENTRED)
        first = head * (D if NORM == "all" else 0)
        x = _scale_norm(x, mean, factor, gain_ptr, bias_ptr, first + column, inside, BIASED)
    if R > 0:
        other = tl.where(column < R // 2, column + R // 2, column - R // 2)
        paired = inside & (column < R)
        y = tl.load(x_ptr + head * D + other, mask=paired, other=0.0).to(tl.float32)
        if NORM != "none" and not AFTER:
            y = _scale_norm(y, mean, factor, gain_ptr, bias_ptr, first + other, paired, BIASED)
        cos = tl.load(cos_ptr + column, mask=column < R, other=1.0)
        sin = tl.load(sin_ptr + column, mask=column < R, other=0.0)
        x = x * cos + tl.where(column < R // 2, -y, y) * sin
    if NORM != "none" and AFTER:
        mean, factor = _moments(x, inside, eps, D, False, CENTRED)
        x = _scale_norm(x, mean, factor, gain_ptr, bias_ptr, column, inside, BIASED)
    return x


@triton.jit(do_not_specialize_on_alignment=PLACES)
def turn_kernel(
    qkv_ptr: tl.tensor,  # [T, WIDTH]: queries, what gates them if anything does, keys from column BEGIN on, values
    q_ptr: tl.tensor,  # [T, H, D]
    keys_ptr: tl.tensor,  # [slots, K, D]
    values_ptr: tl.tensor,
    slots_ptr: tl.tensor,  # int64 [T]
    positions_ptr: tl.tensor,  # int64 [T]
    cos_ptr: tl.tensor,  # float32 [positions, R], each angle twice
    sin_ptr: tl.tensor,
    q_gain_ptr: tl.tensor,  # [D], or [H D] if NORM is "all"
    q_bias_ptr: tl.tensor,
    k_gain_ptr: tl.tensor,  # [D], or [K D]
    k_bias_ptr: tl.tensor,
    eps: tl.tensor,
    H: tl.constexpr,
    H_P: tl.constexpr,
    K: tl.constexpr,
    K_P: tl.constexpr,
    D: tl.constexpr,
    D_P: tl.constexpr,
    R: tl.constexpr,
    BEGIN: tl.constexpr,
    WIDTH: tl.constexpr,
    NORM: tl.constexpr,
    AFTER: tl.constexpr,
    BETA: tl.constexpr,
    LENGTH: tl.constexpr,
    NORMED_VALUES: tl.constexpr,
    CENTRED: tl.constexpr,
    BIASED: tl.constexpr,
) -> None:
    """Norm and rotate a token's queries and, on their way to the cache, its keys; copy its values there. Grid (T,).

    Rotated queries are scaled by `query_scale_beta`, BETA, unless that is None, and `query_scale_length`, LENGTH.
    Values are normed without a gain if NORMED_VALUES. With K D columns behind BEGIN, keys before their norm are the values too;
    with none, keys and values are another layer's.
    """
    token = tl.program_id(0).to(tl.int64)
    slot, position = tl.load(slots_ptr + token), tl.load(positions_ptr + token)
    qkv_ptr += token * WIDTH
    cos_ptr += position * R
    sin_ptr += position * R
    column = tl.arange(0, D_P)[None, :]
    head = tl.arange(0, H_P)[:, None]
    q = _rotate(qkv_ptr, head, q_gain_ptr, q_bias_ptr, cos_ptr, sin_ptr, eps, H, D, D_P, R, NORM, AFTER, CENTRED, BIASED)
    if R > 0 and BETA is not None:
        q *= 1.0 + BETA * tl.log(1.0 + (position // LENGTH).to(tl.float32))
    tl.store(q_ptr + (token * H + head) * D + column, q, mask=(head < H) & (column < D))
    if WIDTH > BEGIN:
        head = tl.arange(0, K_P)[:, None]
        inside, cached = (head < K) & (column < D), (slot * K + head) * D + column
        qkv_ptr += BEGIN
        k = _rotate(qkv_ptr, head, k_gain_ptr, k_bias_ptr, cos_ptr, sin_ptr, eps, K, D, D_P, R, NORM, AFTER, CENTRED, BIASED)
        tl.store(keys_ptr + cached, k, mask=inside)
        v = tl.load(qkv_ptr + (WIDTH - BEGIN - K * D) + head * D + column, mask=inside, other=0.0)
        if NORMED_VALUES:
            v = v.to(tl.float32)
            _, factor = _moments(v, inside, eps, D, False, False)
            v *= factor
        tl.store(values_ptr + cached, v, mask=inside)


@triton.jit
def activate(x: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """One of `layers.ACTIVATIONS` of x. NaN stays NaN."""
    if ACTIVATION == "silu":
        x = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))  # 1 / sqrt(2)
    elif ACTIVATION == "gelu_tanh":
        x = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))  # 2 sqrt(2 / pi)
    else:
        x = tl.where(x < 0.0, 0.0, x)
        if ACTIVATION == "relu2":
            x = x * x
    return x


@triton.jit
def gate_product(
    gate: tl.tensor, up: tl.tensor, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, SLOPE: tl.constexpr
) -> tl.tensor:
    """What `layers.make_gated` makes, with `swiglu_limit` and `swiglu_slope`."""
    if LIMIT is None:
        gate = activate(gate, ACTIVATION) * up
    else:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        gate = (up + 1.0) * gate / (1.0 + tl.exp(-SLOPE * gate))
    return gate


@triton.jit
def activation_kernel(
    x_ptr: tl.tensor,  # [T, 2 M], gates before ups, if GATED, else [T, M]
    out_ptr: tl.tensor,  # [T, M]
    M: tl.constexpr,
    SIZE: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    SLOPE: tl.constexpr,
) -> None:
    """act(gate) * up if GATED, see `gate_product`, else act(x). Grid (T, M / SIZE rounded up)."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    x_ptr += token * (2 * M if GATED else M)
    x = tl.load(x_ptr + at, mask=at < M, other=0.0).to(tl.float32)
    if GATED:
        x = gate_product(x, tl.load(x_ptr + M + at, mask=at < M, other=0.0).to(tl.float32), ACTIVATION, LIMIT, SLOPE)
    else:
        x = activate(x, ACTIVATION)
    tl.store(out_ptr + token * M + at, x, mask=at < M)


@triton.jit
def gate_kernel(
    heads_ptr: tl.tensor,  # [T, Q]
    gate_ptr: tl.tensor,  # [T, P], whose columns from BEGIN on are the gate
    Q: tl.constexpr,
    P: tl.constexpr,
    BEGIN: tl.constexpr,
    SHARED: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """heads *= sigmoid(gate), SHARED columns next to each other by the same. Grid (T, Q / SIZE rounded up)."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    heads = tl.load(heads_ptr + token * Q + at, mask=at < Q, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * P + BEGIN + at // SHARED, mask=at < Q, other=0.0).to(tl.float32)
    tl.store(heads_ptr + token * Q + at, heads / (1.0 + tl.exp(-gate)), mask=at < Q)

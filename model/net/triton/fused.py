"""The small parts of a decoder between its matrices, each one pass over memory: norms, rotation with the cache's write, SwiGLU.

All arithmetic is float32, whatever the tensors hold. In Triton's interpreter these run on the CPU, and they compile for an
H200; no GPU has run them yet.

Shapes: T tokens · E model width · H query heads · K key/value heads · D head size · M width of the MLP. A name that ends in
_P is rounded up to a power of two, as tl.arange needs.
"""

import triton
import triton.language as tl

from model.net.triton.kernels import PLACES


@triton.jit
def norm_kernel(
    update_ptr: tl.tensor,  # [T, E]
    residual_ptr: tl.tensor,  # [T, E]
    gain_ptr: tl.tensor,  # [E]
    normed_ptr: tl.tensor,  # [T, E]
    eps: tl.tensor,
    E: tl.constexpr,
    E_P: tl.constexpr,
    UPDATES: tl.constexpr,
) -> None:
    """residual += update, if UPDATES; normed = residual / rms(residual) * gain (Zhang & Sennrich 2019). Grid (T,)."""
    at = tl.arange(0, E_P)
    inside = at < E
    places = tl.program_id(0).to(tl.int64) * E + at
    x = tl.load(residual_ptr + places, mask=inside, other=0.0).to(tl.float32)
    if UPDATES:
        x += tl.load(update_ptr + places, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual_ptr + places, x, mask=inside)
    gain = tl.load(gain_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed_ptr + places, x * tl.rsqrt(tl.sum(x * x, 0) / E + eps) * gain, mask=inside)


@triton.jit
def _turned(
    x_ptr: tl.tensor,
    places: tl.tensor,
    inside: tl.tensor,
    gain_ptr: tl.tensor,
    pair: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    eps: tl.tensor,
    D: tl.constexpr,
    NORM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Both halves of some heads, each [heads, D / 2], under their norm, if NORM, and rotated."""
    a = tl.load(x_ptr + places, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + places + D // 2, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
        a *= scale * tl.load(gain_ptr + pair, mask=pair < D // 2, other=0.0).to(tl.float32)[None, :]
        b *= scale * tl.load(gain_ptr + D // 2 + pair, mask=pair < D // 2, other=0.0).to(tl.float32)[None, :]
    return a * cos - b * sin, b * cos + a * sin


@triton.jit(do_not_specialize_on_alignment=PLACES)
def turn_kernel(
    qkv_ptr: tl.tensor,  # [T, (H + 2 K) D]
    keys_ptr: tl.tensor,  # [slots, K, D]
    values_ptr: tl.tensor,
    slots_ptr: tl.tensor,  # int64 [T]
    positions_ptr: tl.tensor,  # int64 [T]
    cos_ptr: tl.tensor,  # float32 [positions, D], each angle twice
    sin_ptr: tl.tensor,
    q_gain_ptr: tl.tensor,  # [D]
    k_gain_ptr: tl.tensor,
    eps: tl.tensor,
    H: tl.constexpr,
    H_P: tl.constexpr,
    K: tl.constexpr,
    K_P: tl.constexpr,
    D: tl.constexpr,
    HALF_P: tl.constexpr,
    NORM: tl.constexpr,
) -> None:
    """Norm and rotate a token's queries in place, its keys on their way to the cache; copy its values there. Grid (T,)."""
    token = tl.program_id(0).to(tl.int64)
    slot, position = tl.load(slots_ptr + token), tl.load(positions_ptr + token)
    pair = tl.arange(0, HALF_P)
    angles = position * D + pair
    cos = tl.load(cos_ptr + angles, mask=pair < D // 2, other=0.0)[None, :]
    sin = tl.load(sin_ptr + angles, mask=pair < D // 2, other=0.0)[None, :]

    queries = tl.arange(0, H_P)[:, None]
    inside = (queries < H) & (pair < D // 2)[None, :]
    places = token * ((H + 2 * K) * D) + queries * D + pair[None, :]
    a, b = _turned(qkv_ptr, places, inside, q_gain_ptr, pair, cos, sin, eps, D, NORM)
    tl.store(qkv_ptr + places, a, mask=inside)
    tl.store(qkv_ptr + places + D // 2, b, mask=inside)

    heads = tl.arange(0, K_P)[:, None]
    inside = (heads < K) & (pair < D // 2)[None, :]
    places = token * ((H + 2 * K) * D) + (H + heads) * D + pair[None, :]
    cached = (slot * K + heads) * D + pair[None, :]
    a, b = _turned(qkv_ptr, places, inside, k_gain_ptr, pair, cos, sin, eps, D, NORM)
    tl.store(keys_ptr + cached, a, mask=inside)
    tl.store(keys_ptr + cached + D // 2, b, mask=inside)
    tl.store(values_ptr + cached, tl.load(qkv_ptr + places + K * D, mask=inside), mask=inside)
    tl.store(values_ptr + cached + D // 2, tl.load(qkv_ptr + places + K * D + D // 2, mask=inside), mask=inside)


@triton.jit
def swiglu_kernel(
    gate_up_ptr: tl.tensor,  # [T, 2 M]
    out_ptr: tl.tensor,  # [T, M]
    M: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """silu(gate) * up (Shazeer 2020). Grid (T, M / SIZE rounded up)."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    gate = tl.load(gate_up_ptr + token * (2 * M) + at, mask=at < M, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + token * (2 * M) + M + at, mask=at < M, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * M + at, gate / (1.0 + tl.exp(-gate)) * up, mask=at < M)

"""The gated delta rule and the short convolution in Triton, see `model/net/delta.py` and `model/net/short_conv.py`.

The rule takes three launches for a layer, whatever rows a step has: the convolution, the rule, then the norm and the gate of
heads. A short convolution takes the first one alone. A row's programs compute its tokens one after the other, one token of a
stream like many of a prompt: so a sequence has the same bits alone, in a batch, and in any chunks. Products of matrices over
a prompt's chunk, as in torch's form, would be faster, and would give that up.

All arithmetic is float32, whatever the tensors hold. Nothing is read on the host, so that a step can be recorded: slots and
positions are the layout's own tensors. The state of a sequence that begins is not read. In Triton's interpreter these run on
the CPU, and they compile for an H200; no GPU has run them yet.

Shapes: T tokens of this step · R rows · E model width · C columns of the convolution · W tokens that it sees · H value heads ·
K columns of a key · V of a value · P columns of the first product: C, then H V of the gate; of a short convolution 3 C. A name
that ends in _P is rounded up to a power of two, as tl.arange needs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv, next_power_of_2

from attend.model.net.delta import NORM_EPS, GatedDelta
from attend.model.net.paged_attention import PagedAttention
from attend.model.net.short_conv import ShortConv
from attend.model.net.triton.backend import TritonBackend
from attend.model.net.triton.fused_kernels import activate
from attend.model.net.triton.kernels import PLACES
from attend.model.sublayers import DeltaSpec

HELD = 1 << 12
"""Numbers of a head's state, some of its columns, that a program of the rule holds in its registers."""
TOKENS = 16
"""Tokens and columns that the convolution computes at once; none of these sizes was timed."""
COLUMNS = 64
UNIT_EPS = tl.constexpr(NORM_EPS)


@triton.jit
def _tokens(row: tl.tensor, last_ptr: tl.tensor, tokens_ptr: tl.tensor, num_single: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The place in T of a row's first token, and the row's number of tokens. Rows of one token come first."""
    longer = row >= num_single
    begin = tl.where(longer, tl.load(tokens_ptr + row - num_single, mask=longer, other=0), row)
    return begin, tl.load(last_ptr + row - num_single, mask=longer, other=0) + 1


@triton.jit
def _inputs(
    x_ptr: tl.tensor,
    kept_ptr: tl.tensor,
    at: tl.tensor,
    column: tl.tensor,
    inside: tl.tensor,
    known: tl.tensor,
    P: tl.constexpr,
    W: tl.constexpr,
    GATE: tl.constexpr,
) -> tl.tensor:
    """What came in `at` tokens after a row's first: of this step, else as the state has it; noughts before the sequence.

    Of this step it is multiplied by what stands GATE columns behind it, where that is not 0.
    """
    x = tl.load(x_ptr + at * P + column, mask=inside & (at >= 0), other=0.0).to(tl.float32)
    if GATE:
        x *= tl.load(x_ptr + at * P + GATE + column, mask=inside & (at >= 0), other=0.0).to(tl.float32)
    kept = tl.load(kept_ptr + column * (W - 1) + at + (W - 1), mask=inside & (at < 0) & known, other=0.0)
    return tl.where(at < 0, kept, x)


@triton.jit(do_not_specialize=["num_single"], do_not_specialize_on_alignment=PLACES)
def convolve_kernel(
    x_ptr: tl.tensor,  # [T, P], of which C columns are read, or all three C where it is GATED
    weight_ptr: tl.tensor,  # [C, W]
    bias_ptr: tl.tensor,  # [C], if BIASED
    kept_ptr: tl.tensor,  # float32 [slots, C, W - 1]
    out_ptr: tl.tensor,  # [T, C]
    sources_ptr: tl.tensor,  # int64 [R]: where states are read
    slots_ptr: tl.tensor,  # int64 [R]: where they are written
    positions_ptr: tl.tensor,  # int64 [T]
    last_ptr: tl.tensor,  # int64: the longer rows' tokens, less one
    tokens_ptr: tl.tensor,  # int64: where they lie in T
    num_single: tl.tensor,
    P: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    W_P: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIASED: tl.constexpr,
    GATED: tl.constexpr,
) -> None:
    """act of each column's weighted sum over its last W tokens; then a row's last W - 1 inputs go to its state.

    GATED, an input is the product of the first and the last third of P; the sum is multiplied by the second one, without act.

    Grid (R, C / COLUMNS rounded up): a program is alone with its columns of a state.
    """
    GATE: tl.constexpr = 2 * C if GATED else 0
    row = tl.program_id(0).to(tl.int64)
    begin, count = _tokens(row, last_ptr, tokens_ptr, num_single)
    known = tl.load(positions_ptr + begin) > 0
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    x_ptr += begin * P
    out_ptr += begin * C
    new_ptr = kept_ptr + tl.load(slots_ptr + row) * (C * (W - 1))
    kept_ptr += tl.load(sources_ptr + row) * (C * (W - 1))
    for tile in range(0, count, TOKENS):
        at = tile + tl.arange(0, TOKENS)[:, None]
        inside = (at < count) & (column < C)[None, :]
        total = tl.zeros([TOKENS, COLUMNS], tl.float32)
        for tap in tl.static_range(W):
            weight = tl.load(weight_ptr + column * W + tap, mask=column < C, other=0.0).to(tl.float32)
            total += _inputs(x_ptr, kept_ptr, at + (tap - W + 1), column[None, :], inside, known, P, W, GATE) * weight[None, :]
        if BIASED:
            total += tl.load(bias_ptr + column, mask=column < C, other=0.0).to(tl.float32)[None, :]
        if GATED:
            total *= tl.load(x_ptr + at * P + C + column[None, :], mask=inside, other=0.0).to(tl.float32)
        else:
            total = activate(total, ACTIVATION)
        tl.store(out_ptr + at * C + column[None, :], total, mask=inside)
    place = tl.arange(0, W_P)[None, :]
    column = column[:, None]
    inside = (place < W - 1) & (column < C)
    last = _inputs(x_ptr, kept_ptr, count - (W - 1) + place, column, inside, known, P, W, GATE)
    tl.debug_barrier()  # no other warp is still reading what is written now
    tl.store(new_ptr + column * (W - 1) + place, last, mask=inside)


@triton.jit
def _softplus(x: tl.tensor) -> tl.tensor:
    """log(1 + exp(x)), with all digits where exp(x) is small beside 1 (Kahan's form of log1p)."""
    small = tl.exp(-tl.abs(x))
    whole = 1.0 + small
    rounded = whole - 1.0
    rest = tl.where(rounded > 0.0, tl.log(whole) * (small / tl.where(rounded > 0.0, rounded, 1.0)), small)
    return tl.where(x > 0.0, x, 0.0) + rest


@triton.jit
def _unit(x: tl.tensor) -> tl.tensor:
    """x scaled to length 1."""
    return x * tl.rsqrt(tl.sum(x * x, 0) + UNIT_EPS)


@triton.jit(do_not_specialize=["num_single"], do_not_specialize_on_alignment=PLACES)
def rule_kernel(
    x_ptr: tl.tensor,  # float32 [T, C]: queries, keys, values
    rates_ptr: tl.tensor,  # [T, 2 H]: rates, then steps
    log_speed_ptr: tl.tensor,  # [H]
    step_bias_ptr: tl.tensor,  # [H]
    states_ptr: tl.tensor,  # float32 [slots, H, K, V]
    out_ptr: tl.tensor,  # float32 [T, H, V]
    sources_ptr: tl.tensor,  # int64 [R]: where states are read
    slots_ptr: tl.tensor,  # int64 [R]: where they are written
    positions_ptr: tl.tensor,  # int64 [T]
    last_ptr: tl.tensor,  # int64: the longer rows' tokens, less one
    tokens_ptr: tl.tensor,  # int64: where they lie in T
    num_single: tl.tensor,
    C: tl.constexpr,
    H: tl.constexpr,
    SHARED: tl.constexpr,
    K: tl.constexpr,
    K_P: tl.constexpr,
    V: tl.constexpr,
    PART: tl.constexpr,
    RATE: tl.constexpr,
) -> None:
    """The rule over a row's tokens, for PART columns of a head's state, which are read and written once.

    SHARED value heads have one key. Rates lie in (0, RATE). Grid (R, H, V / PART rounded up).
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin, count = _tokens(row, last_ptr, tokens_ptr, num_single)
    key, value = tl.arange(0, K_P), tl.program_id(2) * PART + tl.arange(0, PART)
    places = head * (K * V) + key[:, None] * V + value[None, :]
    source, slot = tl.load(sources_ptr + row) * (H * K * V), tl.load(slots_ptr + row) * (H * K * V)
    inside = (key < K)[:, None] & (value < V)[None, :]
    state = tl.load(states_ptr + source + places, mask=inside & (tl.load(positions_ptr + begin) > 0), other=0.0)
    speed = tl.exp(tl.load(log_speed_ptr + head).to(tl.float32))
    bias = tl.load(step_bias_ptr + head).to(tl.float32)
    for token in range(begin, begin + count):
        q_ptr = x_ptr + token * C + head // SHARED * K + key
        q = _unit(tl.load(q_ptr, mask=key < K, other=0.0)) * K**-0.5
        k = _unit(tl.load(q_ptr + H // SHARED * K, mask=key < K, other=0.0))
        v = tl.load(x_ptr + token * C + (C - H * V) + head * V + value, mask=value < V, other=0.0)
        rate = RATE / (1.0 + tl.exp(-tl.load(rates_ptr + token * (2 * H) + head).to(tl.float32)))
        step = tl.load(rates_ptr + token * (2 * H) + H + head).to(tl.float32)
        left = tl.exp(-speed * _softplus(step + bias))
        update = rate * (v - left * tl.sum(state * k[:, None], 0))
        out = left * tl.sum(state * q[:, None], 0) + tl.sum(q * k, 0) * update
        state = left * state + k[:, None] * update[None, :]
        tl.store(out_ptr + (token * H + head) * V + value, out, mask=value < V)
    tl.store(states_ptr + slot + places, state, mask=inside)


@triton.jit
def norm_kernel(
    x_ptr: tl.tensor,  # float32 [T, H, V]
    gate_ptr: tl.tensor,  # [T, P], of which the last H V columns are read
    gain_ptr: tl.tensor,  # [V]
    out_ptr: tl.tensor,  # [T, H, V]
    eps: tl.tensor,
    P: tl.constexpr,
    H: tl.constexpr,
    V: tl.constexpr,
    V_P: tl.constexpr,
) -> None:
    """RMSNorm of each head's output, times silu(gate). Grid (T, H)."""
    token, head, at = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, V_P)
    x = tl.load(x_ptr + (token * H + head) * V + at, mask=at < V, other=0.0)
    gate = tl.load(gate_ptr + token * P + (P - H * V) + head * V + at, mask=at < V, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 0) / V + eps) * tl.load(gain_ptr + at, mask=at < V, other=0.0).to(tl.float32)
    tl.store(out_ptr + (token * H + head) * V + at, x * activate(gate, "silu"), mask=at < V)


def recur(module: GatedDelta, x_TE: Tensor, layer: int, attention: PagedAttention, activation: str) -> Tensor:
    """What the layer makes of x, [T, E]; its states have moved on. Waits for nothing."""
    spec, num_rows = module.spec, len(attention.layout.rows)
    kept, states = attention.cache.states[layer]
    inputs_TP, rates_TH = module.inputs(x_TE), module.gates(x_TE)
    rows = _rows(attention)
    sums_TC, heads_THV, out_TN = _room(inputs_TP, spec)
    _convolve(attention, inputs_TP, (module.convolution, None), kept, sums_TC, activation)
    key_p, value_p = next_power_of_2(spec.key_size), next_power_of_2(spec.value_size)
    part = min(value_p, max(1, HELD // key_p))
    rule_kernel[(num_rows, spec.value_heads, cdiv(spec.value_size, part))](
        *(sums_TC, rates_TH, module.log_speed, module.step_bias, states, heads_THV, *rows),
        C=spec.channels,
        H=spec.value_heads,
        SHARED=spec.value_heads // spec.key_heads,
        K=spec.key_size,
        K_P=key_p,
        V=spec.value_size,
        PART=part,
        RATE=module.rate_scale,
    )
    norm_kernel[(len(x_TE), spec.value_heads)](
        *(heads_THV, inputs_TP, module.gain, out_TN, module.norm_eps),
        P=inputs_TP.shape[1],
        H=spec.value_heads,
        V=spec.value_size,
        V_P=value_p,
    )
    return module.merge(out_TN)


def convolve(module: ShortConv, x_TE: Tensor, layer: int, attention: PagedAttention) -> Tensor:
    """What a short convolution makes of x, [T, E]; its states have moved on. Waits for nothing."""
    [kept] = attention.cache.states[layer]
    inputs_TP = module.inputs(x_TE)
    out_TC = inputs_TP.new_empty(len(x_TE), module.spec.channels)
    _convolve(attention, inputs_TP, (module.convolution, module.convolution_bias), kept, out_TC, None)
    return module.merge(out_TC)


def _rows(attention: PagedAttention) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int]:
    """A step's rows as the kernels go through them, see `convolve_kernel`."""
    layout, backend = attention.layout, attention.backend
    assert isinstance(backend, TritonBackend) and layout.states_R is not None and layout.sources_R is not None
    last, tokens = backend.plan(layout).longer[1:]
    return layout.sources_R, layout.states_R, layout.positions_T, last, tokens, layout.num_single


def _convolve(
    attention: PagedAttention,
    inputs_TP: Tensor,
    weights: tuple[Tensor, Tensor | None],
    kept: Tensor,
    out_TC: Tensor,
    activation: str | None,
) -> None:
    """One launch, with a weight and a bias; without an activation it is gated."""
    weight, bias = weights
    columns, kernel = out_TC.shape[1], weight.shape[-1]
    convolve_kernel[(len(attention.layout.rows), cdiv(columns, COLUMNS))](
        *(inputs_TP, weight, weight if bias is None else bias, kept, out_TC, *_rows(attention)),
        P=inputs_TP.shape[1],
        C=columns,
        W=kernel,
        W_P=next_power_of_2(kernel),
        TOKENS=TOKENS,
        COLUMNS=COLUMNS,
        ACTIVATION=activation,
        BIASED=bias is not None,
        GATED=activation is None,
    )


def _room(inputs_TP: Tensor, spec: DeltaSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Buffers: the convolution's sums and the delta rule's outputs, both float32, and the heads' outputs after their norm."""
    sums_TC = inputs_TP.new_empty(len(inputs_TP), spec.channels, dtype=torch.float32)
    return sums_TC, sums_TC.new_empty(len(inputs_TP), spec.value_width), inputs_TP.new_empty(len(inputs_TP), spec.value_width)

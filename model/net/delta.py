"""The gated delta rule in place of attention: each head keeps one matrix for a sequence, whatever its length.

A head's state S [K, V] maps keys to values. At each token it decays, and what it says of the token's key moves towards the
token's value (Yang et al. 2024, "Gated Delta Networks"):

    u_t = b_t (v_t - a_t S_{t-1}ᵀ k_t)        how far it is off, times the rate b_t in (0, 1), or in (0, 2)
    S_t = a_t S_{t-1} + k_t u_tᵀ              with the decay a_t in (0, 1)
    o_t = S_tᵀ q_t

Queries and keys have length 1, and queries are divided by sqrt(K). Before the rule, queries, keys and values pass a
convolution over the last W tokens, each column by itself. So a layer keeps S and the last W - 1 inputs of the convolution.

Shapes: T tokens · R sequences · L tokens of each · E model width · H value heads · K columns of a key · V of a value ·
C columns of the convolution · W tokens that it sees.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attend.model.config import ModelConfig
from attend.model.net.attention import Attention
from attend.model.net.layers import ACTIVATIONS
from attend.model.net.linear import Linear
from attend.model.net.rope import Rotation
from attend.model.net.states import State
from attend.model.sublayers import DeltaSpec

CHUNK = 64
"""Tokens whose corrections are solved for at once."""
NORM_EPS = 1e-6


def causal_convolution(
    x_RLC: Tensor, before_RCW: Tensor, weight_C1W: Tensor, bias_C: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Each column's weighted sum over its last W tokens, [R, L, C]; and the last W - 1 inputs, [R, C, W - 1].

    `before_RCW`: the W - 1 inputs before the first.
    """
    inputs_RCL = torch.cat((before_RCW, x_RLC.mT), dim=-1)
    sums_RCL = F.conv1d(inputs_RCL, weight_C1W, bias_C, groups=len(weight_C1W))
    return sums_RCL.mT, inputs_RCL[..., x_RLC.shape[1] :]


def delta_rule(
    q_RHLK: Tensor, k_RHLK: Tensor, v_RHLV: Tensor, decay_RHL: Tensor, rate_RHL: Tensor, state_RHKV: Tensor
) -> tuple[Tensor, Tensor]:
    """The rule token after token, all in float32: outputs [R, H, L, V] and the state after them.

    `decay_RHL` is log a_t, `rate_RHL` is b_t.
    """
    outputs = []
    for q_RHK, k_RHK, v_RHV, decay_RH, rate_RH in zip(
        *(part.unbind(2) for part in (q_RHLK, k_RHLK, v_RHLV, decay_RHL, rate_RHL)), strict=True
    ):
        left_RH1 = decay_RH.exp()[..., None]
        said_RH2V = left_RH1[..., None] * (torch.stack((k_RHK, q_RHK), dim=2) @ state_RHKV)  # S is read once for both
        update_RHV = rate_RH[..., None] * (v_RHV - said_RH2V[:, :, 0])
        outputs.append(said_RH2V[:, :, 1] + (q_RHK * k_RHK).sum(dim=-1, keepdim=True) * update_RHV)
        state_RHKV = (state_RHKV * left_RH1[..., None]).addcmul_(k_RHK[..., None], update_RHV[:, :, None])
    return torch.stack(outputs, dim=2), state_RHKV


def chunked_delta_rule(
    q_RHLK: Tensor, k_RHLK: Tensor, v_RHLV: Tensor, decay_RHL: Tensor, rate_RHL: Tensor, state_RHKV: Tensor
) -> tuple[Tensor, Tensor]:
    """As `delta_rule`, with matrix products over CHUNK tokens at a time."""
    outputs = []
    for begin in range(0, q_RHLK.shape[2], CHUNK):
        some = (part[:, :, begin : begin + CHUNK] for part in (q_RHLK, k_RHLK, v_RHLV, decay_RHL, rate_RHL))
        out_RHLV, state_RHKV = _chunk(*some, state_RHKV)
        outputs.append(out_RHLV)
    return torch.cat(outputs, dim=2), state_RHKV


def _chunk(
    q_RHLK: Tensor, k_RHLK: Tensor, v_RHLV: Tensor, decay_RHL: Tensor, rate_RHL: Tensor, state_RHKV: Tensor
) -> tuple[Tensor, Tensor]:
    """One chunk. With g_t = a_1 ... a_t the state is S_t = g_t S_0 + sum over i <= t of g_t / g_i k_i u_iᵀ.

    Put into the rule for u_t, that is a triangular system for all corrections of the chunk:

        u_t + b_t sum over i < t of g_t / g_i (k_t · k_i) u_i = b_t (v_t - g_t S_0ᵀ k_t)
    """
    logs_RHL = decay_RHL.double().cumsum(dim=-1)  # float32 keeps too few digits of a small difference of large sums
    ratios_RHLL = (logs_RHL[..., :, None] - logs_RHL[..., None, :]).float()
    later_LL = torch.ones(ratios_RHLL.shape[-2:], dtype=torch.bool, device=ratios_RHLL.device).triu(1)
    ratios_RHLL = ratios_RHLL.masked_fill(later_LL, -torch.inf).exp()
    left_RHL1, kept_RHL1 = (logs.float().exp()[..., None] for logs in (logs_RHL, logs_RHL[..., -1:] - logs_RHL))
    rate_RHL1 = rate_RHL[..., None]
    system_RHLL = rate_RHL1 * ratios_RHLL * (k_RHLK @ k_RHLK.mT)  # its diagonal is taken for ones
    wanted_RHLV = rate_RHL1 * (v_RHLV - left_RHL1 * (k_RHLK @ state_RHKV))
    updates_RHLV = torch.linalg.solve_triangular(system_RHLL, wanted_RHLV, upper=False, unitriangular=True)
    out_RHLV = left_RHL1 * (q_RHLK @ state_RHKV) + (ratios_RHLL * (q_RHLK @ k_RHLK.mT)) @ updates_RHLV
    return out_RHLV, left_RHL1[..., -1:, :] * state_RHKV + (kept_RHL1 * k_RHLK).mT @ updates_RHLV


class GatedDelta(nn.Module):
    """Project to queries, keys, values and gates; convolve; apply the rule in each head; norm, gate and project back."""

    def __init__(self, config: ModelConfig, spec: DeltaSpec) -> None:
        super().__init__()
        self.spec = spec
        self.norm_eps = config.norm_eps if spec.norm_eps is None else spec.norm_eps
        self.rate_scale = 2.0 if spec.negative_eigenvalues else 1.0
        self.activation = ACTIVATIONS[config.activation]
        self.inputs = Linear(config.hidden_size, [spec.channels, spec.value_width], bias=False)
        """Queries, keys, values, and what gates the heads' outputs."""
        self.gates = Linear(config.hidden_size, [spec.value_heads] * 2, bias=False)
        """Each head's rate, then each head's step, which its decay is made of."""
        self.convolution = nn.Parameter(torch.zeros(spec.channels, 1, spec.kernel))
        self.log_speed = nn.Parameter(torch.zeros(spec.value_heads))
        """log a_t = -exp(log_speed) * softplus(step + step_bias)."""
        self.step_bias = nn.Parameter(torch.zeros(spec.value_heads))
        self.gain = nn.Parameter(torch.ones(spec.value_size))
        self.merge = Linear(spec.value_width, [config.hidden_size], bias=False)

    def forward(self, x_TE: Tensor, rotation: Rotation | None, layer: int, attention: Attention) -> Tensor:
        mixed_TC, gate_TN = self.inputs(x_TE).split(self.inputs.parts, dim=-1)
        rate_TH, step_TH = self.gates(x_TE).chunk(2, dim=-1)
        decay_TH = -self.log_speed.float().exp() * F.softplus(step_TH.float() + self.step_bias.float())
        out_THV = attention.recur(layer, self, mixed_TC, decay_TH, rate_TH.sigmoid() * self.rate_scale)
        normed_THV = F.rms_norm(out_THV.float(), (self.spec.value_size,), self.gain.float(), self.norm_eps)
        return self.merge((normed_THV.flatten(-2) * F.silu(gate_TN.float())).to(x_TE.dtype))

    def start(self, count: int) -> State:
        """See Recurrence: the last inputs of the convolution [R, C, W - 1], and S [R, H, K, V]."""
        return tuple(self.gain.new_zeros(count, *shape, dtype=torch.float32) for shape in self.spec.state_shapes)

    def advance(self, inputs: Sequence[Tensor], state: State) -> tuple[Tensor, State]:
        """See Recurrence. `inputs`: the convolution's [R, L, C], log a_t and b_t [R, L, H]. Outputs: float32 [R, L, H, V]."""
        mixed_RLC, decay_RLH, rate_RLH = inputs
        sums_RLC, before_RCW = causal_convolution(mixed_RLC, state[0].to(mixed_RLC.dtype), self.convolution)
        widths = [self.spec.query_width, self.spec.query_width, self.spec.value_width]
        q, k, v = self.activation(sums_RLC).float().split(widths, dim=-1)
        q_RHLK, k_RHLK = (self._unit(x) for x in (q, k))
        v_RHLV = v.unflatten(-1, (-1, self.spec.value_size)).transpose(1, 2)
        gates = (x.float().transpose(1, 2) for x in (decay_RLH, rate_RLH))
        rule = delta_rule if mixed_RLC.shape[1] == 1 else chunked_delta_rule
        out_RHLV, state_RHKV = rule(q_RHLK * self.spec.key_size**-0.5, k_RHLK, v_RHLV, *gates, state[1])
        return out_RHLV.transpose(1, 2), (before_RCW.float(), state_RHKV)

    def _unit(self, x: Tensor) -> Tensor:
        """Heads of length 1, each as often as value heads share it: [R, H, L, K]."""
        heads = x.unflatten(-1, (-1, self.spec.key_size)).transpose(1, 2)
        heads = heads * torch.rsqrt(heads.square().sum(dim=-1, keepdim=True) + NORM_EPS)
        return heads.repeat_interleave(self.spec.value_heads // self.spec.key_heads, dim=1)

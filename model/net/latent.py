"""Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1): of a token one vector is cached for all heads.

    c = norm(x W_DKV)          r = rotated(x W_KR)          the latent vector, and the part of a key that has a position
    k_h = [c W_UK,h ; r]       v_h = c W_UV,h               keys and values of head h, written out
    q_h = [n_h ; p_h]          of x W_Q, or of norm(x W_DQ) W_UQ; p_h is rotated

Keys and values need not be written out, since the matrices around them can change places:

    q_h · k_h = n_h · (c W_UK,h) + p_h · r = [n_h W_UK,hᵀ ; p_h] · [c ; r]
    sum over keys s of weight_s v_h,s = (sum over keys s of weight_s c_s) W_UV,h

So this is attention with one key/value head, whose key [c ; r] is its value too: of the outputs the first columns are read.

Shapes: T tokens · E model width · H heads · N columns of a query that are not rotated · R that are · L columns of a latent
vector · V columns of a value · D = L + R.
"""

import torch
from torch import Tensor, nn

from attend.model.config import ModelConfig
from attend.model.net.attention import Attention
from attend.model.net.layers import RMSNorm
from attend.model.net.linear import Linear
from attend.model.net.rope import Rotation, apply_rotary
from attend.model.sublayers import LatentSpec

NORM_EPS = 1e-6
"""The eps of the norms of latent vectors, whatever `rms_norm_eps` says, as the classes in `transformers` have it."""


class LatentQuery(nn.Module):
    """Queries of all heads from a latent vector of their own: norm(x W_DQ) W_UQ."""

    def __init__(self, config: ModelConfig, rank: int, size: int) -> None:
        """`size`: columns of a head's query."""
        super().__init__()
        self.q_down = Linear(config.hidden_size, [rank], bias=config.qkv_bias)
        self.q_norm = RMSNorm(rank, eps=NORM_EPS)
        self.q_up = Linear(rank, [config.num_heads * size], bias=False, shard_dim="rows", unit=size)

    def forward(self, x_TE: Tensor) -> Tensor:
        return self.q_up(self.q_norm(self.q_down(x_TE)))


class LatentAttention(nn.Module):
    """Project to queries and a latent vector, attend over latent vectors, make values of what comes out, project back."""

    def __init__(self, config: ModelConfig, spec: LatentSpec) -> None:
        super().__init__()
        self.spec = spec
        queries, unit = config.num_heads * spec.query_size, spec.key_size + spec.value_size
        self.query: nn.Module = (
            Linear(config.hidden_size, [queries], bias=False, shard_dim="rows", unit=spec.query_size)
            if spec.query_rank is None
            else LatentQuery(config, spec.query_rank, spec.query_size)
        )
        self.kv_down = Linear(config.hidden_size, [spec.rank, spec.rope_size], bias=config.qkv_bias)
        """W_DKV and W_KR, one below the other: to the latent vector and to the rotated key that all heads share."""
        self.kv_norm = RMSNorm(spec.rank, eps=NORM_EPS)
        self.kv_up = Linear(spec.rank, [config.num_heads * unit], bias=False, shard_dim="rows", unit=unit)
        """W_UK and W_UV, head by head. Nothing is multiplied by it as it stands: see ABSORBED in `linear.py`."""
        values = config.num_heads * spec.value_size
        self.out = Linear(values, [config.hidden_size], bias=config.out_bias, shard_dim="columns", unit=spec.value_size)

    def forward(self, x_TE: Tensor, rotation: Rotation | None, layer: int, attention: Attention) -> Tensor:
        spec = self.spec
        q_THQ = self.query(x_TE).unflatten(-1, (-1, spec.query_size))
        plain_THN, turned_THR = q_THQ.split([spec.key_size, spec.rope_size], dim=-1)
        latent_TL, shared_TR = self.kv_down(x_TE).split(self.kv_down.parts, dim=-1)
        [up] = self.kv_up.slices(self.kv_up.out_features)
        keys_HNL, values_HVL = up.view(q_THQ.shape[1], -1, spec.rank).split([spec.key_size, spec.value_size], dim=1)
        absorbed_THL = torch.einsum("thn,hnl->thl", plain_THN, keys_HNL)
        q_THD = torch.cat((absorbed_THL, apply_rotary(turned_THR, rotation)), dim=-1)
        k_T1D = torch.cat((self.kv_norm(latent_TL)[:, None], apply_rotary(shared_TR[:, None], rotation)), dim=-1)
        mixed_THL = attention(layer, q_THD, k_T1D, k_T1D)[..., : spec.rank]
        return self.out(torch.einsum("thl,hvl->thv", mixed_THL, values_HVL).flatten(-2))

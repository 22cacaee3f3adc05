"""The native decoder computes the checkpoints of every family as `transformers` writes them."""

from functools import partial

import pytest
import torch

from attend.model.net.attention import MultiHeadAttention
from attend.model.net.checkpoint import load_decoder
from attend.model.net.delta import GatedDelta
from attend.model.net.experts import Mixture
from attend.model.net.paged_attention import ReferenceBackend, TorchBackend
from attend.model.net.transformer import Decoder
from tests.model.checkpoints import KINDS, TORCH_ALONE, write_checkpoint
from tests.model.net.margins import margins
from tests.model.net.native.test_native import distance, needs_library, random_text, run, run_native
from tests.model.net.native.test_switches import settle

TEXTS = [random_text(length, at) for at, length in enumerate((70, 3, 33))]
SHORT = [random_text(8, at) for at in range(80)]
NOISE = 0.05
"""Of the spread of a router's scores: what bfloat16 leaves open of the difference of two, with room."""


def decided(whole: Decoder, texts: list[torch.Tensor]) -> torch.Tensor:
    """Which tokens come before the first one of their text for which a router decides within the noise. bool [T]."""
    doubtful = torch.zeros(sum(map(len, texts)), dtype=torch.bool)

    def note(mixture: Mixture, _: object, __: object, scores_TX: torch.Tensor) -> None:
        doubtful.logical_or_(margins(mixture, scores_TX) < NOISE * scores_TX.std())

    mixtures = [module for module in whole.modules() if isinstance(module, Mixture)]
    hooks = [mixture.router.register_forward_hook(partial(note, mixture)) for mixture in mixtures]
    run(whole, ReferenceBackend(whole.config.attention_variants), 1000, 32, torch.float32, texts)
    for hook in hooks:
        hook.remove()
    return torch.cat([part.cumsum(0) == 0 for part in doubtful.split([len(text) for text in texts])])


@needs_library
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in TORCH_ALONE])
@torch.inference_mode()
def test_a_checkpoint_is_computed_no_farther_from_float32_than_torch_computes_it(kind, tmp_path):
    """Of a mixture those tokens are compared that no router's luck reaches: a later one sees what the earlier ones became."""
    folder = write_checkpoint(kind, tmp_path)
    half, whole = load_decoder(folder, torch.bfloat16, "cpu"), load_decoder(folder, torch.float32, "cpu")
    for block in half.blocks:
        if isinstance(block.attention, GatedDelta):
            settle(block.attention)
        elif isinstance(block.attention, MultiHeadAttention):
            block.attention.qkv.weight *= 0.5  # attention to one token alone would make noise of rounding a matter of luck
            if half.config.attention_scale == 1.0 and half.config.qk_norm == "head":  # then the gain of queries decides
                block.attention.q_norm.weight *= 0.5
    whole.load_state_dict(half.state_dict())
    variants, texts = whole.config.attention_variants, TEXTS if whole.config.num_experts is None else SHORT
    compared = decided(whole, texts)
    assert compared.sum() >= 60, "routers decide too few tokens beyond the noise: this case says little"
    wanted = run(whole, ReferenceBackend(variants), 1000, 32, torch.float32, texts)[compared]
    theirs = distance(run(half, TorchBackend(variants), 1000, 32, torch.bfloat16, texts)[compared], wanted)
    found = run_native(half, 1000, 32, texts=texts)[compared]
    assert distance(found, wanted) <= min(theirs, 0.05)

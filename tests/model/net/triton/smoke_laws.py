"""The kernels at the sizes of Llama 8B, smaller in the interpreter: the first laws to run on a GPU. Run as `laws.py` is."""

import copy

import pytest
import torch

from attend.model.engine.cuda_recorder import CudaRecorder
from attend.model.engine.graphs import DecodeGraphs
from attend.model.engine.sampler import TokenSampler
from attend.model.net.paged_attention import BatchLayout, KVCache, PagedAttention, ReferenceBackend, Row
from attend.model.net.transformer import Decoder
from attend.model.net.triton.backend import INTERPRETED, TritonBackend
from attend.model.net.triton.decoder import TritonDecoder
from attend.model.params import SamplingParams
from attend.model.sampling import limit_scores, sample
from attend.model.sampling_plan import Draw, SamplingPlan
from tests.model.checkpoints import tiny_config
from tests.model.net.triton.laws import DEVICE, Scene, assert_close, decodes

HEADS, KV_HEADS, HEAD, BLOCK = 32, 8, 128, 32
SHAPE = (HEADS, KV_HEADS, HEAD, BLOCK, torch.bfloat16)
STREAMS, PAST, PROMPT, WIDTH, MLP, VOCAB = (
    (2, 300, 40, 512, 1024, 9000) if INTERPRETED else (32, 1024, 1024, 4096, 14336, 128256)
)


def layer():
    """One layer of the decoder in bfloat16, on a small vocabulary; the same numbers each time."""
    config = tiny_config(
        **{"hidden_size": WIDTH, "mlp_size": MLP, "num_layers": 1, "vocab_size": 512},
        **{"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_size": HEAD},
    )
    dice = torch.Generator(DEVICE).manual_seed(0)
    with torch.device(DEVICE):
        net = Decoder(config).to(torch.bfloat16).requires_grad_(False)
    for parameter in net.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, parameter.shape[1] ** -0.5, generator=dice)
    return net


def distance(ours, wanted):
    """Between hidden states, of the size of those that are wanted."""
    return float((ours.double() - wanted.double()).norm() / wanted.double().norm())


@torch.inference_mode()
def hidden(way, net, backend):
    """Hidden states [T, E] of a prompt, and of a token after it beside another prompt."""
    cache, found = KVCache.allocate(net.config, 4, BLOCK, net.head.weight.dtype, DEVICE), []
    for rows in ([Row([1, 2], 0, 40)], [Row([1, 2], 40, 1), Row([3], 0, 7)]):
        layout = BatchLayout.build(rows, BLOCK, DEVICE)
        tokens = torch.arange(len(layout.slots_T), device=DEVICE) + 5
        found.append(way(tokens, layout.positions_T, PagedAttention(backend, cache, layout)))
    return torch.cat(found)


def test_decodes_are_the_equation():
    at = Scene(decodes(*[PAST - 31 * row for row in range(STREAMS)]), SHAPE)
    assert_close(at.attend(TritonBackend()), at.attend(ReferenceBackend()))


def test_a_prompt_and_its_next_chunk_are_the_equation():
    at = Scene([(0, PROMPT), (PAST, 40)], SHAPE)
    assert_close(at.attend(TritonBackend()), at.attend(ReferenceBackend()))


def test_a_layer_is_as_near_to_float32_as_torchs():
    half = layer()
    whole = copy.deepcopy(half).float()
    wanted, torchs = (hidden(net, net, ReferenceBackend()) for net in (whole, half))
    found = hidden(TritonDecoder(half), half, TritonBackend())
    assert distance(found, wanted) <= max(1.1 * distance(torchs, wanted), 0.005)


@pytest.mark.parametrize("rows", [1, STREAMS])
def test_the_best_of_all_tokens_is_drawn(rows):
    scores_RV = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(rows)).to(DEVICE, torch.bfloat16)
    greedy = [Draw(SamplingPlan(SamplingParams(temperature=0.0), seed=0), position=0)] * rows
    assert TokenSampler(VOCAB, DEVICE)(scores_RV, greedy).tolist() == sample(scores_RV, greedy).tolist()


def test_a_drawn_token_is_one_that_the_limits_leave_and_the_same_each_time():
    """Of all tokens, by top-k, top-p and min-p."""
    scores_RV = (4 * torch.randn(STREAMS, VOCAB, generator=torch.Generator().manual_seed(3))).to(DEVICE, torch.bfloat16)
    params = SamplingParams(temperature=0.9, top_k=50, top_p=0.9, min_p=0.01)
    draws = [Draw(SamplingPlan(params, seed=row), position=row) for row in range(STREAMS)]
    found_R = TokenSampler(VOCAB, DEVICE)(scores_RV, draws)
    allowed_RV = limit_scores(scores_RV.float().cpu(), [params] * STREAMS) > -torch.inf
    assert allowed_RV.gather(1, found_R.cpu()[:, None]).all()
    assert TokenSampler(VOCAB, DEVICE)(scores_RV, draws).tolist() == found_R.tolist()


@pytest.mark.skipif(INTERPRETED, reason="nothing is recorded in the interpreter")
@torch.inference_mode()
def test_a_recorded_step_is_the_one_that_was_recorded():
    net = layer()
    form, backend, cache = TritonDecoder(net), TritonBackend(), KVCache.allocate(net.config, 9, BLOCK, torch.bfloat16, DEVICE)
    for cached in (*cache.keys, *cache.values):
        cached.normal_()
    graphs = DecodeGraphs(form, backend, cache, 64, 8, CudaRecorder())
    rows = [Row([1 + at], 3 + at, 1) for at in range(5)]
    given, layout = torch.arange(5, device=DEVICE), BatchLayout.build(rows, BLOCK, DEVICE)
    wanted = form(given, layout.positions_T, PagedAttention(backend, cache, layout))
    assert (
        distance(graphs.run(rows, given).hidden_TE, wanted) <= 0.01
    )  # beside rows of padding: the products may differ in bits

"""The deterministic mode is refused where it cannot be kept, and keeps every bit where it is not."""

import pytest
import torch

from attend.model.engine.build import build_engine
from attend.model.engine.options import EngineOptions
from attend.model.engine.request import Request
from attend.model.engine.startup import check_batch_invariance
from attend.model.errors import SettingError
from attend.model.net.checkpoint import save
from attend.model.net.native.library import load_library
from attend.model.params import DecodingParams, SamplingParams
from attend.model.sampling import sample, sample_by_row
from attend.model.sampling_plan import Draw, SamplingPlan
from tests.model.checkpoints import tiny_config, tiny_decoder
from tests.model.engine.machines import answers

needs_library = pytest.mark.skipif(
    load_library() is None, reason="the native decoder is not built here: python -m attend.model.net.native"
)
CONFIG = tiny_config(num_heads=4, num_kv_heads=2, head_size=32, max_positions=128, qk_norm="head")
WAYS = [
    {},
    {"max_batch_tokens": 13},
    {"max_batch_requests": 2},
    {"kv_cache_memory": 6},
    {"prefix_caching": False},
    {"draft_tokens": 8},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    save(tiny_decoder(CONFIG), path, torch.bfloat16)
    return path


def build(folder, **changes):
    """With memory for 65 blocks, or so many."""
    options = {"dtype": "bfloat16", "kv_cache_memory": 65, "max_model_len": 120, "deterministic": True} | changes
    options["kv_cache_memory"] *= 32 * CONFIG.kv_bytes_per_token(1 if options.get("kv_dtype") == "int8" else 2)
    return build_engine(folder, EngineOptions(**options))


def crowd():
    """Greedy and drawn requests of many lengths, half of them with a beginning that others have."""
    prompts = [[5, 6, 7, 8] * (at % 9) + [9 + at] for at in range(20)]
    return [
        Request(f"{at}", prompt, 20, SamplingParams(temperature=at % 3 / 2, top_p=0.9 if at % 3 else 1.0), seed=at)
        for at, prompt in enumerate(prompts)
    ]


@needs_library
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_tokens_are_the_same_alone_in_a_crowd_in_chunks_and_after_preemption(folder, kv_dtype):
    engine, alone = build(folder, prefix_caching=False, kv_dtype=kv_dtype)._engine, {}
    for request in crowd():
        alone |= answers(engine, [request])  # each has ended before the next comes
    assert len({tuple(tokens) for tokens, _ in alone.values()}) > 10, "the answers hardly differ: the test says little"
    for way in WAYS:
        engine = build(folder, **way, kv_dtype=kv_dtype)._engine
        assert answers(engine, crowd()) == alone, way
        assert ("kv_cache_memory" in way) == (engine.scheduler.num_preemptions > 0)


@needs_library
def test_the_fingerprint_tells_of_the_mode_and_not_of_the_threads(folder):
    """Replicas with equal fingerprints give equal tokens; with this mode the number of threads does not matter."""
    prints = [build(folder, num_threads=threads).info.fingerprint for threads in (1, 2)]
    assert prints[0] == prints[1]
    assert prints[0] != build(folder, deterministic=False).info.fingerprint


def test_a_machine_that_cannot_keep_it_refuses_to_start(folder):
    """Torch's matrices sum in an order that depends on how many rows there are."""
    with pytest.raises(SettingError, match=r"deterministic is set, but with the torch backend .* gives other logits"):
        build(folder, backend="torch", block_size=8)


def test_the_same_check_fails_for_what_serves_with_the_mode_off(folder):
    engine = build(folder, backend="torch", block_size=8, deterministic=False)
    with pytest.raises(SettingError):
        check_batch_invariance(engine._engine.runner, engine.info.num_blocks, engine.info.max_model_len)


def biased(token):
    return DecodingParams(logit_bias={token: 2.0})


@pytest.mark.parametrize("changes", [{}, {"top_p": 0.7}, {"top_k": 5}, {"min_p": 0.1}], ids=str)
def test_rows_drawn_by_themselves_are_those_drawn_together(changes):
    """Up to rounding of the last bit, which this size does not meet."""
    logits = torch.randn(9, 96, generator=torch.Generator().manual_seed(1))
    draws = [
        Draw(SamplingPlan(SamplingParams(temperature=at % 3 * 0.5, **changes), 1, decoding=biased(at)), at) for at in range(9)
    ]
    assert torch.equal(sample(logits.clone(), draws), sample_by_row(logits.clone(), draws))

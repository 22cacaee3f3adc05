"""Engines that run a step ahead of a GPU whose copies are late answer as those that wait: no number is used before it is there,
and none of a graph's after the next step has overwritten it.
"""

import pytest
import torch

from attend.model.engine.engine import Engine
from attend.model.engine.graphs import DecodeGraphs
from attend.model.engine.piecewise_graphs import PiecewiseGraphs
from attend.model.engine.runner import ModelRunner
from attend.model.engine.scheduler import Scheduler
from attend.model.net.paged_attention import KVCache, TorchBackend
from attend.model.params import DecodingParams, SamplingParams
from attend.model.pooling import Pooling
from tests.gpu.device import Device
from tests.model.checkpoints import tiny_config, tiny_decoder
from tests.model.engine.machines import Clock, ask, run, sizes, tiny_engine, told

CONFIG = tiny_config(tied_head=False)
POISON = 9
TIGHT = {"num_blocks": 12, "max_model_len": 40, "prefix_caching": True}
WAYS = {
    "at once": {},
    "in small steps": {"max_batch_tokens": 3},
    "preempted": TIGHT,
}


def network():
    net = tiny_decoder(CONFIG)
    with torch.no_grad():
        net.embedding.tokens.weight[POISON] = torch.nan
    return net


def crowd():
    """Greedy and drawn answers, early and late ends, changed and told scores, sums, and a request that fails."""
    drawn, limited = SamplingParams(temperature=0.9), SamplingParams(temperature=0.8, top_k=20, top_p=0.9)
    return [
        ask("greedy", range(10, 15), 12),
        ask("drawn", range(20, 27), 9, sampling=drawn, seed=5),
        ask("limited", range(20, 24), 10, sampling=limited, seed=6),
        ask("stopped", range(30, 33), 12, sampling=drawn, seed=7, stop_token_ids=frozenset(range(40, 90))),
        ask("broken", [POISON], 5),
    ]


def telling():
    """Requests that let no step begin early."""
    return [
        ask("biased", [30], 8, decoding=DecodingParams(repetition_penalty=1.5, logit_bias={3: 2.0})),
        ask("told", range(40, 46), 7, logprobs=3, prompt_logprobs=2),
        ask("banned", [50, 51], 6, min_tokens=5, stop_token_ids=frozenset({3, 4})),
        ask("summed", range(60, 66), 0, pooling=Pooling.MEAN),
    ]


def poisoned(recorded_of):
    """A recorder whose steps first spoil all that recorded ones wrote before, as other rows and other steps may."""

    def record(step):
        def replay(*between):
            for name, held in ((name, held) for each in recorded_of() for name, held in vars(each).items()):
                if name in ("_hidden_TE", "_logits_TV", "_q_THD", "_out_THD"):
                    held.fill_(torch.nan)
                elif name == "_greedy_T":
                    held.fill_(1)
            step(*between)

        return replay

    return record


def on_device(device, *, recorded: bool, **changes) -> Engine:
    """An engine one step ahead on the device."""
    config, clock, net, made = sizes(**changes), Clock(), network(), []
    device.adopt(net)
    cache = KVCache.allocate(CONFIG, config.num_blocks, config.block_size, torch.float32, "cuda")
    backend = TorchBackend(CONFIG.attention_variants)
    graphs, pieces = None, None
    if recorded:
        recorder = poisoned(lambda: made)
        graphs = DecodeGraphs(net, backend, cache, config.max_model_len, 8, recorder)
        pieces = PiecewiseGraphs(net, backend, cache, 32, recorder)
        made += [graphs, pieces]
    runner = ModelRunner(net, backend, cache, "cuda", graphs, pieces=pieces)
    return Engine(Scheduler(config, clock), runner, clock, async_scheduling=True)


def numbers(outputs):
    """Every log probability and sum of an answer."""
    tokens = [token for output in outputs for token in (*output.prompt_logprobs, *output.logprobs)]
    return [value for token in tokens for value in (token.logprob, *(score for _, score in token.top))]


@pytest.mark.parametrize("requests", [crowd, telling, lambda: crowd() + telling()], ids=["ahead", "telling", "both"])
@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "recorded"])
@pytest.mark.parametrize("way", WAYS)
def test_an_engine_ahead_of_a_late_device_answers_as_one_that_waits(way, recorded, requests):
    wanted = run(tiny_engine(network(), **WAYS[way]), requests())
    device = Device()
    with torch.inference_mode(), device:
        found = run(on_device(device, recorded=recorded, **WAYS[way]), requests())
        device.drain()
    assert {name: told(outputs) for name, outputs in wanted.items()} == {name: told(outputs) for name, outputs in found.items()}
    for name, outputs in wanted.items():
        assert numbers(outputs) == pytest.approx(numbers(found[name]), abs=1e-4)
        assert outputs[-1].error == found[name][-1].error
    assert [] == device.faults

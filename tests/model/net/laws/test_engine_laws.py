"""Through scheduler, runner and a whole decoder: a request's tokens and scores are those of the decoder alone."""

import copy
import random
from collections import defaultdict
from functools import cache

import pytest
import torch

from attend.model.config import ModelConfig
from attend.model.engine.engine import Engine
from attend.model.engine.request import Output, Request
from attend.model.engine.runner import ModelRunner
from attend.model.engine.scheduler import Scheduler
from attend.model.net.transformer import Decoder
from attend.model.params import SamplingParams
from attend.model.train.loss import hidden_states
from tests.model.checkpoints import VOCAB, tiny_config, tiny_decoder
from tests.model.engine.machines import Clock, answers, ask, run, sizes, told
from tests.model.net.laws.ways import Way, each_guessing_way, each_pair, each_way

BLOCK = 32
MODELS = {
    "plain": tiny_config(num_heads=4, num_kv_heads=2, head_size=32, max_positions=256),
    "window above": tiny_config(
        num_heads=2, num_kv_heads=2, head_size=64, max_positions=256, qk_norm="head", sliding_window=20, window_layers=(1,)
    ),
    "everything": tiny_config(
        num_heads=3,
        num_kv_heads=1,
        head_size=32,
        max_positions=256,
        qkv_bias=True,
        sliding_window=33,
        softcap=4.0,
        attention_scale=0.3,
    ),
}
each_model = pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
PROMPTS = [31, 30, 1, 29, 64, 32, 97, 33, 100]
TIGHT = {"num_blocks": 6, "max_model_len": 128}
"""Too few blocks for the crowd."""
COMINGS = {
    "chunked": {"max_batch_tokens": 13},
    "batched": {},
    "two at a time": {"max_batch_requests": 2},
    "async scheduling": {"async_scheduling": True, "max_batch_tokens": 100},
    "async scheduling, preempted": {**TIGHT, "async_scheduling": True, "prefix_caching": True},
    "prefix hit": {"prefix_caching": True},
    "preempted": TIGHT,
    "preempted, in chunks, with prefix hits": {**TIGHT, "prefix_caching": True, "max_batch_tokens": 40},
}


@cache
def net_of(config: ModelConfig, dtype: torch.dtype) -> Decoder:
    """As a checkpoint is loaded: weights in the dtype, tables of angles in float32."""
    return tiny_decoder(config).to(dtype).requires_grad_(False)


def engine(way: Way, config: ModelConfig, *, async_scheduling: bool = False, net: Decoder | None = None, **changes) -> Engine:
    """What `build_engine` stands round a decoder, with every slot of the cache holding NaN."""
    settings = sizes(**{"num_blocks": 64, "block_size": BLOCK, "max_model_len": 256} | changes)
    backend = way.choose(config, BLOCK)
    net = backend.decoder(copy.deepcopy(net or net_of(config, way.dtype)).to(way.device))
    counts = [group.num_blocks for group in settings.groups] if changes.get("groups") else settings.num_blocks
    cache = way.cache(config, counts, BLOCK)
    clock = Clock()
    kind = ModelRunner if async_scheduling else backend.runner()
    runner = kind(net, backend.attention, cache, way.device)
    return Engine(Scheduler(settings, clock), runner, clock, async_scheduling=async_scheduling)


def crowd(lengths: list[int] = PROMPTS, shared: int = 2 * BLOCK, max_tokens: int = 12) -> list[Request]:
    """Greedy and drawn, with prompts about the borders of blocks.

    Every second one shares its beginning of two blocks; the others begin with the same two in the other order, so that
    neither a block's tokens alone nor what lies in its slots from before can pass for the right ones.
    """
    dice = random.Random(5)
    stem = dice.choices(range(VOCAB), k=shared)
    stems = stem, [*stem[BLOCK:], *stem[:BLOCK]]
    return [
        ask(
            f"r{at}",
            [*stems[at % 2][:length], *dice.choices(range(VOCAB), k=max(0, length - shared))],
            max_tokens,
            sampling=SamplingParams(temperature=at // 2 % 2),
            seed=at,
            logprobs=0,
        )
        for at, length in enumerate(lengths)
    ]


def repeating() -> list[Request]:
    """Greedy and drawn, with text that says the same thing several times, so that guesses are right and wrong."""
    dice = random.Random(6)
    phrase = dice.choices(range(VOCAB), k=9)
    return [
        ask(f"r{at}", [*phrase * 4, *phrase[: 3 + at]], 40, sampling=SamplingParams(temperature=at % 2 / 2), seed=at)
        for at in range(6)
    ]


Answer = tuple[list[int], list[float]]
"""Tokens and their scores."""


def answer(outputs: list[Output]) -> Answer:
    return told(outputs)[0], [score.logprob for output in outputs for score in output.logprobs]


@cache
def alone(way: Way, config: ModelConfig) -> dict[str, Answer]:
    """What each of the crowd gets from an engine of its own, its whole prompt at once."""
    answers = {}
    for request in crowd():
        answers |= {name: answer(outputs) for name, outputs in run(engine(way, config), [request]).items()}
    return answers


@cache
def scored_by_a_dense_pass(config: ModelConfig, dtype: torch.dtype, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> tuple:
    """The logarithm of each token's probability in float32 over the same weights, and the largest logit beside it, both [T]."""
    whole = tiny_decoder(config)
    whole.load_state_dict({name: tensor.float() for name, tensor in net_of(config, dtype).state_dict().items()})
    with torch.no_grad():
        logits = whole.logits(hidden_states(whole, torch.tensor([[*prompt, *tokens]]))[len(prompt) - 1 : -1])
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0], logits.abs().amax(-1)


def assert_near(way: Way, config: ModelConfig, requests: list[Request], answers: dict[str, Answer]) -> None:
    """Each score is the one that a dense pass in float32 over the same weights gives the same token after the same text.

    Measured in the largest logit: some roundings of the residual stream to the dtype, and sums in float32 on both sides. A code
    of 8 bits is as near to its number as bfloat16 to the largest of its group.
    """
    for request in requests:
        tokens, scores = answers[request.request_id]
        assert len(scores) == len(tokens) == request.max_tokens
        expected, largest = scored_by_a_dense_pass(config, way.dtype, tuple(request.prompt), tuple(tokens))
        relative = 8 * torch.finfo(torch.bfloat16 if way.held else way.dtype).eps + 64 * torch.finfo(torch.float32).eps
        assert ((torch.tensor(scores) - expected).abs() <= relative * largest).all()


@each_model
@each_way
def test_a_request_alone_is_the_decoder_without_a_cache(way, config):
    assert_near(way, config, crowd(), alone(way, config))


@each_pair(COMINGS, MODELS)
def test_a_request_gets_the_tokens_that_it_gets_alone(way, config, coming):
    """Where the dtype is too coarse for that, its scores are still those of its tokens."""
    machine = engine(way, config, **COMINGS[coming])
    found = {name: answer(outputs) for name, outputs in run(machine, crowd()).items()}
    assert_near(way, config, crowd(), found)
    if way.fine:
        assert {name: tokens for name, (tokens, _) in alone(way, config).items()} == {
            name: tokens for name, (tokens, _) in found.items()
        }
    if way.exact:
        assert alone(way, config) == found
    stats = machine.stats()
    assert COMINGS[coming].get("prefix_caching", False) == (stats.num_prefix_hits > 0)
    assert ("preempted" in coming) == (stats.num_preemptions > 0)


@cache
def without_guesses(way: Way, config: ModelConfig) -> dict:
    return answers(engine(way, config), repeating())


@pytest.mark.usefixtures("bold_drafts")
@pytest.mark.parametrize("draft_tokens", [7, 15, 60])
@each_model
@each_guessing_way
def test_guessing_changes_no_token(way, config, draft_tokens):
    machine = engine(way, config, draft_tokens=draft_tokens)
    assert without_guesses(way, config) == answers(machine, repeating())
    assert 0 < machine.stats().num_accepted < machine.stats().num_drafted


@each_model
@each_way
def test_a_prompt_reads_a_block_that_a_stream_fills_in_the_same_step(way, config):
    """All of a layer's keys and values are written before any is read, whichever thread does either."""
    dice = random.Random(7)
    machine = engine(way, config, prefix_caching=True, max_batch_tokens=512)
    streams = [ask(f"s{at}", dice.choices(range(VOCAB), k=2 * BLOCK - 5), 30, logprobs=0) for at in range(6)]
    outputs = defaultdict(list)
    for request in streams:
        machine.add(request)
    while streams[0].num_tokens < 2 * BLOCK:
        for output in machine.step():
            outputs[output.request_id].append(output)
    assert all(request.num_computed == 2 * BLOCK - 1 for request in streams)
    followers = [
        ask(f"f{at}", [*request.tokens(0, 2 * BLOCK), *dice.choices(range(VOCAB), k=3)], 4, logprobs=0)
        for at, request in enumerate(reversed(streams))
    ]
    for name, more in run(machine, followers).items():
        outputs[name] += more
    assert all(request.num_cached == 2 * BLOCK for request in followers)
    found = {name: answer(all_of_it) for name, all_of_it in outputs.items()}
    assert_near(way, config, [*streams, *followers], found)
    for request in (*streams, *followers) if way.exact else ():
        again = ask("again", request.prompt, request.max_tokens, logprobs=0)
        assert answer(run(engine(way, config), [again])["again"]) == found[request.request_id]

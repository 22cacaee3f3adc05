"""Every kind of step on a GPU that keeps account: what waits, how many launches it takes, how much memory."""

from importlib.util import find_spec

import numpy as np
import pytest

from attend.model.config import ModelConfig
from attend.model.params import DecodingParams, SamplingParams
from attend.model.pooling import Pooling
from tests.gpu.steps import item, machine

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

MIB = 1 << 20
LLAMA_8B = ModelConfig(
    family="llama",
    vocab_size=128256,
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_size=128,
    mlp_size=14336,
    max_positions=8192,
    tied_head=False,
)
DRAWN = SamplingParams(temperature=1.0)
LIMITED = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.05)
CHANGED = DecodingParams(repetition_penalty=1.2, frequency_penalty=0.5, presence_penalty=0.5, logit_bias={1: 2.0, 7: -1.0})
ALLOWED = DecodingParams(allowed_token_ids=(1, 2, 3))
READ = {("tolist", "row_logprobs")}
"""Log probabilities are numbers for the caller: somebody must read them."""


class Mask:
    """A grammar that allows a few tokens."""

    def mask(self):
        allowed = np.zeros(LLAMA_8B.vocab_size, dtype=np.bool_)
        allowed[:9] = True
        return allowed


def masked(scheduled):
    scheduled.request.grammar = Mask()
    object.__setattr__(scheduled.request.sampling_plan, "can_sample_unmasked", False)
    return scheduled


def streams(runner, count=32, **asked):
    return [item(runner, f"s{at}", 100 + at, 1, **asked) for at in range(count)]


STEPS = {  # launches, copies to the device among them, MiB beside weights, cache, recordings, waits of submission, of result
    "greedy": (lambda r: streams(r), 5, 1, 1, set(), set()),
    "drawn": (lambda r: streams(r, sampling=DRAWN), 7, 1, 1, set(), set()),
    "top-k, top-p and min-p": (lambda r: streams(r, sampling=LIMITED), 10, 1, 2, set(), set()),
    "penalties and biases": (lambda r: streams(r, decoding=CHANGED), 11, 1, 32, set(), set()),
    "allowed tokens": (lambda r: streams(r, decoding=ALLOWED), 7, 1, 17, set(), set()),
    "banned tokens": (lambda r: streams(r, min_tokens=3, stop_token_ids=frozenset({3, 4})), 7, 1, 17, set(), set()),
    "masks": (lambda r: [masked(each) for each in streams(r)], 7, 1, 17, set(), set()),
    "log probabilities": (lambda r: streams(r, logprobs=3), 12, 3, 40, set(), READ),
    "a prompt": (lambda r: [item(r, "p", 0, 1024)], 298, 2, 117, set(), set()),
    "a part of a prompt": (lambda r: [item(r, "p", 0, 1024, 5)], 293, 2, 117, set(), set()),
    "a prompt beside streams": (lambda r: [*streams(r), item(r, "p", 0, 992)], 364, 2, 117, set(), set()),
    "a prompt beside streams, in pieces": (lambda r: [*streams(r), item(r, "p", 0, 480)], 143, 2, 9, set(), set()),
    "guesses": (lambda r: [item(r, "g", 50, 1, draft=(5, 6, 7)), item(r, "h", 60, 1, draft=(5, 6))], 77, 2, 2, set(), set()),
    "log probabilities of a prompt": (lambda r: [item(r, "p", 0, 512, 3, prompt_logprobs=2)], 84, 4, 318, READ, set()),
    "an embedding": (
        lambda r: [item(r, "e", 0, 64, pooling=Pooling.MEAN)],
        79,
        2,
        2,
        set(),
        {("blocking copy to the host", "_add_to_sum")},
    ),
}
"""Steps of at most 512 tokens are recorded in pieces, 33 of them here."""


@pytest.fixture(scope="module")
def llama():
    with machine(LLAMA_8B, requests=32, tokens=512) as made:
        yield made


@pytest.mark.parametrize("name", STEPS)
def test_a_step_waits_for_nothing_but_what_is_named_and_costs_no_more_than_its_figures(llama, name):
    made, launches, copies, mib, waits, late = STEPS[name]
    drafted = {"num_drafted": 5} if name == "guesses" else {}
    cost = llama.step(*made(llama.runner), **drafted)
    print(f"| {name} | {cost['launches']} | {cost['copies']} | {cost['peak'] / MIB:.0f} |")
    assert (waits, late) == (cost["waits"], cost["late"])
    assert cost["launches"] <= launches
    assert cost["copies"] <= copies
    assert cost["peak"] <= mib * MIB
    assert [] == llama.device.faults

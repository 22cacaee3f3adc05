"""Real models answer as llama.cpp does: `llama_cpp.json` has its greedy tokens, made by `record.py`.

Equal tokens are no law between two engines that round differently: llama.cpp rounds the activations of these files to
8 bits, and sums in another order. So each token of its answer is scored by us, after the same tokens. Ours must be its choice
but at near ties; a free answer of ours may leave its answer only at one; and our log probabilities must be near. That finds
a rope whose base is 1.5 times too large, and not one of 1.1 times: the exact comparisons are those of tests/model/net.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.fakes import Server
from tests.real.models import MODELS, lacking
from tests.real.served import ask, served

RECORDED = json.loads(Path(__file__).with_name("llama_cpp.json").read_text(encoding="utf-8"))
NEAR_TIE = 0.7
"""Our likeliest token beside its choice, in nats; 0.53 is the most that was seen, portably, by AVX2, and by AVX-512."""
AGREE = 0.92
"""The least share of its tokens that are our likeliest; 0.942, with keys in int8, is the least that was seen."""
NEAR = 0.05
"""The mean distance of the log probabilities of its tokens, ours from its; 0.029 to 0.040 were seen."""


class LogprobFields(NamedTuple):
    """A recorded case, and by our scores of each token of its answer, after its prompt and the tokens before it:"""

    case: dict[str, Any]
    logprobs: list[float]
    gaps: list[float]
    """How far it is below our likeliest."""


def scored(server: Server, cases: list[dict[str, Any]]) -> list[LogprobFields]:
    found = []
    for case in cases:
        body = {"prompt": case["ids"] + case["tokens"], "max_tokens": 0, "prompt_logprobs": 1}
        rows = ask(server, "/v1/completions", **body)["choices"][0]["prompt_logprobs"][len(case["ids"]) :]
        own = [row[str(token)]["logprob"] for row, token in zip(rows, case["tokens"], strict=True)]
        best = [max(each["logprob"] for each in row.values()) for row in rows]
        found.append(LogprobFields(case, own, [high - score for high, score in zip(best, own, strict=True)]))
    return found


def check_near(all_of: list[LogprobFields]) -> None:
    """Hold our scores to the three numbers above."""
    gaps = [gap for each in all_of for gap in each.gaps]
    assert max(gaps) < NEAR_TIE
    assert sum(gap == 0 for gap in gaps) >= AGREE * len(gaps)
    apart = [abs(x - y) for each in all_of for x, y in zip(each.logprobs, each.case["logprobs"], strict=True)]
    assert sum(apart) < NEAR * len(apart)


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    if reason := lacking(request.param):
        pytest.skip(reason)
    with served(request.param) as server:
        yield server, scored(server, RECORDED[request.param])


def test_texts_and_chats_become_its_tokens(model):
    server, found = model
    for case in (each.case for each in found):
        body = {name: case[name] for name in (["messages"] if "messages" in case else ["prompt"])}
        assert ask(server, "/tokenize", **body)["tokens"] == case["ids"], body


def test_its_tokens_are_ours_but_at_near_ties(model):
    check_near(model[1])


def test_a_greedy_answer_leaves_its_answer_at_a_near_tie_alone(model):
    server, found = model
    for case, _, gaps in found:
        body = {"prompt": case["ids"], "max_tokens": 24, "temperature": 0, "return_token_ids": True}
        ours = ask(server, "/v1/completions", **body)["choices"][0]["token_ids"]
        parted = next((at for at, token in enumerate(case["tokens"][:24]) if ours[at : at + 1] != [token]), None)
        assert parted is None or 0 < gaps[parted] < NEAR_TIE, (case["prompt"], parted)


@pytest.mark.long
@pytest.mark.skipif(bool(lacking("smollm2")), reason=lacking("smollm2"))
@pytest.mark.parametrize("more", [{"kv_dtype": "int8"}, {"backend": "torch", "dtype": "float32"}], ids=["int8 keys", "torch"])
def test_keys_in_int8_and_the_torch_backend_are_as_near(more):
    with served("smollm2", **more) as server:
        check_near(scored(server, RECORDED["smollm2"]))

"""Scores, changed scores and resumed answers over a real decoder: the same whole, in chunks, preempted and batched."""

import random
from dataclasses import replace

import pytest
import torch

from attend.model.engine.request import FinishReason, Output, Request, TokenLogprob
from attend.model.net.transformer import Decoder
from attend.model.params import DecodingParams, SamplingParams
from attend.model.train.loss import DenseCausal
from tests.model.checkpoints import VOCAB, tiny_config, tiny_decoder
from tests.model.engine.machines import answers, ask, run, tiny_engine, told

NEAR = 1e-4
GREEDY, DRAWN = SamplingParams(temperature=0), SamplingParams(temperature=0.5, top_p=0.95)
TIGHT = {"num_blocks": 17, "block_size": 2}
"""Too few blocks for the crowd: some are preempted, again and again."""
ENGINES = {
    "whole": {},
    "one token a step": {"max_batch_tokens": 1},
    "chunks of 5": {"max_batch_tokens": 5, "chunk_size": 3},
    "two at a time": {"max_batch_requests": 2, "max_batch_tokens": 9},
    "preempted": TIGHT,
    "preempted in chunks": {**TIGHT, "max_batch_tokens": 4, "chunk_size": 3},
}
each_engine = pytest.mark.parametrize("changes", ENGINES.values(), ids=ENGINES)
each_sampling = pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "seeded"])
CHANGED = {
    "repetition": DecodingParams(repetition_penalty=1.8),
    "frequency": DecodingParams(frequency_penalty=1.5),
    "presence": DecodingParams(presence_penalty=2),
    "bias": DecodingParams(logit_bias={3: 9.0, 50: -100, 77: 9}),
    "allowed": DecodingParams(allowed_token_ids=tuple(range(10, 40))),
    "all": DecodingParams(
        repetition_penalty=1.3,
        frequency_penalty=0.5,
        presence_penalty=0.5,
        logit_bias={3: 1.0},
        allowed_token_ids=tuple(range(60)),
    ),
}
each_change = pytest.mark.parametrize("decoding", CHANGED.values(), ids=CHANGED)


@pytest.fixture(scope="module")
def net() -> Decoder:
    """A decoder with weights large enough that its likeliest tokens depend on what stands before them."""
    decoder = tiny_decoder(tiny_config(tied_head=False))
    with torch.no_grad():
        decoder.head.weight.mul_(3)
    return decoder


def crowd(max_tokens: int = 7, **fields) -> list[Request]:
    """Greedy and drawn, prompts of 1 to 22 tokens, each asking for another number of alternatives."""
    dice = random.Random(4)
    return [
        ask(
            f"r{at}",
            dice.choices(range(VOCAB), k=1 + 7 * at % 22),
            max_tokens,
            sampling=(GREEDY, DRAWN)[at % 2],
            seed=dice.randint(-(2**63), 2**63 - 1),
            **{"logprobs": (at + 1) % 4, "prompt_logprobs": at % 3} | fields,
        )
        for at in range(6)
    ]


@torch.no_grad()
def dense(net: Decoder, tokens: list[int]) -> torch.Tensor:
    """Log probabilities after each of `tokens`, [T, V], without cache, blocks or batch."""
    hidden = net(torch.tensor(tokens), torch.arange(len(tokens)), DenseCausal(len(tokens)))
    return net.logits(hidden).log_softmax(dim=-1)


def check(found: TokenLogprob, token: int, scores_V: torch.Tensor, top: int) -> None:
    assert token == found.token_id
    assert pytest.approx(scores_V[token].item(), abs=NEAR) == found.logprob
    values = [value for _, value in found.top]
    assert top == len(values)
    assert sorted(values, reverse=True) == values
    assert pytest.approx(scores_V.topk(top).values.tolist(), abs=NEAR) == values
    assert pytest.approx([scores_V[at].item() for at, _ in found.top], abs=NEAR) == values
    assert top == len({at for at, _ in found.top})


def check_prompt(net: Decoder, request: Request, outputs: list[Output]) -> None:
    """All at once, with the first output; from the second token on, because nothing predicts the first."""
    scores = outputs[0].prompt_logprobs
    assert all(() == output.prompt_logprobs for output in outputs[1:])
    assert len(request.prompt) - 1 == len(scores)
    expected = dense(net, request.prompt)
    for at, found in enumerate(scores):
        check(found, request.prompt[at + 1], expected[at], request.prompt_logprobs)


def check_tokens(net: Decoder, request: Request, outputs: list[Output], received: int = 0) -> None:
    """One score for each token, in the same output, by the model's own scores after all that stands before it."""
    tokens, _ = told(outputs)
    assert [len(output.token_ids) for output in outputs] == [len(output.logprobs) for output in outputs]
    before = len(request.prompt) + received
    expected = dense(net, [*request.prompt, *request.output])[before - 1 :]
    scores = [score for output in outputs for score in output.logprobs]
    for token, score, row in zip(tokens, scores, expected[:-1], strict=True):
        check(score, token, row, request.logprobs)


# Log probabilities


@each_engine
def test_scores_are_the_log_softmax_of_a_dense_forward(net, changes):
    """Of the prompt's tokens and of the answer's, whatever shares, splits or interrupts the steps."""
    engine, requests = tiny_engine(net, **changes), crowd()
    found = run(engine, requests)
    assert ("num_blocks" in changes) == (engine.scheduler.num_preemptions > 0)
    for request in requests:
        check_prompt(net, request, found[request.request_id])
        check_tokens(net, request, found[request.request_id])


@each_engine
def test_asking_for_scores_changes_no_token(net, changes):
    expected = {
        name: told for r in crowd(logprobs=None, prompt_logprobs=None) for name, told in answers(tiny_engine(net), [r]).items()
    }
    assert expected == answers(tiny_engine(net, **changes), crowd())


def test_a_long_prompt_is_scored_in_pieces_of_the_vocabulary(net, monkeypatch):
    monkeypatch.setattr("attend.model.engine.runner.SCORED_AT_ONCE", 4)
    requests = crowd()
    found = run(tiny_engine(net), requests)
    for request in requests:
        check_prompt(net, request, found[request.request_id])


@each_change
def test_scores_are_the_models_own_although_parameters_changed_them(net, decoding):
    requests = crowd(decoding=decoding, logprobs=3, prompt_logprobs=1)
    found = run(tiny_engine(net), requests)
    for request in requests:
        check_prompt(net, request, found[request.request_id])
        check_tokens(net, request, found[request.request_id])


# The prompt alone


@each_engine
def test_no_tokens_asked_for_gives_the_scores_of_the_prompt_and_no_token(net, changes):
    """`run` checks that every block is free again."""
    requests = crowd(max_tokens=0)
    found = run(tiny_engine(net, **changes), requests)
    for request in requests:
        [last] = found[request.request_id]
        assert ((), (), FinishReason.LENGTH, None) == (last.token_ids, last.logprobs, last.finish_reason, last.error)
        assert last.times is not None
        check_prompt(net, request, [last])


# Resuming


RESUMED = {
    "plain": {},
    "penalties": {"decoding": CHANGED["all"]},
    "stops": {"stop_token_ids": frozenset(range(0, VOCAB, 5)), "min_tokens": 4},
    "bad words": {"bad_words": [[at, other] for at in range(40) for other in range(0, VOCAB, 2)]},
}


@each_sampling
@pytest.mark.parametrize("fields", RESUMED.values(), ids=RESUMED)
@pytest.mark.parametrize("changes", [{}, {"max_batch_tokens": 3}], ids=["whole", "chunks"])
def test_an_answer_goes_on_after_any_part_of_it(net, sampling, fields, changes):
    """run(prompt, output=t[:k]) == t[k:], all k together in one engine; and it ends for the same reason."""
    prompt = [5, 17, 8, 60, 33]
    one = ask("whole", prompt, 10, sampling=sampling, seed=11, **fields)
    tokens, reason = answers(tiny_engine(net), [one])["whole"]
    parts = [ask(str(k), prompt, 10, sampling=sampling, seed=11, output=tokens[:k], **fields) for k in range(len(tokens))]
    assert {str(k): (tokens[k:], reason) for k in range(len(tokens))} == answers(tiny_engine(net, **changes), parts)


@each_sampling
@pytest.mark.parametrize("decoding", [DecodingParams(), CHANGED["all"]], ids=["plain", "penalties"])
def test_a_resumed_answer_can_be_preempted(net, sampling, decoding):
    def fresh(k: int, tokens: list[int]) -> Request:
        return ask(str(k), range(4, 11), 10, sampling=sampling, seed=11, decoding=decoding, output=tokens[:k])

    tokens, reason = answers(tiny_engine(net), [fresh(0, [])])["0"]
    engine = tiny_engine(net, **TIGHT, max_batch_tokens=8)
    requests = [fresh(k, tokens) for k in range(10)]
    assert {str(k): (tokens[k:], reason) for k in range(10)} == answers(engine, requests)
    assert any(request.num_preemptions for request in requests[1:])


@pytest.mark.parametrize("k", range(7))
@pytest.mark.parametrize("budget", [3, 256])
def test_a_resumed_answer_scores_its_prompt_and_its_new_tokens_only(net, k, budget):
    for request in crowd():
        tokens, _ = answers(tiny_engine(net), [replace(request, output=[])])[request.request_id]
        again = replace(request, output=tokens[:k], prompt_scores=[], tables=[], num_computed=0)
        outputs = run(tiny_engine(net, max_batch_tokens=budget), [again])[request.request_id]
        check_prompt(net, again, outputs)
        check_tokens(net, again, outputs, received=k)


# Changed scores


@each_change
@pytest.mark.parametrize("changes", [{}, {"max_batch_tokens": 5}, TIGHT], ids=["whole", "chunks", "preempted"])
def test_changed_scores_leave_the_tokens_of_neighbours_as_they_are_alone(net, decoding, changes):
    """And the changed ones get what they get alone."""

    def mixed() -> list[Request]:
        return [replace(r, decoding=decoding, output=[]) if at % 3 else r for at, r in enumerate(crowd(12))]

    expected = {name: told for request in mixed() for name, told in answers(tiny_engine(net), [request]).items()}
    assert expected == answers(tiny_engine(net, **changes), mixed())
    plain = answers(tiny_engine(net), crowd(12))
    others = [request.request_id for request in mixed() if request.decoding is not decoding]
    assert [plain[name] for name in others] == [expected[name] for name in others]
    assert plain != expected, "nothing was changed: the test says little"


@each_sampling
@pytest.mark.parametrize("made", [1, 2, 3])
def test_bad_words_never_appear(net, sampling, made):
    """Among so few tokens that they would, again and again; ban by ban, the words are what the answer holds."""
    few = DecodingParams(allowed_token_ids=(7, 8, 9))

    def answer(words: list[list[int]]) -> list[int]:
        return answers(tiny_engine(net), [ask("a", [7, 8, 9], 30, sampling=sampling, decoding=few, bad_words=words)])["a"][0]

    def holds(tokens: list[int], word: list[int]) -> bool:
        return any(tokens[at : at + made] == word for at in range(len(tokens)))

    words: list[list[int]] = []
    for _ in range(2):
        tokens = answer(words)
        assert not any(holds(tokens, word) for word in words)
        words.append(tokens[10 : 10 + made])
    assert not any(holds(answer(words), word) for word in words)


@each_sampling
def test_a_bad_word_may_be_completed_over_a_border_between_prompt_and_answer(net, sampling):
    """It is the answer that never holds it: the prompt does not count."""
    [free, *_], _ = answers(tiny_engine(net), [ask("a", [1, 2, 3], 4, sampling=sampling)])["a"]
    found, _ = answers(tiny_engine(net), [ask("a", [1, 2, 3], 4, sampling=sampling, bad_words=[[3, free]])])["a"]
    assert free == found[0]

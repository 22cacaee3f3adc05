"""Protobuf to a command, and chunks to protobuf."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from attend.model.engine.request import FinishReason, Times, TokenLogprob
from attend.model.errors import ContextTooLong, InvalidRequest
from attend.service.grpc_api import convert
from attend.service.grpc_api.convert import Responses, check_sizes
from attend.service.records import Chunk, PromptPart
from attend.v1 import generation_pb2 as pb
from tests.fakes import CONTEXT, VOCAB, info

D = pb.DecodingParameters
R = pb.ResponseOptions


def to_response(chunks: Sequence[Chunk], request: pb.GenerateRequest, fingerprint: str) -> pb.GenerateResponse:
    return asyncio.run(Responses(request.response, fingerprint, "id").full_response(chunks))


SCORES = (TokenLogprob(2, -1.5, ((9, -0.5), (8, -1.0))), TokenLogprob(3, float("-inf"), ((9, -0.5), (8, -1.0))))


def chunk(index: int = 0, reason: FinishReason | None = None, stop: str | int | None = None, *, first: bool = False) -> Chunk:
    prompt = PromptPart((1, 2, 3), SCORES, "pqr", 2) if first else None
    times = Times(0.25 * index, 0.5, 1.0) if reason else None
    return Chunk(index, "ab", (97, 98), 7, 3, -5, reason, stop, SCORES, prompt, times)


def test_a_response_carries_deltas_totals_and_the_seed():
    response = to_response([chunk(0), chunk(1)], pb.GenerateRequest(), "fp")
    assert [(output.index, output.text, output.num_tokens) for output in response.outputs] == [(0, "ab", 7), (1, "ab", 7)]
    assert (response.seed, response.system_fingerprint) == (-5, "fp")
    assert not any(output.HasField("finish_info") for output in response.outputs)


def test_the_prompt_is_told_of_in_the_first_response_only():
    assert to_response([chunk(first=True)], pb.GenerateRequest(), "fp").prompt_info.num_prompt_tokens == 3
    assert not to_response([chunk(1, first=True)], pb.GenerateRequest(), "fp").HasField("prompt_info")
    assert not to_response([chunk()], pb.GenerateRequest(), "fp").HasField("prompt_info")


def test_chunks_of_an_answer_that_came_together_are_one_output():
    """Who reads the first output of a message must not lose the text, or the end, that a second one would hold."""
    asked = pb.GenerateRequest(response=R(output_token_ids=True))
    last = replace(chunk(1, FinishReason.LENGTH), num_tokens=9)
    message = asyncio.run(Responses(asked.response, "fp", "id").of([chunk(1), chunk(0), last]))
    assert [(output.index, output.text, output.num_tokens) for output in message.outputs] == [(0, "ab", 7), (1, "abab", 9)]
    assert list(message.outputs[1].token_ids) == [97, 98, 97, 98]
    assert message.outputs[1].finish_info.num_output_tokens == 9


def test_of_the_prompt_there_is_what_was_asked_for_and_nothing_for_its_first_token():
    asked = pb.GenerateRequest(response=R(prompt_token_ids=True, prompt_logprobs=2))
    told = to_response([chunk(first=True)], asked, "fp").prompt_info
    assert (list(told.token_ids), list(told.logprobs)) == ([1, 2, 3], [0, -1.5, float("-inf")])
    assert [list(top.token_ids) for top in told.top_logprobs] == [[], [9, 8], [9, 8]]
    assert told.num_cached_tokens == 2
    bare = to_response([chunk(first=True)], pb.GenerateRequest(), "fp").prompt_info
    assert not (bare.token_ids or bare.logprobs or bare.top_logprobs)


@pytest.mark.parametrize("top", [0, 2])
def test_log_probabilities_stand_beside_the_tokens_and_alternatives_where_asked_for(top):
    asked = pb.GenerateRequest(response=R(logprobs=True, top_logprobs=top))
    (output,) = to_response([chunk()], asked, "fp").outputs
    assert list(output.logprobs) == [-1.5, float("-inf")]
    assert [list(each.logprobs) for each in output.top_logprobs] == ([[-0.5, -1.0]] * 2 if top else [])


def test_timing_is_that_of_the_slowest_answer_and_only_where_it_is_asked_for():
    asked, ends = pb.GenerateRequest(response=R(timing=True)), [chunk(index, FinishReason.STOP) for index in (0, 1)]
    assert to_response(ends, asked, "fp").timing == pb.Timing(queue_ms=250, prefill_ms=500, decode_ms=1000)
    assert not to_response([chunk()], asked, "fp").HasField("timing")
    assert not to_response(ends, pb.GenerateRequest(), "fp").HasField("timing")


@pytest.mark.parametrize(
    ("stop", "kind"), [("END", "stop_string"), ("", "stop_string"), (0, "stop_token_id"), (7, "stop_token_id"), (None, None)]
)
def test_what_stopped_an_answer_is_a_string_a_token_or_nothing(stop, kind):
    (output,) = to_response([chunk(0, FinishReason.STOP, stop)], pb.GenerateRequest(), "fp").outputs
    assert output.finish_info.WhichOneof("stop") == kind
    assert kind is None or getattr(output.finish_info, kind) == stop
    assert output.finish_info.num_output_tokens == 7


def test_a_response_with_many_scores_is_made_in_turns():
    """No more than so many tokens are written before everybody else on the event loop has a turn."""
    prompt = PromptPart((1,) * 1001, (SCORES[0],) * 1000, "")
    answer = replace(chunk(), prompt=prompt, logprobs=(SCORES[0],) * 500)
    asked = pb.GenerateRequest(response=R(prompt_logprobs=2, logprobs=True, top_logprobs=2))
    rounds = 0

    async def run() -> pb.GenerateResponse:
        async def count() -> None:
            nonlocal rounds
            while True:
                await asyncio.sleep(0)
                rounds += 1

        neighbour = asyncio.create_task(count())
        made = await Responses(asked.response, "fp", "id").full_response([answer])
        neighbour.cancel()
        return made

    made = asyncio.run(run())
    assert (len(made.prompt_info.logprobs), len(made.prompt_info.top_logprobs)) == (1001, 1001)
    assert (len(made.outputs[0].logprobs), len(made.outputs[0].top_logprobs)) == (500, 500)
    assert rounds >= 1500 // convert.SCORES - 2


LISTS = {
    "prompt": (CONTEXT, lambda count: pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * count))),
    "allowed_token_ids": (VOCAB, lambda count: pb.GenerateRequest(decoding=D(allowed_token_ids=[1] * count))),
    "resume_token_ids": (CONTEXT, lambda count: pb.GenerateRequest(resume_token_ids=pb.TokenIds(ids=[1] * count))),
    "stop_token_ids": (300, lambda count: pb.GenerateRequest(stopping=pb.StoppingCriteria(stop_token_ids=[1] * count))),
    "stop": (4, lambda count: pb.GenerateRequest(stopping=pb.StoppingCriteria(stop_strings=["x"] * count))),
    "bad_words": (64, lambda count: pb.GenerateRequest(decoding=D(bad_words=["x"] * count))),
    "logit_bias": (300, lambda count: pb.GenerateRequest(decoding=D(logit_bias=dict.fromkeys(range(count), 1.0)))),
    "choice": (1000, lambda count: pb.GenerateRequest(decoding=D(choice={"choices": ["x"] * count}))),
}
"""How many of a list are taken, and a request that has so many."""


def test_choices_that_are_too_long_together_are_refused_before_they_are_written_as_json():
    choices = {"choices": ["x" * 1000] * 66}
    with pytest.raises(InvalidRequest, match="choice must be at most 65536 bytes; got at least 66000"):
        check_sizes(pb.GenerateRequest(decoding=D(choice=choices)), info())


@pytest.mark.parametrize("name", LISTS)
def test_a_list_is_read_up_to_its_limit_and_refused_beyond_it_before_it_is_read(name):
    most, request = LISTS[name]
    check_sizes(request(most), info())
    with pytest.raises(ContextTooLong if name == "prompt" else InvalidRequest) as caught:
        check_sizes(request(most + 1), info())
    assert caught.value.field == name

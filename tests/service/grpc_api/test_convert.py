"""Protobuf to a command, and chunks to protobuf."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import pytest

from attend.model.engine.request import FinishReason, Times, TokenLogprob
from attend.model.errors import ContextTooLong, InvalidRequest
from attend.model.grammar import GrammarSpec, Kind
from attend.model.params import NO_CHANGE, DecodingParams, SamplingParams, StopRules
from attend.service.grpc_api import convert
from attend.service.grpc_api.convert import REASONS, Responses, check_sizes, to_command
from attend.service.records import Chunk, Command, PromptPart, whole
from attend.v1 import generation_pb2 as pb
from tests.fakes import CONTEXT, VOCAB, info

D = pb.DecodingParameters
R = pb.ResponseOptions


def to_response(chunks: Sequence[Chunk], request: pb.GenerateRequest, fingerprint: str) -> pb.GenerateResponse:
    return asyncio.run(Responses(request.response, fingerprint, "id").whole(chunks))


def test_a_bare_text_means_the_contracts_defaults():
    expected = Command(prompts=("a",), sampling=SamplingParams(), stops=StopRules(), request_id="id")
    assert to_command(pb.GenerateRequest(text="a"), "id") == expected


def test_every_field_reaches_the_command():
    request = pb.GenerateRequest(
        request_id="mine",
        model="m",
        token_ids=pb.TokenIds(ids=[1, 2]),
        max_tokens=5,
        temperature=0.5,
        sampling=pb.SamplingParameters(n=2, top_k=7, top_p=0.25, min_p=0.125, seed=-3),
        stopping=pb.StoppingCriteria(
            stop_strings=["x"], stop_token_ids=[4], min_tokens=1, include_stop_string=True, ignore_eos=True
        ),
        decoding=D(
            presence_penalty=0.5,
            frequency_penalty=-1,
            repetition_penalty=1.5,
            logit_bias={5: -100, 0: 2.5},
            allowed_token_ids=[0, 5],
            bad_words=["x", " y"],
        ),
        response=R(skip_special_tokens=False, logprobs=True, top_logprobs=3, prompt_logprobs=7, echo=True),
        truncate_prompt_tokens=6,
        priority=0,
        cache_salt="s",
        deadline_ms=9,
    )
    assert to_command(request, "mine") == Command(
        prompts=((1, 2),),
        sampling=SamplingParams(temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, seed=-3),
        stops=StopRules(max_tokens=5, min_tokens=1, stop=("x",), stop_token_ids=(4,), include_stop=True, ignore_eos=True),
        n=2,
        model="m",
        request_id="mine",
        deadline_ms=9,
        skip_special_tokens=False,
        decoding=DecodingParams(
            presence_penalty=0.5,
            frequency_penalty=-1,
            repetition_penalty=1.5,
            logit_bias={5: -100, 0: 2.5},
            bad_words=("x", " y"),
            allowed_token_ids=(0, 5),
        ),
        logprobs=3,
        prompt_logprobs=7,
        echo=True,
        truncate_prompt_tokens=6,
        priority=0,
        cache_salt="s",
    )
    resumed = pb.GenerateRequest(text="a", resume_token_ids=pb.TokenIds(ids=[1, 2]))
    assert to_command(resumed, "id").resume_token_ids == (1, 2)


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        (R(), (None, None)),
        (R(logprobs=True), (0, None)),
        (R(logprobs=True, top_logprobs=0), (0, None)),
        (R(logprobs=True, top_logprobs=20), (20, None)),
        (R(prompt_logprobs=0), (None, 0)),
    ],
)
def test_log_probabilities_are_reported_with_as_many_alternatives_as_asked_for(options, asked):
    command = to_command(pb.GenerateRequest(text="a", response=options), "id")
    assert (command.logprobs, command.prompt_logprobs) == asked


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response": R(top_logprobs=0)}, "top_logprobs"),
        ({"response": R(top_logprobs=3)}, "top_logprobs"),
        ({"response": R(logprobs=True, top_logprobs=21)}, "top_logprobs"),
        ({"response": R(logprobs=True, top_logprobs=-1)}, "top_logprobs"),
        ({"response": R(prompt_logprobs=21)}, "prompt_logprobs"),
        ({"decoding": D(repetition_penalty=0)}, "repetition_penalty"),
        ({"decoding": D(presence_penalty=float("nan"))}, "presence_penalty"),
        ({"decoding": D(logit_bias={5: float("inf")})}, "logit_bias[5]"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_field(fields, field):
    with pytest.raises(InvalidRequest, match=rf"^{re.escape(field)} ") as caught:
        to_command(pb.GenerateRequest(text="a", **fields), "id")
    assert caught.value.field == field


def test_scores_that_nothing_changes_share_one_record():
    assert to_command(pb.GenerateRequest(text="a", decoding=D(presence_penalty=0)), "id").decoding is NO_CHANGE


@pytest.mark.parametrize(
    ("decoding", "spec"),
    [
        (D(json_object=True), GrammarSpec("json_object", "")),
        (D(json_schema="{}"), GrammarSpec("json_schema", "{}")),
        (D(regex="a+"), GrammarSpec("regex", "a+")),
        (D(grammar="start: A"), GrammarSpec("grammar", "start: A")),
        (D(choice=D.Choices(choices=["a", 'b"'])), GrammarSpec("choice", '["a", "b\\""]')),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_each_form_of_structured_output_is_the_grammar_of_its_kind(decoding, spec):
    assert to_command(pb.GenerateRequest(text="a", decoding=decoding), "id").grammar == spec


def test_there_is_a_case_for_each_form_of_structured_output():
    forms = {field.name for field in D.DESCRIPTOR.oneofs_by_name["structured_output"].fields}
    assert forms == {*get_args(Kind)} - {"tools"}, "a grammar of tools is the server's own"


def test_a_zero_that_is_given_is_not_absent():
    assert to_command(pb.GenerateRequest(text="a", temperature=0), "id").sampling.temperature == 0
    assert to_command(pb.GenerateRequest(text="a", sampling=pb.SamplingParameters(seed=0)), "id").sampling.seed == 0
    with pytest.raises(InvalidRequest, match=r"^max_tokens"):
        to_command(pb.GenerateRequest(text="a", max_tokens=0), "id")
    with pytest.raises(InvalidRequest, match=r"^n must"):
        to_command(pb.GenerateRequest(text="a", sampling=pb.SamplingParameters(n=0)), "id")


def test_empty_text_is_a_prompt_and_no_input_is_a_mistake():
    assert to_command(pb.GenerateRequest(text=""), "id").prompts == ("",)
    assert to_command(pb.GenerateRequest(token_ids=pb.TokenIds()), "id").prompts == ((),)  # refused by the service
    with pytest.raises(InvalidRequest, match=r"^input is required") as caught:
        to_command(pb.GenerateRequest(), "id")
    assert caught.value.field == "input"


SILENT = [
    {"decoding": D()},
    {"decoding": D(presence_penalty=0, frequency_penalty=0, repetition_penalty=1)},
    {"decoding": D(json_object=False)},
    {"decoding": D(bad_words=[], allowed_token_ids=[], logit_bias={})},
    {"response": R()},
    {"response": R(echo=False, timing=False, logprobs=False, prompt_token_ids=False)},
    {"cache_salt": ""},
    {"resume_token_ids": pb.TokenIds()},
]


@pytest.mark.parametrize("fields", SILENT)
def test_a_value_that_asks_for_nothing_is_accepted(fields):
    assert to_command(pb.GenerateRequest(text="a", **fields), "id") == to_command(pb.GenerateRequest(text="a"), "id")


def test_every_field_of_the_proto_is_built():
    """A field that is added to the proto alone fails here: it would be ignored in silence."""
    built = {
        "request_id", "model", "text", "token_ids", "max_tokens", "temperature", "sampling", "decoding", "stopping", "response",
        "deadline_ms", "truncate_prompt_tokens", "cache_salt", "resume_token_ids", "adapter", "priority",
        "decoding.presence_penalty", "decoding.frequency_penalty", "decoding.repetition_penalty", "decoding.logit_bias",
        "decoding.allowed_token_ids", "decoding.bad_words", "decoding.json_schema", "decoding.regex", "decoding.choice",
        "decoding.grammar", "decoding.json_object", "response.prompt_token_ids", "response.prompt_logprobs",
        "response.output_token_ids", "response.logprobs", "response.top_logprobs", "response.echo",
        "response.skip_special_tokens", "response.timing",
    }  # fmt: skip
    groups = {"": pb.GenerateRequest, "decoding.": D, "response.": R}
    fields = {prefix + field.name for prefix, message in groups.items() for field in message.DESCRIPTOR.fields}
    assert fields == built


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


@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("timing", [False, True])
def test_messages_of_a_stream_are_the_same_whether_filled_in_or_made_anew(with_ids, timing):
    asked = pb.GenerateRequest(response=R(output_token_ids=with_ids, timing=timing))
    plain = [
        Chunk(index, text, (3,) * count, 7 + count, 3, -5) for index in (0, 1) for text in ("", "ab", "é") for count in (0, 2)
    ]
    chunks = [
        chunk(first=True),
        chunk(1, first=True),
        *plain,
        chunk(),
        chunk(0, FinishReason.STOP, "x"),
        chunk(1, FinishReason.LENGTH),
    ]
    batches = [*([each] for each in chunks), plain]
    responses = Responses(asked.response, "fp", "id")
    kept = [asyncio.run(responses.of(batch)) for batch in batches]
    anew = [to_response(whole(batch), asked, "fp") for batch in batches]
    assert kept == anew, "each message is its own, to be kept or changed"
    assert [each.SerializeToString() for each in kept] == [each.SerializeToString() for each in anew]


def test_chunks_of_an_answer_that_came_together_are_one_output():
    """Who reads the first output of a message must not lose the text, or the end, that a second one would hold."""
    asked = pb.GenerateRequest(response=R(output_token_ids=True))
    last = replace(chunk(1, FinishReason.LENGTH), num_tokens=9)
    message = asyncio.run(Responses(asked.response, "fp", "id").of([chunk(1), chunk(0), last]))
    assert [(output.index, output.text, output.num_tokens) for output in message.outputs] == [(0, "ab", 7), (1, "abab", 9)]
    assert list(message.outputs[1].token_ids) == [97, 98, 97, 98]
    assert message.outputs[1].finish_info.num_output_tokens == 9


def test_token_ids_are_there_when_asked_for():
    asked = pb.GenerateRequest(response=R(output_token_ids=True))
    assert list(to_response([chunk()], asked, "fp").outputs[0].token_ids) == [97, 98]
    assert not to_response([chunk()], pb.GenerateRequest(), "fp").outputs[0].token_ids


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


def test_an_echo_stands_before_the_first_piece_alone():
    asked = pb.GenerateRequest(response=R(echo=True))
    assert [to_response([one], asked, "fp").outputs[0].text for one in (chunk(first=True), chunk())] == ["pqrab", "ab"]


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


def test_each_reason_has_a_value_of_its_own():
    assert set(REASONS) == set(FinishReason)
    assert set(REASONS.values()) == set(pb.FinishReason.values()) - {pb.FINISH_REASON_UNSPECIFIED, pb.FINISH_REASON_TOOL_CALLS}
    for reason, value in REASONS.items():
        assert pb.FinishReason.Name(value) == f"FINISH_REASON_{reason.name}"


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
        made = await Responses(asked.response, "fp", "id").whole([answer])
        neighbour.cancel()
        return made

    made = asyncio.run(run())
    assert (len(made.prompt_info.logprobs), len(made.prompt_info.top_logprobs)) == (1001, 1001)
    assert (len(made.outputs[0].logprobs), len(made.outputs[0].top_logprobs)) == (500, 500)
    assert rounds >= 1500 // convert.SCORES - 2


TOO_LONG = {
    "prompt": pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * (CONTEXT + 1))),
    "allowed_token_ids": pb.GenerateRequest(decoding=D(allowed_token_ids=[1] * (VOCAB + 1))),
    "resume_token_ids": pb.GenerateRequest(resume_token_ids=pb.TokenIds(ids=[1] * (CONTEXT + 1))),
    "stop_token_ids": pb.GenerateRequest(stopping=pb.StoppingCriteria(stop_token_ids=[1] * 301)),
    "stop": pb.GenerateRequest(stopping=pb.StoppingCriteria(stop_strings=["x"] * 5)),
    "bad_words": pb.GenerateRequest(decoding=D(bad_words=["x"] * 65)),
    "logit_bias": pb.GenerateRequest(decoding=D(logit_bias=dict.fromkeys(range(301), 1.0))),
    "choice": pb.GenerateRequest(decoding=D(choice={"choices": ["x"] * 1001})),
}


def test_choices_that_are_too_long_together_are_refused_before_they_are_written_as_json():
    choices = {"choices": ["x" * 1000] * 66}
    with pytest.raises(InvalidRequest, match="choice must be at most 65536 bytes; got at least 66000"):
        check_sizes(pb.GenerateRequest(decoding=D(choice=choices)), info())


@pytest.mark.parametrize("name", TOO_LONG)
def test_a_list_that_is_too_long_is_refused_before_it_is_read(name):
    request = TOO_LONG[name]
    with pytest.raises(ContextTooLong if name == "prompt" else InvalidRequest) as caught:
        check_sizes(request, info())
    assert caught.value.field == name


def test_lists_up_to_their_limits_are_read():
    ids = pb.TokenIds(ids=[1] * CONTEXT)
    decoding = D(allowed_token_ids=[1] * VOCAB, bad_words=["x"] * 64, logit_bias=dict.fromkeys(range(300), 1.0))
    stopping = pb.StoppingCriteria(stop_token_ids=[1] * 300, stop_strings=["x"] * 4)
    check_sizes(pb.GenerateRequest(token_ids=ids, resume_token_ids=ids, decoding=decoding, stopping=stopping), info())


def test_of_token_ids_that_are_truncated_only_those_are_read_that_stay():
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(1000)), truncate_prompt_tokens=3)
    check_sizes(request, info())
    assert to_command(request, "id").prompts == ((997, 998, 999),)
    assert to_command(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2]), truncate_prompt_tokens=3), "id").prompts == (
        (1, 2),
    )

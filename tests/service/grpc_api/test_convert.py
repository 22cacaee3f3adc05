"""Protobuf to a command, and chunks to protobuf."""

import pytest

from model.engine.request import FinishReason
from model.errors import InvalidRequest, NotSupported
from model.params import SamplingParams, StopRules
from protos.attend.v1 import generation_pb2 as pb
from service.grpc_api.convert import OFF, REASONS, to_command, to_response
from service.records import Chunk, Command

D = pb.DecodingParameters
R = pb.ResponseOptions


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
        response=R(skip_special_tokens=False),
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
    )


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
    {"decoding": D(bad_words=[], allowed_token_ids=[])},
    {"response": R()},
    {"response": R(echo=False, timing=False, logprobs=False, prompt_token_ids=False)},
    {"cache_salt": ""},
]
LOUD = [
    ({"decoding": D(presence_penalty=0.5)}, "presence_penalty"),
    ({"decoding": D(frequency_penalty=-2)}, "frequency_penalty"),
    ({"decoding": D(repetition_penalty=0)}, "repetition_penalty"),
    ({"decoding": D(presence_penalty=float("nan"))}, "presence_penalty"),
    ({"decoding": D(logit_bias={5: 1.0})}, "logit_bias"),
    ({"decoding": D(allowed_token_ids=[1])}, "allowed_token_ids"),
    ({"decoding": D(bad_words=["x"])}, "bad_words"),
    ({"decoding": D(json_schema="{}")}, "json_schema"),
    ({"decoding": D(json_schema="")}, "json_schema"),
    ({"decoding": D(regex="a")}, "regex"),
    ({"decoding": D(choice=D.Choices(choices=["a"]))}, "choice"),
    ({"decoding": D(grammar="g")}, "grammar"),
    ({"decoding": D(json_object=True)}, "json_object"),
    ({"response": R(prompt_token_ids=True)}, "prompt_token_ids"),
    ({"response": R(prompt_logprobs=0)}, "prompt_logprobs"),
    ({"response": R(logprobs=True)}, "logprobs"),
    ({"response": R(top_logprobs=0)}, "top_logprobs"),
    ({"response": R(echo=True)}, "echo"),
    ({"response": R(timing=True)}, "timing"),
    ({"truncate_prompt_tokens": 1}, "truncate_prompt_tokens"),
    ({"cache_salt": "s"}, "cache_salt"),
    ({"resume_token_ids": pb.TokenIds(ids=[1])}, "resume_token_ids"),
    ({"resume_token_ids": pb.TokenIds()}, "resume_token_ids"),
]


@pytest.mark.parametrize("fields", SILENT)
def test_a_value_that_asks_for_nothing_is_accepted(fields):
    assert to_command(pb.GenerateRequest(text="a", **fields), "id") == to_command(pb.GenerateRequest(text="a"), "id")


@pytest.mark.parametrize(("fields", "name"), LOUD)
def test_a_value_that_asks_for_something_is_refused_by_name_in_json_words(fields, name):
    with pytest.raises(NotSupported, match=rf"^{name} is not supported yet; got ") as caught:
        to_command(pb.GenerateRequest(text="a", **fields), "id")
    assert caught.value.field == name
    assert "Container" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_field_of_the_proto_is_built_or_refused():
    """A field that is added to the proto alone fails here: it would be ignored in silence."""
    built = {
        "request_id", "model", "text", "token_ids", "max_tokens", "temperature", "sampling", "decoding", "stopping", "response",
        "deadline_ms", "response.output_token_ids", "response.skip_special_tokens",
    }  # fmt: skip
    groups = {"": pb.GenerateRequest, "decoding.": D, "response.": R}
    fields = {prefix + field.name for prefix, message in groups.items() for field in message.DESCRIPTOR.fields}
    assert fields == built | set(OFF)
    assert {name.rpartition(".")[2] for name in OFF} == {name for _, name in LOUD}


def chunk(index: int = 0, reason: FinishReason | None = None, stop: str | int | None = None) -> Chunk:
    return Chunk(index, "ab", (97, 98), 7, 3, -5, reason, stop)


def test_a_response_carries_deltas_totals_and_the_seed():
    response = to_response([chunk(0), chunk(1)], pb.GenerateRequest(), "fp", first=False)
    assert [(output.index, output.text, output.num_tokens) for output in response.outputs] == [(0, "ab", 7), (1, "ab", 7)]
    assert (response.seed, response.system_fingerprint) == (-5, "fp")
    assert not any(output.HasField("finish_info") for output in response.outputs)


def test_the_prompt_is_told_of_in_the_first_response_only():
    assert to_response([chunk()], pb.GenerateRequest(), "fp", first=True).prompt_info.num_prompt_tokens == 3
    assert not to_response([chunk()], pb.GenerateRequest(), "fp", first=False).HasField("prompt_info")


def test_token_ids_are_there_when_asked_for():
    asked = pb.GenerateRequest(response=R(output_token_ids=True))
    assert list(to_response([chunk()], asked, "fp", first=True).outputs[0].token_ids) == [97, 98]
    assert not to_response([chunk()], pb.GenerateRequest(), "fp", first=True).outputs[0].token_ids


@pytest.mark.parametrize(
    ("stop", "kind"), [("END", "stop_string"), ("", "stop_string"), (0, "stop_token_id"), (7, "stop_token_id"), (None, None)]
)
def test_what_stopped_an_answer_is_a_string_a_token_or_nothing(stop, kind):
    (output,) = to_response([chunk(0, FinishReason.STOP, stop)], pb.GenerateRequest(), "fp", first=True).outputs
    assert output.finish_info.WhichOneof("stop") == kind
    assert kind is None or getattr(output.finish_info, kind) == stop
    assert output.finish_info.num_output_tokens == 7


def test_each_reason_has_a_value_of_its_own():
    assert set(REASONS) == set(FinishReason)
    assert set(REASONS.values()) == set(pb.FinishReason.values()) - {pb.FINISH_REASON_UNSPECIFIED}
    for reason, value in REASONS.items():
        assert pb.FinishReason.Name(value) == f"FINISH_REASON_{reason.name}"

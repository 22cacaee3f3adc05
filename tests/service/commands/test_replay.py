"""`attend replay`: an answer asked for again is the same, or differs where it is told, or cannot be compared for a reason."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from attend.model.errors import SettingError
from attend.service.commands import cli
from attend.service.commands.replay import STATUS, is_precise, read_exchange, replay
from tests.conftest import examples
from tests.fakes import FakeEngine, build_server, info, seeded
from tests.model.checkpoints import write_checkpoint, write_letters
from tests.service.client.cutting import real

ASKED = {"prompt": "x", "max_tokens": 5, "temperature": 0.7}


def ask(body: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The answer of a server whose tokens depend on seed, answer and place alone."""
    answer = build_server(FakeEngine(seeded, info=info(**changes))).post(body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def verdict(asked: dict[str, Any], response: dict[str, Any], precise: bool = True, **changes: Any) -> tuple[str, str]:
    found = replay(asked, response, lambda body: ask(body, **changes), lambda: precise)
    return found.outcome, found.detail


FORMS: list[dict[str, Any]] = [
    {},
    {"seed": 3},
    {"n": 2, "return_token_ids": True},
    {"prompt": ["x", "y"], "logprobs": 1},
    {"deadline_ms": 10_000, "request_id": "mine"},
    {"stop": ["a"], "echo": True},
    {"resume_token_ids": [97, 98], "seed": 3, "return_token_ids": True},
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_an_answer_of_any_form_is_the_same_again(form):
    asked = ASKED | form
    outcome, detail = verdict(asked, ask(asked))
    assert outcome == "same"
    assert ("all tokens" in detail) == ("return_token_ids" in form)


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(0, 1), st.integers(0, 4), st.integers(-1, 300), st.booleans())
def test_one_changed_token_or_character_is_found_at_its_place(choice, place, value, by_text):
    asked = ASKED | {"n": 2, "seed": 3, **({} if by_text else {"return_token_ids": True})}
    response = ask(asked)
    old = response["choices"][choice]
    if by_text:
        old["text"] = old["text"][:place] + "!" + old["text"][place + 1 :]
    else:
        old["token_ids"][place], before = value, old["token_ids"][place]
        if value == before:
            return
    outcome, detail = verdict(asked, response)
    assert outcome == "different"
    assert f"choice {choice}: {'character' if by_text else 'token'} {place} was" in detail


def test_an_answer_of_another_length_or_end_differs():
    asked = ASKED | {"seed": 3, "return_token_ids": True}
    longer = ask(asked | {"max_tokens": 6})
    assert verdict(asked, longer) == ("different", "choice 0: there were 6 tokens and are 5")
    ended = ask(asked)
    ended["choices"][0]["finish_reason"] = "stop"
    assert verdict(asked, ended) == ("different", "choice 0: it ended with 'stop' and ends with 'length'")


def without(document: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {name: value for name, value in {**document, **changes}.items() if value is not None}


def test_what_need_not_be_the_same_is_told_with_its_reason():
    asked = ASKED | {"return_token_ids": True}
    response = ask(asked)
    assert "no seed" in verdict(asked, without(response, seed=None))[1]
    assert "do not belong together" in verdict(asked | {"seed": response["seed"] + 1}, response)[1]
    assert "'fp_other'" in verdict(asked, response, fingerprint="fp_other")[1]
    for reason in ("deadline", "abort", "error", None):
        now = (
            {"finish_reason": "length", "stop_reason": reason} if reason in ("deadline", "abort") else {"finish_reason": reason}
        )
        cut = without(response, choices=[response["choices"][0] | now])
        assert f"ended with {reason!r}" in verdict(asked, cut)[1]
        assert verdict(asked, cut)[0] == "impossible"
    response["choices"][0]["token_ids"][2] = 0
    outcome, detail = verdict(asked, response, precise=False)
    assert outcome == "impossible" and "token 2 was 0" in detail
    assert len({*STATUS.values()}) == 3 and STATUS["impossible"] == 3


def test_bits_depend_on_the_batch_outside_float32_and_the_native_decoder():
    forms = [(dtype, backend) for dtype in ("float32", "bfloat16") for backend in ("native-avx2", "torch")]
    assert [is_precise({"dtype": dtype, "backend": backend}) for dtype, backend in forms] == [True, True, True, False]


BAD = {
    "no JSON": ("{", "is not JSON"),
    "a list": ("[]", "must hold a JSON object; it holds a list"),
    "no request": (json.dumps({"object": "text_completion", "choices": [{}]}), 'has no "request"'),
    "a chat": (json.dumps({"request": {}, "response": {"object": "chat.completion", "choices": [{}]}}), "'chat.completion'"),
    "an error": (json.dumps({"request": {}, "response": {"error": {}}}), "its object is None"),
    "no choices": (json.dumps({"request": {}, "response": {"object": "text_completion", "choices": []}}), "must hold what"),
}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD)
def test_a_file_that_holds_something_else_is_a_sentence(tmp_path, text, message):
    file = tmp_path / "answer.json"
    file.write_text(text)
    with pytest.raises(SettingError, match=message):
        read_exchange(file, None)
    with pytest.raises(SettingError, match="cannot be read"):
        read_exchange(tmp_path / "none.json", None)


def test_choices_of_another_request_do_not_belong_to_it():
    with pytest.raises(SettingError, match="has 2 choices, and its request asks for 1"):
        verdict(ASKED, ask(ASKED | {"n": 2}))


def test_the_command_asks_a_server(tmp_path):
    asked, runner = ASKED | {"return_token_ids": True}, CliRunner()
    both, alone, request = (tmp_path / name for name in ("both.json", "alone.json", "request.json"))
    request.write_text(json.dumps(asked))
    with real(seeded) as replica:
        response = ask(asked)
        both.write_text(json.dumps({"request": asked, "response": response}))
        alone.write_text(json.dumps(response))
        for words in ([str(both)], [str(alone), "--request", str(request)]):
            done = runner.invoke(cli.app, ["replay", words[0], replica.url, *words[1:]])
            assert (done.exit_code, done.stdout.split(":")[0]) == (0, "same"), done.stdout
        response["choices"][0]["token_ids"][1] = 7
        both.write_text(json.dumps({"request": asked, "response": response}))
        done = runner.invoke(cli.app, ["replay", str(both), replica.url])
        assert (done.exit_code, done.stdout) == (1, f"different: choice 0: token 1 was 7 and is {seeded_token(response, 1)}\n")
        both.write_text(json.dumps({"request": asked | {"max_tokens": -1}, "response": response}))
        done = runner.invoke(cli.app, ["replay", str(both), replica.url])
        assert isinstance(done.exception, SettingError) and "max_tokens" in str(done.exception)
    done = runner.invoke(cli.app, ["replay", str(both), "http://127.0.0.1:9"])
    assert isinstance(done.exception, SettingError) and "no server answers" in str(done.exception)
    done = runner.invoke(cli.app, ["replay", str(both), "http://127.0.0.1:9", "--dtype", "float32"])
    assert "--dtype" in str(done.exception)


def seeded_token(response: dict[str, Any], place: int) -> int:
    return (response["seed"] * 31 + place) % 26 + ord("a")


def test_the_command_asks_a_model_here(tmp_path):
    folder = write_letters(write_checkpoint("llama-tied", tmp_path / "tiny"))
    words = ["--model", str(folder), "--dtype", "float32"]
    runner, file = CliRunner(), tmp_path / "answer.json"
    made = runner.invoke(cli.app, ["generate", "ab", "--json", "--max-tokens", "8", "--temperature", "1", *words])
    asked = {"prompt": "ab", "max_tokens": 8, "temperature": 1, "model": "tiny"}
    file.write_text(json.dumps({"request": asked, "response": json.loads(made.stdout)}))
    done = runner.invoke(cli.app, ["replay", str(file), *words])
    assert (done.exit_code, done.stdout.split(":")[0]) == (0, "same"), done.stdout
    done = runner.invoke(cli.app, ["replay", str(file), "--model", str(folder), "--quantize", "int8"])
    assert (done.exit_code, done.stdout.split(":")[0]) == (3, "impossible"), done.stdout

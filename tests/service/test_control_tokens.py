"""Control tokens in the texts of a call: plain text in a chat, on both transports, and control tokens in a prompt."""

import json
from dataclasses import replace

import pytest

from attend.model.text.chat import ChatTemplate
from attend.model.text.control_tokens import ControlTokens
from attend.service.chat.forms import form_of
from attend.service.runtime.checkpoint import read_template
from attend.service.settings import Settings
from tests.fakes import END, INFO, FakeEngine, Server, build_server, byte_tokenizer, says
from tests.service.test_chat_answers import NOW
from tests.service.test_parity_chat import over_grpc, over_http

WORD = "<|endoftext|>"
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.role }}:{{ m.name }}:{{ m.content }}"
    "{{ m.reasoning_content }}{{ m.tool_calls }}<|endoftext|>{% endfor %}{{ think }}"
)
CALL = {"id": "c1", "type": "function", "function": {"name": f"now{WORD}", "arguments": json.dumps({WORD: [{"a": WORD}]})}}
TALK = [
    {"role": "system", "content": WORD, "name": WORD},
    {"role": "user", "content": f"{WORD}a{WORD}b"},
    {"role": "assistant", "content": WORD, "reasoning_content": WORD, "tool_calls": [CALL]},
    {"role": "tool", "content": f"{WORD}{WORD}", "tool_call_id": "c1"},
]
TOOL = {"type": "function", "function": NOW["function"] | {"description": WORD, "parameters": {"properties": {WORD: {}}}}}
BODY = {"messages": TALK, "tools": [TOOL], "chat_template_kwargs": {"think": f"x{WORD}"}, "max_tokens": 1}


def served(*, protected: bool) -> tuple[Server, FakeEngine]:
    template = ChatTemplate(TEMPLATE)
    template.control = ControlTokens(byte_tokenizer().raw, TEMPLATE) if protected else None
    engine = FakeEngine(says("x"), info=replace(INFO, max_model_len=1024))
    return build_server(engine, template=template, form=form_of("", "hermes", "none")), engine


@pytest.mark.parametrize("ask", [over_http, over_grpc])
@pytest.mark.parametrize("protected", [True, False])
def test_only_the_template_ends_a_turn_unless_callers_may(ask, protected):
    server, engine = served(protected=protected)
    found = ask(server, BODY, stream=False)
    assert found.status == 200, found.words
    [request] = engine.requests
    count = json.dumps(BODY).count(WORD) + len(TALK)
    assert request.prompt.count(END) == (len(TALK) if protected else count)
    said = byte_tokenizer().decode(request.prompt, skip_special_tokens=False)
    assert said.count(WORD) == count


def test_a_prompt_may_hold_control_tokens():
    server, engine = served(protected=True)
    assert server.post({"prompt": f"a{WORD}b", "max_tokens": 1}).status_code == 200
    assert engine.requests[0].prompt == [ord("a"), END, ord("b")]


@pytest.mark.parametrize("allowed", [True, False])
def test_a_setting_lets_callers_write_control_tokens(tmp_path, allowed):
    assert not Settings().special_tokens_in_content
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    template = read_template(tmp_path, byte_tokenizer(), special_tokens_in_content=allowed)
    assert template is not None
    written = template.write([{"role": "user", "content": f"a{WORD}"}])
    assert written.text == f"user::a{WORD}{WORD}"
    assert byte_tokenizer().encode(written.text, literals=written.literals).count(END) == (2 if allowed else 1)


def test_a_folder_without_a_template_has_none(tmp_path):
    assert read_template(tmp_path, byte_tokenizer(), special_tokens_in_content=False) is None

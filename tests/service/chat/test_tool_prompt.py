"""Tools, calls and results of which a chat template writes nothing are in its prompt all the same."""

import json

import pytest

from attend.model.text.chat import ChatTemplate
from attend.service.chat.calls import MAX_NAME
from attend.service.chat.forms import CALLS, TEXT_ALONE, AnswerFormat
from attend.service.chat.parser import AnswerParser
from attend.service.chat.parts import CallArguments, CallStart, Tool, join_deltas
from attend.service.chat.prompt import prompt_of, write_calls
from attend.service.chat.tools import NO_CALLS
from tests.service.chat.examples import TOOLS
from tests.service.contract.asked import calling_of

LOOP = "{% for m in messages %}"
KNOWS_NONE = LOOP + "<{{ m.role }}>{{ m.content }}{% endfor %}"
TURNS = LOOP + "{% if m.role in ['user', 'assistant'] %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
KNOWS_ALL = (
    "{{ tools | tojson if tools }}"
    + LOOP
    + "<{{ m.role }}>{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
)
NAMED = "{% if tools %}{{ tools | map(attribute='function') | map(attribute='name') | list }}{% endif %}" + KNOWS_NONE
CITY = {"type": "object", "properties": {"city": {"type": "string", "description": "Größe"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "The sky.", "parameters": CITY}}
NOW = {"type": "function", "function": {"name": "now"}}
ARGUMENTS = {"city": "Zürich", "days": 3, "lines": ["a", 1, True], "text": 'a "b"'}
FUNCTION = {"name": "weather", "arguments": ARGUMENTS}
ASK = {"role": "user", "content": "ask"}
USED = [
    ASK,
    {"role": "assistant", "content": "I look.", "tool_calls": [{"id": "c", "type": "function", "function": FUNCTION}]},
    {"role": "tool", "content": "clear", "tool_call_id": "c"},
]


def prompt(source: str, messages, form: str = "hermes", *, tools=(WEATHER, NOW), choice="auto") -> str:
    answers = AnswerFormat(CALLS[form])
    calling = calling_of(list(tools), choice, None, answers) if tools else NO_CALLS
    return prompt_of(ChatTemplate(source), messages, calling, answers, {}, None).text


LONG = "x" * MAX_NAME
SEVERAL = [[FUNCTION], [FUNCTION, {"name": "now", "arguments": {}}], [{"name": LONG, "arguments": {}}]]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("functions", SEVERAL, ids=["one", "two", "a long name"])
def test_a_call_is_read_as_it_is_written_in_each_form(name, functions):
    form = CALLS[name]
    text = write_calls(form, functions)
    if form.syntax == "channels":  # its messages are begun by tokens of their own
        text = text.replace(" to=functions.now", "<|start|>assistant to=functions.now")
    parser = AnswerParser(AnswerFormat(form), (*TOOLS, Tool(LONG, {})))
    parts = join_deltas(parser.feed(text) + parser.finish())
    assert [part.name for part in parts if isinstance(part, CallStart)] == [each["name"] for each in functions]
    assert [json.loads(part.text) for part in parts if isinstance(part, CallArguments)] == [f["arguments"] for f in functions]


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "now"}}])
@pytest.mark.parametrize("source", [KNOWS_NONE, TURNS, NAMED], ids=["none", "turns", "names alone"])
@pytest.mark.parametrize("name", CALLS)
def test_tools_of_which_a_template_writes_nothing_are_told_with_the_form_of_their_calls(name, source, choice):
    said = prompt(source, [ASK], name, choice=choice)
    assert json.dumps(WEATHER, ensure_ascii=False) in said and json.dumps(NOW) in said
    assert write_calls(CALLS[name], [{"name": "function_name", "arguments": {"argument_name": "argument value"}}]) in said
    assert said.endswith("ask")


def test_tools_follow_what_the_system_says():
    said = prompt(KNOWS_NONE, [{"role": "system", "content": "Be brief."}, ASK])
    assert said.startswith("<system>Be brief.\n\n# Tools\n") and said.count("<system>") == 1 and said.endswith("<user>ask")


def test_a_template_that_writes_tools_gets_them_and_no_other_words():
    assert prompt(KNOWS_ALL, [ASK]) == json.dumps([WEATHER, NOW], ensure_ascii=False) + "<user>ask"
    assert prompt(KNOWS_NONE, [ASK], tools=()) == prompt(KNOWS_NONE, [ASK], choice="none") == "<user>ask"


def test_a_template_that_writes_calls_by_their_ids_gets_them():
    """Kimi's does: its ids hold the names."""
    source = (
        LOOP + "{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.id }}{{ c.function.arguments | tojson }}]{% endfor %}"
    )
    calls = [
        {"id": f"functions.f:{at}", "type": "function", "function": {"name": "f", "arguments": {"a": at}}} for at in (0, 1)
    ]
    talk = [ASK, {"role": "assistant", "content": "", "tool_calls": calls}]
    assert prompt(source + "{% endfor %}", talk, tools=()) == 'ask[functions.f:0{"a": 0}][functions.f:1{"a": 1}]'


@pytest.mark.parametrize("tools", [(WEATHER, NOW), ()], ids=["with tools", "without"])
@pytest.mark.parametrize("name", CALLS)
def test_calls_and_results_of_which_a_template_writes_nothing_are_told(name, tools):
    call = write_calls(CALLS[name], [FUNCTION])
    assert prompt(KNOWS_NONE, USED, name, tools=tools).endswith(f"<user>ask<assistant>I look.\n\n{call}<tool>clear")
    result = "<tool_response>\nclear\n</tool_response>"
    assert prompt(TURNS, USED, name, tools=tools).endswith(f"ask<assistant>I look.\n\n{call}<user>{result}")


def test_calls_are_told_where_no_form_of_them_is_known():
    said = prompt_of(ChatTemplate(KNOWS_NONE), USED, NO_CALLS, TEXT_ALONE, {}, None).text
    assert said == f"<user>ask<assistant>I look.\n\n{write_calls(CALLS['hermes'], [FUNCTION])}<tool>clear"

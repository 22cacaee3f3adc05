"""Tools and reasoning in a real browser: calls are shown, and results that a person types are sent back."""

import json
from dataclasses import replace
from typing import Any

import pytest

from attend.model.text.chat import ChatTemplate
from attend.service.chat.forms import form_of
from tests.fakes import INFO, FakeEngine, build_server, says
from tests.service import pages
from tests.service.pages import expect, finish, opened, serving, violations
from tests.service.test_page_browser import HOSTILE

pytestmark = [pages.pytestmark, pytest.mark.long]

TEMPLATE = ChatTemplate(
    "{% for tool in tools or [] %}{{ tool.function.name }};{{ (tool.function.parameters or {}).properties or [] }}{% endfor %}"
    "{% for m in messages if m.role %}{{ m | tojson }}\n{% endfor %}{{ reasoning_effort }}"
)
WEATHER = {"city": "Zürich 🌍", "unit": "celsius"}
SUM = {"a": 9007199254740993, "b": -0.5}
THOUGHTS = "They ask for\nthe weather & a sum."
FINAL = "It is 21 degrees."


def call(name: str, arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'


CALLS = f"<think>\n{THOUGHTS}\n</think>\n\nI look.\n{call('get_weather', WEATHER)}\n{call('add', SUM)}"


def then(first: str, last: str):
    """Answers `first`, and `last` where a tool has answered."""
    return lambda request: says(last if b'"role": "tool"' in bytes(request.prompt) else first)(request)


def engine_of(first: str, last: str = FINAL, **more: Any) -> FakeEngine:
    return FakeEngine(then(first, last), info=replace(INFO, max_model_len=4096, num_blocks=4096), **more)


def app(engine: FakeEngine, template: ChatTemplate = TEMPLATE):
    return build_server(engine, template=template, form=form_of("", "hermes", "think")).app


def opened_chat(page, live, example: bool = True, **fields: str) -> list[dict[str, Any]]:
    """A chat with the example's tools. Returns the bodies of the calls for chat, which grow."""
    bodies: list[dict[str, Any]] = []
    page.on("request", lambda request: "chat/completions" in request.url and bodies.append(json.loads(request.post_data)))
    opened(page, live, **{"prompt": "a", "max_tokens": "900", **fields})
    page.check("#mode-chat", force=True)
    page.click("#tools-panel > summary")
    if example:
        page.click("#example")
    return bodies


def give(page, at: int, result: str) -> None:
    page.locator(".call textarea").nth(at).fill(result)
    page.locator(".call button").nth(at).click()


def texts(page, selector: str) -> list[str]:
    return page.locator(selector).evaluate_all("all => all.map(one => one.textContent)")


def test_a_call_is_shown_while_it_streams(page):
    engine = engine_of(CALLS, held=True)
    with serving(app(engine)) as live:
        opened_chat(page, live)
        page.click("#generate")
        live.loop.call_soon_threadsafe(engine.release, CALLS.encode().index("Zürich".encode()))
        card = page.locator(".call")
        expect(card.locator(".arguments")).to_have_text('{"city": "')
        expect(card).to_have_attribute("aria-busy", "true")
        expect(page.locator(".answer:last-child .calls-status")).to_have_text("Calling get_weather")
        assert card.locator("textarea").count() == 0
        live.loop.call_soon_threadsafe(engine.release, 900)
        expect(page.locator("#status")).to_have_text(f"Done: {len(CALLS.encode()) + 1} tokens, tool_calls")
        assert [json.loads(text) for text in texts(page, ".call .arguments")] == [WEATHER, SUM]
        assert texts(page, ".thoughts") == [THOUGHTS]


def test_the_loop_by_hand_sends_the_calls_and_their_results_once_there_are_all(page):
    with serving(app(engine_of(CALLS))) as live:
        bodies = opened_chat(page, live)
        finish(page)
        ids = texts(page, ".call .head code")
        page.fill("#prompt", "b")
        page.press("#prompt", "Enter")
        expect(page.locator("#error")).to_contain_text("wait for their results")
        page.fill("#prompt", "")
        give(page, 0, "21 degrees")
        expect(page.locator(".answer:last-child .calls-status")).to_have_text("To be answered: add")
        expect(page.locator(".call textarea").nth(1)).to_be_focused()
        page.keyboard.type("9007199254740992.5")
        page.keyboard.press("Control+Enter")
        expect(page.locator(".answer:last-child .scored").nth(0)).to_have_text("I")
        expect(page.locator(".answer:last-child .prose")).to_contain_text(FINAL)
        expect(page.locator("#status")).to_contain_text("Done")
        assert page.locator(".call textarea").evaluate_all("all => all.map(one => [one.value, one.readOnly])") == [
            ["21 degrees", True], ["9007199254740992.5", True]
        ]  # fmt: skip
        page.reload()
        expect(page.locator("#facts")).to_contain_text("tokens of context")
        expect(page.locator(".prose").nth(1)).to_have_text(FINAL)
        assert [json.loads(text) for text in texts(page, ".call .arguments")] == [WEATHER, SUM]
        page.click("text=Retry >> nth=-1")
        expect(page.locator("#status")).to_contain_text("Done")
        page.fill("#prompt", "b")
        finish(page)
    first, second, again, last = [body["messages"] for body in bodies]
    calls = [
        {"id": number, "type": "function", "function": {"name": name, "arguments": json.dumps(its, ensure_ascii=False)}}
        for number, name, its in zip(ids, ("get_weather", "add"), (WEATHER, SUM), strict=True)
    ]
    assert first == [{"role": "user", "content": "a"}]
    assert second == again == [
        *first,
        {"role": "assistant", "content": "I look.", "reasoning_content": THOUGHTS, "tool_calls": calls},
        {"role": "tool", "tool_call_id": ids[0], "content": "21 degrees"},
        {"role": "tool", "tool_call_id": ids[1], "content": "9007199254740992.5"},
    ]  # fmt: skip
    assert last == [*second, {"role": "assistant", "content": FINAL}, {"role": "user", "content": "b"}]
    assert bodies[0]["tools"] == bodies[1]["tools"]


@pytest.mark.parametrize(
    ("typed", "says_so"), [("[{]", "tools is not JSON: "), ('{"type": "function"}', "tools must be a list"), ("null", "a list")]
)
def test_bad_json_is_said_and_nothing_is_sent(page, typed, says_so):
    with serving(app(engine_of(CALLS))) as live:
        bodies = opened_chat(page, live)
        page.fill("#tools", typed)
        page.click("#generate")
        expect(page.locator("#error")).to_contain_text(says_so)
        assert bodies == []
        page.fill("#tools", " ")
        finish(page)
        expect(page.locator("#error")).to_be_hidden()
    assert "tools" not in bodies[0]


NAMED = {"type": "function", "function": {"name": "none"}}


@pytest.mark.parametrize(
    ("choice", "parallel", "effort", "fields"),
    [
        ("auto", True, "", {}),
        ("none", True, "low", {"tool_choice": "none", "reasoning_effort": "low"}),
        ("required", False, "", {"tool_choice": "required", "parallel_tool_calls": False}),
        ("function none", True, "", {"tool_choice": NAMED}),
    ],
)
def test_the_fields_of_the_panel_are_those_of_the_request(page, choice, parallel, effort, fields):
    """A function may be called as a choice is; what a schema holds keeps all its digits."""
    schema = {"properties": {"x": {"type": "integer", "maximum": 2**63 - 1}}}
    tools = [{"type": "function", "function": {"name": "none", "parameters": schema}}]
    with serving(app(engine_of(FINAL))) as live:
        bodies = opened_chat(page, live, example=False)
        assert page.locator("#tool_choice").is_disabled()
        page.fill("#tools", json.dumps(tools))
        page.select_option("#tool_choice", choice)
        page.set_checked("#parallel_tool_calls", parallel)
        page.select_option("#reasoning_effort", effort)
        finish(page)
    sent = {name: value for name, value in bodies[0].items() if name.startswith(("tool", "parallel", "reasoning"))}
    assert sent == {"tools": tools, **fields}


def test_a_choice_of_a_function_that_is_gone_falls_back_to_auto(page):
    with serving(app(engine_of(FINAL))) as live:
        opened_chat(page, live)
        assert texts(page, "#functions option") == ["get_weather", "add"]
        page.select_option("#tool_choice", "function add")
        page.fill("#tools", page.input_value("#tools").replace('"add"', '"plus"'))
        assert page.input_value("#tool_choice") == "auto"


@pytest.mark.parametrize(("template", "is_hidden"), [("{{ messages[0].content }}", True), ("{{ enable_thinking }}", False)])
def test_effort_is_asked_for_where_the_template_reads_it(page, template, is_hidden):
    with serving(app(engine_of(FINAL), ChatTemplate(template))) as live:
        opened_chat(page, live, example=False)
        assert page.locator("#reasoning_effort").is_hidden() == is_hidden
        page.evaluate("document.getElementById('reasoning_effort').value = 'low'")
        page.click("#generate")
        expect(page.locator("#status")).to_contain_text("Done")


def test_a_call_that_was_cut_cannot_be_answered_and_the_chat_goes_on_without_it(page):
    with serving(app(engine_of(call("add", SUM)))) as live:
        bodies = opened_chat(page, live, max_tokens="55")
        finish(page)
        expect(page.locator(".call")).to_contain_text("cannot be answered")
        assert texts(page, ".call .finish") == ["length"]
        page.fill("#prompt", "b")
        finish(page)
    assert bodies[1]["messages"][1] == {"role": "assistant", "content": ""}


def test_names_arguments_and_reasoning_are_text_whatever_they_hold(page):
    arguments = {"city": HOSTILE, "unit": HOSTILE}
    with serving(app(engine_of(f"<think>{HOSTILE}</think>{call('get_weather', arguments)}"))) as live:
        opened_chat(page, live)
        finish(page)
        assert json.loads(texts(page, ".call .arguments")[0]) == arguments
        give(page, 0, HOSTILE)
        expect(page.locator(".answer:last-child .prose")).to_contain_text(FINAL)
        assert page.locator(".call textarea").first.input_value() == HOSTILE
        assert page.locator("main img, main script").count() == 0


@pytest.mark.parametrize(("width", "scheme"), [(800, "light"), (360, "dark")])
def test_the_panel_and_the_cards_fit_and_axe_finds_nothing(page, width, scheme):
    page.set_viewport_size({"width": width, "height": 780})
    page.emulate_media(color_scheme=scheme)
    with serving(app(engine_of(CALLS))) as live:
        opened_chat(page, live, prompt="a" * 300)
        finish(page)
        give(page, 0, "x" * 300)
        page.evaluate("for (const fold of document.querySelectorAll('details')) fold.open = true")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert violations(page) == []

"""The chat of the playground in a real browser: a conversation that is kept, shown as Markdown, and survives errors."""

import json
import re
from dataclasses import replace

import pytest

from attend.model.errors import Overloaded, Unavailable
from attend.model.text.chat import ChatTemplate
from attend.service.chat.forms import form_of
from tests.fakes import INFO, FakeEngine, build_server, says
from tests.service.http_api.described import TEMPLATE, chatting_server
from tests.service.pages import expect, finish, opened, pytestmark, serving, violations  # noqa: F401 (skips this file)
from tests.service.test_page_browser import letters  # noqa: F401 - a fixture
from tests.service.test_page_tools import THOUGHTS

ROOMY = replace(INFO, max_model_len=8192, num_blocks=8192)
MARKDOWN = """\
# Title

Some **bold** text &amp; `code`.

```python
x = 1

y = 2
```

1. one
2. two

| a | b |
|---|--:|
| 1 | 2 |
"""
ATTACKS = """\
<img src=/attack1 onerror=alert(1)><script src=/attack2></script><iframe src=/attack3></iframe>

<svg onload=alert(2)><a xlink:href="javascript:alert(3)">x</a></svg> <style>@import "/attack4";</style>

![image](/attack5) ![image](http://attack.test/6.png) ![image](data:image/svg+xml,<svg/onload=alert(7)>)
![](javascript:alert(8))

[a](javascript:alert(9)) [b](JaVaScRiPt:alert(10)) [c](&#106;avascript:alert(11)) [d](data:text/html,x)
[e](vbscript:x) [f](/attack13) [g](//attack.test/14) <javascript:alert(15)>
[h]( java\tscript:alert(16)) [i](blob:x) [j](https:attack17)

[k]: javascript:alert(18)
[k] [safe](https://attack.test/19 "onclick=alert(20)") <https://attack.test/?"onmouseover="alert(21)> https://attack.test/22

```html" onclick="alert(23)
<img src=/attack24>
```

| <img src=/attack25> | [x](javascript:alert(26)) |
|---|---|
| <b onclick=alert(27)>x</b> | &lt;img src=/attack28&gt; |
"""


def chat_app(engine: FakeEngine):
    return chatting_server(engine).app


def chat_of(text: str, **more) -> FakeEngine:
    return FakeEngine(says(text), info=ROOMY, **more)


def asked(page, text: str) -> None:
    """Send, to the end of the answer."""
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    expect(page.locator("#prompt")).to_have_value("")
    expect(page.locator("#status")).to_contain_text("Done")


def prompts(engine: FakeEngine) -> list[str]:
    return [bytes(request.prompt).decode() for request in engine.requests]


@pytest.mark.parametrize(
    ("template", "is_chat"), [(TEMPLATE, True), (ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}"), False)]
)
def test_the_page_opens_as_a_chat_where_the_template_tells_who_speaks(page, template, is_chat):
    """One that only joins the texts, as the shipped model's, was not made for chats: there the chat is a tab."""
    with serving(build_server(template=template, form=form_of("", "hermes", "think")).app) as live:
        opened(page, live)
        assert page.is_checked("#mode-chat") == is_chat
        expect(page.locator("#generate")).to_have_text("Send" if is_chat else "Generate")
        page.check("#mode-completions" if is_chat else "#mode-chat", force=True)
        expect(page.locator("#generate")).to_have_text("Generate" if is_chat else "Send")


def test_enter_sends_and_the_answer_joins_the_conversation_by_itself(page):
    engine = FakeEngine(says("bcd"))
    with serving(chat_app(engine)) as live:
        opened(page, live, system="be kind")
        page.focus("#prompt")
        page.keyboard.type("a")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("b")
        page.evaluate("""document.getElementById("prompt").dispatchEvent(
            new KeyboardEvent("keydown", {key: "Enter", isComposing: true, bubbles: true, cancelable: true}))""")
        assert (engine.requests, page.input_value("#prompt")) == ([], "a\nb")
        page.keyboard.press("Enter")
        expect(page.locator("#status")).to_have_text("Done: 4 tokens, stop")
        asked(page, "c")
        assert page.locator(".question p, .prose").all_inner_texts() == ["a\nb", "bcd", "c", "bcd"]
    first = "system: be kind\nuser: a\nb\n"
    assert prompts(engine) == [first, f"{first}assistant: bcd\nuser: c\n"]


def test_a_conversation_is_kept_over_a_reload_until_a_new_chat(page):
    engine = FakeEngine(says("bcd"))
    with serving(chat_app(engine)) as live:
        opened(page, live, system="s")
        asked(page, "a")
        page.reload()
        expect(page.locator(".prose")).to_have_text("bcd")
        assert page.input_value("#system") == "s"
        asked(page, "b")
        page.click("#new-chat")
        expect(page.locator("#log > *")).to_have_count(0)
        page.reload()
        expect(page.locator("#facts")).to_contain_text("tokens of context")
        assert page.locator("#log > *").count() == 0
    assert prompts(engine)[1] == "system: s\nuser: a\nassistant: bcd\nuser: b\n"


def test_a_new_chat_ends_the_answer_that_runs(page):
    engine = FakeEngine(says("bcd"), held=True)
    with serving(chat_app(engine)) as live:
        opened(page, live)
        page.fill("#prompt", "a")
        page.press("#prompt", "Enter")
        live.loop.call_soon_threadsafe(engine.release, 1)
        expect(page.locator(".prose")).to_have_text("b")
        page.click("#new-chat")
        expect(page.locator("#log > *")).to_have_count(0)
        for _ in range(200):
            if engine.aborted:
                break
            page.wait_for_timeout(10)
        live.loop.call_soon_threadsafe(engine.release, 9)
        page.fill("#prompt", "b")
        page.press("#prompt", "Enter")
        expect(page.locator("#status")).to_contain_text("Done")
        assert page.locator(".question p, .prose").all_inner_texts() == ["b", "bcd"]
    assert len(engine.aborted) == 1


STRANGE = '{"system": "", "messages": [{"role": "assistant", "tool_calls": [null]}]}'


@pytest.mark.parametrize("how", ["forbidden", "full", "broken", "strange"])
def test_storage_that_does_not_work_breaks_nothing_and_is_said(page, how):
    throws = "() => { throw new DOMException('no', 'QuotaExceededError'); }"
    scripts = {
        "forbidden": "Object.defineProperty(window, 'localStorage', {get() { throw new Error('no'); }})",
        "full": f"Storage.prototype.setItem = {throws}",
        "broken": "localStorage.setItem('attend.chat', '{\"system\": 1, \"messages\": [null]}')",
        "strange": f"localStorage.setItem('attend.chat', '{STRANGE}')",
    }
    page.add_init_script(scripts[how])
    with serving(chat_app(FakeEngine(says("bcd")))) as live:
        opened(page, live)
        asked(page, "a")
        asked(page, "b")
        assert page.locator(".prose").all_inner_texts() == ["bcd"] * 2
        expect(page.locator("#kept")).to_contain_text(
            "Not kept over a reload" if how in ("forbidden", "full") else "Kept in this"
        )


RENDERED = {
    "**a** and *b* c": "<p><strong>a</strong> and <em>b</em> c</p>",
    "snake_case, 2 * 3 * 4, f(*args, **kw)": "<p>snake_case, 2 * 3 * 4, f(*args, **kw)</p>",
    "``a b`` <b>": "<p><code>a b</code> &lt;b&gt;</p>",
    "- a\n  1. b": '<ul><li style="margin-left: 0ch;">a</li><li value="1" style="margin-left: 2ch;">b</li></ul>',
    "3. a": '<ol><li value="3" style="margin-left: 0ch;">a</li></ol>',
    "a\n-": "<p>a\n-</p>",
    "> a\n> b\n\n---": "<blockquote><p>a\nb</p></blockquote><hr>",
    "## a\n#b": "<h2>a</h2><p>#b</p>",
    "|a|b|\n|-|-|\n|1|2|": '<div class="wide" tabindex="0"><table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td>2</td></tr>'
    "</table></div>",
    "(https://a.b/c).": '<p>(<a href="https://a.b/c" target="_blank" rel="noopener noreferrer">https://a.b/c</a>).</p>',
    "[a](ftp://b) ![c](/d)": "<p>[a](ftp://b) ![c](/d)</p>",
    "[" * 30_000: f"<p>{'[' * 30_000}</p>",
    "`" * 30_001 + "> " * 3000 + "**" * 3000: None,
}
"""Markdown, and its elements. None: it ends."""


def test_markdown_becomes_elements(page):
    with serving(chat_app(chat_of("a"))) as live:
        page.goto(live.url)
        read = "async text => { const {elements} = await import('/static/markdown.js'); return elements(text).innerHTML }"
        found = {text: page.evaluate(read, text) for text in RENDERED}
    assert {text: html for text, html in found.items() if RENDERED[text] not in (None, html)} == {}


def test_what_has_been_shown_stays_the_same_element_while_the_answer_grows(page):
    """So nothing jumps, and what a person selects stays selected. A list that begins is no heading for a moment."""
    engine = chat_of("First *words*.\n- one\n- two\n\n```\ncode\nmore\n", held=True)
    with serving(chat_app(engine)) as live:
        opened(page, live, max_tokens="")
        page.fill("#prompt", "a")
        page.press("#prompt", "Enter")
        live.loop.call_soon_threadsafe(engine.release, len("First *words*.\n-"))
        expect(page.locator(".prose p")).to_have_text(re.compile("-"))
        live.loop.call_soon_threadsafe(engine.release, len(" o"))
        expect(page.locator(".prose li")).to_have_text("o")
        before = page.locator(".prose p, .prose li").element_handles()
        live.loop.call_soon_threadsafe(engine.release, len("ne\n- two\n\n```\nco"))
        expect(page.locator(".prose pre")).to_have_text("co")
        code = page.locator(".prose pre").element_handle()
        live.loop.call_soon_threadsafe(engine.release, 90)
        expect(page.locator("#status")).to_contain_text("Done")
        assert page.locator(".prose p, .prose li").evaluate_all("(all, old) => old.every((one, i) => one === all[i])", before)
        assert code.evaluate("node => node.isConnected && node.textContent") == "code\nmore"


def test_a_page_of_attacks_runs_nothing_and_asks_nobody(page):
    """The fixture fails on a dialog, on an error and on another host."""
    asked_for = []
    with serving(chat_app(chat_of(f"<think>{ATTACKS}</think>{ATTACKS}"))) as live:
        opened(page, live, max_tokens="")
        asked(page, "a")
        page.on("request", lambda request: asked_for.append(request.url))
        asked(page, ATTACKS)
        page.evaluate("for (const one of document.querySelectorAll('.prose a')) one.dispatchEvent(new MouseEvent('mouseover'))")
        page.wait_for_timeout(100)
        tags = page.evaluate("[...new Set([...document.querySelectorAll('#log *')].map(one => one.tagName.toLowerCase()))]")
        links = page.locator(".prose a").evaluate_all("all => all.map(one => [one.getAttribute('href'), one.target, one.rel])")
        names = page.evaluate(
            "[...new Set([...document.querySelectorAll('.prose *')].flatMap(one => one.getAttributeNames()))]"
        )
    assert asked_for == [f"{live.url}v1/chat/completions"]
    assert not {*tags} & {
        "img",
        "script",
        "iframe",
        "svg",
        "style",
        "object",
        "embed",
        "form",
        "input",
        "video",
        "audio",
        "link",
    }
    assert {href.split("/")[2] for href, *_ in links} == {"attack.test"}
    assert {(href.split(":")[0], *rest) for href, *rest in links} <= {
        (each, "_blank", "noopener noreferrer") for each in ("http", "https")
    }
    assert {*names} <= {"href", "target", "rel", "class", "type", "tabindex", "start", "style"}


def test_retry_and_edit_take_the_place_of_what_follows(page):
    engine = FakeEngine(says("bcd"))
    with serving(chat_app(engine)) as live:
        opened(page, live)
        asked(page, "a")
        asked(page, "b")
        page.click("text=Retry >> nth=0")
        expect(page.locator(".answer")).to_have_count(1)
        expect(page.locator("#status")).to_contain_text("Done")
        asked(page, "c")
        page.click("text=Edit >> nth=1")
        assert page.input_value("#prompt") == "c"
        page.keyboard.press("Escape")
        assert (page.input_value("#prompt"), page.locator(".replaced").count()) == ("", 0)
        page.click("text=Edit >> nth=1")
        asked(page, "d")
        assert page.locator(".question p").all_inner_texts() == ["a", "d"]
    assert [text.split("user: ")[-1] for text in prompts(engine)] == ["a\n", "b\n", "a\n", "c\n", "d\n"]
    assert prompts(engine)[-1] == "user: a\nassistant: bcd\nuser: d\n"


def test_another_token_is_chosen_in_an_answer_and_the_conversation_goes_on_from_it(page, letters):  # noqa: F811
    engine = FakeEngine(says("bcd"))
    with serving(chat_app(engine)) as live:
        opened(page, live, max_tokens="3")
        asked(page, "a")
        page.click("text=Probabilities >> nth=0")
        page.locator(".scored").nth(1).click()
        page.locator(".alternatives button").nth(2).click()
        expect(page.locator("#status")).to_have_text("Done: 3 tokens, length")
        page.click(".doings >> text=Probabilities")
        expect(page.locator(".prose")).to_have_text("bed")
        asked(page, "b")
    first, _, resumed, last = prompts(engine)
    assert (first, resumed, last) == ("user: a\n", "user: a\n", "user: a\nassistant: bed\nuser: b\n")


@pytest.mark.parametrize("status", [400, 429, 503])
def test_an_error_stands_at_the_answer_and_another_try_may_succeed(page, status):
    engine = FakeEngine(says("bcd"))
    engine.refusal = {400: None, 429: Overloaded("the queue is full", 7), 503: Unavailable("shutting down")}[status]
    with serving(chat_app(engine)) as live:
        opened(page, live, max_tokens="9")
        page.fill("#prompt", "a" * (500 if status == 400 else 1))
        page.press("#prompt", "Enter")
        error = page.locator(".answer .error")
        expect(error).to_contain_text({400: "maximum context length", 429: "the queue is full", 503: "shutting down"}[status])
        expect(page.locator("#status")).to_have_text("Failed")
        assert page.locator(".answer > *:visible").evaluate_all("all => all.map(one => one.className)") == ["error", "doings"]
        wrong = "node => getComputedStyle(node).color === getComputedStyle(document.querySelector('#status')).color"
        assert error.evaluate(wrong)
        engine.refusal = None
        if status == 400:
            page.click("text=Edit")
            asked(page, "a")
        else:
            page.click("text=Retry")
            expect(page.locator("#status")).to_contain_text("Done")
        expect(page.locator(".answer .error")).to_be_hidden()
        assert page.locator(".prose").all_inner_texts() == ["bcd"]


def test_a_question_after_one_without_an_answer_is_joined_to_it(page):
    """Most templates want question and answer to take turns."""
    engine = FakeEngine(says("bcd"))
    engine.refusal = Overloaded("the queue is full", 7)
    with serving(chat_app(engine)) as live:
        opened(page, live)
        page.fill("#prompt", "a")
        page.press("#prompt", "Enter")
        expect(page.locator("#status")).to_have_text("Failed")
        engine.refusal = None
        asked(page, "b")
        assert page.locator(".question p").all_inner_texts() == ["a\n\nb"]
    assert prompts(engine) == ["user: a\n\nb\n"]


def cut(page, live, path: str, events: int) -> None:
    """Have the next stream of a route break after so many events."""
    done: list[bool] = []

    def broken(route) -> None:
        if done or '"stream": true' not in route.request.post_data:
            route.continue_()
            return
        done.append(True)
        whole = page.request.post(
            f"{live.url}{path}", data=route.request.post_data, headers={"content-type": "application/json"}
        )
        route.fulfill(body="\n\n".join(whole.text().split("\n\n")[:events]) + "\n\n", content_type="text/event-stream")

    page.route(f"**/{path}", broken)


@pytest.mark.parametrize("tab", ["chat", "completions"])
def test_a_connection_that_breaks_is_said_and_the_answer_goes_on(page, tab):
    """A completion goes on after its last event, a chat in its last message."""
    engine = FakeEngine(says("bcdef")) if tab == "chat" else FakeEngine()
    with serving(chat_app(engine)) as live:
        opened(page, live, max_tokens="5")
        page.check(f"#mode-{tab}", force=True)
        page.fill("#prompt", "a")
        cut(page, live, "v1/chat/completions" if tab == "chat" else "v1/completions", 4 if tab == "chat" else 3)
        page.click("#generate")
        expect(page.locator(".answer .error")).to_contain_text("The connection broke after 3 tokens")
        shown = page.locator(".prose" if tab == "chat" else "#result .text")
        expect(shown).to_have_text("bcd" if tab == "chat" else "abcd")
        engine.rule = says("ef") if tab == "chat" else engine.rule
        page.click(".doings >> text=Continue")
        expect(page.locator("#status")).to_contain_text("Done")
        expect(shown).to_have_text("bcdef" if tab == "chat" else "abcdef")
        expect(page.locator(".answer .error")).to_be_hidden()
    expected = "user: a\nassistant: bcd" if tab == "chat" else "a"
    assert prompts(engine)[-1] == expected


def test_an_emptied_field_means_the_default_that_it_shows(page):
    bodies = []
    page.on("request", lambda request: "completions" in request.url and bodies.append(json.loads(request.post_data)))
    with serving(chat_app(FakeEngine(says("bcd")))) as live:
        opened(page, live, max_tokens="")
        shown = {
            name: page.get_attribute(f"#{name}", "placeholder") for name in ("temperature", "top_p", "top_k", "max_tokens")
        }
        asked(page, "a")
        page.check("#mode-completions", force=True)
        assert page.locator("#prompt").bounding_box()["height"] > 100
        for name in ("temperature", "top_p", "max_tokens"):
            page.fill(f"#{name}", "")
        assert page.get_attribute("#max_tokens", "placeholder") == "16"
        finish(page)
        default = page.request.get(live.url + "v1/models").json()["data"][0]["default_sampling"]
    assert shown == {
        "temperature": f"{default['temperature']:g}",
        "top_p": f"{default['top_p']:g}",
        "top_k": "all",
        "max_tokens": "no limit",
    }
    assert all({"temperature", "top_p", "max_tokens"}.isdisjoint(body) for body in bodies)
    assert len(bodies) == 2


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_a_chat_fits_needs_no_mouse_and_axe_finds_nothing(page, width, scheme):
    """With a long answer, an error, and all that can be unfolded."""
    page.set_viewport_size({"width": width, "height": 800})
    page.emulate_media(color_scheme=scheme)
    engine = chat_of(f"<think>{THOUGHTS}</think>{MARKDOWN}" + "x" * 120 + "\n\n" + "word " * 40)
    with serving(chat_app(engine)) as live:
        opened(page, live, max_tokens="")
        asked(page, "a" * 200)
        engine.refusal = Overloaded("the queue is full" * 20, 7)
        page.focus("#prompt")
        page.keyboard.type("b")
        page.keyboard.press("Enter")
        expect(page.locator("#status")).to_have_text("Failed")
        assert violations(page) == []
        engine.refusal = None
        page.keyboard.press("Shift+Tab")
        expect(page.locator(":focus")).to_have_text("Retry")
        page.keyboard.press("Enter")
        expect(page.locator("#status")).to_contain_text("Done")
        page.locator(".doings button[aria-expanded]").last.focus()
        page.keyboard.press("Enter")
        page.evaluate("for (const fold of document.querySelectorAll('#log details')) fold.open = true")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert violations(page) == []

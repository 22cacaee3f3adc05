"""The playground and the docs as a person meets them, in a real browser; skipped where there is no Chromium or no playwright.

`test_page_explorer.py` has the explorer, `pages.py` what both share.
"""

import re
from unittest.mock import patch

import pytest

from attend.model.engine.request import TokenLogprob
from tests.fakes import FakeEngine, build_server, says
from tests.service.http_api.described import chatting_server, document
from tests.service.http_api.test_playground import SECRET, app_with_keys
from tests.service.pages import expect, figures, finish, opened, pytestmark, serving, violations  # noqa: F401 (skips this file)

HOSTILE = "<img src=x onerror=alert(1)> & é 🌍<script>alert(2)</script>\n"


def neighbours(token: int, top: int | None, *_: object) -> tuple[TokenLogprob, ...]:
    """The likeliest are the token and those after it in the alphabet."""
    best = tuple((token + i, -0.5 - i) for i in range(top or 0))
    return () if top is None else (TokenLogprob(token, -0.5, best),)


@pytest.fixture
def letters():
    """Engines that count letters have letters as alternatives."""
    with patch("tests.fakes.scored", neighbours):
        yield


def test_prompt_and_answer_are_shown_as_text_whatever_they_hold(page):
    with serving(build_server(FakeEngine(says(HOSTILE))).app) as live:
        opened(page, live)
        page.fill("#prompt", HOSTILE[:30])
        page.uncheck("#logprobs")
        page.press("#prompt", "Control+Enter")
        expect(page.locator("#status")).to_have_text(f"Done: {len(HOSTILE.encode()) + 1} tokens, stop")
        assert page.locator("#result .text").evaluate("node => node.textContent") == HOSTILE[:30] + HOSTILE
        shown = figures(page)
        assert page.locator("main img, main script").count() == 0
    assert (shown["Finish"], shown["Fingerprint"]) == ("stop", "fp_fake")
    assert re.fullmatch(r"\d+ ms", shown["First token"])
    assert shown["Seed"].isdecimal()


def test_the_coloured_tokens_are_the_whole_answer_and_the_one_that_ended_it(page):
    """Each byte of é and 🌍 is a token, and none of them is a character: the character is one coloured place."""
    with serving(build_server(FakeEngine(says(HOSTILE))).app) as live:
        opened(page, live)
        finish(page)
        spans = page.locator(".scored").evaluate_all("all => all.map(one => [one.textContent, one.tokens.length])")
        page.locator(".scored", has_text="🌍").click()
        expect(page.locator(".alternatives ol")).to_have_count(4)
    assert "".join(text for text, _ in spans) == HOSTILE + "<|endoftext|>"
    assert [pair for pair in spans if pair[1] > 1] == [["é", 2], ["🌍", 4]]


def test_another_token_is_chosen_by_keyboard_and_the_answer_goes_on_from_it(page, letters):
    """What stands before it stays, prompt and tokens are the same ids, and the answer keeps its length."""
    engine = FakeEngine()
    with serving(build_server(engine).app) as live:
        opened(page, live, prompt="a", max_tokens="5")
        page.press("#prompt", "Control+Enter")
        expect(page.locator("#result .text")).to_have_text("abcdef")
        expect(page.locator("#status")).to_contain_text("Done")
        before = page.locator(".scored").nth(0).element_handle()
        page.locator(".scored").nth(0).focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Enter")
        expect(page.locator(".alternatives button").nth(0)).to_have_attribute("aria-current", "true")
        page.keyboard.press("Escape")
        expect(page.locator(".alternatives")).to_be_hidden()
        page.keyboard.press("Enter")
        expect(page.locator(".alternatives button").nth(0)).to_be_focused()
        for _ in range(3):
            page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        expect(page.locator("#result .text")).to_have_text("abfghi")
        expect(page.locator("#status")).to_have_text("Done: 5 tokens, length")
        assert page.locator(".scored").nth(0).evaluate("(node, before) => node === before", before)
    assert [(request.prompt, request.output) for request in engine.requests[1:]] == [([97, 98, 99], []), ([97], [*b"bfghi"])]


def test_stop_frees_the_request_and_keeps_what_came(page):
    engine = FakeEngine(held=True)
    with serving(build_server(engine).app) as live:
        opened(page, live, prompt="a", max_tokens="90")
        page.click("#generate")
        expect(page.locator("#stop")).to_be_enabled()
        live.loop.call_soon_threadsafe(engine.release, 3)
        expect(page.locator("#result .text")).to_have_text("abcd")
        page.click("#stop")
        expect(page.locator("#status")).to_have_text("Stopped")
        expect(page.locator("#generate")).to_be_focused()
        for _ in range(200):
            if not engine.open:
                break
            page.wait_for_timeout(10)
    assert (engine.open, len(engine.aborted)) == ({}, 1)
    assert page.locator("#error").is_hidden()


def test_every_parameter_reaches_the_engine_and_a_seed_keeps_all_its_digits(page):
    engine = FakeEngine()
    given = {"temperature": "0.5", "max_tokens": "2", "top_p": "0.6", "top_k": "7", "min_p": "0.1", "presence_penalty": "1",
             "frequency_penalty": "-1", "repetition_penalty": "1.5", "seed": str(2**63 - 1)}  # fmt: skip
    with serving(build_server(engine).app) as live:
        opened(page, live)
        page.click("text=More parameters")
        for name, value in given.items():
            page.fill(f"#{name}", value)
        finish(page)
        page.fill("#seed", "seven")
        page.click("#generate")
        expect(page.locator(".answer .error")).to_contain_text("seed must be an integer")
    request = engine.requests[0]
    read = {"max_tokens": request.max_tokens, "seed": request.seed}
    read |= {
        name: getattr(holder, name)
        for holder in (request.sampling, request.decoding)
        for name in given
        if hasattr(holder, name)
    }
    assert {name: float(value) for name, value in given.items()} == pytest.approx({name: float(read[name]) for name in given})
    assert request.seed == 2**63 - 1


@pytest.mark.parametrize("broken_after", [None, 3])
def test_an_error_is_the_servers_sentence_with_the_requests_id(page, broken_after):
    """A refusal before the first token, and a failure in the stream."""
    engine = FakeEngine()
    engine.broken_after = broken_after
    with serving(build_server(engine).app) as live:
        opened(page, live, max_tokens="9" if broken_after else "9999")
        page.click("#generate")
        expect(page.locator("#status")).to_have_text("Failed")
        expect(page.locator(".answer .error")).to_contain_text(
            "internal error" if broken_after else "maximum context length is 128"
        )
        expect(page.locator(".answer .error")).to_have_text(re.compile(r"request id:? [0-9a-f]{32}"))


def test_a_key_is_asked_for_only_where_the_server_wants_one_and_is_never_kept(page, tmp_path):
    document()  # made before anybody waits for it
    with serving(app_with_keys(tmp_path)) as live:
        page.goto(live.url)
        expect(page.locator("#key")).to_be_visible()
        page.fill("#max_tokens", "3")
        page.click("#generate")
        expect(page.locator(".answer .error")).to_contain_text("API key")
        expect(page.locator("#key")).to_be_focused()
        page.fill("#key", SECRET)
        finish(page)
        kept = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")
        page.goto(live.url + "docs")
        expect(page.locator("#error")).to_contain_text("API key")
        page.fill("#key", SECRET)
        page.press("#key", "Enter")
        expect(page.locator("summary", has_text="/v1/completions")).to_be_visible()
    assert SECRET not in kept


def test_no_key_chat_or_model_is_asked_for_elsewhere(page):
    with serving(build_server().app) as live:
        opened(page, live)
        expect(page.locator("#facts")).to_contain_text("128 tokens of context")
        assert [page.locator(f"#{name}").is_hidden() for name in ("key", "mode-field", "model", "system", "log")] == [True] * 5


def test_the_docs_show_every_route(page):
    described = document()  # made before anybody waits for it
    with serving(build_server().app) as live:
        page.goto(live.url + "docs")
        expect(page.locator("#routes > details").first).to_be_visible()
        routes = [f"{method.upper()} {path}" for path, item in described["paths"].items() for method in item]
        shown = page.locator("#routes > details > summary").evaluate_all(
            "all => all.map(one => `${one.children[0].textContent} ${one.children[1].textContent}`)"
        )
    assert shown == routes


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_playground_is_no_wider_than_a_phone_and_axe_finds_nothing(page, scheme):
    page.set_viewport_size({"width": 360, "height": 780})
    page.emulate_media(color_scheme=scheme)
    with serving(chatting_server().app) as live:
        opened(page, live, prompt="a" * 30)
        page.check("#mode-completions", force=True)
        finish(page)
        page.evaluate("for (const fold of document.querySelectorAll('details')) fold.open = true")
        page.evaluate("for (const field of document.querySelectorAll('#settings [hidden]')) field.hidden = false")
        page.locator(".scored").nth(25).click()
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        assert violations(page) == []
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).every(part => part < 64)")
    assert dark == (scheme == "dark")


def test_the_docs_are_no_wider_than_a_phone_and_axe_finds_nothing(page):
    page.set_viewport_size({"width": 360, "height": 780})
    with serving(build_server().app) as live:
        page.goto(live.url + "docs")
        page.locator("#routes > details > summary").first.click()
        assert violations(page) == []
        page.evaluate("for (const fold of document.querySelectorAll('details')) fold.open = true")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360

"""The pages as a person meets them, in a real browser; skipped where there is no Chromium or no playwright."""

import asyncio
import os
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import uvicorn

from tests.fakes import FakeEngine, build_server, says
from tests.service.http_api.test_page import SECRET, app_with_keys

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on the path")
expect = sync_api.expect
TEXT = "\n    <img src=x onerror=alert(1)> & é 🌍\n    return n\n"


@dataclass
class Live:
    """An application behind a real HTTP server."""

    url: str
    loop: asyncio.AbstractEventLoop


@contextmanager
def serving(app) -> Iterator[Live]:
    """`app` on a free loopback port."""
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", ws="none"))
    loop = asyncio.new_event_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=loop.run_until_complete, args=(server.serve(sockets=[listener]),))
        thread.start()
        try:
            yield Live(f"http://127.0.0.1:{listener.getsockname()[1]}/", loop)
        finally:
            server.should_exit = True
            thread.join()
            loop.close()


@pytest.fixture(scope="module")
def browser():
    args = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=args)
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    """A page that must have asked one host alone, and must have had no error but refused calls."""
    page, hosts, errors = browser.new_page(), set(), []
    page.set_default_timeout(20_000)
    page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda line: line.type == "error" and "Failed to load" not in line.text and errors.append(line.text))
    yield page
    page.close()
    assert (len(hosts), errors) == (1, [])


def figures(page) -> dict[str, str]:
    names, values = page.locator("#figures dt").all_inner_texts(), page.locator("#figures dd").all_inner_texts()
    return dict(zip(names, values, strict=True))


def test_an_answer_is_shown_as_text_whatever_it_holds(page):
    with serving(build_server(FakeEngine(says(TEXT))).app) as live:
        page.goto(live.url)
        expect(page.locator("#facts")).to_contain_text("fake")
        page.fill("#max_tokens", "90")
        page.press("#prompt", "Control+Enter")
        expect(page.locator("#status")).to_have_text(f"Done: {len(TEXT.encode()) + 1} tokens, stop")
        assert page.locator("#answer").evaluate("node => node.textContent") == "def fibonacci(n):" + TEXT
        assert page.locator("#answer img").count() == 0
        shown = figures(page)
    assert (shown["Finish"], shown["Fingerprint"]) == ("stop", "fp_fake")
    assert re.fullmatch(r"\d+ ms", shown["First token"])
    assert shown["Seed"].isdecimal()


def test_the_coloured_tokens_are_the_whole_answer_and_tell_their_alternatives(page):
    """Each byte of é and 🌍 is a token, and none of them is a character: the character is one coloured place."""
    with serving(build_server(FakeEngine(says(TEXT))).app) as live:
        page.goto(live.url)
        page.fill("#max_tokens", "90")
        page.check("#logprobs")
        page.click("#generate")
        expect(page.locator("#status")).to_contain_text("Done")
        spans = page.locator("#answer .scored").evaluate_all("all => all.map(one => [one.textContent, one.tokens.length])")
        page.focus("#answer")
        page.keyboard.press("ArrowRight")
        expect(page.locator("#token .chosen")).to_contain_text("\\n")
        page.locator("#answer .scored", has_text="🌍").hover()
        expect(page.locator("#token ol")).to_have_count(4)
    assert "".join(text for text, _ in spans) == TEXT
    assert [pair for pair in spans if pair[1] > 1] == [["é", 2], ["🌍", 4]]


def test_stop_frees_the_request_and_keeps_what_came(page):
    engine = FakeEngine(held=True)
    with serving(build_server(engine).app) as live:
        page.goto(live.url)
        page.fill("#prompt", "a")
        page.fill("#max_tokens", "90")
        page.click("#generate")
        expect(page.locator("#stop")).to_be_enabled()
        live.loop.call_soon_threadsafe(engine.release, 3)
        expect(page.locator("#answer")).to_have_text("abcd")
        page.click("#stop")
        expect(page.locator("#status")).to_have_text("Stopped")
        expect(page.locator("#generate")).to_be_focused()
        for _ in range(200):
            if not engine.open:
                break
            page.wait_for_timeout(10)
    assert (engine.open, len(engine.aborted)) == ({}, 1)
    assert page.locator("#error").is_hidden()


def test_a_seed_keeps_all_its_digits(page):
    engine = FakeEngine()
    with serving(build_server(engine).app) as live:
        page.goto(live.url)
        page.fill("#max_tokens", "1")
        page.fill("#seed", "9223372036854775807")
        page.click("#generate")
        expect(page.locator("#status")).to_contain_text("Done")
        page.fill("#seed", "seven")
        page.click("#generate")
        expect(page.locator("#error")).to_contain_text("seed must be an integer")
    assert engine.requests[0].seed == 2**63 - 1


@pytest.mark.parametrize("broken_after", [None, 3])
def test_an_error_is_the_servers_sentence_with_the_requests_id(page, broken_after):
    """A refusal before the first token, and a failure in the stream."""
    engine = FakeEngine()
    engine.broken_after = broken_after
    with serving(build_server(engine).app) as live:
        page.goto(live.url)
        page.fill("#max_tokens", "9" if broken_after else "9999")
        page.click("#generate")
        expect(page.locator("#status")).to_have_text("Failed")
        expect(page.locator("#error")).to_contain_text("internal error" if broken_after else "maximum context length is 128")
        expect(page.locator("#error")).to_have_text(re.compile(r"request id:? [0-9a-f]{32}"))


def test_a_key_is_asked_for_only_where_the_server_wants_one(page, tmp_path):
    with serving(app_with_keys(tmp_path)) as live:
        page.goto(live.url)
        expect(page.locator("#key")).to_be_visible()
        page.fill("#max_tokens", "3")
        page.click("#generate")
        expect(page.locator("#error")).to_contain_text("API key")
        expect(page.locator("#key")).to_be_focused()
        page.fill("#key", SECRET)
        page.click("#generate")
        expect(page.locator("#status")).to_have_text("Done: 3 tokens, length")
        page.goto(live.url + "docs")
        expect(page.locator("#error")).to_contain_text("API key")
        page.fill("#key", SECRET)
        page.press("#key", "Enter")
        expect(page.locator("summary", has_text="/v1/completions")).to_be_visible()


def test_no_key_is_asked_for_elsewhere(page):
    with serving(build_server().app) as live:
        page.goto(live.url)
        expect(page.locator("#facts")).to_contain_text("128 tokens of context")
        assert page.locator("#key").is_hidden()
        assert page.locator("#mode").is_hidden()


def test_the_docs_show_every_route(page):
    with serving(build_server().app) as live:
        page.goto(live.url + "docs")
        expect(page.locator("#routes > details").first).to_be_visible()
        document = page.request.get(live.url + "openapi.json").json()
        routes = [f"{method.upper()} {path}" for path, item in document["paths"].items() for method in item]
        shown = page.locator("#routes > details > summary").evaluate_all(
            "all => all.map(one => `${one.children[0].textContent} ${one.children[1].textContent}`)"
        )
    assert shown == routes


@pytest.mark.parametrize("path", ["", "docs"])
@pytest.mark.parametrize("width", [320, 390, 1180])
def test_no_page_is_wider_than_its_window(page, path, width):
    page.set_viewport_size({"width": width, "height": 800})
    with serving(build_server().app) as live:
        page.goto(live.url + path)
        page.wait_for_load_state("networkidle")
        for summary in page.locator("#routes > details > summary").all():
            summary.click()
        assert page.evaluate("document.documentElement.scrollWidth") <= width

"""In a real browser: a page of another origin calls as OpenAI's JavaScript client does, and reads what comes back."""

import pytest
from fastapi.responses import HTMLResponse

from attend.model.errors import Overloaded
from tests.fakes import FakeEngine, build_server, says
from tests.service.pages import pytestmark, serving  # noqa: F401 - the mark is pytest's

CALL = """async ([url, body]) => {
    const headers = {authorization: "Bearer none", "content-type": "application/json", "x-stainless-lang": "js",
                     "x-stainless-retry-count": "0", "x-stainless-timeout": "600"};
    try {
        const answer = await fetch(url + "v1/completions", {method: "POST", headers, body: JSON.stringify(body)});
        const told = ["x-request-id", "retry-after", "x-should-retry"].map((name) => answer.headers.get(name));
        return [answer.status, await answer.text(), ...told];
    } catch (error) {
        return [0, String(error), null, null, null];
    }
}"""


@pytest.fixture
def page(browser):
    """An empty page of another server: browsers ask before a page of no local server may call one."""
    page = browser.new_page()
    with serving(HTMLResponse("<html></html>")) as live:
        page.goto(live.url)
        yield page
    page.close()


def called(page, origins, engine=None, **body):
    """What the page gets from a server."""
    with serving(build_server(engine, cors_origins=origins).app) as live:
        return page.evaluate(CALL, [live.url, {"prompt": "a"} | body])


@pytest.mark.parametrize("stream", [False, True])
def test_a_page_of_another_origin_reads_an_answer_and_its_id(page, stream):
    status, text, number, *_ = called(page, (page.evaluate("location.origin"),), FakeEngine(says("é")), stream=stream)
    assert (status, "é" in text, bool(number)) == (200, True, True)


def test_a_page_reads_why_it_was_refused_and_when_to_try_again(page):
    engine = FakeEngine()
    engine.refusal = Overloaded("the queue is full", 7)
    status, text, number, after, _ = called(page, ("*",), engine)
    assert (status, "the queue is full" in text, bool(number), after) == (429, True, True, "7")
    assert called(page, ("*",), prompt=7)[0] == 400
    assert called(page, ("*",), deadline_ms=1, engine=FakeEngine(held=True))[::4] == [504, "false"]


def test_a_page_of_an_origin_that_is_not_named_reads_nothing(page):
    assert called(page, ("https://other.example",))[0] == 0

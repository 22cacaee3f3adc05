"""The explorer in a real browser: what /v1/attention says of a text is what the page draws of it."""

import pytest

from tests.fakes import FakeEngine, build_server, says
from tests.service import pages
from tests.service.fake_attention import HOSTILE, LAYERS, STATE, FakeAttention, answers, weights
from tests.service.http_api.described import chatting_server, fastapi_of
from tests.service.pages import expect, finish, opened, serving, violations

pytestmark = [pages.pytestmark, pytest.mark.long]


@pytest.fixture
def server():
    return build_server(FakeEngine(says("fg")))


def explore(page) -> None:
    page.click("#explore")
    expect(page.locator("#explorer-status")).to_contain_text("tokens,")


def links(page) -> dict[tuple[int, int], float]:
    """(who asks, who answers) to the width of the arrow."""
    drawn = page.locator("#links path.link").evaluate_all(
        "all => all.map(one => [+one.dataset.from, +one.dataset.to, +one.getAttribute('stroke-width')])"
    )
    return {(asks, answered): width for asks, answered, width in drawn}


def strongest(page) -> tuple[int, int]:
    return max(links(page), key=links(page).get)


def test_arrows_are_the_weights_of_the_token_layer_and_head_that_are_chosen(page, server):
    FakeAttention(fastapi_of(server))
    with serving(server.app) as live:
        opened(page, live, prompt="abcde")
        explore(page)
        assert strongest(page) == (4, answers(0, 0, 4))
        assert set(links(page)) == {(4, i) for i in range(5)}
        page.locator("#heads button[aria-label='Layer 2, head 1']").click()
        page.locator("#links .chip").nth(3).hover()
        assert strongest(page) == (3, answers(2, 1, 3))
        page.mouse.move(0, 0)
        assert strongest(page) == (4, answers(2, 1, 4))
        page.locator("#links .chip").nth(1).click()
        assert strongest(page) == (1, answers(2, 1, 1))


def test_a_head_is_a_map_with_a_row_for_who_asks_and_nothing_above_the_diagonal(page, server):
    """A layer that keeps a state has no maps, and says so."""
    FakeAttention(fastapi_of(server))
    with serving(server.app) as live:
        opened(page, live, prompt="abcde")
        explore(page)
        alphas = page.locator("#heads button[aria-label='Layer 0, head 0'] canvas").evaluate(
            """canvas => {
                const { data, width } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
                const sides = [...Array(width).keys()];
                return sides.map(i => sides.map(j => data[4 * (i * width + j) + 3]));
            }"""
        )
        rows = page.locator("#heads tbody tr").all_inner_texts()
    expected = [[255 * weight**0.5 for weight in weights(0, 0, i)] + [0] * (4 - i) for i in range(5)]
    assert [len(row) for row in alphas] == [5] * 5
    for drawn, row in zip(alphas, expected, strict=True):
        assert drawn == pytest.approx(row, abs=1)
    assert ["no weights" in row for row in rows] == [layer == STATE for layer in range(LAYERS)]


def test_each_layers_guesses_are_those_after_the_token_that_is_chosen(page, server):
    FakeAttention(fastapi_of(server))
    with serving(server.app) as live:
        opened(page, live, prompt="abcde")
        explore(page)
        page.locator("#links .chip").nth(1).click()
        guesses = page.locator("#lens tr").evaluate_all("all => all.map(row => row.cells[1].textContent)")
        assert guesses == ["c 50.0 %", "d 50.0 %", "e 50.0 %", "c 50.0 %"]
        assert "b" in page.locator("#chosen .name").inner_text()


def test_the_answer_is_explored_with_its_prompt_until_the_prompt_is_changed(page, server):
    fake = FakeAttention(fastapi_of(server))
    with serving(server.app) as live:
        opened(page, live, prompt="ab")
        finish(page)
        explore(page)
        expect(page.locator("#links .chip")).to_have_count(5)
        page.fill("#prompt", "xyz")
        explore(page)
        expect(page.locator("#links .chip")).to_have_count(3)
    texts = [(body["prompt"], body.get("answer")) for body in fake.bodies]
    assert (texts[0], texts[-1]) == (([97, 98], [*b"fg", 256]), ("xyz", None))


def test_a_chat_is_explored_as_the_template_wrote_it(page):
    server = chatting_server(FakeEngine(says("fg")))
    fake = FakeAttention(fastapi_of(server))
    with serving(server.app) as live:
        opened(page, live, prompt="ab")
        finish(page)
        page.click(".answer >> text=Explore attention")
        expect(page.locator("#explorer-status")).to_contain_text("tokens,")
    assert bytes(fake.bodies[0]["prompt"]) == b"user: ab\n"


def test_a_long_text_is_asked_for_in_answers_that_the_server_gives(page, server):
    """The weights of a layer do not fit into one answer: each call names a layer and some of its heads."""
    fake = FakeAttention(fastapi_of(server), layers=1, heads=6)
    with serving(server.app) as live:
        opened(page, live, prompt="a" * 430)
        explore(page)
        expect(page.locator("#explorer-error")).to_be_hidden()
        assert page.locator("#heads canvas").evaluate_all("all => all.map(one => one.width)") == [96] * 6
        assert strongest(page) == (429, answers(0, 0, 429))
    assert [body["heads"] for body in fake.bodies if body["layers"]] == [[0, 1, 2, 3, 4], [5]]


@pytest.mark.parametrize(("prompt", "busy", "says_so"), [("a", 1, "the engine is busy"), ("a" * 513, 0, "at most 512 tokens")])
def test_a_refusal_is_the_servers_sentence_and_another_try_may_succeed(page, server, prompt, busy, says_so):
    FakeAttention(fastapi_of(server), busy=busy)
    with serving(server.app) as live:
        opened(page, live, prompt=prompt)
        page.click("#explore")
        expect(page.locator("#explorer-error")).to_contain_text(says_so)
        page.fill("#prompt", "ab")
        explore(page)
        expect(page.locator("#explorer-error")).to_be_hidden()


def test_the_text_of_a_token_is_never_markup(page, server):
    FakeAttention(fastapi_of(server))
    with serving(server.app) as live:
        opened(page, live, prompt="<a<")
        explore(page)
        assert page.locator("#links .chip").all_inner_texts() == [HOSTILE, "a", HOSTILE]
        assert page.locator("main img, main script").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_explorer_needs_no_mouse_fits_a_phone_and_axe_finds_nothing(page, server, scheme):
    """From the field of the prompt on by keys alone."""
    page.set_viewport_size({"width": 360, "height": 780})
    page.emulate_media(color_scheme=scheme)
    FakeAttention(fastapi_of(server))
    with serving(server.app) as live:
        opened(page, live)
        page.focus("#prompt")
        reach(page, "explore")
        page.keyboard.press("Enter")
        expect(page.locator("#explorer-status")).to_contain_text("tokens,")
        expect(page.locator("#explorer-name")).to_be_focused()
        page.keyboard.press("Tab")
        page.keyboard.press("ArrowLeft")
        assert strongest(page) == (15, answers(0, 0, 15))
        page.keyboard.press("Tab")
        page.keyboard.press("ArrowRight")
        assert strongest(page) == (15, answers(0, 1, 15))
        expect(page.locator("#heads button[aria-pressed=true]")).to_have_attribute("aria-label", "Layer 0, head 1")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        assert violations(page) == []


def reach(page, name: str) -> None:
    """Press Tab until the element with this id has the focus."""
    for _ in range(30):
        if page.evaluate("document.activeElement.id") == name:
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"no Tab leads to {name}")

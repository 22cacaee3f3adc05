"""What the tests of the pages share: an application behind a real HTTP server, a browser, and what a page shows."""

import asyncio
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import uvicorn

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on the path")
expect = sync_api.expect


@dataclass
class Live:
    """An application behind a real HTTP server."""

    port: int
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"


@contextmanager
def serving(app, port: int = 0) -> Iterator[Live]:
    """`app` on a loopback port; 0 takes a free one."""
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", ws="none", timeout_graceful_shutdown=1))
    loop = asyncio.new_event_loop()
    with socket.create_server(("127.0.0.1", port)) as listener:
        thread = threading.Thread(target=loop.run_until_complete, args=(server.serve(sockets=[listener]),))
        thread.start()
        try:
            yield Live(listener.getsockname()[1], loop)
        finally:
            server.should_exit = True
            thread.join()
            loop.close()


def opened(page, live: Live, **fields: str):
    """The playground of a server that has been described, with these fields filled."""
    page.goto(live.url)
    expect(page.locator("#facts")).to_contain_text("tokens of context")
    page.evaluate("document.getElementById('settings').open = true")  # which a phone folds
    for name, value in {"max_tokens": "90", **fields}.items():
        page.fill(f"#{name}", value)


def finish(page) -> None:
    """Generate, to the end."""
    page.evaluate("document.getElementById('status').textContent = ''")
    page.click("#generate")
    expect(page.locator("#status")).to_contain_text("Done")


def figures(page) -> dict[str, str]:
    names, values = page.locator(".figures dt").all_inner_texts(), page.locator(".figures dd").all_inner_texts()
    return dict(zip(names, values, strict=True))


def violations(page) -> list[tuple[str, str]]:
    """What axe-core has against a page: rules, and the first element that breaks each."""
    found = axe.Axe().run(page).response["violations"]
    return [(rule["id"], rule["nodes"][0]["html"]) for rule in found]

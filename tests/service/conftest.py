"""The two servers that the end-to-end tests share, side by side on one machine; and a browser for the pages."""

import asyncio
import inspect
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.service.server import Server, running


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine, on an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The default model as `attend serve` serves it, in float32, where answers are the same to the bit."""
    with running(tmp_path_factory.mktemp("first") / "log", "--dtype", "float32") as server:
        yield server


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A second server beside the first, with two replicas and another name."""
    flags = ("--replicas", "2", "--served-model-name", "second", "--num-threads", "1")
    with running(tmp_path_factory.mktemp("second") / "log", "--dtype", "float32", *flags) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, for a file of tests."""
    from tests.service.pages import CHROMIUM, sync_api

    args = ["--no-sandbox"] if os.geteuid() == 0 else []
    args += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=args)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page that must have asked one host alone, run no script of a text, and had no error but refused calls."""
    page, hosts, errors = browser.new_page(), set(), []
    page.set_default_timeout(8_000)
    page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("dialog", lambda dialog: (errors.append(dialog.message), dialog.dismiss()))
    page.on("console", lambda line: line.type == "error" and "Failed to load" not in line.text and errors.append(line.text))
    yield page
    page.close()
    assert (len(hosts), errors) == (1, [])

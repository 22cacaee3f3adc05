"""The pictures of the pages that the README shows: `python -m tests.service.pictures`, with Chromium.

A server of its own serves the default model in float32 with fixed seeds: a picture changes where the page or the model does.
"""

import io
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

from tests.service.pages import CHROMIUM, expect, sync_api
from tests.service.server import running

FOLDER = Path(__file__).with_name("screenshots")
MAX_BYTES = 60_000
COLOURS = 64
WINDOW = {"width": 960, "height": 680}


def main() -> None:
    """Write all pictures."""
    FOLDER.mkdir(exist_ok=True)
    args = ["--no-sandbox"] if os.geteuid() == 0 else []
    with (
        tempfile.TemporaryDirectory() as folder,
        running(Path(folder) / "log", "--dtype", "float32") as server,
        sync_api.sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=args)
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport=WINDOW, color_scheme=scheme)
            answer(page, server.url)
            save(page.screenshot(), f"playground-{scheme}")
            page.keyboard.press("Escape")
            if scheme == "light":
                explore(page)
                save(page.locator("#explorer").screenshot(), "explorer")
        browser.close()


def answer(page: Any, url: str) -> None:
    """A function, and what else one of its tokens could have been."""
    page.goto(url)
    page.fill("#prompt", "def fibonacci(n):")
    page.fill("#seed", "3")
    page.fill("#max_tokens", "60")
    page.click("#generate")
    expect(page.locator("#status")).to_contain_text("Done")
    page.locator(".scored").nth(6).click()


def explore(page: Any) -> None:
    """Whom a token attends to, in a head of the middle."""
    page.fill("#prompt", "def area(width, height):\n    return width *")
    page.set_viewport_size({"width": 960, "height": 1000})
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
    main()

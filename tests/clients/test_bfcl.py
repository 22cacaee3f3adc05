"""The Berkeley function calling leaderboard, where ATTEND_TEST_BFCL names a Python that has bfcl-eval."""

import os
import subprocess

import pytest

from tests.service.server import Server

PYTHON = os.environ.get("ATTEND_TEST_BFCL", "")
pytestmark = [pytest.mark.ray, pytest.mark.clients, pytest.mark.timeout(900)]


@pytest.mark.skipif(not PYTHON, reason="ATTEND_TEST_BFCL names no Python with bfcl-eval")
def test_no_sample_is_refused_and_no_call_disobeys(server: Server):
    command = [PYTHON, "-m", "tests.clients.bfcl", server.url, "--each", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    assert "in all" in done.stdout
    assert not [line for line in server.output().splitlines() if "/v1/chat/completions" in line and ", status 200" not in line]

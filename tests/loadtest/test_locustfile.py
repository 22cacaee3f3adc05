"""The load test measures what it says: run as its users run it, against servers whose pace is known."""

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import pytest

from protos.attend.v1 import generation_pb2 as pb
from protos.attend.v1 import generation_pb2_grpc as pb_grpc

ROOT = Path(__file__).resolve().parents[2]
TOKENS, PAUSE = 10, 0.02


class Sse(BaseHTTPRequestHandler):
    """Ten tokens, one each 20 ms. Under /busy it refuses, under /cut it never says [DONE]."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        mode = self.path.removesuffix("/v1/completions")
        self.refuse() if mode == "/busy" else self.stream(cut=mode == "/cut")

    def refuse(self):
        self.send_response(429)
        self.send_header("Retry-After", "1")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def stream(self, cut):
        assert self.body["stream"] is True
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for i in range(TOKENS):
            time.sleep(PAUSE)
            reason = "length" if i == TOKENS - 1 else None
            self.event(json.dumps({"choices": [{"index": 0, "text": "x", "finish_reason": reason}], "usage": None}))
        self.event(json.dumps({"choices": [], "usage": {"completion_tokens": TOKENS}}))
        if not cut:
            self.event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def event(self, data):
        payload = f"data: {data}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(payload), payload))

    def log_message(self, *_):
        pass


class Servicer(pb_grpc.GenerationServiceServicer):
    def __init__(self):
        self.busy = False

    def GenerateStream(self, request, context):  # noqa: N802 - gRPC's name
        assert request.text
        assert request.stopping.ignore_eos
        if self.busy:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue full")
        for i in range(1, TOKENS + 1):
            time.sleep(PAUSE)
            output = pb.Output(text="x", num_tokens=i)
            if i == TOKENS:
                output.finish_info.finish_reason = pb.FINISH_REASON_LENGTH
            yield pb.GenerateResponse(outputs=[output])


@pytest.fixture(scope="module")
def http_address():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Sse)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def grpc_server():
    server, servicer = grpc.server(ThreadPoolExecutor(4)), Servicer()
    pb_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}", servicer
    server.stop(grace=0).wait()


@pytest.fixture
def locust(tmp_path, http_address, grpc_server):
    """Runs locust as the README does; gives the exit code, the rows of its statistics by (type, name), and its output.

    From the JSON file, because locust's CSV is a snapshot that may be a second old when the run ends.
    """

    def run(*arguments, seconds, mode=""):
        address, _ = grpc_server
        command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless", "-u", "2", "-r", "2"]
        command += ["-t", f"{seconds}s", "--host", http_address + mode, "--grpc-host", address]
        command += ["--json-file", str(tmp_path / "out"), "--only-summary", *arguments]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        rows = {(row["method"], row["name"]): row for row in json.loads((tmp_path / "out.json").read_text())}
        return ended.returncode, rows, ended.stdout

    return run


def average(row):
    return row["total_response_time"] / row["num_requests"]


def test_both_transports_are_timed_to_the_first_token_per_token_and_whole(locust):
    code, rows, output = locust("--max-ttft-p95-ms", "5000", seconds=4)
    assert code == 0, output
    assert {name for _, name in rows} == {"completions", "GenerateStream"}
    assert len(rows) == 6
    for kind, name in (("HTTP", "completions"), ("GRPC", "GenerateStream")):
        whole, ttft, tpot = (rows[each, name] for each in (kind, "TTFT", "TPOT"))
        assert [row["num_failures"] for row in (whole, ttft, tpot)] == [0, 0, 0]
        assert whole["num_requests"] == ttft["num_requests"] == tpot["num_requests"] > 0
        assert whole["total_content_length"] == TOKENS * whole["num_requests"]
        # Sums of sleeps: never shorter. A client that buffers sees all tokens at once, and a TPOT near nothing.
        assert average(whole) >= TOKENS * PAUSE * 1000
        assert average(tpot) >= PAUSE * 1000 / 2
        assert average(ttft) < average(whole) / 2


def test_a_missed_objective_is_exit_code_3(locust):
    code, _, output = locust("--max-ttft-p95-ms", "0.001", "HttpStreamUser", seconds=1)
    assert code == 3
    assert "SLO: completions: p95 of TTFT" in output


def test_a_stream_without_done_is_a_failure(locust):
    code, rows, output = locust("HttpStreamUser", seconds=1, mode="/cut")
    assert rows.keys() == {("HTTP", "completions")}
    row = rows["HTTP", "completions"]
    assert row["num_failures"] == row["num_requests"] > 0
    assert code == 3
    assert "SLO: 1.0000 of the requests failed" in output


def test_being_refused_is_a_row_and_no_failure(locust, grpc_server):
    _, servicer = grpc_server
    servicer.busy = True
    try:
        _, rows, _ = locust(seconds=1, mode="/busy")
    finally:
        servicer.busy = False
    assert rows.keys() == {("HTTP", "completions refused (429)"), ("GRPC", "GenerateStream refused (RESOURCE_EXHAUSTED)")}
    assert all(row["num_failures"] == 0 < row["num_requests"] for row in rows.values())

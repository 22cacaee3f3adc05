"""The client that measures servers, against small servers of ours that say exactly what a test needs."""

import asyncio
import json
import subprocess
import sys
from contextlib import AsyncExitStack, asynccontextmanager

import psutil
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from loadtest.bench import serve
from loadtest.bench.client import answer, closed_loop, http_caller, read_events, rows
from loadtest.bench.contestant import TREE
from loadtest.measures import total
from loadtest.stream import ITL, REFUSED, TOTAL, TTFT, FailedError, Stream
from tests.service.server import wait_for


def chunk(text, reason=None):
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
    return b"data: " + json.dumps({"choices": [choice], "usage": None}).encode() + b"\n\n"


def usage(tokens):
    return b"data: " + json.dumps({"choices": [], "usage": {"completion_tokens": tokens}}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
WHOLE = [chunk("a"), chunk("b"), chunk('"finish_reason"', "length"), usage(3), DONE]


async def pieces(parts):
    for part in parts:
        yield part


def heard(parts):
    """How often the stream heard something."""
    stream = Stream()
    asyncio.run(read_events(pieces(parts), stream))
    return len(stream.gaps) + bool(stream.first)


def cut(data, size):
    return [data[at : at + size] for at in range(0, len(data), size)]


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
def test_every_choice_is_heard_once_however_the_bytes_are_cut(size):
    assert heard(cut(b"".join(WHOLE), size)) == 3


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        (WHOLE[:-1], "no \\[DONE\\]"),
        ([chunk("a"), b'data: {"error": {"code": "internal"}}\n\n', DONE], "error in the stream"),
        ([chunk("a"), chunk("", "abort"), DONE], "error in the stream"),
    ],
    ids=["cut", "error", "abort"],
)
def test_a_stream_that_ends_wrongly_is_a_failure(parts, reason):
    with pytest.raises(FailedError, match=reason):
        asyncio.run(read_events(pieces(parts), Stream()))


def served_by(handler):
    """An OpenAI-compatible server with one model, whose completions are `handler`'s."""

    async def models(_):
        return web.json_response({"data": [{"id": "tiny", "max_model_len": 512}]})

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.post("/v1/completions", handler)])
    return TestServer(app)


async def whole_answer(request):
    """As many tokens as were asked for."""
    body = await request.json()
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(body["max_tokens"]):
        await response.write(chunk("x"))
    await response.write(usage(body["max_tokens"]) + DONE)
    return response


def ask(handler, do):
    """What `do` returns of a caller of such a server."""

    @asynccontextmanager
    async def caller():
        async with served_by(handler) as server, http_caller(str(server.make_url("")).rstrip("/")) as found:
            yield found

    async def run():
        async with caller() as found:
            return await do(found)

    return asyncio.run(run())


def test_a_loop_asks_every_prompt_once_and_counts_what_the_server_counted():
    async def do(caller):
        assert caller.max_model_len == 512
        return await closed_loop(caller, 3, [[1, 2, 3, 4]] * 7, 5)

    found, seconds = ask(whole_answer, do)
    answers = total(found, TOTAL)
    assert (answers.count, answers.failures, answers.tokens) == (7, 0, 35) and seconds > 0
    assert total(found, TTFT).count == 7 and total(found, ITL).count == 7 * 4


@pytest.mark.parametrize(("status", "failed", "turned_away"), [(429, 0, 1), (500, 1, 0)])
def test_a_full_server_refuses_and_a_broken_one_fails_and_says_why(status, failed, turned_away, capsys):
    async def handler(_):
        return web.Response(status=status, text="no")

    async def do(caller):
        return rows("HTTP", [await answer(caller, [1], 4)])

    found = ask(handler, do)
    assert (total(found, TOTAL).failures, total(found, REFUSED).count) == (failed, turned_away)
    assert ("1 of 1 answers failed" in (said := capsys.readouterr().err)) == bool(failed) and ("status 500" in said) == bool(
        failed
    )


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    """For the logs of servers."""
    monkeypatch.setattr(serve, "FOLDER", tmp_path)


def command(words_, count=2, handler=whole_answer):
    """`attend bench serve` with so many servers, named one, two."""

    async def run():
        async with AsyncExitStack() as stack:
            servers = [await stack.enter_async_context(served_by(handler)) for _ in range(count)]
            urls = [f"{name}={str(each.make_url('')).rstrip('/')}" for name, each in zip(("one", "two"), servers, strict=False)]
            await asyncio.to_thread(serve.main, [*urls, *words_])

    asyncio.run(run())


def test_the_command_compares_two_servers_and_files_what_it_found(tmp_path, capsys):
    out = tmp_path / "found.json"
    command(["--at-once", "2", "--rounds", "1", "--turns", "2", "--seed", "3", "--json", str(out)])
    found = json.loads(out.read_text())
    whats = [figure["what"] for figure in found["figures"]]
    assert "2 at once, output, one" in whats and "2 at once, TTFT p95, one / two" in whats
    assert found["provenance"]["seed"] == 3 and found["provenance"]["servers"].keys() == {"one", "two"}
    assert found["provenance"]["servers"]["two"]["model"] == "tiny"
    assert "| 2 at once, failed or refused | requests | 0 | 0 |  |" in capsys.readouterr().out


def prompts_of(seed, *flags):
    """The prompts that each of two servers was sent, in their order, by prompt length and all."""
    asked = {}

    async def handler(request):
        body = await request.json()
        asked.setdefault(request.url.port, []).append(body)
        return await whole_answer(request)

    command(
        ["--at-once", "1", "--rounds", "2", "--turns", "1", "--prompt", "16", "32", "--seed", str(seed), *flags], 2, handler
    )
    one, two = asked.values()
    assert [body["prompt"] for body in one] == [body["prompt"] for body in two]
    return one


def test_all_servers_get_the_prompts_of_the_seed_and_never_one_twice():
    first, again, other = ([body["prompt"] for body in prompts_of(seed)] for seed in (5, 5, 6))
    assert first == again != other
    assert [len(prompt) for prompt in first] == [16] * 4 + [32] * 4  # a turn to warm up, and one that counts
    assert len({tuple(prompt) for prompt in first}) == 8


@pytest.mark.parametrize(("flags", "drawn"), [((), (0, None)), (("--sampled",), (0.7, 0.95))])
def test_answers_are_greedy_or_drawn(flags, drawn):
    assert {(body["temperature"], body.get("top_p")) for body in prompts_of(1, *flags)} == {drawn}


WAITS = """
import http.server, json, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass
    def say(self, body):
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.say(b'{"data": [{"id": "slow"}]}' if self.path == "/v1/models" else b'{"version": "7"}')
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        event = b'data: {"choices": [{"text": "x", "finish_reason": null}], "usage": {"completion_tokens": 1}}'
        self.say(event + b"\\n\\ndata: [DONE]\\n\\n")
time.sleep(0.3)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def alive(script):
    """The processes that run a script."""
    return [one for one in psutil.process_iter(["cmdline"]) if str(script) in (one.info["cmdline"] or [])]


def test_a_server_that_is_started_here_is_timed_weighed_and_ended(tmp_path):
    script, out = tmp_path / "waits.py", tmp_path / "found.json"
    script.write_text(WAITS)
    start = f"slow=sh -c '{sys.executable} {script} {{port}}; true'"  # whose end is not that of its child
    serve.main(["--start", start, "--at-once", "1", "--rounds", "1", "--turns", "1", "--json", str(out)])
    found = json.loads(out.read_text())
    figures = {figure["what"]: figure["values"] for figure in found["figures"]}
    assert len(figures["the command to the first token, slow"]) == 1
    assert all(0.3 <= seconds < 10 for seconds in figures["the command to the first token, slow"])
    assert figures["1 at once, memory, slow"][0] > 1
    assert found["provenance"]["servers"]["slow"]["version"] == "7"
    assert not alive(script)


def test_a_run_that_is_ended_has_its_rows_and_ends_what_it_started(tmp_path):
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    command = [sys.executable, "-m", "loadtest.bench.serve", "--start", f"slow={sys.executable} {script} {{port}}"]
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--at-once", "1", "--rounds", "1", "--turns", "9999"], stdout=out, stderr=out, cwd=TREE
        )
    try:
        assert wait_for(lambda: "turn 3 of" in log.read_text() or process.poll() is not None, 60), log.read_text()
    finally:
        process.terminate()
    process.wait(30)
    assert "| the command to the first token | s |" in log.read_text()
    assert "| 1 at once, output | tokens/s |" in log.read_text()
    assert wait_for(lambda: not alive(script))


def test_who_had_no_turn_before_the_end_has_an_empty_cell(monkeypatch, capsys):
    async def ended(turns, count, *, values, show):
        values["two"] = [await turns["two"]()]
        raise KeyboardInterrupt

    monkeypatch.setattr(serve, "take_turns", ended)
    with pytest.raises(KeyboardInterrupt):
        command(["--at-once", "1", "--rounds", "1"])
    assert "| 1 at once, failed or refused | requests |  | 0 |  |" in capsys.readouterr().out


def test_an_attend_of_its_own_has_the_weights_that_are_asked_for(monkeypatch):
    monkeypatch.setattr(serve, "write_shape", lambda name, form: f"{name}-{form}")
    asked = {form: serve.own_command(serve.read_flags(["--shape", "S", "--weights", form])) for form in ("int4", "q4_0")}
    assert [words[4:-4] for words in asked.values()] == [["S-bf16", "--quantize", "int4"], ["S-q4_0"]]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--start", "no-name --port {port}"], "is not NAME=COMMAND"),
        (["--start", "x=no-port"], "is not NAME=COMMAND"),
        (["--start", "x=/nowhere/server {port}"], "/nowhere/server did not start"),
        (["--start", "x=/bin/false {port}"], "x: the server was not ready"),
        (["--shape", "S", "--model", "m.gguf"], "not allowed with"),
    ],
)
def test_what_cannot_be_started_is_one_sentence(flags, reason, capsys):
    with pytest.raises(SystemExit) as ended:
        serve.main(flags)
    assert reason in f"{ended.value} {capsys.readouterr().err}"

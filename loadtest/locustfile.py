"""Streams from Attend under load, over HTTP (server-sent events) and over gRPC. How to run and read it: README.md.

Every request fires three events: TTFT (time to the first token), TPOT (time per token after the first) and HTTP or GRPC
(the whole; its length is the number of tokens). A refused request fires one row named so instead: being full is no fault.
"""

import random
import time

import grpc.experimental.gevent

grpc.experimental.gevent.init_gevent()  # before any channel exists, or a blocking call stops every user

import gevent  # noqa: E402
import grpc  # noqa: E402
import orjson  # noqa: E402
from locust import HttpUser, User, constant, events, task  # noqa: E402
from locust.event import EventHook  # noqa: E402
from locust.runners import WorkerRunner  # noqa: E402

from protos.attend.v1 import generation_pb2 as pb  # noqa: E402
from protos.attend.v1.generation_pb2_grpc import GenerationServiceStub  # noqa: E402

SHORT = "def fibonacci(n):\n"
LONG = '''class Stack:
    """Last in, first out."""

    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()


'''
WHOLE = ("HTTP", "GRPC")
RETRY_SECONDS = 1.0  # a refused client waits so long at most, and as long as that where it is told nothing


class RefusedError(Exception):
    """The service is full and says so: 429 or RESOURCE_EXHAUSTED."""

    def __init__(self, what, retry_after=RETRY_SECONDS):
        super().__init__(what)
        self.retry_after = min(retry_after, RETRY_SECONDS)


class FailedError(Exception):
    """An answer that is wrong or not complete."""


@events.init_command_line_parser.add_listener
def add_options(parser):
    """The load's shape and the service level objectives, beside locust's own options."""
    group = parser.add_argument_group("Attend")
    group.add_argument("--grpc-host", default="127.0.0.1:9000", help="gRPC address, host:port")
    group.add_argument("--max-tokens", type=int, default=64, help="tokens per answer; the end-of-text token is ignored")
    group.add_argument("--long-ratio", type=float, default=0.25, help="share of long prompts, 0..1")
    group.add_argument("--deadline-s", type=float, default=60.0, help="a request that takes longer has failed")
    group.add_argument("--max-ttft-p95-ms", type=float, default=None, help="exit with 3 when a TTFT row's p95 is above")
    group.add_argument("--max-fail-ratio", type=float, default=0.0, help="exit with 3 when more of the whole requests fail")


@events.quitting.add_listener
def judge(environment, **_):
    """Sets the exit code: 3 when an objective is missed."""
    if isinstance(environment.runner, WorkerRunner):
        return  # a worker sees its own share only; the master judges
    broken = list(broken_objectives(environment.stats.entries.values(), environment.parsed_options))
    for sentence in broken:
        print(f"SLO: {sentence}")
    environment.process_exit_code = 3 if broken else 0


def broken_objectives(entries, options):
    """A sentence for each objective that was missed."""
    whole = [entry for entry in entries if entry.method in WHOLE]
    asked = sum(entry.num_requests for entry in whole)
    if not asked:
        yield "no request was answered"
        return
    ratio = sum(entry.num_failures for entry in whole) / asked
    if ratio > options.max_fail_ratio:
        yield f"{ratio:.4f} of the requests failed, more than {options.max_fail_ratio}"
    if options.max_ttft_p95_ms is None:
        return
    first = [entry for entry in entries if entry.method == "TTFT"]
    if not first:
        yield "no first token was seen"
    for entry in first:
        p95 = entry.get_response_time_percentile(0.95)
        if p95 > options.max_ttft_p95_ms:
            yield f"{entry.name}: p95 of TTFT is {p95:.0f} ms, above {options.max_ttft_p95_ms} ms"


class Stream:
    """The clock of one streamed answer."""

    def __init__(self):
        self.started = time.perf_counter()
        self.first = self.last = None
        self.tokens = 0

    def heard(self):
        self.last = time.perf_counter()
        self.first = self.first or self.last

    def finish(self, reason):
        if reason in ("error", "abort"):
            raise FailedError(f"finish_reason {reason}")

    def report(self, fire, kind, name, error):
        """One refused row, or the whole and, of an answer that is complete, its first token and its pace."""
        whole = time.perf_counter() - self.started
        if isinstance(error, RefusedError):
            fire(request_type=kind, name=f"{name} refused ({error})", seconds=whole)
            return
        fire(request_type=kind, name=name, seconds=whole, length=self.tokens, exception=error)
        if error is None:
            fire(request_type="TTFT", name=name, seconds=self.first - self.started)
            if self.tokens > 1:
                fire(request_type="TPOT", name=name, seconds=(self.last - self.first) / (self.tokens - 1))


class StreamUser(User):
    """Asks, reads the stream to its end, asks again."""

    abstract = True
    wait_time = constant(0)
    kind = name = ""

    @task
    def stream(self):
        stream, error = Stream(), None
        try:
            with gevent.Timeout(self.options.deadline_s, FailedError("deadline exceeded")):
                self.ask(self.prompt(), stream)
            if stream.first is None:
                raise FailedError("complete, but without a token")
        except Exception as exc:  # whatever it was, it is this request's result
            error = exc
        stream.report(self.fire, self.kind, self.name, error)
        if error:
            gevent.sleep(getattr(error, "retry_after", RETRY_SECONDS))

    @property
    def options(self):
        return self.environment.parsed_options

    def prompt(self):
        """A first line of its own keeps the prefix cache out of the measurement."""
        body = LONG if random.random() < self.options.long_ratio else SHORT
        return f"# {random.getrandbits(32):08x}\n{body}"

    def fire(self, request_type, name, seconds, length=0, exception=None):
        self.environment.events.request.fire(
            request_type=request_type,
            name=name,
            response_time=seconds * 1000,
            response_length=length,
            exception=exception,
            context={},
        )


class HttpStreamUser(StreamUser, HttpUser):
    """POST /v1/completions with stream. FastHttpUser would wait for 1024 bytes at a time and so measure no first token."""

    kind, name = "HTTP", "completions"

    def on_start(self):
        self.client.request_event = EventHook()  # nobody listens: locust's own row would end at the headers

    def ask(self, prompt, stream):
        body = {
            "prompt": prompt,
            "max_tokens": self.options.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        path, deadline = "/v1/completions", self.options.deadline_s
        with self.client.post(path, json=body, stream=True, catch_response=True, timeout=deadline) as response:
            try:
                self.check(response)
                self.read(response.iter_lines(), stream)
            finally:
                response.close()

    def check(self, response):
        if response.error:
            raise response.error
        if response.status_code == 429:
            raise RefusedError("429", float(response.headers.get("Retry-After", RETRY_SECONDS)))
        if response.status_code != 200:
            raise FailedError(f"status {response.status_code}: {response.text[:160]}")

    def read(self, lines, stream):
        """Reads on after [DONE] to the end of the body, so that the connection can be used again."""
        done = False
        for line in lines:
            if line == b"data: [DONE]":
                done = True
            elif line.startswith(b"data: "):
                self.hear(orjson.loads(line[6:]), stream)
        if not done:
            raise FailedError("stream cut: no [DONE]")

    def hear(self, chunk, stream):
        if "error" in chunk:
            raise FailedError(f"error in the stream: {chunk['error'].get('code')}")
        if chunk.get("usage"):
            stream.tokens = chunk["usage"]["completion_tokens"]
        for choice in chunk["choices"]:
            stream.heard()
            stream.finish(choice.get("finish_reason"))


class GrpcStreamUser(StreamUser):
    """GenerateStream through the synchronous stub; grpc.aio does not live with gevent."""

    kind, name = "GRPC", "GenerateStream"

    def on_start(self):
        # A pool of its own: else all users share one connection.
        self.channel = grpc.insecure_channel(self.options.grpc_host, options=[("grpc.use_local_subchannel_pool", 1)])
        self.stub = GenerationServiceStub(self.channel)

    def on_stop(self):
        self.channel.close()

    def ask(self, prompt, stream):
        request = pb.GenerateRequest(
            text=prompt,
            max_tokens=self.options.max_tokens,
            temperature=0,
            stopping=pb.StoppingCriteria(ignore_eos=True),
        )
        # Serve routes by this metadata as soon as it holds more than one application.
        call = self.stub.GenerateStream(request, timeout=self.options.deadline_s, metadata=[("application", "default")])
        try:
            self.read(call, stream)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise RefusedError("RESOURCE_EXHAUSTED") from None
            raise FailedError(error.code().name) from None
        finally:
            call.cancel()

    def read(self, responses, stream):
        finished = False
        for response in responses:
            for output in response.outputs:
                stream.heard()
                stream.tokens = output.num_tokens
                if output.HasField("finish_info"):
                    finished = True
                    stream.finish(pb.FinishReason.Name(output.finish_info.finish_reason).removeprefix("FINISH_REASON_").lower())
        if not finished:
            raise FailedError("stream cut: no finish_info")

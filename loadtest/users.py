"""The users: callers who read streamed answers over HTTP (server-sent events) and over gRPC."""

import random
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import gevent
import grpc
import orjson
from gevent.pool import Group
from locust import HttpUser, User, task
from locust.env import Environment
from locust.event import EventHook
from urllib3 import PoolManager

from attend.v1 import generation_pb2 as pb
from attend.v1.generation_pb2_grpc import GenerationServiceStub
from loadtest.options import api_key
from loadtest.stream import RETRY_SECONDS, FailedError, RefusedError, Stream, draw, report

CONNECTIONS = 1024


class StreamUser(User):
    """Asks in the loop that was chosen, and puts each answer into the statistics.

    In the closed loop it reads an answer to its end and asks again. In the open loop it asks at random moments, `source_rate`
    a second on average, however slow the service is: the gaps are exponential, so the arrivals of all users are a Poisson
    process of the sum of their rates. An answer is timed from when it was due: a generator that comes late shows as latency.
    """

    abstract = True
    transport = ""
    users_begun: ClassVar[Counter[str]] = Counter()
    """Users of each transport that this process has had."""

    def __init__(self, environment: Environment) -> None:
        """Number the user: with the same seed the same user of the same worker asks the same, at the same moments."""
        super().__init__(environment)
        worker = getattr(environment.runner, "worker_index", 0)
        own = f"{self.options.seed} {self.transport} {worker} {self.users_begun[self.transport]}"
        self.users_begun[self.transport] += 1
        self.dice, self.moments = random.Random(f"{own} prompts"), random.Random(f"{own} moments")

    def on_start(self) -> None:
        self.running = Group()
        self.due = time.perf_counter() + self.moments.expovariate(self.options.source_rate)
        self.connect()

    def on_stop(self) -> None:
        """Let running requests end within locust's --stop-timeout; what still runs then is dropped and counted nowhere."""
        self.running.join(timeout=self.environment.stop_timeout or 0.0)
        self.running.kill()
        self.disconnect()

    @task
    def turn(self) -> None:
        """Begin every request that is due; or make one, with a pause where it was refused or failed."""
        if self.options.loop == "closed":
            error = self.request(due=None)
            if error is not None:
                gevent.sleep(getattr(error, "retry_after", RETRY_SECONDS))
            return
        while self.due <= time.perf_counter():
            self.running.spawn(self.request, due=self.due)
            self.due += self.moments.expovariate(self.options.source_rate)

    def wait_time(self) -> float:
        return 0.0 if self.options.loop == "closed" else max(0.0, self.due - time.perf_counter())

    @property
    def options(self) -> Any:
        return self.environment.parsed_options

    def request(self, due: float | None) -> Exception | None:
        """One answer from its prompt to its rows; returns why there was none."""
        kind, prompt = draw(self.dice, self.options.prompts, self.options.long_chars)
        stream, error = Stream(due), None
        try:
            with gevent.Timeout(self.options.deadline_s, FailedError("deadline exceeded")):
                self.ask(prompt, stream)
            stream.check()
        except Exception as exc:  # whatever it was, it is this request's result
            error = exc
        report(self.environment, f"{self.transport} {kind}", stream, error)
        return error

    def connect(self) -> None:
        pass

    def disconnect(self) -> None:
        pass

    def ask(self, prompt: str, stream: Stream) -> None:
        """Ask, and read the answer."""
        raise NotImplementedError


class HttpStreamUser(StreamUser, HttpUser):
    """POST /v1/completions with stream. FastHttpUser would wait for 1024 bytes at a time and so measure no first token."""

    transport = "HTTP"
    pool_manager = PoolManager(maxsize=CONNECTIONS)

    def connect(self) -> None:
        self.client.request_event = EventHook()  # nobody listens: locust's own row would end at the headers
        if api_key():
            self.client.headers["Authorization"] = f"Bearer {api_key()}"
        if self.options.ca_file:
            self.client.verify = self.options.ca_file

    def ask(self, prompt: str, stream: Stream) -> None:
        body = {"prompt": prompt, "max_tokens": self.options.max_tokens, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        more = {"stream": True, "catch_response": True, "timeout": self.options.deadline_s}
        with self.client.post("/v1/completions", json=body, **more) as response:
            if response.error:  # there is no answer, and nothing to close
                raise response.error
            try:
                if response.status_code == 429:
                    raise RefusedError("429", float(response.headers.get("Retry-After", RETRY_SECONDS)))
                if response.status_code != 200:
                    raise FailedError(f"status {response.status_code}: {response.text[:160]}")
                self.read(response.iter_lines(), stream)
            finally:
                response.close()

    @staticmethod
    def read(lines: Iterable[bytes], stream: Stream) -> None:
        """Reads on after [DONE] to the end of the body, so that the connection can be used again."""
        done = False
        for line in lines:
            done |= line == b"data: [DONE]"
            if line.startswith(b"data: {"):
                chunk = orjson.loads(line[6:])
                if "error" in chunk:
                    raise FailedError(f"error in the stream: {chunk['error'].get('code')}")
                if chunk.get("usage"):
                    stream.tokens = chunk["usage"]["completion_tokens"]
                for choice in chunk["choices"]:
                    stream.message_received()
                    stream.finish("abort" if choice.get("stop_reason") == "abort" else choice.get("finish_reason"))
        if not done:
            raise FailedError("stream cut: no [DONE]")


class GrpcStreamUser(StreamUser):
    """GenerateStream through the synchronous stub; grpc.aio does not live with gevent."""

    transport = "GRPC"

    def connect(self) -> None:
        # Not before the user starts: a channel does not survive the fork of --processes. A pool of its own, or else all
        # users share one connection.
        pool = [("grpc.use_local_subchannel_pool", 1)]
        if self.options.grpc_tls:
            trusted = Path(self.options.ca_file).read_bytes() if self.options.ca_file else None
            self.channel = grpc.secure_channel(self.options.grpc_host, grpc.ssl_channel_credentials(trusted), options=pool)
        else:
            self.channel = grpc.insecure_channel(self.options.grpc_host, options=pool)
        self.stub: Any = GenerationServiceStub(self.channel)  # type: ignore[no-untyped-call]  # generated code
        # Serve routes by the first as soon as it holds more than one application.
        self.metadata = [("application", "default"), *([("authorization", f"Bearer {api_key()}")] if api_key() else [])]

    def disconnect(self) -> None:
        self.channel.close()

    def ask(self, prompt: str, stream: Stream) -> None:
        request = pb.GenerateRequest(
            text=prompt,
            max_tokens=self.options.max_tokens,
            temperature=0,
            stopping=pb.StoppingCriteria(ignore_eos=True),
        )
        call = self.stub.GenerateStream(request, timeout=self.options.deadline_s, metadata=self.metadata)
        try:
            self.read(call, stream)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise RefusedError("RESOURCE_EXHAUSTED") from None
            raise FailedError(error.code().name) from None
        finally:
            call.cancel()

    @staticmethod
    def read(responses: Iterable[pb.GenerateResponse], stream: Stream) -> None:
        finished = False
        for response in responses:
            for output in response.outputs:
                stream.message_received()
                stream.tokens = output.num_tokens
                if output.HasField("finish_info"):
                    finished = True
                    stream.finish(pb.FinishReason.Name(output.finish_info.finish_reason).removeprefix("FINISH_REASON_").lower())
        if not finished:
            raise FailedError("stream cut: no finish_info")

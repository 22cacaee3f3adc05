"""The users: callers who read streamed answers over HTTP (server-sent events) and over gRPC."""

import random
from collections import Counter
from collections.abc import Iterable
from typing import Any, ClassVar

import gevent
import grpc
import orjson
from locust import HttpUser, User, task
from locust.env import Environment
from locust.event import EventHook
from urllib3 import PoolManager

from attend.v1 import generation_pb2 as pb
from attend.v1.generation_pb2_grpc import GenerationServiceStub
from loadtest.loops import ClosedLoop, OpenLoop, TraceLoop
from loadtest.options import api_key, root_certificates
from loadtest.prompts import TOOL, Ask
from loadtest.stream import RETRY_SECONDS, FailedError, RefusedError, Stream, report
from loadtest.traces import Call, read_trace
from loadtest.workload import workload_of

CONNECTIONS = 1024


class StreamUser(User):
    """Asks in the loop that was chosen, and puts each answer into the statistics."""

    abstract = True
    transport = ""
    users_begun: ClassVar[Counter[str]] = Counter()
    """Users of each transport that this process has had."""

    def __init__(self, environment: Environment) -> None:
        """Number the user: with the same seed the same user of the same worker asks the same, at the same moments."""
        super().__init__(environment)
        worker = getattr(environment.runner, "worker_index", 0)
        own = f"{self.options.seed} {self.transport} {worker} {self.users_begun[self.transport]}"
        self.number = self.users_begun.total()
        self.users_begun[self.transport] += 1
        self.dice, self.moments = random.Random(f"{own} prompts"), random.Random(f"{own} moments")

    def on_start(self) -> None:
        options, drain = self.options, self.environment.stop_timeout or 0.0
        self.workload = workload_of(self.environment)
        self.loop: ClosedLoop | OpenLoop | TraceLoop
        if options.loop == "open":
            self.loop = OpenLoop(self, options.source_rate, drain, self.moments)
        elif options.loop == "trace":
            self.loop = TraceLoop(self, self.share(), options.trace_speed, drain)
        else:
            self.loop = ClosedLoop(self)
        self.connect()

    def share(self) -> list[Call]:
        """This user's calls of the trace."""
        calls = read_trace(self.options.trace, scale=self.options.trace_scale)
        return calls[self.number :: max(1, self.environment.runner.target_user_count)]

    def on_stop(self) -> None:
        self.loop.end()
        self.disconnect()

    @task
    def turn(self) -> None:
        self.loop.turn()

    def wait_time(self) -> float:
        return self.loop.pause()

    @property
    def options(self) -> Any:
        return self.environment.parsed_options

    def request(self, due: float | None, call: Call | None = None) -> Exception | None:
        """One answer from its prompt to its rows; returns why there was none. `call`: of a trace."""
        ask = self.workload.draw(self.dice) if call is None else self.workload.replay(call)
        stream, error, kind = Stream(due), None, ask.kind
        try:
            with gevent.Timeout(self.options.deadline_s, FailedError("deadline exceeded")):
                kind = self.ask(ask, stream) or kind
            stream.check()
        except Exception as exc:  # whatever it was, it is this request's result
            error = exc
        report(self.environment, f"{self.transport} {kind}", stream, error)
        return error

    def connect(self) -> None:
        pass

    def disconnect(self) -> None:
        pass

    def ask(self, ask: Ask, stream: Stream) -> str | None:
        """Ask, and read the answer; returns its kind where that is another than the prompt's."""
        raise NotImplementedError


class HttpStreamUser(StreamUser, HttpUser):
    """POST /v1/completions with stream. FastHttpUser would wait for 1024 bytes at a time and so measure no first token."""

    transport = "HTTP"
    path = "/v1/completions"
    pool_manager = PoolManager(maxsize=CONNECTIONS)

    def connect(self) -> None:
        self.client.request_event = EventHook()  # nobody listens: locust's own row would end at the headers
        if api_key():
            self.client.headers["Authorization"] = f"Bearer {api_key()}"
        if self.options.ca_file:
            self.client.verify = self.options.ca_file

    def ask(self, ask: Ask, stream: Stream) -> str | None:
        self.post({"prompt": ask.prompt}, ask, stream)
        return None

    def post(self, fields: dict[str, Any], ask: Ask, stream: Stream) -> None:
        """A streamed greedy answer of exactly so many tokens."""
        body = fields | {
            "max_tokens": ask.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if ask.model:
            body["model"] = ask.model
        deadline = self.options.deadline_s
        with self.client.post(self.path, json=body, stream=True, catch_response=True, timeout=deadline) as response:
            if response.error:  # there is no answer, and nothing to close
                raise response.error
            try:
                self.check(response)
                self.read(response.iter_lines(), stream)
            finally:
                response.close()

    @staticmethod
    def check(response: Any) -> None:
        if response.status_code == 429:
            raise RefusedError("429", float(response.headers.get("Retry-After", RETRY_SECONDS)))
        if response.status_code != 200:
            raise FailedError(f"status {response.status_code}: {response.text[:160]}")

    @classmethod
    def read(cls, lines: Iterable[bytes], stream: Stream) -> None:
        """Reads on after [DONE] to the end of the body, so that the connection can be used again."""
        done = False
        for line in lines:
            if line == b"data: [DONE]":
                done = True
            elif line.startswith(b"data: "):
                cls.hear(orjson.loads(line[6:]), stream)
        if not done:
            raise FailedError("stream cut: no [DONE]")

    @staticmethod
    def hear(chunk: dict[str, Any], stream: Stream) -> None:
        if "error" in chunk:
            raise FailedError(f"error in the stream: {chunk['error'].get('code')}")
        if chunk.get("usage"):
            stream.tokens = chunk["usage"]["completion_tokens"]
        for choice in chunk["choices"]:
            delta = choice.get("delta")
            if delta is not None and not (delta.get("content") or delta.get("tool_calls") or choice.get("finish_reason")):
                continue  # a chat's first message has its role alone
            stream.message_received()
            stream.text += (delta or {}).get("content") or ""
            stream.finish("abort" if choice.get("stop_reason") == "abort" else choice.get("finish_reason"))


class HttpChatUser(HttpStreamUser):
    """POST /v1/chat/completions with stream: conversations of --turns turns, each with all that was said before.

    Its rows tell first turns from later ones, whose beginning is in the prefix cache.
    """

    transport, path = "CHAT", "/v1/chat/completions"

    def connect(self) -> None:
        super().connect()
        self.resting: list[list[dict[str, str]]] = []

    def ask(self, ask: Ask, stream: Stream) -> str | None:
        """Go on with a conversation that waits for its user, or begin one."""
        messages = self.resting.pop() if self.resting else self.workload.system(self.dice)
        turn = sum(message["role"] == "user" for message in messages) + 1
        asked = [*messages, {"role": "user", "content": self.workload.message(self.dice, ask)}]
        self.post({"messages": asked} | ({"tools": [TOOL]} if ask.tools else {}), ask, stream)
        if turn < self.options.turns:
            self.resting.append([*asked, {"role": "assistant", "content": stream.text}])
        return f"{'tools, ' if ask.tools else ''}{'first turn' if turn == 1 else 'later turns'}"


class GrpcStreamUser(StreamUser):
    """GenerateStream through the synchronous stub; grpc.aio does not live with gevent."""

    transport = "GRPC"

    def connect(self) -> None:
        # Not before the user starts: a channel does not survive the fork of --processes. A pool of its own, or else all
        # users share one connection.
        pool = [("grpc.use_local_subchannel_pool", 1)]
        if self.options.grpc_tls:
            credentials = grpc.ssl_channel_credentials(root_certificates(self.options))
            self.channel = grpc.secure_channel(self.options.grpc_host, credentials, options=pool)
        else:
            self.channel = grpc.insecure_channel(self.options.grpc_host, options=pool)
        self.stub: Any = GenerationServiceStub(self.channel)  # type: ignore[no-untyped-call]  # generated code
        # Serve routes by the first as soon as it holds more than one application.
        self.metadata = [("application", "default"), *([("authorization", f"Bearer {api_key()}")] if api_key() else [])]

    def disconnect(self) -> None:
        self.channel.close()

    def ask(self, ask: Ask, stream: Stream) -> str | None:
        given = {"text": ask.prompt} if isinstance(ask.prompt, str) else {"token_ids": pb.TokenIds(ids=ask.prompt)}
        request = pb.GenerateRequest(
            **given,
            adapter=ask.model,
            max_tokens=ask.max_tokens,
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
        return None

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

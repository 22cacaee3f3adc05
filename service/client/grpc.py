"""gRPC client: `GenerateStream` with retries, resumed after a broken stream."""

import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any

import grpc

from attend.service.client.errors import Answer, InvalidRequest
from attend.service.client.retry import Call, Delta, Policy, TryFailed, resume
from attend.v1 import generation_pb2 as pb
from attend.v1 import generation_pb2_grpc as rpc

OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
)
"""A channel connects again within a second, and tries no call twice: `Policy` does. It shares no connection with others."""
RETRY_AFTER, REQUEST_ID = "retry-after", "x-request-id"
OF_A_RESET = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
"""What gRPC makes of a stream that is reset, or of an answer that is no gRPC. The server's own come with the call's id."""


class GrpcClient:
    """A client of the server at `target`, HOST:PORT. Use it as a context manager, or call `close`. Threads may share it."""

    def __init__(
        self,
        target: str,
        *,
        key: str | None = None,
        policy: Policy | None = None,
        sleep: Callable[[float], None] = time.sleep,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """With `credentials` the channel is encrypted."""
        if credentials is None:
            self._channel = grpc.insecure_channel(target, OPTIONS)
        else:
            self._channel = grpc.secure_channel(target, credentials, OPTIONS)
        self._begin: Any = rpc.GenerationServiceStub(self._channel).GenerateStream  # type: ignore[no-untyped-call]
        self._metadata = (("authorization", f"Bearer {key}"),) if key else ()
        self._policy, self._sleep = policy or Policy(), sleep

    def __enter__(self) -> "GrpcClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the gRPC channel."""
        self._channel.close()

    def stream(self, request: pb.GenerateRequest) -> Iterator[Delta]:
        """The answer as it is made, over as many tries as it takes. Raises CallFailed, InvalidRequest."""
        return resume(call_of(self._policy, request), partial(self._attempt, request), self._sleep)

    def generate(self, request: pb.GenerateRequest) -> Answer:
        """The whole answer. Raises as `stream` does."""
        call = call_of(self._policy, request)
        for _ in resume(call, partial(self._attempt, request), self._sleep):
            pass
        return call.answer

    def _attempt(self, request: pb.GenerateRequest, call: Call) -> Generator[Delta, None, None]:
        """One try, which ends at the call's deadline."""
        messages = self._begin(next_request(request, call), timeout=call.remaining(), metadata=self._metadata)
        try:
            for message in messages:
                yield from deltas_of(message)
        except grpc.RpcError as error:
            raise failed_try(messages, call) from error
        finally:
            messages.cancel()


def call_of(policy: Policy, request: pb.GenerateRequest) -> Call:
    """A call for this request. Raises InvalidRequest where its stream could not go on."""
    for name, asked in (
        ("sampling.n", request.sampling.n > 1),
        ("response.echo", request.response.echo),
        ("response.prompt_logprobs", request.response.HasField("prompt_logprobs")),
    ):
        if asked:
            raise InvalidRequest(
                f"{name} is not supported by this client: its streams have one answer, which can be resumed", name
            )
    seed = request.sampling.seed if request.sampling.HasField("seed") else None
    return Call(policy, seed, request.resume_token_ids.ids)


def next_request(request: pb.GenerateRequest, call: Call) -> pb.GenerateRequest:
    """What the next try sends: the same request, the same seed, and the tokens that have come."""
    asked = pb.GenerateRequest()
    asked.CopyFrom(request)
    asked.response.output_token_ids = True
    asked.sampling.seed = call.seed
    if call.received_tokens:
        asked.resume_token_ids.ids[:] = call.received_tokens
    return asked


def deltas_of(message: pb.GenerateResponse) -> Iterator[Delta]:
    """What a message adds to the answer."""
    for output in message.outputs:
        delta = Delta(output.text, tuple(output.token_ids), message.system_fingerprint)
        if not output.HasField("finish_info"):
            yield delta
            continue
        info = output.finish_info
        kind = info.WhichOneof("stop")
        reason = pb.FinishReason.Name(info.finish_reason).removeprefix("FINISH_REASON_").lower()
        yield Delta(delta.text, delta.token_ids, delta.fingerprint, reason, None if kind is None else getattr(info, kind))


def failed_try(error: Any, call: Call) -> TryFailed:
    """The end of a try that was not OK. The caller's own end of a stream does not come here."""
    code, beside = error.code(), dict(error.trailing_metadata() or ())
    wait = beside.get(RETRY_AFTER, "")
    after = float(wait) if wait.isdecimal() else 0.0
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        call.remaining()
    again = code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    again = again or (code in OF_A_RESET and REQUEST_ID not in beside)
    full = code is grpc.StatusCode.RESOURCE_EXHAUSTED and after > 0
    return TryFailed(f"{code.name}: {error.details()}", again=again or full, after=after, code=code.name)

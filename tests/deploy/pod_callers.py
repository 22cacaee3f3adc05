"""Callers that run in a pod of the service's own image: `python callers.py KIND...`.

For each call a line of JSON: kind, begin, seconds, error. Each kind is a thread that calls at least once a second. Nothing is
tried again: a kept connection that the server closes under a call is a failed call.
"""

import http.client
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

HOST = os.environ.get("CALL_HOST", "attend-serve-svc")
PODS = os.environ.get("CALL_PODS", "dns:///attend-pods:9000")
HTTP_PORT, GRPC_PORT = int(os.environ.get("CALL_HTTP", "8000")), os.environ.get("CALL_GRPC", "9000")
PROMPT, TIMEOUT = "def fibonacci(n):", 60
ROUND_ROBIN = json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})


def _post(connection: http.client.HTTPConnection, tokens: int, stream: bool) -> str:
    """One completion on this connection: `` or what was wrong."""
    body = json.dumps({"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "stream": stream})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    text = answer.read()
    if answer.status != 200:
        return f"{answer.status} {text[:120]!r}"
    return "" if not stream or text.rstrip().endswith(b"data: [DONE]") else f"cut: {text[-80:]!r}"


def _new() -> http.client.HTTPConnection:
    return http.client.HTTPConnection(HOST, HTTP_PORT, timeout=TIMEOUT)


def _anew(tokens: int, *, stream: bool) -> Iterator[str]:
    while True:
        connection = _new()
        try:
            error = _post(connection, tokens, stream)
        finally:
            connection.close()
        yield error


def plain() -> Iterator[str]:
    """A new connection for each call."""
    return _anew(16, stream=False)


def kept() -> Iterator[str]:
    """One connection, which is kept until the server says that it closes it."""
    connection = _new()
    try:
        while True:
            yield _post(connection, 16, stream=False)
    finally:
        connection.close()


def sse() -> Iterator[str]:
    """Streams of server-sent events; each must come to its end."""
    return _anew(100, stream=True)


def _streams(target: str, options: list[tuple[str, str]]) -> Iterator[str]:
    import grpc

    from attend.v1 import generation_pb2 as pb
    from attend.v1.generation_pb2_grpc import GenerationServiceStub

    asked = pb.GenerateRequest(text=PROMPT, max_tokens=48)
    asked.stopping.ignore_eos = True
    with grpc.insecure_channel(target, options=options) as channel:
        stub = GenerationServiceStub(channel)
        while True:
            try:
                last = list(stub.GenerateStream(asked, timeout=TIMEOUT))[-1]
                right = last.outputs[-1].finish_info.finish_reason == pb.FINISH_REASON_LENGTH
                yield "" if right else "ended early"
            except grpc.RpcError as error:
                yield f"{error.code().name}: {error.details()}"[:160]


def grpc_service() -> Iterator[str]:
    """Streams over one channel to the Service, which leads it to one pod."""
    return _streams(f"{HOST}:{GRPC_PORT}", [])


def grpc_pods() -> Iterator[str]:
    """Streams over a channel to every pod, in turn."""
    return _streams(PODS, [("grpc.service_config", ROUND_ROBIN)])


KINDS: dict[str, Callable[[], Iterator[str]]] = {
    "plain": plain,
    "kept": kept,
    "sse": sse,
    "grpc": grpc_service,
    "grpc-pods": grpc_pods,
}


def call_for_ever(kind: str) -> None:
    """Call after call of one kind, with a line for each."""
    calls = KINDS[kind]()
    while True:
        began = time.time()
        try:
            error = next(calls)
        except (OSError, http.client.HTTPException) as failure:  # ends the iterator too
            error, calls = f"{type(failure).__name__}: {failure}"[:160], KINDS[kind]()
        print(json.dumps([kind, round(began, 3), round(time.time() - began, 3), error]), flush=True)
        time.sleep(0.5 if error else 0.1)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        threading.Thread(target=call_for_ever, args=(name,)).start()

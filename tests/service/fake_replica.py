"""A process that stands for a replica behind HAProxy: `python -m tests.service.fake_replica HTTP_PORT GRPC_PORT NAME`.

One event loop serves both sides, as in a replica. Over HTTP the path says what happens: /now answers, /wait never does, /die
ends the process, /stream sends a line every 50 ms, /block holds the event loop for three seconds, /leave begins what a replica
does that Serve ends. Over gRPC a method's name says it: Now, Wait, Stream.
"""

import asyncio
import contextlib
import os
import sys
import time

import grpc

BLOCK_SECONDS = 3.0


class Replica:
    """The state of one process."""

    def __init__(self, name: str) -> None:
        self.name, self.health = name, "success"
        self.listener: asyncio.Server | None = None

    async def http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await self.answers(reader, writer)

    async def answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            path = head.split()[1].decode()
            given = [line.split(b": ")[1].decode() for line in head.split(b"\r\n") if line.lower().startswith(b"x-request-id")]
            if path == "/wait":
                await asyncio.Event().wait()
            if path == "/die":
                os._exit(1)
            if path == "/block":
                time.sleep(BLOCK_SECONDS)  # noqa: ASYNC251  # that is what it is for
            if path == "/leave":
                self.health = "DRAINING"
                self.listener.close()
            if path == "/stream":
                await self.stream(writer)
            body = f"{self.name} {' '.join(given)}".encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))

    async def stream(self, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"2\r\n.\n\r\n")
            await writer.drain()
            await asyncio.sleep(0.05)

    async def call(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return self.name.encode()

    async def wait(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        await asyncio.Event().wait()
        return b""

    async def healthz(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        if self.health != "success":
            context.set_code(grpc.StatusCode.UNAVAILABLE)
            context.set_details(self.health)
        return b"\n%c%s" % (len(self.health), self.health.encode())  # a message of Ray's: a string in field 1

    async def messages(self, request: bytes, context: grpc.aio.ServicerContext):
        while True:
            yield b"."
            await asyncio.sleep(0.05)

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        methods = {"Wait": self.wait, "Healthz": self.healthz}
        name = details.method.split("/")[-1]
        if name == "Stream":
            return grpc.unary_stream_rpc_method_handler(self.messages)
        return grpc.unary_unary_rpc_method_handler(methods.get(name, self.call))


async def main(http: int, rpc: int, name: str) -> None:
    replica = Replica(name)

    class Handler(grpc.GenericRpcHandler):
        def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            return replica.service(handler_call_details)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Handler(),))
    server.add_insecure_port(f"127.0.0.1:{rpc}")
    await server.start()
    replica.listener = await asyncio.start_server(replica.http, "127.0.0.1", http)
    print("ready", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))

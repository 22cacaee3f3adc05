"""A process that stands for a replica behind HAProxy: `python -m tests.service.fake_replica HTTP_PORT GRPC_PORT NAME`.

One event loop serves both sides, as in a replica. Over HTTP the path says what happens: /now answers, /wait prints "waits" and
never answers, /die ends the process, /stream sends a line every 50 ms, /block holds the event loop for three seconds, /leave
begins what a replica does that Serve ends, /eat reads the body. Over gRPC a method's name says it: Now, Wait, Stream. On
SIGUSR1 the kernel drops whatever comes for it, as if its machine were gone.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import struct
import sys
import time

import grpc

BLOCK_SECONDS = 3.0
SO_ATTACH_FILTER = 26


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
                print("waits", flush=True)
                await asyncio.Event().wait()
            if path == "/die":
                os._exit(1)
            if path == "/block":
                time.sleep(BLOCK_SECONDS)  # noqa: ASYNC251  # that is what it is for
            if path == "/eat":
                await reader.readexactly(next(int(line.split()[1]) for line in head.split(b"\r\n") if b"ength:" in line))
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


def vanish() -> None:
    """Drop every packet for any of our connections before TCP sees it: no acknowledgement, no RST."""
    drop = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))  # one instruction of BPF: return 0 bytes
    program = struct.pack("HP", 1, ctypes.addressof(drop))
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), socket.fromfd(fd, socket.AF_INET, socket.SOCK_STREAM) as held:
            held.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
    os.kill(os.getpid(), signal.SIGSTOP)


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
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, vanish)
    print("ready", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))

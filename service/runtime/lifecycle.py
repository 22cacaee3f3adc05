"""Life of the first process: signals, the ready line, certificates, the stop."""

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from attend.model.errors import SettingError
from attend.model.machine import process_age
from attend.service.access.hosts import is_loopback
from attend.service.runtime.terminal_lines import print_line
from attend.service.settings import Settings

NOTICE_SECONDS = 10.0
"""How often a start says that it is still loading."""
CUT_SECONDS = 3.0
"""How long a process may take to end its calls once it is told to stop at once."""


async def run_until(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Run `work` until `stop` is set: True if it finished first, False if it was cancelled. Raises what `work` raises."""
    task, told = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait((task, told), return_when=asyncio.FIRST_COMPLETED)
    told.cancel()
    if task.done():
        task.result()
        return True
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return False


async def tell_while_slow(work: Awaitable[object]) -> None:
    """Do `work`, and say every 10 s that it is under way. Raises what `work` raises."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=NOTICE_SECONDS))[0]:
            print_line(f"Still loading, {process_age():.0f} s so far ...")
        task.result()
    finally:
        task.cancel()


def run_in_daemon_thread(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> asyncio.Future[Any]:
    """Run `function` in a background (daemon) thread, which does not delay the exit: Serve may block in it for ever."""
    loop, result = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def settle(setter: Callable[[Any], None], value: Any) -> None:
        if not result.done():
            setter(value)

    def run() -> None:
        try:
            outcome = result.set_result, function(*arguments, **keywords)
        except BaseException as error:
            outcome = result.set_exception, error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, daemon=True).start()
    return result


def check_certificate(settings: Settings) -> None:
    """Raise SettingError where certificate and key cannot be served. Says where clients will refuse them."""
    if not settings.tls_cert:
        return
    from attend.service.runtime.tls import expiry, read_pair

    if (expiry(read_pair(settings.tls_cert, settings.tls_key)) or 0) < time.time():
        print_line(f"attend: clients will refuse tls_cert {settings.tls_cert!r}: it has expired, or cannot be read")


def refuse_tls(settings: Settings) -> None:
    """Raise SettingError for a certificate under Ray Serve, where nobody reads it."""
    if settings.tls_cert:
        raise SettingError("tls_cert: Ray Serve speaks no TLS; attend serve --single does, or a gateway in front of the server")


def ready_line(settings: Settings, facts: dict[str, Any]) -> str:
    """Where the server listens, what it serves, to whom, and which page to open."""
    numbers = facts["dtype"] if facts["weights"] == facts["dtype"] else f"{facts['dtype']}, {facts['weights']} weights,"
    return listening_line(
        settings,
        f"{settings.name} ({facts['family']}, {facts['parameters'] / 1e6:.1f}M parameters)  {facts['device']} "
        f"({facts['device_name']}) {numbers} {facts['backend']}  {facts['kv_tokens']} KV tokens in "
        f"{facts['kv_bytes'] / 1e9:.1f} GB  started in {process_age():.1f} s"
        + (f"  {settings.tensor_parallel} ranks" if settings.tensor_parallel > 1 else ""),
    )


def listening_line(settings: Settings, what: str) -> str:
    """Where the server listens with `what`, and who may call it."""
    host, scheme = shown_host(settings.host), "https" if settings.tls_cert else "http"
    url = f"{scheme}://{host}:{settings.port}"
    page = f"\nOpen:  {url}/ in a browser" if settings.expose_docs else ""
    return f"Ready: {url}  grpc {host}:{settings.grpc_port}  {what}{openness(settings)}{page}"


def shown_host(host: str) -> str:
    """The host as a URL has it, for somebody on this machine."""
    if host in ("127.0.0.1", "0.0.0.0", "::"):
        return "localhost"
    return f"[{host}]" if ":" in host else host


def openness(settings: Settings) -> str:
    """Who may call a server that asks for no API keys; nothing where it asks for them. Ray's ports listen on every address."""
    if settings.api_keys_file:
        return ""
    if not (settings.single or settings.models):
        reach = "everybody who reaches this machine"
    elif is_loopback(settings.host):
        reach = "everybody on this machine"
    else:
        reach = f"everybody who reaches {settings.host}"
    return f"  no API keys: open to {reach}"


class Stop(asyncio.Event):
    """Set when the process is told to stop."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        """The number of the signal that set it."""
        self.enough, self.again = asyncio.Event(), asyncio.Event()
        """Set by another signal while the server lingers, and while calls are drained."""
        self.is_lingering = self.is_draining = False
        """True once another signal sets them, and does not exit."""


def stop_signals() -> tuple[signal.Signals, ...]:
    """SIGTERM, SIGINT, and SIGHUP, which a terminal sends that is closed, unless `nohup` has it ignored."""
    nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT, *(() if nohup else (signal.SIGHUP,)))


def catch_signals() -> Stop:
    """An event that `stop_signals` set. Another one ends the lingering, and one more the calls that are drained. Where there is
    nothing of these to end the next one exits at once; what is left of Ray the supervisor ends.
    """
    stop, loop = Stop(), asyncio.get_running_loop()

    def handle(number: int, frame: object) -> None:
        told: asyncio.Event = stop
        if not stop.is_set():
            stop.number = number
        elif stop.is_draining and not stop.again.is_set():
            told = stop.again
            signal.signal(signal.SIGALRM, lambda *_: os._exit(128 + number))
            signal.setitimer(signal.ITIMER_REAL, CUT_SECONDS)
        elif stop.is_lingering and not stop.is_draining:
            told = stop.enough
        else:
            os._exit(128 + number)
        loop.call_soon_threadsafe(told.set)

    for number in stop_signals():
        signal.signal(number, handle)
    return stop


def stopping_line(count: int, seconds: float) -> str:
    """What is said when requests are drained."""
    requests = "1 request" if count == 1 else f"{count} requests"
    return f"Stopping: {requests} may end within {seconds:g} s; Ctrl-C again ends them at once" if count else "Stopping ..."


async def linger(stop: Stop, seconds: float, work: Coroutine[Any, Any, None]) -> None:
    """Do `work` for so long while new calls are still answered; another signal ends that. Raises what `work` raises."""

    async def for_so_long() -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(work, seconds)

    stop.is_lingering = True
    print_line(f"Stopping: new calls are answered for {seconds:g} s more; Ctrl-C again ends that")
    await run_until(stop.enough, for_so_long())


async def drain_until_told_again(stop: Stop, seconds: float, drain: Callable[[float], Awaitable[object]]) -> None:
    """Let running requests end for so many seconds; another signal ends them at once, with their reason."""
    stop.is_draining = True
    if not await run_until(stop.again, wait_for(drain(seconds))):
        await drain(0.0)


def drained_status(stop: Stop) -> int:
    """The exit status of a process that has drained. It need not end within CUT_SECONDS any more."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    return 128 + stop.number if stop.again.is_set() else 0


async def wait_for(work: Awaitable[object]) -> None:
    """What `run_until` runs of what is no coroutine, or returns something. Raises what `work` raises."""
    await work

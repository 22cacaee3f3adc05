"""Life of the first process: signals, the ready line, certificates, the stop."""

import asyncio
import contextlib
import json
import os
import shlex
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from attend.model.errors import SettingError
from attend.model.machine import process_age
from attend.service.access.hosts import is_loopback
from attend.service.runtime.terminal_lines import print_line
from attend.service.settings import Settings

FIRST_NOTICE = 5.0
"""Seconds after which a start says that it is still loading."""
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
    """Do `work`, and say that it is under way: after 5 s, 10 s, 20 s, and so on. Raises what `work` raises."""

    async def tell() -> None:
        wait, seconds = FIRST_NOTICE, FIRST_NOTICE
        while True:
            await asyncio.sleep(wait)
            print_line(f"Still loading, {seconds:g} s so far ...")
            wait, seconds = seconds, 2 * seconds

    telling = asyncio.create_task(tell())
    try:
        await work
    finally:
        telling.cancel()


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
    """Raise SettingError where certificate and key cannot be served. Says what clients will not trust."""
    if not settings.tls_cert:
        return
    from attend.service.runtime.tls import read_pair, why_untrusted

    if (why := why_untrusted(read_pair(settings.tls_cert, settings.tls_key))) is not None:
        print_line(f"attend: clients will refuse tls_cert {settings.tls_cert!r}: {why}")


def refuse_tls(settings: Settings) -> None:
    """Raise SettingError for a certificate under Ray Serve, where nobody reads it."""
    if settings.tls_cert:
        raise SettingError("tls_cert: Ray Serve speaks no TLS; attend serve --single does, or a gateway in front of the server")


def ready_line(settings: Settings, facts: dict[str, Any]) -> str:
    """Where the server listens, what it serves, who may call, how to try it, and which page to open."""
    host, scheme = shown_host(settings.host), "https" if settings.tls_cert else "http"
    device = f"{facts['device']} ({facts['device_name']})"
    numbers = facts["dtype"] if facts["weights"] == facts["dtype"] else f"{facts['dtype']}, {facts['weights']} weights,"
    processes = "  one process, without Ray" if settings.single else ""
    commit = f" at {facts['commit'][:12]}" if facts.get("commit") else ""
    if settings.tensor_parallel > 1:
        processes = f"  {settings.tensor_parallel} ranks"
    return (
        f"Ready: {scheme}://{host}:{settings.port}  grpc {host}:{settings.grpc_port}  {settings.name}{commit} "
        f"({facts['family']}, {facts['parameters'] / 1e6:.1f}M parameters)  {device} {numbers} "
        f"{facts['backend']}{_graphs(*facts['recorded'])}  {facts['kv_tokens']} KV tokens in {facts['kv_bytes'] / 1e9:.1f} GB"
        f"{_sampling(facts['sampling'])}  started in {process_age():.1f} s{processes}{openness(settings)}\n"
        f"Try:   {example_command(settings, f'{scheme}://{host}:{settings.port}', chats=facts['chats'])}"
        + (f"\nOpen:  {scheme}://{host}:{settings.port}/ in a browser" if settings.expose_docs else "")
    )


def _graphs(graphs: int, pieces: int) -> str:
    """How many sizes of steps are CUDA graphs, and in how many the pieces between attentions are; nothing without any."""
    return f", CUDA graphs {graphs}, piecewise {pieces}" if graphs or pieces else ""


def _sampling(defaults: dict[str, float]) -> str:
    """How tokens are drawn where a call does not say; nothing where that is from all of them."""
    return "  samples with " + ", ".join(f"{name} {value:g}" for name, value in defaults.items()) if defaults else ""


def shown_host(host: str) -> str:
    """The host as a URL has it, for somebody on this machine."""
    if host in ("127.0.0.1", "0.0.0.0", "::"):
        return "localhost"
    return f"[{host}]" if ":" in host else host


def openness(settings: Settings) -> str:
    """Who may call a server that asks for no API keys; nothing where it asks for them. Ray's ports listen on every address."""
    if settings.api_keys_file:
        return ""
    if not settings.single:
        reach = "everybody who reaches this machine"
    elif is_loopback(settings.host):
        reach = "everybody on this machine"
    else:
        reach = f"everybody who reaches {settings.host}"
    return f"  no API keys: open to {reach}"


def example_command(settings: Settings, url: str, *, chats: bool) -> str:
    """A command that calls the server; `chats`: the model was taught to."""
    words, route = ["curl", "-N"], "completions"
    body: dict[str, Any] = {"prompt": "def fibonacci(n):", "max_tokens": 48, "stream": True}
    if chats:
        route, body = "chat/completions", {"messages": [{"role": "user", "content": "Who are you?"}], "stream": True}
    if settings.tls_cert:
        words += ["--cacert", shlex.quote(settings.tls_cert)]
    if settings.api_keys_file:
        words += ["-H", '"Authorization: Bearer $ATTEND_API_KEY"']
    return " ".join([*words, "--json", f"'{json.dumps(body, separators=(',', ':'))}'", f"{url}/v1/{route}"])


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

"""True if HAProxy routes to the replicas.

Serve reports that an application runs as soon as a call can reach it, even if only through Serve's own proxy. A moment later it
starts HAProxy again with the replicas' addresses, and the previous process closes each connection after its current answer.
"""

import asyncio

from attend.service.observe.edge import statistics

TIMEOUT_SECONDS = 2.0
RESTART_SECONDS, END_SECONDS = 15.0, 60.0
"""How long HAProxy may lead to no replica that runs before it is started again, and before the server ends."""


async def lead_to(replicas: int, application: str, port: int, *, seconds: float) -> bool:
    """True if HAProxy, with its statistics at `port`, has so many replicas for HTTP and for gRPC within `seconds`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while await asyncio.to_thread(reachable_replicas, application, port) < replicas:
        if loop.time() > deadline:
            return False
        await asyncio.sleep(0.05)
    return True


def reachable_replicas(application: str, port: int) -> int:
    """Replicas that calls of either protocol can reach without Serve's own proxy, which is listed as a backup."""
    try:
        rows = statistics("127.0.0.1", port, TIMEOUT_SECONDS)
    except OSError:  # between two of its processes
        return 0
    active = {row["pxname"]: int(row["act"]) for row in rows if row["svname"] == "BACKEND"}
    return min(active.get(f"{protocol}-{application}", 0) for protocol in ("http", "grpc"))


class UnreachableTime:
    """For how long HAProxy has led to no replica although one runs: it was not told of it, or its files are gone."""

    def __init__(self) -> None:
        self.since: float | None = None
        self.is_told = False

    def look(self, leads: bool, now: float) -> str:
        """What is to be done: nothing (empty), `restart` once, or `end`."""
        if leads:
            self.since, self.is_told = None, False
            return ""
        self.since = now if self.since is None else self.since
        if now - self.since >= END_SECONDS:
            return "end"
        if now - self.since < RESTART_SECONDS or self.is_told:
            return ""
        self.is_told = True
        return "restart"

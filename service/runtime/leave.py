"""What a container of a RayService runs before it is told to end (preStop): `python3 -m attend.service.runtime.leave 10`.

It gives the Service those seconds to forget the pod, and leaves a watch behind. Ray keeps a node that drains until successors
of its replicas run elsewhere, and the head for its whole time. Where every node of the cluster drains, none can come: the
cluster was deleted. There the watch ends Ray's raylet, and with it the container, once no request has run for a while.
"""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path

PAUSE, QUIET = 1.0, 5.0
"""Seconds between two looks, and without a request until the end."""
PAGE = "http://127.0.0.1:8000/metrics"
REQUESTS = re.compile(r"^attend_requests_(?:running|waiting)\{[^}]*\} (\S+)$", re.MULTILINE)
Nodes = tuple[set[str], set[str]]
"""Those that are alive, and those of them that stay."""


def is_quiet(url: str) -> bool:
    """True if no request runs or waits in the cluster, or no replica answers any more. One that is slow to answer is busy."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            found = REQUESTS.findall(answer.read().decode())
    except urllib.error.HTTPError as error:
        return error.code == 503  # of HAProxy, which has no replica left
    except urllib.error.URLError as error:
        return isinstance(error.reason, ConnectionRefusedError)
    except (OSError, HTTPException):
        return False
    return bool(found) and not any(map(float, found))


def look_at(address: str) -> Callable[[], Nodes]:
    """Ask the head at this address for the nodes. What it returns raises an error of Ray's where the head is gone."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled, without types
    from ray.serve._private.cluster_node_info_cache import DefaultClusterNodeInfoCache

    cache = DefaultClusterNodeInfoCache(GcsClient(address=address))

    def nodes() -> Nodes:
        cache.update()
        return cache.get_alive_node_ids(), cache.get_active_node_ids()

    return nodes


def below(ancestor: int) -> dict[str, int]:
    """The processes below one, by name."""
    parents: dict[int, tuple[int, str]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            start, _, rest = path.read_text().rpartition(") ")
        except OSError:
            continue  # it has ended
        parents[int(path.parent.name)] = (int(rest.split()[1]), start.partition(" (")[2])
    found: dict[str, int] = {}
    for pid, (above, name) in parents.items():
        while above in parents and above != ancestor:
            above = parents[above][0]
        if above == ancestor:
            found[name] = pid
    return found


def watch(nodes: Callable[[], Nodes], quiet: Callable[[], bool], first: int) -> None:
    """End the raylet below the container's first process when all nodes leave and nothing runs; the head's is the last."""
    began: float | None = None
    while True:
        time.sleep(PAUSE)
        processes = below(first)
        alive, staying = nodes()
        if staying or not (len(alive) == 1 if "gcs_server" in processes else quiet()):
            began = None
            continue
        began = began or time.monotonic()
        if time.monotonic() - began >= QUIET:
            os.kill(processes["raylet"], signal.SIGTERM)
            return


def main(words: list[str]) -> None:
    """With a number wait for so many seconds, and leave a watch behind; without one be it."""
    if words:
        null, itself = subprocess.DEVNULL, [sys.executable, "-m", "attend.service.runtime.leave"]
        subprocess.Popen(itself, start_new_session=True, stdin=null, stdout=null, stderr=null)
        time.sleep(float(words[0]))
    else:
        watch(look_at(os.environ["RAY_ADDRESS"]), lambda: is_quiet(PAGE), first=1)


if __name__ == "__main__":
    main(sys.argv[1:])

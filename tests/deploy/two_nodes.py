"""A Ray cluster of several nodes on one machine, each as alone as a pod, and what clients see when nodes die.

    python -m tests.deploy.two_nodes nodes --redis PATH_OF_REDIS_SERVER
    python -m tests.deploy.two_nodes autoscaling

Each node has network, processes and address of its own (Linux namespaces), so that every port is the one of the RayService,
and the end of its first process is the end of all of them, as in a pod. Nothing of it touches the machine's own network, and
it needs no root where user namespaces are allowed. The counts are printed as JSON.
"""

import argparse
import contextlib
import copy
import http.client
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from attend.service.runtime.supervisor import write_edge
from tests.deploy.manifests import ROOT, attend_env, cluster, ray_env, serve
from tests.service.server import wait_for

HOST, HEAD, FIRST, SECOND, THIRD = (f"10.86.0.{number}" for number in range(1, 6))
NAMESPACES = ("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
OUTER = (*NAMESPACES[:1], "--user", "--map-root-user", *NAMESPACES[1:])
INSIDE = """
ip link set lo up
until ip link show eth0 >/dev/null 2>&1; do sleep 0.05; done
ip addr add "$ADDRESS/24" dev eth0 && ip link set eth0 up
"$@"
"""
START_SECONDS = 150.0
CPUS = cluster["workerGroupSpecs"][0]["rayStartParams"]["num-cpus"]
LONG = {"prompt": "def fibonacci(n):", "max_tokens": 900, "ignore_eos": True, "temperature": 0.7}
RECOVERY_SECONDS = 5.0
"""After the loss of a node every call through another is answered, or refused in our shape, within so long."""
SILENT_SECONDS = 30.0
"""A client takes its stream for broken that is silent for so long: nobody tells it that the node it went through is lost."""
SHORT = {"prompt": "def fibonacci(n):", "max_tokens": 4}
FAULT_TOLERANCE = {"RAY_external_storage_namespace": "attend", "RAY_gcs_rpc_server_reconnect_timeout_s": "300"}


def can_run() -> bool:
    """True if this machine lets us make such nodes."""
    if not shutil.which("ip") or not shutil.which("unshare"):
        return False
    probe = ("sh", "-c", "ip link add veth0 type veth peer name eth0")
    return subprocess.run([*OUTER, *probe], capture_output=True, check=False).returncode == 0


def run(scenario: str, *flags: str, seconds: float = 600.0) -> dict[str, Any]:
    """Run a scenario in namespaces of its own, which end with it, and return its counts."""
    command = [*OUTER, sys.executable, "-m", "tests.deploy.two_nodes", scenario, *flags, "--inside"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])


class Pod:
    """One node: the command that KubeRay gives a pod, in namespaces of its own."""

    count = 0

    def __init__(self, address: str, command: Sequence[str], environment: dict[str, str], folder: Path) -> None:
        self.address = address
        self.log = folder / f"{address}.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*NAMESPACES, "sh", "-c", INSIDE, "pod", *command],
                env={**os.environ, **environment, "ADDRESS": address},
                stdout=log,
                stderr=log,
            )
        ours = os.readlink("/proc/self/ns/net")
        assert wait_for(lambda: os.readlink(f"/proc/{self.process.pid}/ns/net") != ours)
        Pod.count += 1
        self.outside = f"veth{Pod.count}"
        ip(f"link add {self.outside} type veth peer name eth0 netns {self.process.pid}")
        ip(f"link set {self.outside} master br0 up")

    def cut(self) -> None:
        """Let no packet in or out, as where the machine itself is lost: the ends of connections are not told."""
        ip(f"link set {self.outside} down")

    def drain(self) -> None:
        """SIGTERM to `ray start`, as from the kubelet; returns when the node has ended."""
        pid = self.process.pid
        for _ in ("the namespace's first process", "its command"):
            pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
        os.kill(pid, signal.SIGTERM)
        self.process.wait(START_SECONDS)

    def kill(self) -> float:
        """SIGKILL every process of the node; returns the time."""
        self.process.kill()
        self.process.wait()
        return time.monotonic()


def ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True)


class Cluster:
    """A head without CPUs and workers with `cpus` each, by default as many, with the variables, as the RayService's pods."""

    def __init__(self, folder: Path, cpus: str = CPUS, **environment: str) -> None:
        self.folder, self.cpus = folder, cpus
        token = secrets.token_hex(32)
        self.headers = {"Authorization": f"Bearer {token}"}
        auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        edge = folder / "edge"
        edge.mkdir()
        own = {"RAY_SERVE_HAPROXY_BINARY_PATH": str(write_edge(edge)), "ATTEND_NUM_THREADS": "1"}  # the edge as in the image
        self.environment = ray_env | attend_env | auth | own | environment
        self.pods: dict[str, Pod] = {}

    def start(self, *workers: str) -> None:
        """Start the head, or start it again at the same address, as behind KubeRay's Service of the head; and workers."""
        flags = ["--head", "--port=6379", "--dashboard-host=0.0.0.0"]
        self._start(HEAD, flags, cluster["headGroupSpec"]["rayStartParams"]["num-cpus"])
        assert wait_for(lambda: self._serve_details() is not None, START_SECONDS), self.pods[HEAD].log.read_text()
        for address in workers:  # after the head, as KubeRay's wait-gcs-ready makes them
            self.start_worker(address)

    def start_worker(self, address: str) -> None:
        """Start a worker."""
        self._start(address, [f"--address={HEAD}:6379"], self.cpus)

    def _start(self, address: str, flags: list[str], cpus: str) -> None:
        ray = str(Path(sys.executable).with_name("ray"))
        common = [f"--num-cpus={cpus}", "--metrics-export-port=8080", f"--temp-dir={self.folder}/{address}"]
        sizes = ["--object-store-memory=80000000", "--dashboard-agent-listen-port=52365", "--block"]
        command = [ray, "start", *flags, f"--node-ip-address={address}", *common, *sizes]
        self.pods[address] = Pod(address, command, self.environment, self.folder)

    def kill(self, address: str) -> float:
        """Kill a node."""
        return self.pods.pop(address).kill()

    def deploy(self, config: dict[str, Any]) -> None:
        """`serve deploy` of a configuration, as KubeRay does it through the head's dashboard."""
        path = self.folder / "serve.yaml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        command = [str(Path(sys.executable).with_name("serve")), "deploy", "-a", f"http://{HEAD}:8265", str(path)]
        done = subprocess.run(command, env={**os.environ, **self.environment}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def _serve_details(self) -> dict[str, Any] | None:
        request = urllib.request.Request(f"http://{HEAD}:8265/api/serve/applications/", headers=self.headers)
        with contextlib.suppress(OSError, ValueError), urllib.request.urlopen(request, timeout=5) as answer:
            return json.load(answer)
        return None

    def replicas(self) -> dict[str, str]:
        """The running replicas and their nodes; none while the head does not answer."""
        application = ((self._serve_details() or {}).get("applications") or {}).get("default") or {}
        found = (application.get("deployments") or {}).get("Attend", {}).get("replicas", [])
        return {each["replica_id"]: each["node_ip"] for each in found if each["state"] == "RUNNING"}

    def wait_for_replicas(self, number: int) -> dict[str, str]:
        """Until so many run."""
        deadline = time.monotonic() + START_SECONDS
        while len(found := self.replicas()) != number:
            assert time.monotonic() < deadline, self._serve_details()
            time.sleep(0.02)
        return found

    def stop(self) -> None:
        for address in list(self.pods):
            self.kill(address)


class Stream(threading.Thread):
    """A client of one streamed answer. `broken` when it ended without its last event."""

    def __init__(self, address: str, body: dict[str, Any] = LONG) -> None:
        super().__init__(daemon=True)
        self.address, self.body = address, body
        self.events, self.broken, self.ended = 0, True, 0.0
        self.start()

    def run(self) -> None:
        with contextlib.suppress(OSError, ValueError, EOFError):
            for line in post(self.address, SILENT_SECONDS, **self.body, stream=True):
                self.events += line.startswith(b"data: {")
                if line.startswith(b"data: [DONE]"):
                    self.broken = False
        self.ended = time.monotonic()


class Polls(threading.Thread):
    """A client that asks one short question after another, through whichever address is next."""

    def __init__(self, *addresses: str, pause: float = 0.1, body: dict[str, Any] = SHORT) -> None:
        super().__init__(daemon=True)
        self.addresses, self.pause, self.body = addresses, pause, body
        self.answered: list[tuple[float, float]] = []
        """(start, seconds) of each."""
        self.failed: list[tuple[float, str]] = []
        self.waited = 0.0
        """The longest that a call which failed took to do so, in seconds."""
        self._end = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._end.wait(self.pause):
            address = self.addresses[(len(self.answered) + len(self.failed)) % len(self.addresses)]
            started = time.monotonic()
            try:
                list(post(address, **self.body))
                self.answered.append((started, time.monotonic() - started))
            except (OSError, ValueError, EOFError) as error:
                self.failed.append((started, f"{address}: {error!r}{shape(error)}"))
                self.waited = max(self.waited, time.monotonic() - started)

    def end(self) -> None:
        """Ask no more; the question under way is still answered."""
        self._end.set()

    def counts(self, since: float) -> dict[str, Any]:
        """End, and what it saw; times are seconds after `since`."""
        self.end()
        self.join(60)
        slowest, started = max(((seconds, started) for started, seconds in self.answered), default=(0.0, since))
        return {
            "answered": len(self.answered),
            "answered_later": sum(started > since + RECOVERY_SECONDS for started, _ in self.answered),
            "slowest_failure_seconds": round(self.waited, 2),
            "requests": len(self.answered) + len(self.failed),
            "failed": [(round(started - since, 2), what) for started, what in self.failed],
            "slowest_seconds": round(slowest, 2),
            "slowest_began_at": round(started - since, 1),
        }


def shape(error: Exception) -> str:
    """The body of an error's answer, where it is not in our shape."""
    if not isinstance(error, urllib.error.HTTPError):
        return ""
    with error:
        body = error.read()
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return f" {json.loads(body)['error']['type']}"
    return f" BARE {body[:200]!r}"


def post(address: str, seconds: float = 120, **body: object) -> Iterator[bytes]:
    """The lines of the answer to POST /v1/completions. Raises OSError or ValueError where there is none, or half a one.

    It is given up when nothing comes for `seconds`.
    """
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"http://{address}:8000/v1/completions", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            yield from answer
    except http.client.HTTPException as error:
        raise ValueError(str(error)) from error


def running_requests(address: str) -> dict[str, int]:
    """Requests that run in each replica."""
    with urllib.request.urlopen(f"http://{address}:8000/metrics", timeout=10) as answer:
        found = re.findall(r'^attend_requests_running\{replica="(\w+)"[^}]*\} (\S+)', answer.read().decode(), re.MULTILINE)
    return {replica: int(float(value)) for replica, value in found}


def reachable_replicas(address: str) -> int:
    """Replicas that the HAProxy of a node sends to. Until it knows any, it sends to the Python proxy on the head."""
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{address}:8404/stats;csv", timeout=5) as answer:
        servers = [line.split(",") for line in answer.read().decode().splitlines() if line.startswith("http-default,SERVE_REP")]
        return sum(server[17] == "UP" for server in servers)
    return 0


def breaks(streams: Sequence[Stream], since: float) -> list[tuple[float, str]]:
    """When each of the broken ones ended, in seconds after `since`, and the address that it went through."""
    return [(round(stream.ended - since, 2), stream.address) for stream in streams if stream.broken]


def busy_replicas(address: str) -> set[str]:
    """Replicas that have a request."""
    return {replica for replica, running in running_requests(address).items() if running}


def lose_the_head(ray: Cluster) -> dict[str, Any]:
    """Kill the head under streams, and start it again at its address ten seconds later."""
    before = ray.wait_for_replicas(2)
    streams = [Stream(address) for address in (FIRST, SECOND) * 3]
    polls = Polls(FIRST, SECOND)
    assert wait_for(lambda: all(stream.events for stream in streams), 60)
    killed = ray.kill(HEAD)
    alive = [stream for stream in streams if stream.is_alive()]
    time.sleep(10)
    started = time.monotonic()
    ray.start()
    after = ray.wait_for_replicas(2)
    recovered = time.monotonic() - started
    for stream in streams:
        stream.join(120)
    return {
        "streams": len(streams),
        "streams_at_the_kill": len(alive),
        "streams_broken": breaks(streams, killed),
        **polls.counts(killed),
        "same_replicas": before == after,
        "seconds_from_start_to_known_replicas": round(recovered, 1),
    }


def lose_a_node(ray: Cluster) -> dict[str, Any]:
    """Kill a worker under streams; then add one."""
    (lost,) = [replica for replica, address in ray.wait_for_replicas(2).items() if address == FIRST]
    through_other = [Stream(SECOND) for _ in range(8)]
    assert wait_for(lambda: all(stream.events for stream in through_other), 60)
    on_both = running_requests(SECOND)
    through_lost = [Stream(FIRST) for _ in range(4)]
    assert wait_for(lambda: all(stream.events for stream in through_lost), 60)
    polls = Polls(SECOND)
    ray.pods[FIRST].cut()
    killed = ray.kill(FIRST)
    for stream in (*through_other, *through_lost):
        stream.join(120)
    ends = breaks(through_other, killed)
    while not (without := ray.replicas()) or lost in without:
        time.sleep(0.2)
    added = time.monotonic()
    ray.start_worker(THIRD)
    after = ray.wait_for_replicas(2)
    two_again = time.monotonic() - added
    assert wait_for(lambda: answers(THIRD), 60) or len(set(after.values())) == 1
    reachable = time.monotonic() - added
    return {
        "streams_through_other_node": len(through_other),
        "of_those_on_the_lost_replica": on_both[lost],
        "broken_of_those": sum(stream.broken for stream in through_other),
        "streams_through_lost_node": len(through_lost),
        "broken_of_these": sum(stream.broken for stream in through_lost),
        "last_break_after_seconds": max(seconds for seconds, _ in ends),
        **polls.counts(killed),
        "seconds_until_ray_noticed": round(added - killed, 1),
        "replicas_without_the_node": sorted(without.values()),
        "replicas_with_a_new_node": sorted(after.values()),
        "seconds_from_new_node_to_two_replicas": round(two_again, 1),
        "seconds_from_new_node_to_its_answers": round(reachable, 1),
    }


def whole(ray: Cluster) -> dict[str, str]:
    """Both replicas and their nodes, once each node's HAProxy reaches both."""
    found = ray.wait_for_replicas(2)
    assert wait_for(lambda: reachable_replicas(FIRST) == reachable_replicas(SECOND) == 2, START_SECONDS)
    return found


def update_in_place(ray: Cluster, number: int) -> dict[str, Any]:
    """Change a setting under streams, without a spare worker."""
    before, config = whole(ray), copy.deepcopy(serve)
    config["applications"][0]["args"]["served_model_name"] = f"model-{number}"
    streams = [Stream(address) for address in (FIRST, SECOND) * 3]
    polls = Polls(FIRST, SECOND)
    assert wait_for(lambda: all(stream.events for stream in streams), 60)
    began = time.monotonic()
    ray.deploy(config)
    assert wait_for(lambda: len(found := ray.replicas()) == 2 and not found.keys() & before.keys(), START_SECONDS), (
        ray._serve_details()
    )
    took = time.monotonic() - began
    whole(ray)
    for stream in streams:
        stream.join(120)
    return seen(polls, streams, began) | {"spread": sorted(ray.replicas().values()), "seconds": round(took, 1)}


def drain_a_node(ray: Cluster) -> dict[str, Any]:
    """Drain a worker under streams through the other, which has no room for its replica; then start it again."""
    whole(ray)
    streams = [Stream(FIRST) for _ in range(8)]
    polls = Polls(FIRST)
    assert wait_for(lambda: all(stream.events for stream in streams), 60)
    on_both, began = busy_replicas(FIRST), time.monotonic()
    ray.pods.pop(SECOND).drain()
    took = time.monotonic() - began
    ray.start_worker(SECOND)
    after = whole(ray)
    spread = time.monotonic() - began - took
    for stream in streams:
        stream.join(120)
    return seen(polls, streams, began) | {
        "busy_replicas": len(on_both),
        "seconds": round(took, 1),
        "spread": sorted(after.values()),
        "seconds_from_new_node_to_two_replicas": round(spread, 1),
    }


def seen(polls: Polls, streams: Sequence[Stream], since: float) -> dict[str, Any]:
    """What callers saw of a change."""
    return {"streams": len(streams), "streams_broken": breaks(streams, since), **polls.counts(since)}


def answers(address: str) -> bool:
    """True if a short question is answered there."""
    with contextlib.suppress(OSError, ValueError):
        return bool(list(post(address, **SHORT)))
    return False


def nodes(folder: Path, redis: str) -> dict[str, Any]:
    """attend.yaml on two workers: the loss of the head (with a Redis), two updates, a drain, the loss of a worker."""
    state = {}
    if redis:
        command = [redis, "--bind", HOST, "--port", "6379", "--protected-mode", "no", "--dir", str(folder), "--save", ""]
        subprocess.Popen(command, stdout=subprocess.DEVNULL)
        state = FAULT_TOLERANCE | {"RAY_REDIS_ADDRESS": f"{HOST}:6379"}
    ray = Cluster(folder, **state)
    started = time.monotonic()
    ray.start(FIRST, SECOND)
    ray.deploy(serve)
    spread = whole(ray)
    counts: dict[str, Any] = {"spread": sorted(spread.values()), "seconds_to_start": round(time.monotonic() - started, 1)}
    if redis:
        counts["head"] = lose_the_head(ray)
    counts["updates"] = [update_in_place(ray, number) for number in (1, 2)]
    counts["drain"] = drain_a_node(ray)
    counts["node"] = lose_a_node(ray)
    ray.stop()
    return counts


def scale(folder: Path) -> dict[str, Any]:
    """autoscaling.yaml between one and two replicas, its delays cut to seconds."""
    quick = {"look_back_period_s": 2, "metrics_interval_s": 1, "upscale_delay_s": 1, "downscale_delay_s": 3}
    own = {"ATTEND_MAX_BATCH_REQUESTS": "16", "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1"}
    ray = Cluster(folder, "4", **own)
    document = yaml.safe_load((ROOT / "deploy/serve/autoscaling.yaml").read_text())
    document["applications"][0]["deployments"][0]["autoscaling_config"] |= quick | {"min_replicas": 1, "max_replicas": 2}
    ray.start(FIRST)
    ray.deploy(document)
    ray.wait_for_replicas(1)
    assert wait_for(lambda: reachable_replicas(FIRST) == 1, START_SECONDS)
    began = time.monotonic()
    clients = [Polls(FIRST, pause=0, body=SHORT | {"max_tokens": 64, "stream": stream}) for stream in (True, False) * 12]
    before = ray.wait_for_replicas(2)
    up = time.monotonic() - began
    busy = wait_for(lambda: len(busy_replicas(FIRST)) == 2, 30)
    for client in clients:
        client.end()
    idle = time.monotonic()
    trickle = Polls(FIRST, pause=0.2)
    streams: list[Stream] = []
    running: dict[str, int] = {}
    while len(after := ray.replicas()) != 1:
        running |= running_requests(FIRST)  # of a replica that is gone the last count stays
        streams += [Stream(FIRST) for _ in range(6 - sum(stream.is_alive() for stream in streams))]
    down = time.monotonic() - idle
    across = [stream for stream in streams if stream.is_alive()]
    for stream in streams:
        stream.join(120)
    seen = [client.counts(began) for client in (*clients, trickle)]
    ray.stop()
    return {
        "requests": sum(each["requests"] for each in seen),
        "failed": [what for each in seen for what in each["failed"]],
        "streams": len(streams),
        "streams_broken": sum(stream.broken for stream in streams),
        "streams_at_the_removal": len(across),
        "requests_in_the_removed_replica": sum(running[replica] for replica in before.keys() - after.keys()),
        "both_took_requests": busy,
        "seconds_from_load_to_two_replicas": round(up, 1),
        "seconds_from_idle_to_one_replica": round(down, 1),
    }


def main() -> None:
    """Inside the namespaces: make the bridge, run the scenario, print its counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scenario", choices=["nodes", "autoscaling"])
    parser.add_argument("--redis", default="", help="redis-server; without it the head is not killed")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not given.inside:
        print(json.dumps(run(*sys.argv[1:]), indent=2))
        return
    for command in ("link set lo up", "link add br0 up type bridge", f"addr add {HOST}/24 dev br0"):
        ip(command)
    with tempfile.TemporaryDirectory(prefix="attend-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        scenario = scale(Path(folder)) if given.scenario == "autoscaling" else nodes(Path(folder), given.redis)
        print(json.dumps(scenario))


if __name__ == "__main__":
    main()

"""Rolling updates of a Serve application under callers: does any call fail, does any stream break?

    python -m tests.deploy.updates --times 20

Two replicas of deploy/serve/attend.yaml on a Ray node of our own. Each update changes a setting, so that every replica is
replaced while calls and streams of both transports go on through it. It prints a line for each update, and ends with 3 if a
call failed.
"""

import argparse
import itertools
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import yaml

from loadtest.faults.deaths import Calls
from loadtest.server import Address
from protos.attend.v1 import generation_pb2 as pb
from protos.attend.v1.generation_pb2_grpc import GenerationServiceStub
from tests.deploy.manifests import ROOT
from tests.deploy.ray_nodes import Cluster, cluster
from tests.service.server import wait_for

PROMPT = "def fibonacci(n):"
TOKENS, LONGEST = 600, 30
"""Of a stream; and seconds that a replica which leaves gives its streams."""
UPDATE_SECONDS = 180


@dataclass(frozen=True)
class Application:
    """What `Calls` needs of a server."""

    address: Address

    def headers(self) -> dict[str, str]:
        """Of a call."""
        return {"content-type": "application/json"}


class Streams:
    """A stream of each transport after the other, until the end; `ends` has how each of them ended."""

    def __init__(self, address: Address) -> None:
        self.address, self.ends, self.over = address, [], threading.Event()

    def over_http(self) -> str:
        """`[DONE]` is the last event of a whole stream."""
        body = {"prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        last = ""
        with httpx.stream("POST", f"{self.address.http}/v1/completions", json=body, timeout=120) as answer:
            for line in filter(None, answer.iter_lines()):
                last = line
        return "ok" if last == "data: [DONE]" else f"HTTP: {answer.status_code}, {last[:80]}"

    def over_grpc(self) -> str:
        """The last message of a whole stream says why it ended."""
        request = pb.GenerateRequest(text=PROMPT, max_tokens=TOKENS, stopping=pb.StoppingCriteria(ignore_eos=True))
        count = 0
        with grpc.insecure_channel(self.address.grpc, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            for message in GenerationServiceStub(channel).GenerateStream(request, timeout=120):
                count += sum(len(output.token_ids) or 1 for output in message.outputs)
                reason = message.outputs[-1].finish_info.finish_reason
        return "ok" if reason == pb.FINISH_REASON_LENGTH else f"gRPC: ended with {reason}"

    def run(self, one) -> None:
        """Stream after stream."""
        while not self.over.is_set():
            try:
                self.ends.append(one())
            except (httpx.HTTPError, grpc.RpcError) as error:
                self.ends.append(f"{type(error).__name__}: {error}"[:120])
            if self.ends[-1] != "ok":
                time.sleep(1)  # as a client does

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """One of each transport at a time."""
        with ThreadPoolExecutor(2) as pool:
            for one in (self.over_http, self.over_grpc):
                pool.submit(self.run, one)
            try:
                yield
            finally:
                self.over.set()


def deployed(nodes: Cluster, number: int) -> None:
    """Deploy the file with its ports moved, and as model number so many; returns when only its replicas run."""
    config = yaml.safe_load((ROOT / "deploy/serve/attend.yaml").read_text())
    config["http_options"] |= {"host": "127.0.0.1", "port": nodes.http}
    config["grpc_options"]["port"] = nodes.grpc
    [application] = config["applications"]
    application["args"] |= {
        "request_timeout_seconds": LONGEST,
        "drain_seconds": LONGEST,
        "served_model_name": f"model-{number}",
    }
    file = nodes.folder / "serve.yaml"
    file.write_text(yaml.safe_dump(config))
    before = replica_ids(nodes)
    nodes.deploy(file)

    def replaced() -> bool:
        now = replica_ids(nodes)
        return len(now) == 2 and not now & before and nodes.application().get("status") == "RUNNING"

    if not wait_for(replaced, UPDATE_SECONDS):
        raise RuntimeError(f"update {number} did not end: {nodes.application()}")


def replica_ids(nodes: Cluster) -> set[str]:
    """All replicas that Serve still knows, those that leave too."""
    deployment = nodes.application().get("deployments", {}).get("Attend", {})
    return {each["replica_id"] for each in deployment.get("replicas", [])}


def update(nodes: Cluster, address: Address, number: int) -> tuple[list[str], str]:
    """One update under callers: what failed, and its line."""
    calls, streams = Calls(Application(address)), Streams(address)
    with calls.going_on(), streams.going_on():
        wait_for(lambda: calls.ok_since(0) and len(streams.ends) >= 2, 60)
        began = time.monotonic()
        deployed(nodes, number)
        seconds = time.monotonic() - began
        time.sleep(2)
    broken = [end for end in streams.ends if end != "ok"]
    failed = [f"{call.transport}: {call.result}" for call in calls.done if call.result != "ok"]
    when = sorted(call.began - began for call in calls.done if call.result != "ok")
    span = f", from {when[0]:.1f} to {when[-1]:.1f} s after it began" if when else ""
    slow = max(calls.done, key=lambda call: call.seconds)
    slowest = f"the slowest {slow.seconds:.2f} s ({slow.transport}, begun at {slow.began - began:.1f} s)"
    of_calls = f"{len(calls.done)} calls, {len(failed)} failed{span}, {slowest}"
    return failed + broken, f"update {number}: {seconds:.0f} s; {of_calls}; {len(streams.ends)} streams, {len(broken)} broken"


def main(words: Sequence[str] | None = None) -> int:
    """0, or 3 where a call failed or a stream broke."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20, help="updates (default 20)")
    options, wrong = parser.parse_args(words), 0
    with tempfile.TemporaryDirectory() as folder, cluster(Path(folder)) as nodes:
        address = Address(f"http://127.0.0.1:{nodes.worker_http}", f"127.0.0.1:{nodes.worker_grpc}")
        deployed(nodes, 0)
        wait_for(lambda: Calls(Application(address)).over_http() == Calls(Application(address)).over_grpc() == "ok", 60)
        for number in itertools.islice(itertools.count(1), options.times):
            bad, line = update(nodes, address, number)
            wrong += len(bad)
            print(line, *sorted(set(bad)), sep="\n    ", flush=True)
    print(f"{options.times} updates, {wrong} calls or streams failed")
    return 3 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""The chart on a real cluster of two nodes or more, with callers in pods.

    make test-kubernetes KUBECONFIG=FILE IMAGE=REPOSITORY:TAG

The nodes have the image or can pull it. LIMITS has what each row may cost; a table of what it cost is printed at the end. Rows
that need KubeRay, Redis or metrics-server are skipped where these are missing. Further variables: NEW_IMAGE, another reference
for the update (by default the same image by its whole name, or by its digest); REDIS, HOST:PORT of a Redis in the cluster, with
REDIS_NAMESPACE and REDIS_PASSWORD (by default one of REDIS_IMAGE, redis:7, is started). It makes the namespaces attend-test,
attend-test-redis and attend-test-tools, which is privileged since it kills processes of a node, and removes them.
"""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deploy import pod_callers
from tests.deploy.live import (
    IMAGE,
    NAMESPACE,
    REDIS_SPACE,
    TOOLS,
    active,
    all_gone,
    forwarded,
    is_ready,
    is_served,
    is_whole,
    kill_container,
    kubectl,
    make,
    objects,
    our_pods,
    output_of,
    pod,
    ready_addresses,
    run,
    serving_pods,
    wait_for,
)

ROOT = Path(__file__).parents[2]
NEW_IMAGE = os.environ.get("NEW_IMAGE", "")
WORKERS = {"standalone": "app.kubernetes.io/name=attend", "rayservice": "app=attend,ray.io/node-type=worker"}

if not (IMAGE and os.environ.get("KUBECONFIG")):
    reason = "no cluster is given: make test-kubernetes KUBECONFIG=FILE IMAGE=REPOSITORY:TAG"
    pytest.skip(reason, allow_module_level=True)
pytestmark = pytest.mark.timeout(3600)

LIMITS = {
    # row: failed calls, seconds of the longest call, seconds until all replicas are ready and one may be evicted
    "install": (0, 0, 300),
    "restart": (0, 30, 240),
    "new tag": (0, 30, 300),
    "changed setting": (0, 30, 300),
    "roll back": (0, 30, 300),
    "drain of a node": (0, 30, 240),
    "drain of the next node": (0, 30, 240),
    "SIGKILL of a pod": (20, 30, 90),
    "SIGKILL of the head": (1000, 60, 240),
    "SIGKILL of the head, with Redis": (0, 30, 180),
    "autoscaler": (0, 60, 360),
    "uninstall": (0, 0, 60),
}


def image_values(image: str) -> list[str]:
    """The values of the chart that name an image by its tag or digest."""
    repository, _, digest = image.partition("@")
    if digest:
        return ["--set", f"image.repository={repository}", "--set", f"image.digest={digest}"]
    repository, _, tag = image.rpartition(":")
    return ["--set", f"image.repository={repository}", "--set-string", f"image.tag={tag}", "--set", "image.digest="]


def other_name(image: str) -> str:
    """Another reference to the same image, so that pods are replaced; of a registry's, by the digest that a node reports."""
    if NEW_IMAGE:
        return NEW_IMAGE
    first, slash, _ = image.partition("/")
    if not slash:
        return f"docker.io/library/{image}"
    if "." not in first and ":" not in first and first != "localhost":
        return f"docker.io/{image}"
    ids = [status["imageID"] for pod in serving_pods() for status in pod["status"]["containerStatuses"]]
    digest = next((each for each in ids if re.fullmatch(r".+@sha256:[0-9a-f]{64}", each)), None)
    if digest is None:
        pytest.skip("new tag: the nodes report no digest of IMAGE; NEW_IMAGE names another reference")
    return f"{image.rpartition(':')[0]}@{digest.rpartition('@')[2]}"


# Callers


@dataclass
class Seen:
    """What a row cost: calls, those that failed, the longest in seconds, and seconds until the service was whole again."""

    mode: str
    row: str
    calls: int = 0
    errors: list[str] = field(default_factory=list)
    longest: float = 0.0
    ready: float = 0.0
    began: float = field(default_factory=time.monotonic)

    def until(self, holds: Callable[[], bool] = is_whole) -> None:
        """Wait for it, by the row's limit and half as long again, so that the table has the number."""
        wait_for(str(holds.__doc__), holds, LIMITS[self.row][2] * 1.5)
        self.ready = time.monotonic() - self.began

    def judge(self) -> None:
        """Raises AssertionError where it is beyond the row's limits."""
        failed, longest, ready = LIMITS[self.row]
        assert len(self.errors) <= failed, f"{len(self.errors)} of {self.calls} calls failed: {self.errors[:8]}"
        assert self.longest <= longest
        assert self.ready <= ready


TABLE: list[Seen] = []
"""Rows after which the replicas shared a worker."""
LEVELS = itertools.cycle(("debug", "info"))


class Callers:
    """A pod of callers in the service's namespace, restricted and under its policies."""

    def __init__(self, mode: str) -> None:
        self.kinds = [kind for kind in pod_callers.KINDS if mode == "standalone" or kind != "grpc-pods"]
        script = {"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"name": "callers"}}
        make(script | {"data": {"callers.py": Path(pod_callers.__file__).read_text()}})
        volume, mount = {"name": "script", "configMap": {"name": "callers"}}, {"name": "script", "mountPath": "/script"}
        make(pod("callers", ["python3", "/script/callers.py", *self.kinds], mounts=[mount], volumes=[volume]))
        wait_for("callers of each kind are answered", lambda: self.answered() >= set(self.kinds), 120)
        self.before = len(self.lines())

    def lines(self) -> list[tuple[str, float, float, str]]:
        """Kind, begin, seconds and error of each call that has ended."""
        if objects("get", "pod", "callers")[0]["status"].get("phase") == "Pending":
            return []
        said = kubectl("logs", "callers", "--tail=-1").splitlines()
        return [tuple(json.loads(line)) for line in said if line.startswith("[")]

    def answered(self, since: int = 0) -> set[str]:
        """Kinds of which a call was answered."""
        return {kind for kind, _, _, error in self.lines()[since:] if not error}

    def end(self, seen: Seen) -> None:
        """Count what they saw since they were all answered, and end them."""
        lines = self.lines()[self.before :]
        seen.calls += len(lines)
        seen.errors += [f"{kind}: {error}" for kind, _, _, error in lines if error]
        seen.longest = max([seen.longest, *(seconds for _, _, seconds, _ in lines)])
        quiet = set(self.kinds) - self.answered(self.before)
        kubectl("delete", "pod", "callers", "--wait")
        assert not quiet, f"no call was answered after the change: {quiet}"


@contextmanager
def row(mode: str, name: str) -> Iterator[Seen]:
    """A change under callers: they go on until five seconds after the block. Then it is judged, and stands in the table."""
    callers = Callers(mode)
    seen = Seen(mode, name)
    TABLE.append(seen)
    try:
        yield seen
        time.sleep(5)
    finally:
        callers.end(seen)
    seen.judge()


@contextmanager
def loss(mode: str, name: str) -> Iterator[Seen]:
    """A row that takes a pod away. Within 90 s each worker has a replica again."""
    with row(mode, name) as seen:
        yield seen
        seen.until(is_whole if mode == "standalone" else is_served)
    wait_for("a replica in each worker", is_whole, 90)


# The cluster and the release


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Names of the nodes that take pods, with the namespaces made; at the end these are removed and the table is printed."""
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    for program in ("kubectl", "helm"):
        assert shutil.which(program), f"{program} is not installed"
    nodes = json.loads(run("kubectl", "get", "nodes", "-o", "json"))["items"]
    closed = {"NoSchedule", "NoExecute"}
    names = [
        node["metadata"]["name"]
        for node in nodes
        if not node["spec"].get("unschedulable")
        and is_ready(node)
        and not any(taint["effect"] in closed for taint in node["spec"].get("taints", []))
    ]
    assert len(names) >= 2, f"two nodes that take pods are needed: {names}"
    for namespace, level in ((NAMESPACE, "restricted"), (TOOLS, "privileged"), (REDIS_SPACE, "privileged")):
        left = subprocess.run(["kubectl", "get", "namespace", namespace], capture_output=True).returncode == 0
        assert not left, f"the namespace {namespace} is there, perhaps of an earlier run: kubectl delete namespace {namespace}"
        metadata = {"name": namespace, "labels": {"pod-security.kubernetes.io/enforce": level}}
        make({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}, namespace="default")
    try:
        yield names
    finally:
        for name in names:
            run("kubectl", "uncordon", name)
        for namespace in (NAMESPACE, TOOLS, REDIS_SPACE):
            run("kubectl", "delete", "namespace", namespace, "--wait=false")
        reporter = request.config.pluginmanager.get_plugin("terminalreporter")
        for line in table():
            reporter.write_line(line)


def table() -> Iterator[str]:
    """What each row cost."""
    yield ""
    yield f"{'mode':12}{'row':34}{'calls':>7}{'failed':>8}{'longest s':>11}{'ready s':>9}   limits: failed, longest, ready"
    for each in TABLE:
        limits = ", ".join(map(str, LIMITS[each.row]))
        yield f"{each.mode:12}{each.row:34}{each.calls:7}{len(each.errors):8}{each.longest:11.1f}{each.ready:9.0f}   {limits}"


def needs_kuberay() -> None:
    """Skip where the cluster knows no RayServices."""
    if subprocess.run(["kubectl", "get", "crd", "rayservices.ray.io"], capture_output=True).returncode:
        pytest.skip("no RayService: KubeRay's operator is not installed")


def helm(verb: str, mode: str, *words: str) -> None:
    """`install`, with the values of README's third step; or `upgrade`, which keeps what is set."""
    chart = [str(ROOT / "deploy/chart"), "--namespace", NAMESPACE]
    if verb == "install":
        kind = ["--values", str(ROOT / "deploy/chart/values/kind.yaml"), "--set", f"mode={mode}", *image_values(IMAGE)]
        run("helm", "install", "attend", *chart, *kind, *words)
    else:
        run("helm", "upgrade", "attend", *chart, "--reset-then-reuse-values", *words)


def install(mode: str, *words: str) -> None:
    """Install, and stand in the table."""
    seen = Seen(mode, "install")
    TABLE.append(seen)
    helm("install", mode, *words)
    seen.until()
    seen.judge()


@pytest.fixture(scope="module", params=["standalone", "rayservice"])
def mode(request: pytest.FixtureRequest, cluster: list[str]) -> Iterator[str]:
    """A release in that mode, whole; its last test uninstalls it."""
    if request.param == "rayservice":
        needs_kuberay()
    try:
        install(request.param)
        yield request.param
    finally:
        run("helm", "uninstall", "attend", "--namespace", NAMESPACE, "--ignore-not-found")


def only(mode: str, wanted: str) -> None:
    """Skip in the other mode."""
    if mode != wanted:
        pytest.skip(f"{wanted} alone")


def test_an_installed_service_answers_and_is_checked(mode):
    with forwarded() as (http, grpc):
        answer = httpx.post(f"{http}/v1/completions", json={"prompt": "def fibonacci(n):", "max_tokens": 32}, timeout=60)
        assert answer.status_code == 200 and answer.json()["object"] == "text_completion", answer.text
        said = run(str(Path(sys.executable).with_name("attend")), "check", http, "--grpc", grpc)
    assert all(line.split()[0] in ("ok", "skipped") for line in said.splitlines()), said


def test_a_check_behind_several_pods_ends_well(mode):
    words = ["attend", "check", "http://attend-serve-svc:8000", "--grpc", "attend-serve-svc:9000"]
    phase, said = output_of(pod("check", words), NAMESPACE)
    assert phase == "Succeeded", said


def rolled_out() -> None:
    """Wait until the Deployment's new pods are ready, and its old ones gone."""
    kubectl("rollout", "status", "deployment/attend", "--timeout=600s", timeout=660)
    all_gone()


def test_a_restart(mode):
    only(mode, "standalone")
    with row(mode, "restart") as seen:
        kubectl("rollout", "restart", "deployment/attend")
        kubectl("rollout", "status", "deployment/attend", "--timeout=600s", timeout=660)
        seen.until()
        all_gone()


def generation(mode: str) -> str:
    """What tells one generation of pods from the next: the Deployment's template, or the RayService's active cluster."""
    if mode == "standalone":
        return str(objects("get", "deployment", "attend")[0]["status"].get("observedGeneration"))
    return str(active().get("rayClusterName"))


def update(mode: str, name: str, change: Callable[[], None]) -> None:
    """A change that replaces every pod, under callers, until the old ones are gone."""
    with row(mode, name) as seen:
        before = generation(mode)
        change()
        if mode == "standalone":
            kubectl("rollout", "status", "deployment/attend", "--timeout=600s", timeout=660)
        wait_for("the new generation is the active one", lambda: generation(mode) != before, 600)
        seen.until()
        all_gone()


def test_a_new_tag(mode):
    new = other_name(IMAGE)
    update(mode, "new tag", lambda: helm("upgrade", mode, *image_values(new)))


def test_a_changed_setting_and_the_way_back(mode):
    update(mode, "changed setting", lambda: helm("upgrade", mode, "--set", "settings.log_level=debug"))
    update(mode, "roll back", lambda: run("helm", "rollback", "attend", "--namespace", NAMESPACE))


def test_each_node_is_drained_in_turn(mode):
    drained = ""
    for name in ("drain of a node", "drain of the next node"):
        nodes = {each["spec"]["nodeName"] for each in serving_pods()}
        drained = min(nodes - {drained} or nodes)
        with loss(mode, name):
            words = ("--pod-selector", WORKERS[mode], "--delete-emptydir-data", "--ignore-daemonsets", "--timeout=900s")
            try:
                run("kubectl", "drain", drained, *words, timeout=960)
            finally:
                run("kubectl", "uncordon", drained)


def test_a_killed_container(mode):
    with loss(mode, "SIGKILL of a pod"):
        kill_container(serving_pods()[0])


def test_a_killed_head(mode):
    only(mode, "rayservice")
    with loss(mode, "SIGKILL of the head"):
        kill_container(serving_pods("head")[0])
        with suppress(AssertionError):
            wait_for("the workers have noticed", lambda: not ready_addresses(), 90)


CONNECT = """
import socket, sys
for port in (8000, 9000, 8080, 8265, 6379, 10001, 8404, 9101, 30000, 40000):
    try:
        socket.create_connection((sys.argv[1], port), 2).close()
        print(port)
    except OSError:
        pass
"""


def open_ports(namespace: str, address: str) -> set[int]:
    """The ports at that address to which a pod in that namespace can connect."""
    return set(map(int, output_of(pod("connect", ["python3", "-c", CONNECT, address]), namespace)[1].split()))


def test_network_policies_open_the_two_ports_alone(mode):
    address = serving_pods()[0]["status"]["podIP"]
    if open_ports(TOOLS, address):
        pytest.skip("network policies: this cluster's network does not enforce them")
    assert open_ports(NAMESPACE, address) == {8000, 9000}
    run("kubectl", "label", "namespace", TOOLS, "attend-client=true")
    try:
        wait_for("a namespace with the label may call", lambda: open_ports(TOOLS, address) == {8000, 9000}, 60)
    finally:
        run("kubectl", "label", "namespace", TOOLS, "attend-client-")


def secret(name: str, **data: str) -> dict[str, Any]:
    """A Secret."""
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": data}


def new_key(name: str, file: Path) -> str:
    """A key, made as its page says and given to the cluster as the Secret."""
    key = run(str(Path(sys.executable).with_name("attend")), "keys", "add", name, "--file", str(file)).split()[-1]
    make(secret("attend-api-keys", keys=file.read_text()))
    return key


def test_keys_of_a_secret_and_a_new_one_without_a_restart(mode, tmp_path):
    only(mode, "standalone")
    first = new_key("one", tmp_path / "keys")
    helm("upgrade", mode, "--set", "keys.existingSecret=attend-api-keys")
    rolled_out()

    def status(key: str) -> int:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        body = {"prompt": "a", "max_tokens": 1}
        return httpx.post(f"{http}/v1/completions", json=body, headers=headers, timeout=60).status_code

    with forwarded() as (http, _):
        assert (status(""), status(first)) == (401, 200)
        second = new_key("two", tmp_path / "keys")
        wait_for("the new key is taken", lambda: status(second) == 200, 180)
    helm("upgrade", mode, "--set", "keys.existingSecret=")
    rolled_out()


def test_the_autoscaler_begins_with_the_live_number_and_adds(mode):
    only(mode, "standalone")
    if subprocess.run(["kubectl", "top", "nodes"], capture_output=True).returncode != 0:
        pytest.skip("autoscaler: metrics-server is not installed")
    kubectl("scale", "deployment/attend", "--replicas=3")
    wait_for("three pods", lambda: is_whole(3), 120)
    with row(mode, "autoscaler") as seen:
        smallest: list[int] = []
        helm("upgrade", mode, "--set", "autoscaling.enabled=true,autoscaling.maxReplicas=4,autoscaling.cpuPercent=20")

        def grown() -> bool:
            smallest.append(objects("get", "deployment", "attend")[0]["spec"]["replicas"])
            return len(ready_addresses()) > 3

        wait_for("a fourth pod serves", grown, 360)
        seen.ready = time.monotonic() - seen.began
    assert min(smallest) >= 3, "turning the autoscaler on took pods away"


def start_redis() -> str:
    """HOST:PORT of a Redis in the cluster; skips where none can be had."""
    if given := os.environ.get("REDIS"):
        return given
    image = os.environ.get("REDIS_IMAGE", "redis:7")
    words = ("run", "redis", f"--image={image}", "--port=6379", "--expose", "--", "--requirepass", "secret")
    kubectl(*words, namespace=REDIS_SPACE)
    try:
        wait_for("Redis is ready", lambda: is_ready(objects("get", "pod", "redis", namespace=REDIS_SPACE)[0]), 120)
    except AssertionError:
        pytest.skip(f"Redis: no pod of {image} became ready; REDIS=HOST:PORT names one, REDIS_IMAGE another image")
    return f"redis.{REDIS_SPACE}:6379"


def test_an_idle_service_is_gone_soon(mode):
    seen = Seen(mode, "uninstall")
    TABLE.append(seen)
    run("helm", "uninstall", "attend", "--namespace", NAMESPACE)
    wait_for("no pod of Attend", lambda: not our_pods(), 1000)
    seen.ready = time.monotonic() - seen.began
    seen.judge()


def test_a_killed_head_with_redis_costs_nothing(cluster):
    needs_kuberay()
    address = start_redis()
    make(secret("attend-redis", password=os.environ.get("REDIS_PASSWORD", "secret")))
    space = os.environ.get("REDIS_NAMESPACE", REDIS_SPACE)

    def with_its_head() -> bool:
        """All replicas ready, and the head."""
        return is_whole() and any(map(is_ready, serving_pods("head")))

    try:
        install("rayservice", "--set", f"redis.address={address}", "--set", f"redis.namespace={space}")
        with row("rayservice", "SIGKILL of the head, with Redis") as seen:
            kill_container(serving_pods("head")[0])
            seen.until(with_its_head)
    finally:
        run("helm", "uninstall", "attend", "--namespace", NAMESPACE, "--ignore-not-found")
        # A job of KubeRay's clears Redis first: without its namespace it never would, and that would never end.
        wait_for("KubeRay has cleared Redis", lambda: not objects("get", "rayclusters"), 900)

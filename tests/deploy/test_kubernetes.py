"""The chart on a real cluster of two nodes or more, with callers in pods.

    make test-kubernetes KUBECONFIG=FILE IMAGE=REPOSITORY:TAG

The nodes have the image or can pull it. LIMITS has what each row may cost; a table of what it cost is printed at the end. Rows
that need KubeRay, Redis or metrics-server are skipped where these are missing. Further variables: NEW_IMAGE, another reference
for the update (by default the same image by its whole name, or by its digest); REDIS, HOST:PORT of a Redis in the cluster, with
REDIS_NAMESPACE and REDIS_PASSWORD (by default one of REDIS_IMAGE, redis:7, is started). It makes the namespaces attend-test,
attend-test-redis and attend-test-tools, which is privileged since it kills processes of a node, and removes them.
"""

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

ROOT = Path(__file__).parents[2]
NAMESPACE, TOOLS, REDIS_SPACE = "attend-test", "attend-test-tools", "attend-test-redis"
IMAGE, NEW_IMAGE = os.environ.get("IMAGE", ""), os.environ.get("NEW_IMAGE", "")
REPLICAS = 2
ENDPOINTS = ("get", "endpointslices", "-l", "kubernetes.io/service-name=attend-serve-svc")

if not (IMAGE and os.environ.get("KUBECONFIG")):
    reason = "no cluster is given: make test-kubernetes KUBECONFIG=FILE IMAGE=REPOSITORY:TAG"
    pytest.skip(reason, allow_module_level=True)
pytestmark = pytest.mark.timeout(1800)

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


def run(*words: str, stdin: str = "", timeout: float = 120) -> str:
    """Output of a program. Raises AssertionError with its error text where it fails."""
    done = subprocess.run(words, input=stdin, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr[-2000:]}{done.stdout[-500:]}"
    return done.stdout


def kubectl(*words: str, namespace: str = NAMESPACE, **options: Any) -> str:
    """Output of kubectl, in a namespace."""
    return run("kubectl", "--namespace", namespace, *words, **options)


def objects(*words: str, namespace: str = NAMESPACE) -> list[dict[str, Any]]:
    """The objects that `kubectl get` finds."""
    found = json.loads(kubectl(*words, "-o", "json", namespace=namespace))
    return found.get("items", [found])


def make(*documents: dict[str, Any], namespace: str = NAMESPACE) -> None:
    """Make or change objects."""
    kubectl("apply", "-f", "-", namespace=namespace, stdin="\n---\n".join(map(json.dumps, documents)))


def wait_for(what: str, holds: Callable[[], bool], seconds: float) -> None:
    """Wait until it holds. Raises AssertionError with the sentence, and the pods as they are, where it does not in time."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"not within {seconds:.0f} s: {what}\n{kubectl('get', 'pods', '-o', 'wide')}"
        time.sleep(1)


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


def pod(name: str, command: list[str], **spec: Any) -> dict[str, Any]:
    """A pod of the image, restricted unless `spec` says otherwise."""
    own = {"runAsNonRoot": True, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    container = {
        "name": "main",
        "image": IMAGE,
        "command": command,
        "securityContext": spec.pop("security", own | {"seccompProfile": {"type": "RuntimeDefault"}}),
        "volumeMounts": spec.pop("mounts", []),
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": "attend-test"}},
        "spec": {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [container], **spec},
    }


def serving_pods() -> list[dict[str, Any]]:
    """The pods that hold replicas and are not ending."""
    found = objects("get", "pods", "-l", "app.kubernetes.io/name=attend")
    return [
        each
        for each in found
        if not each["metadata"].get("deletionTimestamp")
        and each["status"].get("phase") not in ("Succeeded", "Failed")
        and each["metadata"]["labels"].get("ray.io/node-type", "worker") == "worker"
    ]


def is_ready(each: dict[str, Any]) -> bool:
    """True if a pod's condition Ready is true."""
    return any(item["type"] == "Ready" and item["status"] == "True" for item in each["status"].get("conditions", []))


def ready_addresses() -> set[str]:
    """The addresses to which the Service leads calls."""
    return {
        address
        for part in objects(*ENDPOINTS)
        for each in part.get("endpoints") or []
        if each["conditions"].get("ready")
        for address in each["addresses"]
    }


def is_whole(replicas: int = REPLICAS) -> bool:
    """True if each serving pod is ready and led to, there are enough of them, and one may be evicted again."""
    pods = serving_pods()
    budgets = objects("get", "poddisruptionbudgets")
    return (
        len(pods) >= replicas
        and all(map(is_ready, pods))
        and len(ready_addresses()) >= replicas
        and bool(budgets)
        and all(each["status"].get("disruptionsAllowed", 0) >= 1 for each in budgets)
    )


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

    def until_whole(self, replicas: int = REPLICAS) -> None:
        """Wait for it, by the row's limit and half as long again, so that the table has the number."""
        limit = LIMITS[self.row][2]
        wait_for("all replicas ready, and a pod may be evicted", lambda: is_whole(replicas), limit * 1.5)
        self.ready = time.monotonic() - self.began

    def judge(self) -> None:
        """Raises AssertionError where it is beyond the row's limits."""
        failed, longest, ready = LIMITS[self.row]
        assert len(self.errors) <= failed, f"{len(self.errors)} of {self.calls} calls failed: {self.errors[:8]}"
        assert self.longest <= longest
        assert self.ready <= ready


TABLE: list[Seen] = []


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


# The cluster and the release


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Names of the nodes that take pods, with the namespaces made; at the end these are removed and the table is printed."""
    os.environ["PATH"] += os.pathsep + str(Path(sys.executable).parent)
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
    seen.until_whole()
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


@contextmanager
def forwarded() -> Iterator[tuple[str, str]]:
    """Addresses here of the Service's HTTP and gRPC ports."""
    words = ["kubectl", "-n", NAMESPACE, "port-forward", "service/attend-serve-svc", ":8000", ":9000"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ports: dict[str, str] = {}
        try:
            while len(ports) < 2:
                line = process.stdout.readline()
                assert line, "kubectl port-forward has ended"
                if found := re.search(r"127\.0\.0\.1:(\d+) -> (\d+)", line):
                    ports[found[2]] = found[1]
            yield f"http://127.0.0.1:{ports['8000']}", f"127.0.0.1:{ports['9000']}"
        finally:
            process.terminate()


def output_of(each: dict[str, Any], namespace: str) -> tuple[str, str]:
    """The phase and the log of a pod of ours that is made, ends and is removed."""
    name = each["metadata"]["name"]
    make(each, namespace=namespace)

    def phase() -> str:
        return str(objects("get", "pod", name, namespace=namespace)[0]["status"].get("phase"))

    wait_for(f"the pod {name} has ended", lambda: phase() in ("Succeeded", "Failed"), 120)
    end, said = phase(), kubectl("logs", name, namespace=namespace)
    kubectl("delete", "pod", name, "--wait", namespace=namespace)
    return end, said


KILL = """
import os, sys, glob
for path in glob.glob("/proc/[0-9]*"):
    try:
        own, status = open(path + "/cgroup").read(), open(path + "/status").read()
        if any(each in own for each in sys.argv[1:]) and status.split("NSpid:")[1].splitlines()[0].split()[-1] == "1":
            os.kill(int(path[6:]), 9)
            print("killed", path)
    except (OSError, IndexError):
        pass
"""


def kill_container(each: dict[str, Any]) -> None:
    """SIGKILL to the first process of a pod's container, by a privileged pod on its node."""
    ids = [status["containerID"].rpartition("/")[2] for status in each["status"]["containerStatuses"]]
    root = {"privileged": True, "runAsUser": 0, "runAsNonRoot": False}
    killer = pod("killer", ["python3", "-c", KILL, *ids], nodeName=each["spec"]["nodeName"], hostPID=True, security=root)
    _, said = output_of(killer, TOOLS)
    assert "killed" in said, f"no process of the container was found on its node: {ids}"
    wait_for("the killed container is another or gone", lambda: not has_container(each["metadata"]["name"], ids[0]), 120)


def has_container(name: str, ident: str) -> bool:
    """True if the pod is there, with that container running."""
    pods = [each for each in objects("get", "pods") if each["metadata"]["name"] == name]
    held = [status for each in pods for status in each["status"].get("containerStatuses", [])]
    return any("running" in status["state"] and status["containerID"].endswith(ident) for status in held)


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


def test_a_restart(mode):
    only(mode, "standalone")
    with row(mode, "restart") as seen:
        kubectl("rollout", "restart", "deployment/attend")
        kubectl("rollout", "status", "deployment/attend", "--timeout=600s", timeout=660)
        seen.until_whole()


def generation(mode: str) -> str:
    """What tells one generation of pods from the next: the Deployment's template, or the RayService's active cluster."""
    if mode == "standalone":
        return str(objects("get", "deployment", "attend")[0]["status"].get("observedGeneration"))
    return str(objects("get", "rayservice", "attend")[0]["status"].get("activeServiceStatus", {}).get("rayClusterName"))


def update(mode: str, name: str, change: Callable[[], None]) -> None:
    """A change that replaces every pod, under callers, until the new generation alone serves."""
    with row(mode, name) as seen:
        before = generation(mode)
        change()
        if mode == "standalone":
            kubectl("rollout", "status", "deployment/attend", "--timeout=600s", timeout=660)
        wait_for("the new generation is the active one", lambda: generation(mode) != before, 600)
        seen.until_whole()


def test_a_new_tag(mode):
    new = other_name(IMAGE)
    update(mode, "new tag", lambda: helm("upgrade", mode, *image_values(new)))


def test_a_changed_setting_and_the_way_back(mode):
    update(mode, "changed setting", lambda: helm("upgrade", mode, "--set", "settings.log_level=debug"))
    update(mode, "roll back", lambda: run("helm", "rollback", "attend", "--namespace", NAMESPACE))


def test_each_node_is_drained_in_turn(mode, cluster):
    held = [node for node in cluster if any(each["spec"].get("nodeName") == node for each in serving_pods())]
    for name, node in zip(("drain of a node", "drain of the next node"), (held * 2)[:2], strict=True):
        with row(mode, name) as seen:
            words = ("--pod-selector", "app.kubernetes.io/name=attend", "--delete-emptydir-data", "--ignore-daemonsets")
            try:
                run("kubectl", "drain", node, *words, "--timeout=900s", timeout=960)
            finally:
                run("kubectl", "uncordon", node)
            seen.until_whole()


def test_a_killed_container(mode):
    with row(mode, "SIGKILL of a pod") as seen:
        kill_container(serving_pods()[0])
        seen.until_whole()


def head() -> dict[str, Any]:
    """The pod of the head."""
    return objects("get", "pods", "-l", "app.kubernetes.io/name=attend,ray.io/node-type=head")[-1]


def test_a_killed_head(mode):
    only(mode, "rayservice")
    with row(mode, "SIGKILL of the head") as seen:
        kill_container(head())
        with suppress(AssertionError):
            wait_for("the service has noticed", lambda: not is_whole(), 60)
        seen.until_whole()


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
    kubectl("rollout", "status", "deployment/attend", "--timeout=600s", timeout=660)

    def status(key: str) -> int:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        body = {"prompt": "a", "max_tokens": 1}
        return httpx.post(f"{http}/v1/completions", json=body, headers=headers, timeout=60).status_code

    with forwarded() as (http, _):
        assert (status(""), status(first)) == (401, 200)
        second = new_key("two", tmp_path / "keys")
        wait_for("the new key is taken", lambda: status(second) == 200, 180)
    helm("upgrade", mode, "--set", "keys.existingSecret=")
    kubectl("rollout", "status", "deployment/attend", "--timeout=600s", timeout=660)


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
    wait_for("no pod of Attend", lambda: not objects("get", "pods", "-l", "app.kubernetes.io/name=attend"), 1000)
    seen.ready = time.monotonic() - seen.began
    seen.judge()


def test_a_killed_head_with_redis_costs_nothing(cluster):
    needs_kuberay()
    address = start_redis()
    make(secret("attend-redis", password=os.environ.get("REDIS_PASSWORD", "secret")))
    space = os.environ.get("REDIS_NAMESPACE", REDIS_SPACE)
    try:
        install("rayservice", "--set", f"redis.address={address}", "--set", f"redis.namespace={space}")
        with row("rayservice", "SIGKILL of the head, with Redis") as seen:
            kill_container(head())
            seen.until_whole()
            assert is_ready(head())
    finally:
        run("helm", "uninstall", "attend", "--namespace", NAMESPACE, "--ignore-not-found")

"""What a real cluster has of Attend, as kubectl tells it, and pods of tests in it."""

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

NAMESPACE, TOOLS, REDIS_SPACE = "attend-test", "attend-test-tools", "attend-test-redis"
IMAGE = os.environ.get("IMAGE", "")
REPLICAS = 2
OURS = {("app.kubernetes.io/name", "attend"), ("app", "attend")}
"""The label of the Deployment's pods, and of Ray's."""
ENDPOINTS = ("get", "endpointslices", "-l", "kubernetes.io/service-name=attend-serve-svc")


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
    items: list[dict[str, Any]] = found.get("items", [found])
    return items


def make(*documents: dict[str, Any], namespace: str = NAMESPACE) -> None:
    """Make or change objects."""
    kubectl("apply", "-f", "-", namespace=namespace, stdin="\n---\n".join(map(json.dumps, documents)))


def wait_for(what: str, holds: Callable[[], bool], seconds: float) -> None:
    """Wait until it holds. Raises AssertionError with the sentence, and the pods as they are, where it does not in time."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"not within {seconds:.0f} s: {what}\n{kubectl('get', 'pods', '-o', 'wide')}"
        time.sleep(1)


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


def our_pods() -> list[dict[str, Any]]:
    """Attend's pods, also those that end."""
    return [each for each in objects("get", "pods") if OURS & each["metadata"].get("labels", {}).items()]


def is_ending(each: dict[str, Any]) -> bool:
    """True if a pod is to end, or has ended."""
    return "deletionTimestamp" in each["metadata"] or each["status"].get("phase") in ("Succeeded", "Failed")


def serving_pods(node: str = "worker") -> list[dict[str, Any]]:
    """The pods that hold replicas and are not ending; or those of another type of Ray's nodes."""
    of_type = [each for each in our_pods() if each["metadata"]["labels"].get("ray.io/node-type", "worker") == node]
    return [each for each in of_type if not is_ending(each)]


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
    """All replicas ready in pods of their own, old ones told to end, and one may be evicted."""
    pods = serving_pods()
    labels = [each["metadata"]["labels"].items() for each in pods]
    # Budgets of earlier generations stay, and allow nothing.
    budgets = [
        each
        for each in objects("get", "poddisruptionbudgets")
        if any(each["spec"]["selector"]["matchLabels"].items() <= own for own in labels)
    ]
    return (
        len(pods) == replicas
        and all(map(is_ready, pods))
        and len(ready_addresses()) >= replicas
        and bool(budgets)
        and all(each["status"].get("disruptionsAllowed", 0) >= 1 for each in budgets)
    )


def active() -> dict[str, Any]:
    """What the RayService says of its active cluster."""
    status: dict[str, dict[str, Any]] = objects("get", "rayservice", "attend")[0].get("status", {})
    return status.get("activeServiceStatus", {})


def is_served() -> bool:
    """Serve has all its replicas, which may share a worker, and the Service leads to a ready one."""
    application = active().get("applicationStatuses", {}).get("default", {})
    states = [each["status"] for each in application.get("serveDeploymentStatuses", {}).values()]
    return states == ["HEALTHY"] and any(map(is_ready, serving_pods())) and bool(ready_addresses())


def all_gone() -> None:
    """Wait until the pods that end are gone."""
    wait_for("the old pods are gone", lambda: not any("deletionTimestamp" in each["metadata"] for each in our_pods()), 300)


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

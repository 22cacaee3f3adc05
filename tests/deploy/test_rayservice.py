"""The RayService: what must agree between its parts, with KubeRay and Ray, beside what `check.py` asks of each rendering."""

import importlib.util
from pathlib import Path

from tests.deploy.manifests import (
    cluster,
    pods,
    ray_env,
    rayservice,
    serve,
)

application = serve["applications"][0]
containers = [pod["containers"][0] for pod in pods]


def test_attend_ends_a_request_before_anything_below_it_does():
    longest = application["args"]["request_timeout_seconds"]
    for limit in (
        serve["http_options"]["request_timeout_s"],
        serve["grpc_options"]["request_timeout_s"],
        int(ray_env["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]),
        int(ray_env["RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S"]),
    ):
        assert longest < limit


def test_no_replica_runs_on_the_head():
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert rayservice["spec"]["excludeHeadPodFromServeSvc"] is True


def test_settings_are_checked_before_ray_starts():
    """A wrong one ends this container, and its sentence is the pod's termination message."""
    for pod in pods:
        [check] = pod["initContainers"]
        assert check["command"] == ["attend", "inspect"]
        assert check["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_head_and_workers_differ_in_no_setting():
    checks = [container for pod in pods for container in pod["initContainers"]]
    assert all(container["envFrom"] == containers[0]["envFrom"] for container in (*containers, *checks))
    assert all("env" not in container for container in containers)


def test_kubernetes_writes_no_attend_variable_of_its_own():
    """A Service called attend would set ATTEND_PORT=tcp://... in each pod of the namespace."""
    assert all(pod["enableServiceLinks"] is False for pod in pods)


def test_ray_reads_each_variable():
    """Ray ignores a misspelt one in silence."""
    ray = Path(importlib.util.find_spec("ray").origin).parent
    sources = ["serve/_private/constants.py", "_private/ray_constants.py", "_common/usage/usage_constants.py"]
    in_python = "".join((ray / source).read_text() for source in sources)
    in_cpp = (ray / "core/src/ray/gcs/gcs_server").read_bytes()
    names = [name for name in ray_env if name.startswith("RAY_")]
    assert [name for name in names if f'"{name}"' not in in_python and name.encode() not in in_cpp] == []

"""The RayService: what must agree between its parts, and with KubeRay, Ray and the package."""

import importlib.util
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.deploy.manifests import (
    BASE,
    DOCKERFILE,
    ROOT,
    attend_env,
    cluster,
    constraint,
    groups,
    pods,
    ray_env,
    rayservice,
    serve,
)

application = serve["applications"][0]
deployment = application["deployments"][0]
[workers] = cluster["workerGroupSpecs"]
containers = [pod["containers"][0] for pod in pods]
ports = [{port["name"]: port["containerPort"] for port in container["ports"]} for container in containers]
worker_cpus = int(containers[1]["resources"]["requests"]["cpu"])
EXIT_SECONDS = 20  # from the end of a node's drain to the end of `ray start`: 17 were measured
REPLICA_CPUS = 1  # what attend.service.runtime.deployment.build asks Ray for


def pre_stop(pod):
    command = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert command[0] == "sleep"
    return int(command[1])


def test_longest_request_fits_the_drain_fits_the_nodes_drain_fits_the_deletion_delay():
    longest = application["args"]["request_timeout_seconds"]
    drain = application["args"]["drain_seconds"]
    node_drain = int(ray_env["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
    assert longest <= drain <= node_drain
    for pod in pods:
        grace = pod["terminationGracePeriodSeconds"]
        assert pre_stop(pod) + node_drain + EXIT_SECONDS <= grace <= rayservice["spec"]["rayClusterDeletionDelaySeconds"]


def test_a_node_that_leaves_gives_the_successors_of_its_replicas_five_minutes_to_load():
    """Serve stops a replica on a draining node as soon as no more is left of the node's drain than the replica's own."""
    own = application["args"]["drain_seconds"] + 1
    assert int(ray_env["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]) - own >= 300


def test_attend_ends_a_request_before_anything_below_it_does():
    longest = application["args"]["request_timeout_seconds"]
    for limit in (
        serve["http_options"]["request_timeout_s"],
        serve["grpc_options"]["request_timeout_s"],
        int(ray_env["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]),
        int(ray_env["RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S"]),
    ):
        assert longest < limit


def test_a_replicas_drain_and_its_reachable_period_fit_the_nodes_drain():
    reachable = int(ray_env["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"])
    node_drain = int(ray_env["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
    assert application["args"]["drain_seconds"] + 1 + reachable <= node_drain  # the builder gives Serve one second more


def test_the_head_lives_as_long_as_the_workers_that_need_it():
    head, worker = (pod["terminationGracePeriodSeconds"] for pod in pods)
    assert head >= worker


def test_an_update_with_its_surge_fits_the_workers():
    replicas = deployment["num_replicas"] * (1 + deployment["max_surge_percent"] / 100)
    assert replicas * REPLICA_CPUS <= workers["replicas"] * worker_cpus, "the new replicas would wait for ever"


def test_the_kv_caches_of_an_update_leave_half_of_a_pods_memory():
    in_a_pod = worker_cpus / REPLICA_CPUS
    memory = int(containers[1]["resources"]["limits"]["memory"].removesuffix("Gi")) << 30
    assert in_a_pod * int(attend_env["ATTEND_KV_CACHE_MEMORY"]) <= memory / 2


def test_a_replica_has_as_many_threads_as_its_pod_has_cpus():
    assert int(attend_env["ATTEND_NUM_THREADS"]) == worker_cpus


def test_kuberay_finds_the_ports_by_name_on_every_pod():
    for named in ports:
        assert named["serve"] == serve["http_options"]["port"] == 8000
        assert named["serve-grpc"] == serve["grpc_options"]["port"] == 9000
        assert named["metrics"] == 8080


def test_the_serve_service_names_the_containers_ports():
    service = {port["name"]: port["targetPort"] for port in rayservice["spec"]["serveService"]["spec"]["ports"]}
    assert service == {name: port for name, port in ports[0].items() if name.startswith("serve")}


def test_no_replica_runs_on_the_head():
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert rayservice["spec"]["excludeHeadPodFromServeSvc"] is True


def test_settings_are_checked_before_ray_starts():
    """A wrong one ends this container, and its sentence is the pod's termination message."""
    for pod in pods:
        [check] = pod["initContainers"]
        assert check["command"] == ["attend", "inspect"]
        assert check["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_kuberay_places_its_own_probes():
    for container in containers:
        assert not {"livenessProbe", "readinessProbe"} & container.keys()


def test_head_and_workers_differ_in_no_setting():
    checks = [container for pod in pods for container in pod["initContainers"]]
    assert all(container["envFrom"] == containers[0]["envFrom"] for container in (*containers, *checks))
    assert all("env" not in container for container in containers)


def test_kubernetes_writes_no_attend_variable_of_its_own():
    """A Service called attend would set ATTEND_PORT=tcp://... in each pod of the namespace."""
    assert all(pod["enableServiceLinks"] is False for pod in pods)


def test_rays_control_plane_asks_for_a_token():
    assert cluster["authOptions"] == {"mode": "token"}


def test_pods_run_the_haproxy_that_the_image_holds():
    settings = yaml.safe_load((BASE / "kustomization.yaml").read_text())["configMapGenerator"][0]
    [path] = [line.partition("=")[2] for line in settings["literals"] if line.startswith("RAY_SERVE_HAPROXY_BINARY_PATH=")]
    assert path == "/opt/attend/edge/haproxy"
    assert "/opt/attend/edge" in DOCKERFILE


def test_the_fast_data_plane_is_on():
    assert ray_env["RAY_SERVE_ENABLE_HA_PROXY"] == ray_env["RAY_SERVE_THROUGHPUT_OPTIMIZED"] == "1"


@pytest.mark.parametrize("name", [name for name in ray_env if name.startswith("RAY_")])
def test_ray_reads_each_variable(name):
    """Ray ignores a misspelt one in silence."""
    ray = Path(importlib.util.find_spec("ray").origin).parent
    sources = ["serve/_private/constants.py", "_private/ray_constants.py", "_common/usage/usage_constants.py"]
    own = name.encode() in (ray / "core/src/ray/gcs/gcs_server").read_bytes()  # of its part in C++
    assert own or any(f'"{name}"' in (ray / source).read_text() for source in sources)


def test_ray_version_is_the_pinned_one():
    assert cluster["rayVersion"] == constraint("ray")


def test_every_pod_runs_the_image_of_this_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    images = {container["image"] for pod in pods for container in (*pod["initContainers"], *pod["containers"])}
    assert images == {f"attend:{version}"}


def test_pods_carry_the_label_that_the_policies_select():
    label = {"app.kubernetes.io/name": "attend"}
    assert all(group["template"]["metadata"]["labels"] == label for group in groups)
    policy = yaml.safe_load((BASE / "networkpolicy.yaml").read_text())
    budget = yaml.safe_load((BASE / "pdb.yaml").read_text())
    assert policy["spec"]["podSelector"]["matchLabels"] == label
    assert label.items() <= budget["spec"]["selector"]["matchLabels"].items()

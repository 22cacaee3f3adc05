"""The RayService: what must agree between its parts, and with KubeRay, Ray and the package."""

import importlib.util
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.deploy.manifests import BASE, ROOT, attend_env, cluster, constraint, groups, pods, ray_env, rayservice, serve

application = serve["applications"][0]
deployment = application["deployments"][0]
[workers] = cluster["workerGroupSpecs"]
containers = [pod["containers"][0] for pod in pods]
ports = [{port["name"]: port["containerPort"] for port in container["ports"]} for container in containers]
worker_cpus = int(containers[1]["resources"]["requests"]["cpu"])
EXIT_SECONDS = 20  # from the end of a node's drain to the end of `ray start`: 17 were measured
REPLICA_CPUS = 1  # what service.deployment.build asks Ray for


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


def test_attend_ends_a_request_before_anything_below_it_does():
    longest = application["args"]["request_timeout_seconds"]
    for limit in (
        serve["http_options"]["request_timeout_s"],
        serve["grpc_options"]["request_timeout_s"],
        int(ray_env["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]),
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


def test_kuberay_places_its_own_probes():
    for container in containers:
        assert not {"livenessProbe", "readinessProbe"} & container.keys()


def test_head_and_workers_differ_in_no_setting():
    assert all(container["envFrom"] == containers[0]["envFrom"] for container in containers)
    assert all("env" not in container for container in containers)


def test_kubernetes_writes_no_attend_variable_of_its_own():
    """A Service called attend would set ATTEND_PORT=tcp://... in each pod of the namespace."""
    assert all(pod["enableServiceLinks"] is False for pod in pods)


def test_pods_are_restricted_and_their_root_is_read_only():
    for pod, container in zip(pods, containers, strict=True):
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"]


def test_rays_control_plane_asks_for_a_token():
    assert cluster["authOptions"] == {"mode": "token"}


def test_the_fast_data_plane_is_on():
    assert ray_env["RAY_SERVE_ENABLE_HA_PROXY"] == ray_env["RAY_SERVE_THROUGHPUT_OPTIMIZED"] == "1"


@pytest.mark.parametrize("name", [name for name in ray_env if name.startswith("RAY_")])
def test_ray_reads_each_variable(name):
    """Ray ignores a misspelt one in silence."""
    ray = Path(importlib.util.find_spec("ray").origin).parent
    sources = ["serve/_private/constants.py", "_private/ray_constants.py", "_common/usage/usage_constants.py"]
    assert any(f'"{name}"' in (ray / source).read_text() for source in sources)


def test_ray_version_is_the_pinned_one():
    assert cluster["rayVersion"] == constraint("ray")


def test_every_pod_runs_the_image_of_this_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert {container["image"] for container in containers} == {f"attend:{version}"}


def test_pods_carry_the_label_that_the_policies_select():
    label = {"app.kubernetes.io/name": "attend"}
    assert all(group["template"]["metadata"]["labels"] == label for group in groups)
    policy = yaml.safe_load((BASE / "networkpolicy.yaml").read_text())
    budget = yaml.safe_load((BASE / "pdb.yaml").read_text())
    assert policy["spec"]["podSelector"]["matchLabels"] == label
    assert label.items() <= budget["spec"]["selector"]["matchLabels"].items()


def test_strangers_reach_only_the_served_ports():
    policy = yaml.safe_load((BASE / "networkpolicy.yaml").read_text())
    rules = policy["spec"]["ingress"]
    assert [sorted(port["port"] for port in rule.get("ports", [])) for rule in rules] == [[], [8000, 9000], [8265], [8080]]
    assert rules[0]["from"] == [{"podSelector": policy["spec"]["podSelector"]}]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="NOT RENDERED: there is no kubectl to run kustomize")
def test_a_rendering_points_every_container_at_the_hashed_configmap():
    command = ["kubectl", "kustomize", str(BASE)]
    text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    objects = {doc["kind"]: doc for doc in yaml.safe_load_all(text)}
    settings = objects["ConfigMap"]["metadata"]["name"]
    assert settings.startswith("attend-settings-")
    rendered = objects["RayService"]["spec"]["rayClusterConfig"]
    for group in [rendered["headGroupSpec"], *rendered["workerGroupSpecs"]]:
        assert group["template"]["spec"]["containers"][0]["envFrom"] == [{"configMapRef": {"name": settings}}]
    assert objects["ConfigMap"]["data"].items() >= ray_env.items()

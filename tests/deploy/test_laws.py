"""What a cluster would make of the renderings: evictions, places of pods, who calls whom."""

import os

import pytest

from attend.service.runtime.sizes import gpus_per_rank, placement_options
from attend.service.settings import read_settings
from tests.deploy import render
from tests.deploy.kubernetes import Peer, disruptions_allowed, matches, reaches

pytestmark = pytest.mark.skipif(not render.can_render() and not os.environ.get("CI"), reason=render.MISSING)
GPU, HA, IN_PLACE = "chart gpu", "chart gpu-ha", "chart gpu-in-place"
RAY = [folder for folder in render.RENDERED if "standalone" not in folder]
each_rendering = pytest.mark.parametrize("folder", render.RENDERED)


def cluster_of(objects):
    [service] = render.of_kind(objects, "RayService")
    return service["spec"]["rayClusterConfig"]


# --- a node is drained


def healthy_pods(objects, budget):
    """(how many pods of a budget there are at least, what a scale subresource says of them)."""
    selector = budget["spec"]["selector"]
    for scaler in render.of_kind(objects, "HorizontalPodAutoscaler", "ScaledObject"):
        fewest = scaler["spec"].get("minReplicas") or scaler["spec"]["minReplicaCount"]
        return fewest, fewest
    for deployment in render.of_kind(objects, "Deployment"):
        return deployment["spec"]["replicas"], deployment["spec"]["replicas"]
    [worker] = [pods for pods in render.pods_of(objects) if pods.owner == "RayService worker"]
    assert matches(selector, worker.labels)
    return cluster_of(objects)["workerGroupSpecs"][0]["minReplicas"], None  # RayCluster has no scale


@each_rendering
def test_a_drain_may_take_one_pod_at_a_time(folder):
    objects = render.render(folder)
    for budget in render.of_kind(objects, "PodDisruptionBudget"):
        healthy, wanted = healthy_pods(objects, budget)
        assert disruptions_allowed(budget, healthy, wanted) == 1
        assert disruptions_allowed(budget, healthy - 1, wanted) == 0, "and the next one waits for its successor"


# --- who calls whom


ATTEND = {True: (("app", "attend"),), False: (("app.kubernetes.io/name", "attend"),)}
"""Of Ray's pods, and of the Deployment's."""
CLIENT = (("attend-client", "true"),)


def home(objects):
    """The namespace of the objects; helm's is not written into them, and the model calls that `default`."""
    return render.of_kind(objects, "NetworkPolicy")[0]["metadata"].get("namespace", "default")


def pod(objects, node=None):
    """A pod of ours: of a node of Ray, or of the Deployment."""
    return Peer(home(objects), (*ATTEND[bool(node)], *((("ray.io/node-type", node),) if node else ())))


def serving(folder, objects):
    return pod(objects, "worker" if folder in RAY else None)


CLOSED = (6379, 8080, 8265, 8404, 8500, 9101, 9500, 10001, 30000, 40000, 52365)
"""Ports that answer past HAProxy, or that run code: of Ray's nodes, proxies and replicas."""


@each_rendering
def test_others_reach_the_served_ports_alone_and_only_from_near_or_labelled_namespaces(folder):
    objects = render.render(folder)
    target = serving(folder, objects)
    near, labelled = Peer(home(objects), (("app", "caller"),)), Peer("gateway-proxies", space=CLIENT)
    for port in (8000, 9000, *CLOSED):
        assert reaches(objects, near, target, port) == reaches(objects, labelled, target, port) == (port not in CLOSED), port
        assert folder not in RAY or reaches(objects, pod(objects, "head"), target, port), (
            "Ray's own pods are open to each other"
        )
        assert not reaches(objects, Peer("elsewhere"), target, port)
    assert [reaches(objects, Peer("monitoring"), target, port) for port in (8000, 9000)] == [True, False]


@pytest.mark.parametrize("folder", RAY)
@pytest.mark.parametrize("name", ["kuberay-operator", "kuberay"], ids=["helm", "kustomize"])
def test_the_operator_reaches_the_dashboard_however_it_was_installed(folder, name):
    objects = render.render(folder)
    operator = (("app.kubernetes.io/component", "kuberay-operator"), ("app.kubernetes.io/name", name))
    assert reaches(objects, Peer("kuberay-system", operator), pod(objects, "head"), 8265)


@each_rendering
def test_the_pods_that_need_it_reach_the_api_server_and_the_hub_and_no_others(folder):
    """Ray's autoscaler on the head, and what downloads a checkpoint."""
    objects = render.render(folder)
    scaled = any(
        item["spec"]["rayClusterConfig"].get("enableInTreeAutoscaling") for item in render.of_kind(objects, "RayService")
    )
    hub = any(each["name"] == "weights" for pods in render.pods_of(objects) for each in pods.spec.get("initContainers", []))
    far = Peer("elsewhere")
    if folder in RAY:
        assert reaches(objects, pod(objects, "head"), far, 443) == scaled
    assert reaches(objects, serving(folder, objects), far, 443) == hub
    assert not reaches(objects, serving(folder, objects), far, 6443)
    assert not reaches(objects, serving(folder, objects), far, 80)


def test_the_head_alone_reaches_redis():
    objects = render.render(HA)
    redis = Peer("redis")
    assert reaches(objects, pod(objects, "head"), redis, 6379) and reaches(objects, pod(objects, "redis-cleanup"), redis, 6379)
    assert not reaches(objects, pod(objects, "worker"), redis, 6379)


@each_rendering
def test_spans_reach_the_collector_where_the_settings_name_one(folder):
    objects = render.render(folder)
    named = settings_of(objects).otel_endpoint
    assert (named == "http://collector.observability.svc:4318") == (folder == IN_PLACE)
    assert reaches(objects, serving(folder, objects), Peer("observability"), 4318) == bool(named)


# --- what KubeRay sets itself


KUBERAYS_OWN = {
    *("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_CLUSTER_NAME", "RAY_IP", "RAY_PORT", "FQ_RAY_IP"),
    *("RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "RAY_external_storage_namespace", "RAY_gcs_rpc_server_reconnect_timeout_s"),
    *("RAY_NODE_TYPE_NAME", "RAY_timeout_ms_task_wait_for_death_info", "RAY_gcs_server_request_timeout_seconds"),
    *("RAY_SERVE_KV_TIMEOUT_S", "RAY_USAGE_STATS_KUBERAY_IN_USE", "RAY_DASHBOARD_ENABLE_K8S_DISK_USAGE"),
}


@pytest.mark.parametrize("folder", RAY)
def test_no_variable_stands_where_kuberays_own_would_win_over_it(folder):
    """A variable of the container wins over one of a ConfigMap, in silence."""
    maps = render.of_kind(render.render(folder), "ConfigMap")
    assert maps and [item["data"].keys() & KUBERAYS_OWN for item in maps if item["data"].keys() & KUBERAYS_OWN] == []


# --- what a pod has


@pytest.mark.parametrize("folder", [folder for folder in RAY if folder.startswith("chart")])
def test_the_head_has_neither_weights_nor_a_gpu_nor_its_image(folder):
    head, worker = render.pods_of(render.render(folder))
    assert not any("persistentVolumeClaim" in volume for volume in head.spec["volumes"])
    assert not any("nvidia.com/gpu" in each["resources"]["limits"] for each in head.containers)
    assert "tolerations" not in head.spec and "nodeSelector" not in head.spec
    images = [{each["image"] for each in pods.containers} for pods in (head, worker)]
    assert images == [{"registry.example.com/attend:0.1.0"}, {"registry.example.com/attend:0.1.0-gpu"}]
    [check] = head.spec["initContainers"]
    settings = {each["name"]: each["value"] for each in check["env"]}
    assert settings == {"ATTEND_MODEL": "", "ATTEND_TENSOR_PARALLEL": ""}, "it would look for weights"


@pytest.mark.parametrize("folder", [folder for folder in render.RENDERED if folder not in RAY])
def test_a_standalone_pod_runs_ray_only_where_it_must_and_then_has_its_memory_and_gpus(folder):
    objects = render.render(folder)
    [pods] = render.pods_of(objects)
    settings, limits = settings_of(objects), pods.spec["containers"][0]["resources"]["limits"]
    ranks = settings.tensor_parallel * settings.replicas
    mounts = {mount["mountPath"] for mount in pods.spec["containers"][0]["volumeMounts"]}
    assert settings.single == (ranks == 1) == ("/dev/shm" not in mounts)
    assert int(limits.get("nvidia.com/gpu", ranks)) == ranks


@pytest.mark.parametrize("folder", RAY)
def test_a_replica_with_all_its_ranks_fits_on_one_worker(folder):
    """Its placement group is on one node, and no second replica fits. KubeRay tells Ray a worker's GPUs."""
    objects = render.render(folder)
    start = cluster_of(objects)["workerGroupSpecs"][0]["rayStartParams"]
    [worker] = [pods for pods in render.pods_of(objects) if pods.owner == "RayService worker"]
    settings, resources = settings_of(objects), worker.spec["containers"][0]["resources"]
    place = placement_options(settings, gpus_per_rank(settings, 0))
    wanted = place.get("placement_group_bundles") or [{"CPU": 1, "GPU": place["ray_actor_options"]["num_gpus"]}]
    assert len(wanted) == settings.tensor_parallel
    assert sum(bundle["CPU"] for bundle in wanted) == int(start["num-cpus"])
    assert sum(bundle.get("GPU", 0) for bundle in wanted) == int(resources["limits"].get("nvidia.com/gpu", 0))


def settings_of(objects):
    """What a pod of the cluster reads from its environment."""
    [data] = [
        each["data"] for each in render.of_kind(objects, "ConfigMap") if each["metadata"]["name"].startswith("attend-settings")
    ]
    return read_settings({}, data)

"""What a cluster would make of the renderings: evictions, places of pods, who calls whom, and what an overlay can change."""

import os
import shutil
import subprocess

import pytest
import yaml

from attend.service.runtime.place import gpus_wanted, place_wanted
from attend.service.settings import read_settings
from tests.deploy import render
from tests.deploy.check import problems
from tests.deploy.kubernetes import Node, Peer, disruptions_allowed, matches, place, reaches
from tests.deploy.manifests import ROOT

pytestmark = pytest.mark.skipif(
    render.renderer() is None and not os.environ.get("CI"), reason="NOT RENDERED: neither kustomize nor kubectl is installed"
)
ALONE = ("base/standalone", "overlays/standalone-gpu")
HA, EXAMPLE = "overlays/prod-gpu-ha", "overlays/example"
RAY = [folder for folder in render.RENDERED if folder not in ALONE]
OVERLAYS = [folder for folder in render.RENDERED if folder.startswith("overlays/")]
each_rendering = pytest.mark.parametrize("folder", render.RENDERED)


def cluster_of(objects):
    [service] = render.of_kind(objects, "RayService")
    return service["spec"]["rayClusterConfig"]


def serve_config(objects):
    [service] = render.of_kind(objects, "RayService")
    return yaml.safe_load(service["spec"]["serveConfigV2"])


# --- a node is drained


def healthy_pods(objects, budget):
    """(how many pods of a budget there are at least, what a scale subresource says of them)."""
    selector = budget["spec"]["selector"]
    for scaler in render.of_kind(objects, "HorizontalPodAutoscaler"):
        return scaler["spec"]["minReplicas"], scaler["spec"]["minReplicas"]
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


@pytest.mark.parametrize("folder", RAY)
def test_autoscalers_of_nodes_leave_the_heads_node_alone(folder):
    [head] = [pods for pods in render.pods_of(render.render(folder)) if pods.owner == "RayService head"]
    assert head.template["metadata"]["annotations"] == {
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
        "karpenter.sh/do-not-disrupt": "true",
    }


# --- where workers run


def workers(folder, cluster="a"):
    """(spec, labels) of a worker, with the labels that KubeRay adds."""
    [pods] = [pods for pods in render.pods_of(render.render(folder)) if pods.owner == "RayService worker"]
    return pods.spec, {**pods.labels, "ray.io/cluster": cluster}


def spread(nodes, folder, number, cluster="a"):
    """Places so many workers one after the other; returns how many of them each node has, and None's share is pending."""
    spec, labels = workers(folder, cluster)
    names = [node.name if node else None for node in (place(nodes, spec, labels) for _ in range(number))]
    return {name: names.count(name) for name in names}


def test_four_workers_on_four_machines_are_one_each():
    assert spread([Node(name, 1) for name in "abcd"], HA, 4) == {"a": 1, "b": 1, "c": 1, "d": 1}


def test_machines_without_gpus_hold_no_gpu_back():
    nodes = [Node("a", 2), Node("b", 2), *(Node(f"cpu-{i}", 0, labels={}) for i in range(3))]
    assert spread(nodes, HA, 4) == {"a": 2, "b": 2}


def test_two_machines_at_least_even_if_that_leaves_a_worker_pending():
    assert spread([Node("a", 8)], HA, 2) == {"a": 1, None: 1}
    assert spread([Node("a", 8)], "overlays/prod-gpu", 2) == {"a": 2}, "without -ha one machine is enough"


def test_the_second_cluster_of_an_upgrade_is_spread_by_itself():
    """The third machine is full of others' work: the first cluster's workers must not count against the second's."""
    nodes = [Node("a", 4), Node("b", 4), Node("c", 0)]
    assert spread(nodes, HA, 2, "old") == spread(nodes, HA, 2, "new") == {"a": 1, "b": 1}


# --- who calls whom


ATTEND = (("app.kubernetes.io/name", "attend"),)
CLIENT = (("attend-client", "true"),)


@pytest.mark.parametrize("folder", OVERLAYS)
def test_callers_of_the_same_and_of_labelled_namespaces_get_through_and_others_do_not(folder):
    objects = render.render(folder)
    service = Peer("attend", ATTEND)
    for port in (8000, 9000):
        assert reaches(objects, Peer("attend", (("app", "caller"),)), service, port)
        assert reaches(objects, Peer("gateway-proxies", space=CLIENT), service, port)
        assert not reaches(objects, Peer("elsewhere"), service, port)
    assert not reaches(objects, Peer("attend", (("app", "caller"),)), Peer("elsewhere"), 443)


@pytest.mark.parametrize("folder", [folder for folder in OVERLAYS if folder in RAY])
@pytest.mark.parametrize("name", ["kuberay-operator", "kuberay"], ids=["helm", "kustomize"])
def test_the_operator_reaches_the_dashboard_however_it_was_installed(folder, name):
    operator = (("app.kubernetes.io/component", "kuberay-operator"), ("app.kubernetes.io/name", name))
    assert reaches(render.render(folder), Peer("kuberay-system", operator), Peer("attend", ATTEND), 8265)


@pytest.mark.parametrize("folder", OVERLAYS)
def test_spans_reach_the_collector_where_the_settings_name_one(folder):
    objects = render.render(folder)
    [settings] = [
        item for item in render.of_kind(objects, "ConfigMap") if item["metadata"]["name"].startswith("attend-settings")
    ]
    named = settings["data"].get("ATTEND_OTEL_ENDPOINT", "")
    assert (named == "http://collector.observability.svc:4318") == (folder == EXAMPLE)
    assert reaches(objects, Peer("attend", ATTEND), Peer("observability"), 4318) == bool(named)


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
    for item in render.of_kind(render.render(folder), "ConfigMap"):
        assert not item["data"].keys() & KUBERAYS_OWN


# --- what an overlay changes


@pytest.fixture
def overlay(tmp_path):
    """Renders a kustomization over a copy of deploy/; `files` lie beside it."""
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")

    def build(text, **files):
        folder = tmp_path / "deploy/overlays/mine"
        folder.mkdir()
        for name, content in {"kustomization": text, **files}.items():
            (folder / f"{name}.yaml").write_text(content)
        done = subprocess.run([*render.renderer(), str(folder)], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return list(yaml.load_all(done.stdout, Loader=render.StrictLoader))

    return build


def images(objects):
    return {container["image"] for pods in render.pods_of(objects) for container in pods.containers}


@each_rendering
def test_an_overlay_names_the_registry_once_over_whatever_it_stands_on(overlay, folder):
    before = images(render.render(folder))
    after = images(overlay(f"resources: [../../{folder}]\nimages: [{{name: attend, newName: example.com/team/attend}}]\n"))
    if folder != EXAMPLE:  # it has a registry already
        assert after == {image.replace("attend:", "example.com/team/attend:") for image in before}


@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`")  # Ray Serve's own models
def test_an_overlay_changes_replicas_surge_and_times_without_the_rest_of_the_serve_configuration(overlay):
    example = yaml.safe_load((ROOT / "deploy/overlays/example/kustomization.yaml").read_text())
    mine = {"resources": ["../kind-cpu"], "configMapGenerator": example["configMapGenerator"]}
    mine["replacements"] = [each for each in example["replacements"] if "knobs.yaml" in each["source"]["fieldPath"]]
    knobs = """  args: {request_timeout_seconds: 60, drain_seconds: 70}
  deployments: [{name: Attend, num_replicas: 3, max_surge_percent: 33}]
"""
    objects = overlay(yaml.safe_dump(mine), knobs=knobs)
    changed, plain = serve_config(objects), serve_config(render.render("overlays/kind-cpu"))
    assert changed["applications"][0].pop("args") == {"request_timeout_seconds": 60, "drain_seconds": 70}
    assert changed["applications"][0].pop("deployments") == [{"name": "Attend", "num_replicas": 3, "max_surge_percent": 33}]
    for name in ("args", "deployments"):
        del plain["applications"][0][name]
    assert changed == plain
    assert problems(objects) == []


def test_the_example_updates_a_pool_of_gpus_that_has_no_spare_one():
    objects = render.render(EXAMPLE)
    [deployment] = serve_config(objects)["applications"][0]["deployments"]
    [group] = cluster_of(objects)["workerGroupSpecs"]
    assert deployment["max_surge_percent"] == 0 and group["maxReplicas"] == deployment["num_replicas"]
    assert deployment["rolling_update_percentage"] * deployment["num_replicas"] == 1
    [service] = render.of_kind(objects, "RayService")
    assert service["spec"]["upgradeStrategy"] == {"type": "None"}


def test_the_example_moves_the_runbooks_and_keeps_each_anchor():
    [rule] = render.of_kind(render.render(EXAMPLE), "PrometheusRule")
    found = {
        each["alert"]: each["annotations"]["runbook_url"]
        for group in rule["spec"]["groups"]
        for each in group["rules"]
        if "alert" in each
    }
    assert found and all(url == f"https://example.com/runbooks/attend.md#{name.lower()}" for name, url in found.items())


@pytest.mark.parametrize("folder", ["overlays/prod-gpu", "overlays/standalone-gpu", EXAMPLE])
def test_everything_for_the_prometheus_operator_carries_the_release(folder):
    items = render.of_kind(render.render(folder), "ServiceMonitor", "PodMonitor", "PrometheusRule")
    assert {item["kind"] for item in items} >= {"PodMonitor", "PrometheusRule"}
    release = "monitoring" if folder == EXAMPLE else "kube-prometheus-stack"
    assert all(item["metadata"]["labels"]["release"] == release for item in items)


def test_the_standalone_pods_with_a_gpu_have_what_the_workers_have():
    [alone] = render.pods_of(render.render("overlays/standalone-gpu"))
    [worker] = [pods for pods in render.pods_of(render.render("overlays/prod-gpu")) if pods.owner == "RayService worker"]
    for pods in (alone, worker):
        container = pods.spec["containers"][0]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == container["resources"]["requests"]["nvidia.com/gpu"] == "1"
        assert {mount["mountPath"] for mount in container["volumeMounts"]} >= {"/weights", "/etc/attend", "/tmp"}
    assert alone.spec["tolerations"] == worker.spec["tolerations"]


@pytest.mark.parametrize("folder", RAY)
def test_a_replica_with_all_its_ranks_fits_on_one_worker(folder):
    """Its placement group is on one node. KubeRay tells Ray a worker's GPUs, and its CPUs if `num-cpus` does not."""
    objects = render.render(folder)
    start = cluster_of(objects)["workerGroupSpecs"][0]["rayStartParams"]
    [worker] = [pods for pods in render.pods_of(objects) if pods.owner == "RayService worker"]
    settings, resources = settings_of(objects), worker.spec["containers"][0]["resources"]
    place = place_wanted(settings, gpus_wanted(settings, 0))
    wanted = place.get("placement_group_bundles") or [{"CPU": 1, "GPU": place["ray_actor_options"]["num_gpus"]}]
    assert len(wanted) == settings.tensor_parallel
    assert sum(bundle["CPU"] for bundle in wanted) <= int(start.get("num-cpus") or resources["requests"]["cpu"])
    assert sum(bundle.get("GPU", 0) for bundle in wanted) == int(resources["limits"].get("nvidia.com/gpu", 0))


def settings_of(objects):
    """What a pod of the cluster reads from its environment."""
    [data] = [
        each["data"] for each in render.of_kind(objects, "ConfigMap") if each["metadata"]["name"].startswith("attend-settings")
    ]
    return read_settings({}, data)

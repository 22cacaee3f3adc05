"""Laws about what leads calls to the pods, what counts and scales them, and whose labels they carry."""

import re
from collections.abc import Iterator
from typing import Any

import yaml

from tests.deploy.render import jobs_of, of_kind, pods_of, services_of

Objects = list[dict[str, Any]]
RESERVED = re.compile(r"(app\.kubernetes\.io/(name|created-by)|ray\.io/.*)")
"""Labels that KubeRay 1.7 gives Ray's pods, unless their template has them: `labelPod` in its controllers/ray/common/pod.go.
Its Service of the head finds the head by them: `HeadServiceLabels` in service.go."""
RANKS = "ATTEND_TENSOR_PARALLEL"
NGINX = "nginx.ingress.kubernetes.io/proxy-read-timeout"


def _seconds(text: str | int | None) -> float:
    return float(str(text or 0).removesuffix("s"))


def gateways_cut_no_stream(objects: Objects, longest: float) -> Iterator[str]:
    """What a gateway allows is longer than the longest request. Of a GRPCRoute it is Envoy Gateway's policy that says so."""
    of_google = [item["spec"]["default"].get("timeoutSec") for item in of_kind(objects, "GCPBackendPolicy")]
    for route in of_kind(objects, "HTTPRoute"):
        for rule in route["spec"]["rules"]:
            if max(_seconds(each) for each in (rule.get("timeouts", {}).get("request"), *of_google)) <= longest:
                yield f"HTTPRoute {route['metadata']['name']}: the gateway cuts a request before Attend ends it"
    for policy in of_kind(objects, "BackendTrafficPolicy"):
        limits = policy["spec"]["timeout"].get("http", {})
        if limits.get("requestTimeout") != "0s" or _seconds(limits.get("maxStreamDuration")) <= longest:
            yield f"BackendTrafficPolicy {policy['metadata']['name']}: the gateway cuts a stream before Attend ends it"
        routes = {(item["kind"], item["metadata"]["name"]) for item in of_kind(objects, "GRPCRoute")}
        if not {(each["kind"], each["name"]) for each in policy["spec"]["targetRefs"]} <= routes:
            yield f"BackendTrafficPolicy {policy['metadata']['name']}: there is no such route"
    for ingress in of_kind(objects, "Ingress"):
        if _seconds(ingress["metadata"].get("annotations", {}).get(NGINX, "60")) <= longest:
            yield f"Ingress {ingress['metadata']['name']}: the controller cuts a stream before Attend ends it"


def scalers_scale_down(objects: Objects) -> Iterator[str]:
    """While one of several metrics is missing, Kubernetes scales nothing down; that of the CPU is always there."""
    for item in of_kind(objects, "HorizontalPodAutoscaler"):
        for metric in item["spec"]["metrics"]:
            if metric["type"] != "Resource":
                yield f"HorizontalPodAutoscaler {item['metadata']['name']}: without {metric['type']} it never scales down"
    scaled = of_kind(objects, "HorizontalPodAutoscaler", "ScaledObject")
    if len(scaled) > 1:
        yield "two autoscalers change one number: KEDA makes a HorizontalPodAutoscaler of its own"
    for item in of_kind(objects, "Deployment"):
        if bool(scaled) == ("replicas" in item["spec"]):
            yield f"Deployment {item['metadata']['name']}: its replicas are given {'twice' if scaled else 'by nothing'}"


def nothing_is_scraped_twice(objects: Objects) -> Iterator[str]:
    """Pods that a monitor selects carry no annotations for a Prometheus that finds pods by them, nor Services."""
    for each in pods_of(objects):
        if any(key.startswith("prometheus.io/") for key in each.template["metadata"].get("annotations", {})):
            yield f"{each.owner}: annotations for Prometheus, beside a monitor: it is scraped twice"
    endpoints = [(item, each) for item in of_kind(objects, "ServiceMonitor") for each in item["spec"]["endpoints"]]
    endpoints += [(item, each) for item in of_kind(objects, "PodMonitor") for each in item["spec"]["podMetricsEndpoints"]]
    ports = [each.get("port") for _, each in endpoints]
    for item, each in endpoints:
        if ports.count(each.get("port")) > 1:
            yield f"{item['kind']} {item['metadata']['name']}: the port {each.get('port')} is scraped twice"


def jobs_serve_nothing(objects: Objects) -> Iterator[str]:
    """A Job's pods carry none of the labels by which a Service finds those that serve."""
    for job in jobs_of(objects):
        for service in services_of(objects):
            if service["spec"].get("selector", {"app": "attend"}).items() <= job.labels.items():
                yield f"{job.owner}: a Service would send it calls"


def labels_leave_the_operators_alone(objects: Objects) -> Iterator[str]:
    """A label of ours in their place would hide Ray's pods from KubeRay's own Services."""
    for item in of_kind(objects, "RayService"):
        cluster = item["spec"]["rayClusterConfig"]
        groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
        found = [label for group in groups for label in group["template"]["metadata"].get("labels", {})]
        found += [label for label in item["spec"]["serveService"]["metadata"].get("labels", {}) if label.startswith("ray.io")]
        yield from (
            f"RayService {item['metadata']['name']}: the label {label} is KubeRay's"
            for label in found
            if RESERVED.fullmatch(label)
        )


def a_worker_holds_one_replica(objects: Objects) -> Iterator[str]:
    """After a loss two would share a worker. The other, without one, stays unready and no eviction is allowed."""
    for item in of_kind(objects, "RayService"):
        cluster, name = item["spec"]["rayClusterConfig"], f"RayService {item['metadata']['name']}"
        [deployment] = yaml.safe_load(item["spec"]["serveConfigV2"])["applications"][0]["deployments"]
        [group] = cluster["workerGroupSpecs"]
        settings = [
            each["data"] for each in of_kind(objects, "ConfigMap") if each["metadata"]["name"].startswith("attend-sett")
        ]
        ranks = next((data[RANKS] for data in settings if RANKS in data), "1")
        if group["rayStartParams"].get("num-cpus") != ranks:
            yield f"{name}: a replica asks Ray for {ranks} CPUs, and a worker has {group['rayStartParams'].get('num-cpus')}"
        if deployment["max_surge_percent"]:
            yield f"{name}: in an update in place successors find no worker"
        most = deployment.get("autoscaling_config", {}).get("max_replicas") or deployment["num_replicas"]
        most += bool(cluster.get("enableInTreeAutoscaling"))  # a worker for the successor of one that drains
        if group["maxReplicas"] != most:
            yield f"{name}: {group['maxReplicas']} workers at most, and {most} are needed"

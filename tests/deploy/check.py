"""Strict checks of what deploy/ renders to, without a cluster: `python -m tests.deploy.check`, or `make manifests`.

Kubernetes' own kinds are held against its schemas, custom resources against custom_resources.yaml, the Serve configuration
against Ray's schema. Then come rules that no schema has: what refers to something finds it, and the laws of this service.
A kind without a schema is a problem, never passed over. None of this proves that a cluster accepts the objects.
"""

import functools
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from attend.model.errors import SettingError
from attend.service.settings import Settings, read_settings
from tests.deploy.render import (
    MISSING,
    RENDERED,
    Pods,
    StrictLoader,
    can_render,
    jobs_of,
    of_kind,
    pods_of,
    render,
    services_of,
)
from tests.deploy.serve_schema import problems_of_serve_config
from tests.deploy.traffic import (
    a_worker_holds_one_replica,
    gateways_cut_no_stream,
    jobs_serve_nothing,
    labels_leave_the_operators_alone,
    nothing_is_scraped_twice,
    scalers_scale_down,
)

OLDEST, NEWEST = "1.29", "1.37"
"""Versions of Kubernetes."""
CUSTOM = yaml.safe_load(Path(__file__).with_name("custom_resources.yaml").read_text())
QUANTITY = re.compile(r"^(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+|[numkMGTPE]|[KMGTPE]i)?$")
SHUTDOWN, RAYS_SHUTDOWN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", 30
SUCCESSOR_SECONDS = {True: 300, False: 10}
"""Least seconds in which successors load while a node drains: with an autoscaler, which adds a worker for them, and without."""
"""How long a node that leaves waits: Ray's default, and what must be left, beside the replicas' drain, for their successors."""
EXTERNAL = {
    "Secret": {"attend-redis", "attend-api-keys", "attend-tls", "hub", "registry"},
    "PersistentVolumeClaim": {"attend-weights", "attend-kv"},
}
"""What a user makes: Secrets must not be in a repository, and claims hold what somebody put there."""
PROTOCOL = {8000: "http", 9000: "kubernetes.io/h2c"}
PROTOCOL_TLS = {8000: "https", 9000: None}
KUBERAYS_DELAY, LEAVES = 60, "attend.service.runtime.leave"
"""Seconds from an update to the deletion of the old cluster, by KubeRay's default; and what ends the nodes of a deleted one."""
EXIT_SECONDS = 20
"""From the end of a node's drain to the end of `ray start`: 17 were measured."""

Objects = list[dict[str, Any]]


def problems(objects: Objects, version: str = NEWEST) -> list[str]:
    """One sentence for each thing that is wrong; empty is well. The laws are asked about what has the right shape."""
    shape = [*schema_problems(objects, version)] or [*serve_config_problems(objects)]
    return shape or [problem for law in LAWS for problem in law(objects)]


def name_of(item: dict[str, Any]) -> str:
    return f"{item.get('kind')} {item.get('metadata', {}).get('name')}"


def schema_problems(objects: Objects, version: str) -> Iterator[str]:
    for item in objects:
        for part in parts(item):
            if message := schema_problem(json.dumps(part), version):
                yield f"{name_of(item)}: {message}"


def parts(item: dict[str, Any]) -> list[dict[str, Any]]:
    """An object, and Kubernetes' own kinds inside a custom one."""
    if item.get("kind") != "RayService":
        return [item]
    inner: list[dict[str, Any]] = []
    cluster = item["spec"].get("rayClusterConfig", {})
    for group in (cluster.get("headGroupSpec", {}), *cluster.get("workerGroupSpecs", [])):
        template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "ray"}}
        inner.append(template | {"template": group.get("template", {})})
    inner.append({"apiVersion": "v1", "kind": "Service", "metadata": {}} | item["spec"].get("serveService", {}))
    options = cluster.get("autoscalerOptions")
    if options:
        container = {key: value for key, value in options.items() if key not in ("version", "idleTimeoutSeconds")}
        spec = {"containers": [{"name": "autoscaler", **container}]}
        inner.append({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, "spec": spec})
    return [item, *inner]


@functools.cache
def schema_problem(text: str, version: str) -> str | None:
    """What the schema of an object's kind says against it. The schemas are large: an object is looked at once."""
    item = json.loads(text)
    custom = CUSTOM.get(f"{item.get('apiVersion')} {item.get('kind')}")
    try:
        if custom is None:
            import kubernetes_validate

            kubernetes_validate.validate(item, version, strict=True)
        else:
            properties = {"apiVersion": {}, "kind": {}, "metadata": {"$ref": "#/$defs/metadata"}, "spec": custom}
            schema = {"$defs": CUSTOM["$defs"], "properties": properties, "required": ["spec"], "additionalProperties": False}
            jsonschema.validate(item, schema)
    except jsonschema.ValidationError as error:
        return f"{error.json_path}: {error.message[:200]}"
    except Exception as error:
        if type(error).__module__.startswith("kubernetes_validate"):
            return f"{type(error).__name__}: {str(error)[:300]}"
        raise
    return None


def serve_config_problems(objects: Objects) -> Iterator[str]:
    for item in of_kind(objects, "RayService"):
        config = yaml.load(item["spec"]["serveConfigV2"], Loader=StrictLoader)
        yield from (f"{name_of(item)}: serveConfigV2: {problem}" for problem in problems_of_serve_config(config))


def names_are_unique(objects: Objects) -> Iterator[str]:
    seen = [(item["apiVersion"].split("/")[0], name_of(item)) for item in objects]
    yield from (f"{name} stands twice" for _, name in sorted({each for each in seen if seen.count(each) > 1}))


def quantities_are_quantities(objects: Objects) -> Iterator[str]:
    for pods in [*pods_of(objects), *jobs_of(objects)]:
        for container in pods.containers:
            for kind, amounts in container.get("resources", {}).items():
                for name, amount in amounts.items() if isinstance(amounts, dict) else ():
                    if not QUANTITY.match(str(amount)):
                        yield f"{pods.owner}: {container['name']}: {kind}.{name}: {amount!r} is no quantity"
        for volume in pods.spec.get("volumes", []):
            claim = volume.get("ephemeral", {}).get("volumeClaimTemplate", {}).get("spec", {}).get("resources", {})
            for amount in (volume.get("emptyDir", {}).get("sizeLimit"), claim.get("requests", {}).get("storage")):
                if amount is not None and not QUANTITY.match(str(amount)):
                    yield f"{pods.owner}: volume {volume['name']}: {amount!r} is no quantity"


def named(objects: Objects, kind: str) -> set[str]:
    return {item["metadata"]["name"] for item in of_kind(objects, kind)} | EXTERNAL.get(kind, set())


def references(pods: Pods) -> Iterator[tuple[str, str]]:
    """(kind, name) of each object that a pod asks for."""
    if "serviceAccountName" in pods.spec:
        yield "ServiceAccount", pods.spec["serviceAccountName"]
    for container in pods.containers:
        for source in container.get("envFrom", []):
            yield "ConfigMap", source.get("configMapRef", {}).get("name")
        for variable in container.get("env", []):
            if secret := variable.get("valueFrom", {}).get("secretKeyRef"):
                yield "Secret", secret["name"]
    for secret in pods.spec.get("imagePullSecrets", []):
        yield "Secret", secret["name"]
    for volume in pods.spec.get("volumes", []):
        if "configMap" in volume:
            yield "ConfigMap", volume["configMap"].get("name")
        if "secret" in volume:
            yield "Secret", volume["secret"].get("secretName")
        if "persistentVolumeClaim" in volume:
            yield "PersistentVolumeClaim", volume["persistentVolumeClaim"].get("claimName")


def what_pods_ask_for_exists(objects: Objects) -> Iterator[str]:
    for pods in [*pods_of(objects), *jobs_of(objects)]:
        for kind, name in references(pods):
            if name not in named(objects, kind):
                yield f"{pods.owner}: there is no {kind} {name}"
        volumes = {volume["name"] for volume in pods.spec.get("volumes", [])}
        for container in pods.containers:
            for mount in container.get("volumeMounts", []):
                if mount["name"] not in volumes:
                    yield f"{pods.owner}: {container['name']} mounts {mount['name']}, which is no volume"
    for item in of_kind(objects, "RayService"):
        secret = item["spec"]["rayClusterConfig"].get("gcsFaultToleranceOptions", {}).get("redisPassword", {})
        if secret and secret["valueFrom"]["secretKeyRef"]["name"] not in EXTERNAL["Secret"]:
            yield f"{name_of(item)}: nobody makes the Secret of Redis"


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def selectors_find_something(objects: Objects) -> Iterator[str]:
    for item in objects:
        spec, labels = item.get("spec", {}), [pods.labels for pods in [*pods_of(objects), *jobs_of(objects)]]
        if item["kind"] == "Service":
            selector = spec.get("selector", {})
        elif item["kind"] in ("PodDisruptionBudget", "Deployment", "PodMonitor"):
            selector = spec.get("selector", {}).get("matchLabels", {})
        elif item["kind"] == "ServiceMonitor":
            selector = spec["selector"]["matchLabels"]
            labels = [service["metadata"].get("labels", {}) for service in services_of(objects)]
        elif item["kind"] == "NetworkPolicy" and spec.get("podSelector"):
            selector = spec["podSelector"].get("matchLabels", {})
        else:
            continue
        if not selector or not any(selects(selector, each) for each in labels):
            yield f"{name_of(item)}: nothing carries the labels {selector}"


def ports_find_each_other(objects: Objects) -> Iterator[str]:
    """Names and numbers of ports, from routes over Services to containers, and from monitors and probes."""
    pods, services = pods_of(objects), services_of(objects)
    for service in services:
        for port in service["spec"]["ports"]:
            target = port.get("targetPort", port["port"])
            if not any(target in each.ports or target in each.ports.values() for each in pods):
                yield f"{name_of(service)}: no container has the port {target}"
    offered = {(service["metadata"]["name"], port["port"]) for service in services for port in service["spec"]["ports"]}
    for route in of_kind(objects, "HTTPRoute", "GRPCRoute"):
        for backend in (backend for rule in route["spec"]["rules"] for backend in rule.get("backendRefs", [])):
            if (backend.get("name"), backend.get("port")) not in offered:
                yield f"{name_of(route)}: there is no Service {backend}"
    names = {port.get("name") for service in services for port in service["spec"]["ports"]}
    for monitor in of_kind(objects, "ServiceMonitor"):
        yield from (
            f"{name_of(monitor)}: no port {each.get('port')}"
            for each in monitor["spec"].get("endpoints", [])
            if each.get("port") not in names
        )
    for monitor in of_kind(objects, "PodMonitor"):
        for endpoint in monitor["spec"].get("podMetricsEndpoints", []):
            if not all(endpoint.get("port") in each.ports for each in pods):
                yield f"{name_of(monitor)}: not every pod has the port {endpoint.get('port')}"
    for each in pods:
        for container in each.containers:
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                action = container.get(probe, {}).get("httpGet") or container.get(probe, {}).get("grpc")
                if action and action.get("port") not in {*each.ports, *each.ports.values()}:
                    yield f"{each.owner}: {probe} asks the port {action.get('port')}"


def the_served_ports_have_their_names_and_protocols(objects: Objects) -> Iterator[str]:
    """KubeRay finds the ports by these names; a gateway would speak HTTP/1 to gRPC without the protocol's name."""
    for pods in pods_of(objects):
        wanted = {"serve": 8000, "serve-grpc": 9000} | ({"metrics": 8080} if "Ray" in pods.owner else {})
        yield from (
            f"{pods.owner}: port {name} is not {number}" for name, number in wanted.items() if pods.ports.get(name) != number
        )
    protocol = PROTOCOL_TLS if "ATTEND_TLS_CERT" in settings_of(objects) else PROTOCOL
    for service in services_of(objects):
        for port in service["spec"]["ports"]:
            if port.get("appProtocol") != protocol.get(port["port"]):
                yield f"{name_of(service)}: port {port['port']} has the appProtocol {port.get('appProtocol')}"


def pods_are_restricted(objects: Objects) -> Iterator[str]:
    """Pod Security "restricted", a read-only root, and no token but the autoscaler's."""
    for pods in [*pods_of(objects), *jobs_of(objects)]:
        context = pods.spec.get("securityContext", {})
        if context.get("runAsNonRoot") is not True or context.get("seccompProfile") != {"type": "RuntimeDefault"}:
            yield f"{pods.owner}: the pod's securityContext is not restricted"
        if pods.spec.get("hostNetwork") or pods.spec.get("hostPID") or pods.spec.get("hostIPC"):
            yield f"{pods.owner}: shares something of its host"
        if any({"hostPath"} & volume.keys() for volume in pods.spec.get("volumes", [])):
            yield f"{pods.owner}: mounts a path of its host"
        for container in [*pods.containers, *sidecars(objects, pods)]:
            wanted = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
            if container.get("securityContext") != wanted:
                yield f"{pods.owner}: {container['name']} is not restricted"
    scaled = any(item["spec"]["rayClusterConfig"].get("enableInTreeAutoscaling") for item in of_kind(objects, "RayService"))
    for pods in [*pods_of(objects), *jobs_of(objects)]:
        if pods.spec.get("automountServiceAccountToken") is not (scaled and pods.owner == "RayService head"):
            yield f"{pods.owner}: automountServiceAccountToken is {pods.spec.get('automountServiceAccountToken')}"


def sidecars(objects: Objects, pods: Pods) -> list[dict[str, Any]]:
    clusters = [item["spec"]["rayClusterConfig"] for item in of_kind(objects, "RayService")]
    options = [each["autoscalerOptions"] for each in clusters if each.get("enableInTreeAutoscaling")]
    return [{"name": "autoscaler", **each} for each in options] if pods.owner == "RayService head" else []


def settings_of(objects: Objects) -> dict[str, str]:
    """The ConfigMap of the service, and the arguments in the Serve configuration, as variables."""
    values: dict[str, str] = {}
    for item in of_kind(objects, "ConfigMap"):
        if item["metadata"]["name"].startswith("attend-settings"):
            values |= item["data"]
    for item in of_kind(objects, "RayService"):
        [application] = yaml.safe_load(item["spec"]["serveConfigV2"])["applications"]
        values |= {f"ATTEND_{name.upper()}": str(value) for name, value in application.get("args", {}).items()}
    return values


def settings_are_settings(objects: Objects) -> Iterator[str]:
    values = settings_of(objects)
    known = {f"ATTEND_{name.upper()}" for name in Settings.model_fields}
    yield from (f"there is no setting {name}" for name in values if name.startswith("ATTEND_") and name not in known)
    try:
        read_settings({}, values)
    except SettingError as error:
        yield str(error)


def times_are_in_order(objects: Objects) -> Iterator[str]:
    """Longest request <= drain <= the node's drain, lingering and exit <= grace period; a route is longer.

    The node's drain is longer than its replicas' by the time that their successors may take. An old cluster is deleted when
    the Service has forgotten it: its pods drain by themselves, and hold their GPUs no longer than their last request.
    """
    values = settings_of(objects)
    try:
        settings = read_settings({}, values)
    except SettingError:
        return
    longest, drain = settings.request_timeout_seconds, settings.drain_seconds
    of_ray = any(of_kind(objects, "RayService"))
    node_drain = float(values.get(SHUTDOWN, RAYS_SHUTDOWN if of_ray else drain + 1))
    scaled = any(item["spec"]["rayClusterConfig"].get("enableInTreeAutoscaling") for item in of_kind(objects, "RayService"))
    if of_ray and node_drain - (drain + 1) < SUCCESSOR_SECONDS[scaled]:
        yield f"the node's drain {node_drain:g} leaves successors no time to load after a drain of {drain:g}"
    if not longest <= drain <= node_drain:
        yield f"longest request {longest}, drain {drain}, node's drain {node_drain}: not in this order"
    for pods in pods_of(objects):
        grace = pods.spec.get("terminationGracePeriodSeconds", 30)
        for container in pods.spec["containers"]:
            command = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
            lingers = float(command[-1]) + settings.linger_seconds  # under Ray a preStop
            if lingers < 5:
                yield f"{pods.owner}: the Service has no time to forget the pod before it refuses calls"
            if lingers + node_drain + EXIT_SECONDS > grace:
                yield f"{pods.owner}: a grace period of {grace} is shorter than lingering, drain and exit"
            if of_ray and LEAVES not in command:
                yield f"{pods.owner}: a deleted cluster would keep its nodes for the whole grace period"
    for item in of_kind(objects, "RayService"):
        if not 30 <= item["spec"].get("rayClusterDeletionDelaySeconds", KUBERAYS_DELAY) <= 60:
            yield f"{name_of(item)}: after an update the old cluster goes too early for the Service, or holds its nodes"
    yield from gateways_cut_no_stream(objects, longest)


def the_scaler_scales_what_is_there(objects: Objects) -> Iterator[str]:
    for item in of_kind(objects, "HorizontalPodAutoscaler", "ScaledObject"):
        target = item["spec"].get("scaleTargetRef", {})
        if target.get("name") not in named(objects, target.get("kind", "Deployment")):
            yield f"{name_of(item)}: there is no {target}"


def every_namespaced_object_is_in_the_one_namespace(objects: Objects) -> Iterator[str]:
    spaces = {item["metadata"].get("namespace") for item in objects if item["kind"] != "Namespace"}
    own = {item["metadata"]["name"] for item in of_kind(objects, "Namespace")} or {None}
    if spaces != own:
        yield f"objects are in {spaces}, the namespace is {own}"


LAWS: list[Callable[[Objects], Iterator[str]]] = [
    names_are_unique,
    quantities_are_quantities,
    what_pods_ask_for_exists,
    selectors_find_something,
    labels_leave_the_operators_alone,
    jobs_serve_nothing,
    ports_find_each_other,
    the_served_ports_have_their_names_and_protocols,
    pods_are_restricted,
    settings_are_settings,
    times_are_in_order,
    a_worker_holds_one_replica,
    the_scaler_scales_what_is_there,
    scalers_scale_down,
    nothing_is_scraped_twice,
    every_namespaced_object_is_in_the_one_namespace,
]


def main() -> int:
    """Check every rendering for the oldest and the newest Kubernetes. Returns the exit status."""
    if not can_render():
        print(MISSING)
        return 2
    warnings.simplefilter("ignore")
    failed = 0
    for folder in RENDERED:
        try:
            objects = render(folder)
            found = sorted({each for version in (OLDEST, NEWEST) for each in problems(objects, version)})
        except subprocess.CalledProcessError as error:
            objects, found = [], [error.stderr.strip()]
        print(f"{folder:<22} {len(objects):>2} objects  {len(found)} problems")
        print("".join(f"    {each}\n" for each in found), end="")
        failed += bool(found)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""What deploy/ renders to passes every check, and the checks find what is wrong: one mutant for each way to be wrong."""

import copy
import os
import re

import pytest
import yaml

from attend.service.observe import autoscaling
from tests.deploy import prometheus_rule, render
from tests.deploy.check import NEWEST, OLDEST, problems
from tests.deploy.manifests import ROOT, SERVE_TEXT, serve

pytestmark = [
    pytest.mark.skipif(
        not render.can_render() and not os.environ.get("CI"),
        reason=render.MISSING,
    ),
    pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`"),  # Ray Serve's own models
]
KIND, HA, ALONE = "overlays/kind-cpu", "chart gpu-ha", "base/standalone"
HEAD = "spec.rayClusterConfig.headGroupSpec"
WORKER = "spec.rayClusterConfig.workerGroupSpecs.0"
RAY = f"{WORKER}.template.spec.containers.0"
POD = "spec.template.spec"
LEAVE_OUT = object()
HUB = "chart gpu-hub"
CPU, NGINX = "chart standalone-cpu", "nginx\\.ingress\\.kubernetes\\.io/proxy-read-timeout"
CPU_METRIC = {"type": "Resource", "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 85}}}
CUSTOM = {
    "type": "Pods",
    "pods": {"metric": {"name": "attend_requests_waiting"}, "target": {"type": "AverageValue", "averageValue": "4"}},
}


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_no_rendering_has_a_problem(version):
    found = {folder: problems(render.render(folder), version) for folder in render.RENDERED}
    assert {folder: each for folder, each in found.items() if each} == {}


@pytest.mark.parametrize("folder", ["base/rayservice", KIND])
def test_the_rayservice_applies_the_serve_configuration_word_for_word(folder):
    [service] = render.of_kind(render.render(folder), "RayService")
    assert service["spec"]["serveConfigV2"] == (ROOT / "deploy/serve/attend.yaml").read_text()


def test_the_autoscaled_rayservice_has_the_serve_configuration_that_was_run():
    [service] = render.of_kind(render.render("chart gpu"), "RayService")
    file = yaml.safe_load((ROOT / "deploy/serve/autoscaling.yaml").read_text())
    assert yaml.safe_load(service["spec"]["serveConfigV2"]) == file


def test_the_autoscaled_serve_configuration_differs_in_the_number_of_replicas_alone():
    scaled = yaml.safe_load((ROOT / "deploy/serve/autoscaling.yaml").read_text())
    plain = copy.deepcopy(serve)
    numbers = scaled["applications"][0]["deployments"][0].pop("autoscaling_config")
    assert numbers["min_replicas"] == plain["applications"][0]["deployments"][0].pop("num_replicas")
    assert scaled == plain


def test_the_autoscaled_serve_configuration_scales_as_attend_serve_does():
    scaled = yaml.safe_load((ROOT / "deploy/serve/autoscaling.yaml").read_text())
    numbers = scaled["applications"][0]["deployments"][0]["autoscaling_config"]
    assert numbers == autoscaling.config(numbers["min_replicas"], numbers["max_replicas"])


def test_the_prometheus_rule_is_the_rule_file():
    assert prometheus_rule.TARGET.read_text() == prometheus_rule.text(), "run: python -m tests.deploy.prometheus_rule"


MUTANTS = [  # rendering, kind, place, value, what the check says
    (HA, "ConfigMap", "data.ATTEND_DEVIC", "cuda", "no setting ATTEND_DEVIC"),
    (HA, "ConfigMap", "data.ATTEND_DEVICE", "tpu", "ATTEND_DEVICE = 'tpu' cannot be used"),
    (HA, "PodDisruptionBudget", "spec.selector.matchLabels", {"app": "attnd"}, "nothing carries"),
    (HUB, "Job", "spec.template.spec.containers.0.securityContext", {}, "weights is not restricted"),
    (HUB, "Job", "spec.template.spec.containers.0.env.2.valueFrom.secretKeyRef.name", "hubs", "no Secret hubs"),
    (HUB, "Job", "spec.template.metadata.labels.app", "attend", "a Service would send it calls"),
    (HA, "HTTPRoute", "spec.rules.0.backendRef", [], "backendRef"),
    (HA, "HTTPRoute", "spec.rules.0.matches.0.path.type", "Prefix", "Prefix"),
    (HA, "HTTPRoute", "spec.rules.0.backendRefs.0.port", 8001, "no Service"),
    (HA, "HTTPRoute", "spec.rules.0.timeouts.request", "15s", "gateway cuts"),
    (HA, "BackendTrafficPolicy", "spec.timeout.http.requestTimeout", "15s", "cuts a stream"),
    (HA, "BackendTrafficPolicy", "spec.targetRefs.0.name", "attnd", "no such route"),
    ("chart gpu-in-place", "GCPBackendPolicy", "spec.default.timeoutSec", 30, "cuts a request"),
    ("chart gpu-in-place", "HealthCheckPolicy", "spec.default.config.httpHealthCheck.path", "/", "path"),
    (CPU, "Ingress", f"metadata.annotations.{NGINX}", LEAVE_OUT, "cuts a stream"),
    (HA, "GRPCRoute", "spec.rules.0.timeouts", {"request": "630s"}, "timeouts"),
    (HA, "ServiceMonitor", "spec.endpoints.0.port", "http", "no port http"),
    (HA, "PodMonitor", "spec.podMetricsEndpoints.0.port", "metric", "has the port metric"),
    (HA, "PodMonitor", "spec.podMetricsEndpoints.0.port", "serve", "the port serve is scraped twice"),
    (HA, "PrometheusRule", "spec.groups.0.rules.0.exp", "1", "exp"),
    (HA, "RayService", "spec.serveService.spec.ports.1.appProtocol", LEAVE_OUT, "appProtocol None"),
    (HA, "RayService", f"{WORKER}.maxReplicas", 3, "workers at most"),
    (HA, "RayService", f"{WORKER}.rayStartParams.num-cpus", "2", "asks Ray for 1 CPUs"),
    (HA, "RayService", f"{WORKER}.rayStartParams", {}, "a worker has None"),
    (HA, "RayService", f"{WORKER}.replicas", "2", "'2'"),
    (HA, "RayService", f"{RAY}.ports.0.name", "http", "port serve is not 8000"),
    (HA, "RayService", f"{RAY}.ports.2.name", "metric", "port metrics is not 8080"),
    (HA, "RayService", f"{RAY}.envFrom.0.configMapRef.name", "attend-settings", "no ConfigMap attend-settings"),
    (HA, "RayService", f"{RAY}.volumeMounts.0.name", "temp", "no volume"),
    (HA, "RayService", f"{RAY}.resources.limits.memory", "16GB", "no quantity"),
    (HA, "RayService", f"{RAY}.securityContext.allowPrivilegeEscalation", LEAVE_OUT, "not restricted"),
    (HA, "RayService", f"{RAY}.lifecycle.preStop.exec.command.3", "60", "shorter than lingering, drain and exit"),
    (ALONE, "Deployment", "spec.template.spec.terminationGracePeriodSeconds", 645, "shorter than lingering, drain and exit"),
    (HA, "RayService", f"{WORKER}.template.spec.serviceAccountName", "attend-sa", "no ServiceAccount"),
    (HA, "RayService", "spec.rayClusterDeletionDelaySeconds", 1010, "holds its nodes"),
    (HA, "RayService", f"{RAY}.lifecycle.preStop.exec.command", ["sleep", "10"], "keep its nodes"),
    (HA, "RayService", f"{HEAD}.template.metadata.labels.app\\.kubernetes\\.io/name", "attend", "is KubeRay's"),
    (HA, "RayService", f"{HEAD}.template.metadata.labels.ray\\.io/identifier", "attend-head", "is KubeRay's"),
    (HA, "RayService", f"{WORKER}.template.metadata.labels.app\\.kubernetes\\.io/created-by", "helm", "is KubeRay's"),
    (HA, "RayService", "spec.rayClusterConfig.autoscalerOptions.securityContext", LEAVE_OUT, "autoscaler is not restricted"),
    (HA, "RayService", "spec.serveConfigV2", SERVE_TEXT.replace("num_replicas:", "num_replica:"), "num_replica is unknown"),
    (HA, "RayService", "spec.serveConfigV2", SERVE_TEXT.replace("port: 8000", "port: eight"), "http_options"),
    (
        HA,
        "RayService",
        "spec.serveConfigV2",
        SERVE_TEXT.replace("drain_seconds: 620", "drain_seconds: 300"),
        "not in this order",
    ),
    (
        HA,
        "RayService",
        "spec.serveConfigV2",
        SERVE_TEXT.replace("drain_seconds: 620", "drain_seconds: 700"),
        "no time to load",
    ),
    (HA, "RayService", "spec.serveConfigV2", SERVE_TEXT.replace("drain_seconds:", "drain_second:"), "ATTEND_DRAIN_SECOND"),
    (ALONE, "Deployment", f"{POD}.containers.0.readinessProbe.httpGet.port", "http", "asks the port http"),
    (ALONE, "Deployment", f"{POD}.containers.0.startupProbe.grpc.port", 9001, "asks the port 9001"),
    (ALONE, "Deployment", f"{POD}.volumes.0.hostPath", {"path": "/tmp"}, "path of its host"),
    (ALONE, "Service", "spec.ports.0.targetPort", "http", "no container has the port http"),
    (ALONE, "Deployment", "spec.template.metadata.annotations", {"prometheus.io/scrape": "true"}, "scraped twice"),
    (CPU, "Deployment", "spec.replicas", 2, "given twice"),
    (CPU, "HorizontalPodAutoscaler", "spec.scaleTargetRef.name", "attnd", "there is no"),
    (CPU, "HorizontalPodAutoscaler", "spec.metrics", [CUSTOM, CPU_METRIC], "never scales down"),
    ("chart standalone-gpu", "ScaledObject", "spec.scaleTargetRef.name", "attnd", "there is no"),
]


def mutated(objects, kind, place, value):
    name = {"ConfigMap": "attend-settings", "Service": "attend-serve"}.get(kind, "")
    item = next(item for item in objects if item["kind"] == kind and item["metadata"]["name"].startswith(name))
    *steps, last = (step.replace("\\", "") for step in re.split(r"(?<!\\)\.", place))
    for step in steps:
        item = item[int(step)] if isinstance(item, list) else item[step]
    key = int(last) if isinstance(item, list) else last
    if value is LEAVE_OUT:
        del item[key]
    else:
        item[key] = value
    return objects


@pytest.mark.parametrize(
    ("folder", "kind", "place", "value", "words"),
    MUTANTS,
    ids=[f"{kind}-{place}-{i}" for i, (_, kind, place, *_) in enumerate(MUTANTS)],
)
def test_a_mutant_fails_the_check_and_is_named(folder, kind, place, value, words):
    found = problems(mutated(render.render(folder), kind, place, value))
    assert any(words in problem for problem in found), found


def test_a_field_that_a_kind_does_not_have_is_named():
    kinds = {item["kind"]: item for folder in render.RENDERED for item in render.render(folder)}
    for kind, item in kinds.items():
        item.get("spec", item)["misspelt"] = {}
        assert any("misspelt" in problem for problem in problems([item])), kind


def test_the_overlays_namespace_refuses_pods_that_are_not_restricted():
    [namespace] = render.of_kind(render.render(KIND), "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


@pytest.mark.parametrize("folder", [KIND, "chart gpu", "chart standalone-gpu"])
def test_a_namespace_of_its_own_refuses_what_no_policy_allows(folder):
    objects = render.render(folder)
    [deny] = [item for item in render.of_kind(objects, "NetworkPolicy") if item["metadata"]["name"] == "default-deny"]
    assert deny["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


# The marks.
MARKED = ROOT / "deploy/DECISIONS.md"
MARK = re.compile(
    r"`((?:serve|base|chart|models|compose|overlays)/[^` ]*)`(?=.* \| (cluster|run|schema-checked) \|$)", re.MULTILINE
)


def marks():
    return dict(MARK.findall(MARKED.read_text().split("## What was proved")[1]))


def test_a_machine_that_calls_itself_ci_renders():
    assert render.can_render() or not os.environ.get("CI"), "without kubectl and helm no manifest is checked"


def test_every_folder_of_manifests_has_its_mark():
    files = [path for path in (ROOT / "deploy").rglob("*") if path.suffix in (".yaml", ".env", ".json")]
    owned = {str(path.relative_to(ROOT / "deploy")) for path in files if path.parent.name != "monitoring"}
    assert {path for path in owned if path.startswith(tuple(marks()))} == owned
    assert all((ROOT / "deploy" / path).exists() for path in marks()), "a mark for nothing"


def test_each_serve_configuration_is_named_by_a_test_that_starts_ray():
    tests = (*(ROOT / "tests/deploy").glob("test_ray_*.py"), ROOT / "tests/service/test_applications.py")
    text = "".join(path.read_text() for path in tests)
    files = {path.name for path in (ROOT / "deploy/serve").glob("*.yaml")} - {"kustomization.yaml"}
    assert marks()["serve/"] == "run" and all(f'deploy/serve/{name}"' in text for name in files)

"""The chart: what the plain manifests are, what its schema refuses, and what it says once it is installed."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
import yaml

from attend.service.settings import read_settings
from tests.deploy import chart, render
from tests.deploy.check import problems
from tests.deploy.kubernetes import matches
from tests.deploy.manifests import ROOT, constraint

pytestmark = pytest.mark.skipif(not render.can_render() and not os.environ.get("CI"), reason=render.MISSING)
TRAILER = "helm.sh/resource-policy"


def helm(*sets, files=()):
    """The objects for these `--set-json` assignments."""
    done = run(*sets, files=files)
    assert done.returncode == 0, done.stderr
    return render.objects_of(done.stdout)


def run(*sets, files=()):
    words = [word for file in files for word in ("--values", str(chart.CHART / "values" / file))]
    return render.helm(*words, *(word for each in sets for word in ("--set-json", each)))


def one(objects, kind, name="attend"):
    [item] = [item for item in objects if item["kind"] == kind and item["metadata"]["name"].startswith(name)]
    return item


# --- the plain manifests are what the chart gives


def comparable(objects):
    """By kind and name; without what differs on purpose: hashes, Helm's own annotation, the namespace."""
    text = re.sub(r', "attend-generation": "\w+"|(?<=attend-workers)-\w+', "", json.dumps(objects))
    names = {
        item["metadata"]["name"] for item in objects if item["kind"] == "ConfigMap" and "settings" in item["metadata"]["name"]
    }
    for name in names:
        text = text.replace(name, "attend-settings")
    found = {}
    for item in json.loads(text):
        annotations = item["metadata"].pop("annotations", {})
        annotations.pop(TRAILER, None)
        item["metadata"].pop("namespace", None)
        if labels := item["metadata"].get("labels", {}):
            item["metadata"]["labels"] = labels
        found[item["kind"], item["metadata"]["name"]] = item | {"annotations": annotations}
    assert len(found) == len(objects)
    return found


@pytest.mark.parametrize(
    ("folder", "sets", "files"),
    [
        ("base/rayservice", (), ()),
        ("base/standalone", ('mode="standalone"',), ()),
        ("overlays/kind-cpu", (), ("kind.yaml",)),
    ],
)
def test_the_plain_manifests_are_what_the_chart_gives(folder, sets, files):
    plain, charted = comparable(render.render(folder)), comparable(helm(*sets, files=files))
    plain.pop(("Namespace", "attend"), None)  # helm makes it: --create-namespace
    assert plain.keys() == charted.keys()
    for key in plain:
        assert plain[key] == charted[key], key


# --- what is written from elsewhere


def test_the_schema_knows_the_settings_of_this_version():
    assert chart.SCHEMA.read_text() == chart.schema(), "run `make docs`, and read what git shows"


def test_each_value_has_a_comment():
    assert chart.uncommented() == []


def test_versions_are_the_packages():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    about = yaml.safe_load((chart.CHART / "Chart.yaml").read_text())
    assert about["version"] == about["appVersion"] == version
    assert one(helm(), "RayService")["spec"]["rayClusterConfig"]["rayVersion"] == constraint("ray")


@pytest.mark.parametrize(
    ("files", "sets", "labels"),
    [
        ((), (), None),
        ((), ('nodeSelector={"kubernetes.io/arch": "arm64"}',), {"kubernetes.io/arch": "arm64"}),
        (("gpu.yaml",), (), {"kubernetes.io/arch": "amd64", "nvidia.com/gpu.present": "true"}),
    ],
)
def test_pods_that_serve_go_to_nodes_that_their_image_is_for(files, sets, labels):
    *_, serving = render.pods_of(helm(*sets, files=files))
    assert serving.spec.get("nodeSelector") == labels


# --- wrong values are refused by name


@pytest.mark.parametrize(
    ("files", "sets", "says"),
    [
        ((), ('mode="ray"',), "/mode"),
        ((), ("replica=3",), "replica"),
        ((), ("replicas=0",), "/replicas"),
        ((), ("tensorParallel=17",), "/tensorParallel"),
        ((), ("tensorParallel=2", 'rolling="inPlace"', "resources.cpu=1"), "resources.cpu is 1"),
        ((), ("replicasPerPod=2",), "replicasPerPod needs mode: standalone"),
        ((), ('image.repository="Attend"',), "/image/repository"),
        ((), ('model.source="pvc"',), "/model/source"),
        ((), ('nodeSelector={"a": 1}',), "/nodeSelector"),
        ((), ('gpu.enabled="yes"',), "/gpu/enabled"),
        ((), ('gpu.tolerations=[{"keys": "a"}]',), "keys"),
        ((), ('headResources.cpu="one"',), "/headResources/cpu"),
        ((), ('kvCacheMemory="512Mo"',), "/kvCacheMemory"),
        ((), ('kvDisk.volume="pvc"',), "/kvDisk/volume"),
        ((), ('storageClass="Fast"',), "/storageClass"),
        ((), ('settings.log_levl="debug"',), "log_levl"),
        ((), ('settings.device="cuda"',), "device"),
        ((), ('settings.log_level="loud"',), "/settings/log_level"),
        ((), ("settings.block_size=48",), "/settings/block_size"),
        ((), ("settings.max_batch_requests=0",), "/settings/max_batch_requests"),
        ((), ('settings.prefix_caching="yes"',), "/settings/prefix_caching"),
        ((), ("settings.state_cache_share=0.6",), "/settings/state_cache_share"),
        ((), ('settings.batch_bytes="20GiBi"',), "/settings/batch_bytes"),
        ((), ("settings.linger_seconds=20",), "settings.linger_seconds needs mode: standalone"),
        ((), ('autoscaling.by="memory"',), "/autoscaling/by"),
        ((), ("autoscaling.enabled=true", "autoscaling.maxReplicas=1"), "autoscaling.maxReplicas is less than replicas"),
        (("standalone-gpu.yaml",), ('autoscaling.by="cpu"',), "autoscaling.by: cpu says nothing of a GPU"),
        ((), ("requestTimeoutSeconds=700",), "drainSeconds is less than requestTimeoutSeconds"),
        ((), ('drainSeconds="620"',), "/drainSeconds"),
        ((), ("successorSeconds=10",), "/successorSeconds"),
        ((), ("startupSeconds=601",), "/startupSeconds"),
        ((), ('priorityClassName="High"',), "/priorityClassName"),
        ((), ('spread.hosts="yes"',), "/spread/hosts"),
        ((), ('keys.existingSecret="My_Keys"',), "/keys/existingSecret"),
        ((), ('tls.existingSecret="attend-tls"',), "tls.existingSecret needs mode: standalone"),
        ((), ('gateway.kind="nginx"',), "/gateway/kind"),
        ((), ('redis.address="redis"',), "/redis/address"),
        (("standalone-gpu.yaml",), ('redis.address="redis:6379"',), "redis.address needs mode: rayservice"),
        ((), ('tracing.endpoint="collector:4318"',), "/tracing/endpoint"),
        ((), ('monitoring.labels={"a": 1}',), "/monitoring/labels"),
        ((), ("monitoring.dashboards=true",), "dashboards"),
        ((), ('networkPolicy.defaultDeny="no"',), "/networkPolicy/defaultDeny"),
        ((), ("loadTest.users=0",), "/loadTest/users"),
    ],
    ids=lambda each: "; ".join(each) if isinstance(each, tuple) else "",
)
def test_a_wrong_value_is_refused_by_its_name(files, sets, says):
    done = run(*sets, files=files)
    assert done.returncode != 0, done.stdout[:200]
    assert says in done.stderr, done.stderr


def test_every_group_of_values_has_a_wrong_one_above():
    schema = json.loads(chart.SCHEMA.read_text())

    def closed(part):
        if part.get("type") == "object" and "properties" in part:
            assert part.get("additionalProperties") is False, part
            for inner in part["properties"].values():
                closed(inner)

    closed(schema)
    assert schema["properties"].keys() - {"global"} == yaml.safe_load(chart.VALUES.read_text()).keys()
    [parametrize] = [mark for mark in test_a_wrong_value_is_refused_by_its_name.pytestmark if mark.name == "parametrize"]
    tried = {each.partition("=")[0].partition(".")[0] for _, sets, _ in parametrize.args[1] for each in sets}
    assert schema["properties"].keys() - {"global"} == tried - {"replica"}


# --- knobs do what they say


def test_a_value_that_a_setting_takes_reaches_it_as_it_is():
    """Large numbers too, which helm would write as 2e+06."""
    given = {"log_level": "debug", "max_queued_tokens": 2_000_000, "batch_bytes": "20GiB", "batch_key_bytes": 3_000_000_000}
    given |= {"state_cache_share": 0.25, "prefix_caching": False, "block_size": 64, "batch_file_bytes": "1.5 gb"}
    objects = helm(*(f"settings.{name}={json.dumps(value)}" for name, value in given.items()))
    data = one(objects, "ConfigMap", "attend-settings")["data"]
    found = read_settings({}, {f"ATTEND_{name.upper()}": data[f"ATTEND_{name.upper()}"] for name in given})
    sizes = {"batch_bytes": 20 << 30, "batch_file_bytes": 1_500_000_000}
    assert {name: getattr(found, name) for name in given} == given | sizes


def test_the_budget_of_an_update_counts_the_workers_of_one_cluster():
    def budget_and_worker(*sets):
        objects = helm(*sets, files=("gpu.yaml",))
        [worker] = [pods for pods in render.pods_of(objects) if pods.owner == "RayService worker"]
        return one(objects, "PodDisruptionBudget"), worker.labels

    first, old = budget_and_worker()
    for change in (
        'image.tag="2"',
        "settings.max_adapters=2",
        "drainSeconds=700",
        "requestTimeoutSeconds=500",
        'resources.memory="20Gi"',
    ):
        second, new = budget_and_worker(change)
        assert matches(first["spec"]["selector"], old) and matches(second["spec"]["selector"], new)
        assert not matches(first["spec"]["selector"], new) and not matches(second["spec"]["selector"], old)
        assert first["metadata"]["name"] != second["metadata"]["name"], "helm keeps the old one while old workers serve"
    in_place, same = budget_and_worker("replicas=3")
    assert same == old and in_place["metadata"]["name"] == first["metadata"]["name"], "no second cluster"
    assert first["metadata"]["annotations"] == {TRAILER: "keep"}


@pytest.mark.parametrize("mode", ["rayservice", "standalone"])
@pytest.mark.parametrize("rolling", ["surge", "inPlace"])
def test_rolling_both_ways(mode, rolling):
    objects = helm(f'mode="{mode}"', f'rolling="{rolling}"', "replicas=4")
    if mode == "standalone":
        strategy = one(objects, "Deployment")["spec"]["strategy"]["rollingUpdate"]
        assert strategy == {"maxSurge": int(rolling == "surge"), "maxUnavailable": int(rolling == "inPlace")}
        return
    service = one(objects, "RayService")["spec"]
    [deployment] = yaml.safe_load(service["serveConfigV2"])["applications"][0]["deployments"]
    assert service["upgradeStrategy"]["type"] == ("NewCluster" if rolling == "surge" else "None")
    assert (deployment["max_surge_percent"], deployment["rolling_update_percentage"]) == (0, 0.25)


@pytest.mark.parametrize(
    ("kind", "kinds"),
    [
        ("none", set()),
        ("ingress", {"Ingress"}),
        ("gateway", {"HTTPRoute", "GRPCRoute"}),
        ("istio", {"HTTPRoute", "GRPCRoute"}),
        ("envoyGateway", {"HTTPRoute", "GRPCRoute", "BackendTrafficPolicy"}),
        ("gke", {"HTTPRoute", "GRPCRoute", "GCPBackendPolicy", "HealthCheckPolicy"}),
    ],
)
def test_each_gateway_has_what_keeps_it_from_cutting_streams(kind, kinds):
    plain = {item["kind"] for item in helm()}
    assert {item["kind"] for item in helm(f'gateway.kind="{kind}"')} - plain == kinds


def test_load_balancers_outside_the_cluster_pass_the_network_policy():
    def blocks(*sets):
        [policy] = [each for each in helm(*sets) if each["kind"] == "NetworkPolicy"]
        rules = [rule for rule in policy["spec"]["ingress"] if {"port": 9000, "protocol": "TCP"} in rule.get("ports", [])]
        return [peer["ipBlock"]["cidr"] for rule in rules for peer in rule["from"] if "ipBlock" in peer]

    assert blocks() == []
    assert blocks('networkPolicy.clients=["203.0.113.0/24"]') == ["203.0.113.0/24"]
    assert blocks('gateway.kind="gke"') == ["130.211.0.0/22", "35.191.0.0/16"]  # Google's health checks and proxies


def test_an_ingress_asks_pods_with_tls_by_tls():
    def protocols(*sets):
        ingresses = [each for each in helm('mode="standalone"', 'gateway.kind="ingress"', *sets) if each["kind"] == "Ingress"]
        return [each["metadata"]["annotations"].get("nginx.ingress.kubernetes.io/backend-protocol") for each in ingresses]

    assert protocols() == [None, "GRPC"]
    assert protocols('tls.existingSecret="attend-tls"') == ["HTTPS", "GRPCS"]


@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`")  # Ray Serve's own models
@pytest.mark.parametrize("mode", ["rayservice", "standalone"])
@pytest.mark.parametrize(("longest", "drain"), [(30, 40), (200, 210), (1800, 1900)])
@pytest.mark.parametrize("kind", ["ingress", "envoyGateway", "gke"])
def test_other_times_keep_their_order_down_to_the_gateway(mode, longest, drain, kind):
    times = (f"requestTimeoutSeconds={longest}", f"drainSeconds={drain}", f'gateway.kind="{kind}"')
    assert problems(helm(f'mode="{mode}"', *times)) == []


@pytest.mark.parametrize(
    ("given", "grace", "says"), [([], 680, []), ([45], 715, []), ([0], 670, ["no time to forget the pod"])]
)
def test_the_grace_period_counts_the_lingering_and_no_pod_needs_a_shell_for_it(given, grace, says):
    objects = helm('mode="standalone"', *(f"settings.linger_seconds={each}" for each in given))
    pod = one(objects, "Deployment")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == grace
    assert not any("lifecycle" in container for container in pod["containers"])
    assert [each for each in says if each not in str(problems(objects))] == [] and bool(problems(objects)) == bool(says)


def test_rules_and_dashboard_are_those_of_the_folder():
    objects = helm("monitoring.enabled=true")
    assert one(objects, "PrometheusRule")["spec"] == yaml.safe_load((ROOT / "deploy/monitoring/rules.yaml").read_text())
    dashboard = one(objects, "ConfigMap", "attend-dashboard")["data"]["dashboard.json"]
    assert dashboard == (ROOT / "deploy/monitoring/dashboard.json").read_text()


@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`")  # Ray Serve's own models
def test_the_heads_check_and_the_builder_need_no_weights(monkeypatch):
    """The builder of the application may run there."""
    from attend.service.runtime.deployment import build

    objects = helm('keys.existingSecret="k"', files=("gpu.yaml", "gpu-tp.yaml"))
    [check] = render.pods_of(objects)[0].spec["initContainers"]
    variables = one(objects, "ConfigMap", "attend-settings")["data"]
    bare = {name: value for name, value in os.environ.items() if not name.startswith("ATTEND_")}
    environment = bare | variables | {each["name"]: each["value"] for each in check["env"]}
    command = [sys.executable, "-m", "attend.service.commands.cli", *check["command"][1:]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    for name, value in variables.items():
        if name.startswith("ATTEND_"):
            monkeypatch.setenv(name, value)
    monkeypatch.setattr("attend.service.runtime.deployment.ray.nodes", list)
    config = yaml.safe_load(one(objects, "RayService")["spec"]["serveConfigV2"])
    assert build(config["applications"][0]["args"]) is not None


# --- what it says


def notes(tmp_path, *sets, files=()):
    """NOTES.txt, which `helm template` leaves out: rendered as a manifest of a copy of the chart."""
    copy = tmp_path / "chart"
    shutil.copytree(chart.CHART, copy)
    text = (copy / "templates/NOTES.txt").read_text()
    (copy / "templates/notes.yaml").write_text(
        f'{{{{- define "notes" }}}}{text}{{{{ end }}}}\nnotes: {{{{ include "notes" . | toJson }}}}\n'
    )
    (copy / "templates/NOTES.txt").unlink()
    words = [word for file in files for word in ("--values", str(file))]
    words += [word for each in sets for word in ("--set-json", each)]
    done = render.helm("--show-only", "templates/notes.yaml", *words, chart=copy)
    assert done.returncode == 0, done.stderr
    return yaml.safe_load(done.stdout)["notes"]


def test_the_notes_say_how_to_wait_and_to_ask(tmp_path):
    said = notes(tmp_path)
    assert "kubectl -n attend wait --for=condition=Ready rayservice/attend" in said
    assert "kubectl -n attend port-forward service/attend-serve-svc 8000 9000" in said
    assert "curl --json" in said and "Authorization" not in said and "Callers need no key" in said


def test_the_notes_name_the_key_and_tls(tmp_path):
    said = notes(tmp_path, 'mode="standalone"', 'keys.existingSecret="k"', 'tls.existingSecret="t"', 'gateway.kind="gateway"')
    assert "curl --insecure" in said and "Bearer $ATTEND_API_KEY" in said and "https://localhost:8000" in said
    assert "attend check https://attend.example.com --grpc grpc.attend.example.com:443" in said

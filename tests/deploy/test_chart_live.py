"""What the chart makes of a cluster that already runs it: helm asks an API server of the test, as `helm upgrade` does."""

import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.deploy import render
from tests.deploy.test_chart import helm, one

pytestmark = pytest.mark.skipif(not render.can_render() and not os.environ.get("CI"), reason=render.MISSING)
SCALED = ("--set", "mode=standalone", "--set", "autoscaling.enabled=true", "--set", "autoscaling.maxReplicas=20")
KINDS = {
    "v1": ("ServiceAccount", "ConfigMap", "Service"),
    "apps/v1": ("Deployment",),
    "policy/v1": ("PodDisruptionBudget",),
    "networking.k8s.io/v1": ("NetworkPolicy",),
    "autoscaling/v2": ("HorizontalPodAutoscaler",),
    "keda.sh/v1alpha1": ("ScaledObject",),
}
OURS = {
    "annotations": {"meta.helm.sh/release-name": "attend", "meta.helm.sh/release-namespace": "attend"},
    "labels": {"app.kubernetes.io/managed-by": "Helm"},
}


def plural(kind):
    """The name of a kind in URLs."""
    return f"{kind.lower()}s".replace("ys", "ies")


def discovery():
    """By path, what an API server says of what it has."""
    found = {
        "/version": {"major": "1", "minor": "34", "gitVersion": "v1.34.4"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
    }
    groups = []
    for version, kinds in KINDS.items():
        group, _, short = version.rpartition("/")
        resources = [{"name": plural(kind), "namespaced": True, "kind": kind, "verbs": ["get"]} for kind in kinds]
        found[f"/apis/{version}" if group else "/api/v1"] = {
            "kind": "APIResourceList",
            "groupVersion": version,
            "resources": resources,
        }
        groups += [{"name": group, "versions": [{"groupVersion": version, "version": short}]}] if group else []
    return found | {"/apis": {"kind": "APIGroupList", "groups": groups}}


@pytest.fixture
def cluster(tmp_path):
    """A function: helm's rendering of a chart whose Deployment, if there is one, has so many pods."""
    answers = discovery()

    class Server(BaseHTTPRequestHandler):
        def do_GET(self):
            found = answers.get(self.path.partition("?")[0])
            self.send_response(404 if found is None else 200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(
                json.dumps(found or {"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}).encode()
            )

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (tmp_path / "config").write_text("apiVersion: v1\nkind: Config\n")
    url = f"http://127.0.0.1:{server.server_port}"
    words = (
        "--dry-run=server",
        "--disable-openapi-validation",
        "--kube-apiserver",
        url,
        "--kubeconfig",
        str(tmp_path / "config"),
    )

    def rendered(pods, *values):
        live = {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "attend", **OURS},
            "spec": {"replicas": pods},
        }
        if pods:
            answers["/apis/apps/v1/namespaces/attend/deployments/attend"] = live
        done = render.helm(*words, *values)
        assert done.returncode == 0, done.stderr
        return one(render.objects_of(done.stdout), "Deployment")["spec"]

    yield rendered
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("by", ["cpu", "keda"])
@pytest.mark.parametrize("pods", [1, 10])
def test_with_an_autoscaler_the_number_of_pods_stays_as_it_is(cluster, by, pods):
    """A manifest that lost the number would have Kubernetes take its default, one."""
    assert cluster(pods, *SCALED, "--set", f"autoscaling.by={by}")["replicas"] == pods


def test_without_an_autoscaler_it_is_that_of_the_values(cluster):
    assert cluster(10, "--set", "mode=standalone", "--set", "replicas=3")["replicas"] == 3


def test_where_no_deployment_is_known_the_number_is_the_autoscalers(cluster):
    """A first installation, and a tool that renders without a cluster: it would set the number back with each change."""
    assert "replicas" not in cluster(0, *SCALED)
    assert "replicas" not in one(helm('mode="standalone"', "autoscaling.enabled=true"), "Deployment")["spec"]

"""`attend serve` with the settings of the standalone Deployment: its probes are answered, and SIGTERM ends it."""

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.deploy.manifests import ROOT
from tests.service.server import SLOWNESS, running

pytestmark = [pytest.mark.ray, pytest.mark.alone, pytest.mark.long]
FOLDER = ROOT / "deploy/base/standalone"


def test_the_deployments_probes_are_answered_and_an_idle_server_ends_after_lingering(tmp_path, monkeypatch):
    for line in (ROOT / "deploy/base/standalone/attend.env").read_text().splitlines():
        if not line.startswith("#"):
            monkeypatch.setenv(*line.split("=", 1))
    deployment = yaml.safe_load_all((FOLDER / "deployment.yaml").read_text())
    [container] = next(item for item in deployment if item["kind"] == "Deployment")["spec"]["template"]["spec"]["containers"]
    with running(tmp_path / "log") as server:
        for probe in ("readinessProbe", "livenessProbe"):
            assert server.get(container[probe]["httpGet"]["path"])[0] == 200
        assert container["startupProbe"]["grpc"] == {"port": 9000}
        with grpc.insecure_channel(server.target) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert server.metric("attend_requests_waiting") == 0  # what the ScaledObject asks for
        assert 10 <= server.stop(within=60) < 10 + 6 * SLOWNESS  # ATTEND_LINGER_SECONDS
        assert server.process.returncode == 0
        assert server.processes() == []

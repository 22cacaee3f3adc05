"""Whatever values the chart takes, what it renders passes every check: random values, by seed."""

import json
import os
import random

import pytest

from tests.deploy import render
from tests.deploy.check import problems

pytestmark = [
    pytest.mark.skipif(not render.can_render() and not os.environ.get("CI"), reason=render.MISSING),
    pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`"),  # Ray Serve's own models
]
CLAIM = {"source": "claim", "claim": "attend-weights"}
HUB = {"source": "hub", "reference": "hf://a/b@main", "tokenSecret": "hub"}
OCI = {"source": "oci", "image": f"registry.example.com:5000/models/a@sha256:{'c' * 64}"}
DIGESTS = {"digest": f"sha256:{'a' * 64}", "gpuDigest": f"sha256:{'b' * 64}"}
SCALED = {"enabled": True, "maxReplicas": 8}
CHOICES = {
    "mode": ["rayservice", "standalone"],
    "image": [{}, DIGESTS | {"pullPolicy": "Always", "pullSecrets": ["registry"]}],
    "model": [
        {},
        CLAIM,
        CLAIM | {"path": "a/b.gguf"},
        HUB,
        HUB | {"volume": "emptyDir"},
        HUB | {"claim": "attend-weights"},
        OCI,
    ],
    "replicas": [1, 2, 3, 7],
    "replicasPerPod": [1, 1, 2],
    "tensorParallel": [1, 1, 2, 4],
    "nodeSelector": [{}, {"kubernetes.io/arch": "arm64"}],
    "gpu": [
        {},
        {"enabled": True},
        {"enabled": True, "nodeSelector": {"a": "b"}, "tolerations": [], "runtimeClassName": "nvidia"},
    ],
    "resources": [{"cpu": 8}, {"cpu": 16, "cpuRequest": "500m", "memoryRequest": "1Gi", "ephemeralStorage": "1Gi"}],
    "kvDisk": [{}, {"volume": "emptyDir"}, {"volume": "ephemeral", "size": "500Mi"}, {"volume": "claim", "claim": "attend-kv"}],
    "storageClass": ["", "fast"],
    "settings": [{}, {"log_level": "debug", "served_model_name": "x", "state_cache_share": 0.1, "max_batch_requests": 16}],
    "autoscaling": [{}, SCALED, SCALED | {"by": "keda"}],
    "rolling": ["surge", "inPlace"],
    "spread": [{}, {"hosts": "require", "zones": True}],
    "keys": [{}, {"existingSecret": "attend-api-keys"}],
    "tls": [{}, {}, {"existingSecret": "attend-tls"}],
    "gateway": [{"kind": kind} for kind in ("none", "ingress", "gateway", "envoyGateway", "istio", "gke")],
    "redis": [{}, {}, {"address": "redis.redis.svc:6379"}],
    "tracing": [{}, {"endpoint": "http://c.observability.svc:4318"}, {"endpoint": "https://c.observability.svc/v1"}],
    "monitoring": [{}, {"enabled": True}],
    "loadTest": [
        {},
        {},
        {"enabled": True, "target": "http://a.example.com", "grpcTarget": "a.example.com:9000", "keySecret": "hub"},
    ],
    "networkPolicy": [{}, {"defaultDeny": True, "clients": ["10.0.0.0/8"]}],
}


@pytest.mark.parametrize("seed", range(30))
def test_what_the_chart_takes_passes_every_check(seed, tmp_path):
    """Values that do not go together are drawn anew; the sentence that refuses them is the chart's own."""
    draw, file = random.Random(seed), tmp_path / "values.json"
    for _ in range(50):
        file.write_text(json.dumps({name: draw.choice(each) for name, each in CHOICES.items()}))
        done = render.helm("--values", str(file))
        if done.returncode == 0:
            assert problems(render.objects_of(done.stdout)) == [], file.read_text()
            return
        assert "execution error at (attend/templates" in done.stderr, done.stderr
        assert any(word in done.stderr for word in (" needs ", "resources.cpu", "autoscaling.")), done.stderr
    raise AssertionError("nothing was taken")

"""The Job of the chart that loads the service: its command runs, with what the image `loadtest` holds and nothing beside."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy import render
from tests.deploy.check import problems
from tests.deploy.kubernetes import Peer, reaches
from tests.deploy.manifests import ROOT
from tests.deploy.test_chart import helm
from tests.deploy.test_image import instructions, pairs
from tests.service.server import running

pytestmark = [
    pytest.mark.skipif(not render.can_render() and not os.environ.get("CI"), reason=render.MISSING),
    pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`"),  # Ray Serve's own models
]
ON = "loadTest.enabled=true"
AWAY = ('loadTest.target="https://attend.example.com"', 'loadTest.grpcTarget="grpc.attend.example.com:8443"')
LOAD = Peer("default", (("app.kubernetes.io/name", "attend-loadtest"),))


def locust(*sets):
    [job] = render.jobs_of(helm(ON, *sets))
    return job.spec["containers"][0]


@pytest.mark.parametrize("mode", ["rayservice", "standalone"])
def test_it_waits_for_the_service_and_loads_it(mode):
    objects = helm(f'mode="{mode}"', ON, "networkPolicy.defaultDeny=true")
    assert problems(objects) == []
    [job] = render.jobs_of(objects)
    [wait] = job.spec["initContainers"]
    assert "http://attend-serve-svc:8000/readyz" in wait["command"][2]
    assert job.spec["containers"][0]["image"] == "attend:0.1.0-loadtest"
    server = Peer("default", (("app.kubernetes.io/name", "attend"), ("ray.io/node-type", "worker")))
    assert all(reaches(objects, LOAD, server, port) for port in (8000, 9000))
    assert not reaches(objects, LOAD, Peer("elsewhere"), 443) and not reaches(objects, server, LOAD, 8000)


def test_another_address_is_loaded_over_tls_with_a_key_and_nothing_else_is_reached():
    sets = (ON, *AWAY, 'loadTest.keySecret="k"', "loadTest.users=3", 'image.tag="7"')
    objects = helm(*sets)
    [job] = render.jobs_of(objects)
    container = job.spec["containers"][0]
    assert "initContainers" not in job.spec, "/readyz is not routed"
    words = " ".join(container["command"])
    assert "--host https://attend.example.com --grpc-host grpc.attend.example.com:8443 --grpc-tls" in words and "-u 3" in words
    assert container["env"][0]["valueFrom"] == {"secretKeyRef": {"name": "k", "key": "key"}}
    assert container["image"] == "attend:7-loadtest"
    assert [reaches(objects, LOAD, Peer("elsewhere"), port) for port in (443, 8443, 80)] == [True, True, False]


@pytest.fixture(scope="module")
def image(tmp_path_factory) -> Path:
    """The files that the target copies from the tree, where the image has them."""
    root = tmp_path_factory.mktemp("image")
    for words in (line.split() for line in instructions("COPY", "loadtest") if not line.startswith("--from=")):
        [source, target] = words
        shutil.copytree(ROOT / source, root / target.strip("/"), symlinks=True, ignore=shutil.ignore_patterns("out", "*.pyc"))
    return root


def isolated(image: Path, words: list[str]) -> subprocess.CompletedProcess:
    """Run with the image's own path to our modules."""
    folder = pairs("ENV", "loadtest")["PYTHONPATH"]
    env = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": f"{image}{folder}", "HOME": str(image)}
    return subprocess.run(words, env=env, cwd=image, capture_output=True, text=True, timeout=100, check=False)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One process: the Service of the test."""
    with running(tmp_path_factory.mktemp("server") / "log", "--single") as made:
        yield made


def test_the_jobs_command_loads_a_server_over_both_transports(image, server):
    command = locust("loadTest.users=2", "loadTest.seconds=5", 'loadTest.args=["--max-tokens", "8"]')["command"]
    addresses = {"http://attend-serve-svc:8000": server.url, "attend-serve-svc:9000": server.target}
    done = isolated(image, [addresses.get(word, word.replace("/opt/", f"{image}/opt/")) for word in command])
    assert done.returncode == 0, done.stderr[-3000:]
    assert "HTTP" in done.stderr + done.stdout and "GRPC" in done.stderr + done.stdout

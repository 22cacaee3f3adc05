"""The Job of the chart that loads the service: its command runs, with what the image `loadtest` holds and nothing beside."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy import images, render
from tests.deploy.check import problems
from tests.deploy.kubernetes import Peer, reaches
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
    server = Peer("default", (("app.kubernetes.io/name", "attend"), ("app", "attend")))
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
    """The image's files: of the tree, and the packages that it installs, without what an environment of tests has beside."""
    root = tmp_path_factory.mktemp("image")
    images.lay_out("loadtest", root)
    [run] = instructions("RUN", "packages-loadtest")
    images.site(root / "site", *run.partition("constraints.txt ")[2].split())
    return root


def isolated(image: Path, words: list[str]) -> subprocess.CompletedProcess:
    """Run a command of the image, with its path to modules alone."""
    program = [sys.executable, "-S", str(Path(sys.executable).with_name(words[0]))]
    path = f"{image}{pairs('ENV', 'loadtest')['PYTHONPATH']}:{image}/site"
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": path, "HOME": str(image)}
    here = [word.replace("/opt/", f"{image}/opt/") for word in words[1:]]
    return subprocess.run([*program, *here], env=env, cwd=image, capture_output=True, text=True, timeout=100, check=False)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One process: the Service of the test."""
    with running(tmp_path_factory.mktemp("server") / "log", "--single") as made:
        yield made


def test_the_images_own_command_starts(image):
    """--help does not look at the file; --list does."""
    [command] = instructions("CMD", "loadtest")
    for last, says in (("--help", "Usage: locust"), ("--list", "GrpcStreamUser")):
        done = isolated(image, [*json.loads(command)[:-1], last])
        assert done.returncode == 0 and says in done.stdout, done.stderr[-3000:]


def test_the_jobs_command_loads_a_server_over_both_transports(image, server):
    args = '["--max-tokens", "8", "--report", "report"]'
    command = locust("loadTest.users=2", "loadTest.seconds=10", f"loadTest.args={args}")["command"]
    addresses = {"http://attend-serve-svc:8000": server.url, "attend-serve-svc:9000": server.target}
    done = isolated(image, [addresses.get(word, word) for word in command])
    assert done.returncode == 0, done.stderr[-3000:]
    assert "HTTP" in done.stderr + done.stdout and "GRPC" in done.stderr + done.stdout
    assert json.loads((image / "report/summary.json").read_text())["failed"] == 0

"""The Job of the chart that loads the service: its command runs, with what the image `loadtest` holds and nothing beside."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy import render
from tests.deploy.check import problems
from tests.deploy.kubernetes import Peer, reaches
from tests.deploy.manifests import DOCKERFILE, ROOT, constraint
from tests.deploy.test_chart import helm, one, run
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


def test_it_is_off_by_default():
    assert not render.of_kind(helm(), "Job")


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


def test_other_values_are_another_job_and_other_settings_are_not():
    def name(*sets):
        return one(helm(ON, *sets), "Job")["metadata"]["name"]

    assert name() == name('settings.log_level="debug"') and len({name(), name("loadTest.users=3"), name(*AWAY)}) == 3


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (("loadTest.users=0",), "/loadTest/users"),
        (("loadTest.seconds=1",), "/loadTest/seconds"),
        (('loadTest.shape="wave"',), "/loadTest/shape"),
        (('loadTest.args=["--loop open; rm"]',), "/loadTest/args"),
        (('loadTest.image="A b"',), "/loadTest/image"),
        (('loadTest.target="attend.example.com"',), "/loadTest/target"),
        (('loadTest.target="https://attend.example.com"',), "/loadTest/grpcTarget"),
        (('loadTest.grpcTarget="attend.example.com"',), "/loadTest/grpcTarget"),
        (('loadTest.keySecret="My Key"',), "/loadTest/keySecret"),
        (('keys.existingSecret="k"',), "loadTest.keySecret is needed with keys.existingSecret"),
        (('mode="standalone"', 'tls.existingSecret="t"'), "loadTest.target is needed with tls.existingSecret"),
        (("loadTest.user=1",), "user"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(sets, says):
    done = run(ON, *sets)
    assert done.returncode != 0 and says in done.stderr, done.stderr


@pytest.fixture(scope="module")
def image(tmp_path_factory) -> Path:
    """The files that the target copies from the tree, where the image has them."""
    root = tmp_path_factory.mktemp("image")
    for words in (line.split() for line in instructions("COPY", "loadtest") if not line.startswith("--from=")):
        [source, target] = words
        shutil.copytree(ROOT / source, root / target.strip("/"), symlinks=True, ignore=shutil.ignore_patterns("out", "*.pyc"))
    return root


IMPORTED = """
import sys
from importlib.metadata import packages_distributions
import loadtest.locustfile as own
of, files = packages_distributions(), {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items()}
for name in {name.partition(".")[0] for name, file in files.items() if "site-packages" in file}:
    print(name, *of.get(name, ()))
print("at", own.__file__)
"""
"""Prints each package that is imported, with the distributions that may have brought it."""
OF_THIS_MACHINE = {"_distutils_hack", "_virtualenv", "grpc_health", "grpc_reflection", "grpc_tools"}
"""What an environment's own files import at every start, and what grpc imports where it is installed."""


def brought(named):
    """The distributions that pip brings with these, by what is installed here."""
    found, wanted = set(), [Requirement(each) for each in named]
    while wanted:
        one = wanted.pop()
        name = canonicalize_name(one.name)
        if name in found or (one.marker and not one.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        wanted += [Requirement(each) for each in requires(name) or []]
    return found


def test_the_image_has_what_the_callers_import(image):
    """In the versions that are pinned; nothing of torch or Ray is among it."""
    [install] = instructions("RUN", "packages-loadtest")
    named = install.removeprefix("pip install -c constraints.txt ").split()
    assert all(map(constraint, named))
    done = isolated(image, [sys.executable, "-P", "-c", IMPORTED])
    rows = dict(line.partition(" ")[::2] for line in done.stdout.splitlines())
    assert rows.pop("at", None) == f"{image}/opt/loadtest/loadtest/locustfile.py", done.stderr
    ours = {name for name in rows if name.startswith("__editable__")} | OF_THIS_MACHINE
    there = brought(named)
    assert {
        name for name in rows.keys() - ours if not {canonicalize_name(each) for each in rows[name].split()} & there
    } == set()


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


def test_the_image_of_the_load_test_has_no_default_server():
    assert "FROM runtime AS loadtest" in DOCKERFILE and instructions("HEALTHCHECK", "loadtest") == ["NONE"]
    assert instructions("CMD", "loadtest")[0].startswith('["locust"')

"""deploy/AIRGAP.md names every image and package, and values without a hub leave pods nothing to reach."""

import os
import re
import subprocess

import pytest

from tests.deploy import airgap, render
from tests.deploy.check import problems
from tests.deploy.kubernetes import Peer, reaches
from tests.deploy.manifests import ROOT, constraint
from tests.service.document_blocks import commands

pytestmark = [
    pytest.mark.skipif(not render.can_render() and not os.environ.get("CI"), reason=render.MISSING),
    pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`"),  # Ray Serve's own models
]
TEXT = airgap.PAGE.read_text()


@pytest.fixture
def values(tmp_path):
    text = TEXT.partition("with `my-values.yaml`")[2].partition("\n\n")[2].partition("\n\n")[0]
    file = tmp_path / "my-values.yaml"
    file.write_text("".join(f"{line[4:]}\n" for line in text.splitlines()))
    return file


def test_the_list_is_that_of_this_tree():
    assert airgap.page() == TEXT, "run `make docs`, and read what git shows"


def test_every_image_of_every_rendering_is_listed_and_none_comes_from_elsewhere():
    names = {image.rpartition("/")[2] for image in airgap.rendered()}
    assert {"attend:0.1.0", "attend:0.1.0-gpu", "attend:0.1.0-loadtest"} == names
    assert all(f"`{name}`" in TEXT for name in names)


def test_the_versions_of_the_commands_are_the_pinned_ones():
    assert f"torch=={constraint('torch')}+cpu" in TEXT
    assert set(re.findall(r"kuberay-operator --version (\S+)|kuberay/operator:v([\d.]+)", TEXT)) == {
        (airgap.operator(), ""),
        ("", airgap.operator()),
    }


def test_the_pages_values_render_and_reach_nothing_outside(values):
    done = render.helm("--values", str(values))
    assert done.returncode == 0, done.stderr
    objects = render.objects_of(done.stdout)
    assert problems(objects) == []
    for node in ("head", "worker"):
        pod = Peer("default", (("app", "attend"), ("ray.io/node-type", node)))
        assert not any(reaches(objects, pod, Peer("elsewhere"), port) for port in (80, 443, 6443, 8080))


def test_the_pages_command_prints_every_image_of_the_values(values):
    [command] = [each.code for each in commands("deploy/AIRGAP.md") if "helm template" in each.code]
    folder = values.parent
    (folder / "deploy").symlink_to(ROOT / "deploy")
    env = {**os.environ, "PATH": f"{os.path.dirname(render.program('helm'))}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False)
    named = {line.partition(" ")[2].strip('"') for line in done.stdout.splitlines()}
    ours = "registry.example.com"
    assert {each for each in named if "/" in each} == {
        f"{ours}/attend:0.1.0",
        f"{ours}/attend:0.1.0-gpu",
        f"{ours}/models/qwen3-8b:1",
    }

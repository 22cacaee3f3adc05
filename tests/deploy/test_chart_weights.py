"""How the chart brings the weights: a volume of each pod, one Job for a claim, the files of an image."""

import json
import os
import subprocess

import pytest

from tests.deploy import render
from tests.deploy.check import problems
from tests.deploy.test_chart import helm, one, run

pytestmark = [
    pytest.mark.skipif(not render.can_render() and not os.environ.get("CI"), reason=render.MISSING),
    pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`"),  # Ray Serve's own models
]


def test_the_hub_is_read_by_an_init_container_with_the_token():
    pods = render.pods_of(helm('model.source="hub"', 'model.reference="hf://a/b@main"', 'model.tokenSecret="hub"'))
    head, worker = (pods.spec["initContainers"] for pods in pods)
    assert [each["name"] for each in head] == ["settings"]
    assert [each["name"] for each in worker] == ["weights", "settings"]
    assert worker[0]["command"] == ["attend", "pull", "hf://a/b@main", "/weights/model"]
    assert [each["name"] for each in worker[0]["env"]] == ["HF_HOME", "HF_XET_CHUNK_CACHE_SIZE_BYTES", "HF_TOKEN"]


SHARED = ('model.source="hub"', 'model.reference="hf://a/b@main"', 'model.claim="attend-weights"', 'model.tokenSecret="hub"')


@pytest.mark.parametrize("mode", ["rayservice", "standalone"])
def test_a_claim_is_filled_by_one_job_and_the_pods_wait_for_it(mode):
    objects = helm(f'mode="{mode}"', *SHARED)
    assert problems(objects) == []
    [job], [*_, pods] = render.jobs_of(objects), render.pods_of(objects)
    [download], wait = job.spec["containers"], pods.spec["initContainers"][0]
    folder = one(objects, "ConfigMap", "attend-settings")["data"]["ATTEND_MODEL"]
    assert folder == "/weights/a--b--main"
    assert download["command"][2] == f"test -e {folder} || exec attend pull hf://a/b@main {folder}"
    assert wait["name"] == "wait" and f"until test -e {folder};" in wait["command"][2]
    [claim] = [each["persistentVolumeClaim"] for each in pods.spec["volumes"] if each["name"] == "weights"]
    assert claim == {"claimName": "attend-weights", "readOnly": True}
    everywhere = json.dumps([each.template for each in render.pods_of(objects)])
    assert "HF_TOKEN" not in everywhere and "HF_TOKEN" in json.dumps(job.template), "the token is the Job's alone"
    assert job.labels == {"app.kubernetes.io/name": "attend-pull"}, "no Service and no monitor takes it for a pod that serves"


@pytest.mark.parametrize("there", [False, True])
def test_the_jobs_and_the_pods_commands_run(there, tmp_path):
    """By the shell of this machine, with a program `attend` that makes the folder."""
    objects = helm(*SHARED)
    [job], [_, worker] = render.jobs_of(objects), render.pods_of(objects)
    program = tmp_path / "attend"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\nmkdir "$3"\n')
    program.chmod(0o755)
    (tmp_path / "weights").mkdir()
    if there:
        (tmp_path / "weights/a--b--main").mkdir()
    for command in (job.spec["containers"][0]["command"], worker.spec["initContainers"][0]["command"]):
        words = [word.replace("/weights/", f"{tmp_path}/weights/") for word in command]
        path = f"{tmp_path}:{os.environ['PATH']}"
        assert subprocess.run(words, env={"PATH": path}, timeout=20, check=False).returncode == 0
    assert (tmp_path / "weights/a--b--main").is_dir() and (tmp_path / "asked").exists() != there


@pytest.mark.parametrize("mode", ["rayservice", "standalone"])
def test_the_files_of_an_image_are_mounted_where_kubernetes_has_such_volumes(mode):
    sets = (f'mode="{mode}"', 'model.source="oci"', 'model.image="registry.example.com/models/qwen3:1"', 'model.path="qwen3"')
    done = run(*sets)
    objects = render.objects_of(done.stdout)
    assert problems(objects) == [] and problems(objects, "1.33") == []
    [*_, pods] = render.pods_of(objects)
    assert {"name": "weights", "image": {"reference": "registry.example.com/models/qwen3:1"}} in pods.spec["volumes"]
    assert one(objects, "ConfigMap", "attend-settings")["data"]["ATTEND_MODEL"] == "/weights/qwen3"
    old = render.helm("--kube-version", "1.32", *(word for each in sets for word in ("--set-json", each)))
    assert old.returncode != 0 and "model.source: oci needs Kubernetes 1.33" in old.stderr

"""What users wrote for each version still works: settings, a file of keys, values of the chart, requests over both transports.

A golden is never changed. What is to break is deleted there, and deploy/UPGRADING.md says so.
"""

import json
import os
import shutil
import tomllib
from pathlib import Path

import pytest

from attend.service.access.keys import KeyRing
from attend.service.settings import read_settings, unknown_variables
from tests.deploy import render
from tests.deploy.check import problems
from tests.deploy.manifests import ROOT
from tests.service.http_api.described import ask, chatting_server

FOLDER = Path(__file__).with_name("goldens")
each_version = pytest.mark.parametrize("folder", sorted(FOLDER.iterdir()), ids=lambda folder: folder.name)
needs_helm = pytest.mark.skipif(not render.can_render() and not os.environ.get("CI"), reason=render.MISSING)


def read(folder, name):
    return json.loads((folder / name).read_text())


def test_this_version_has_goldens_and_a_section_of_the_page():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (FOLDER / version).is_dir()
    page = (ROOT / "deploy/UPGRADING.md").read_text()
    assert all(f"## To {folder.name}\n" in page for folder in FOLDER.iterdir())


@each_version
def test_settings_mean_what_they_meant(folder):
    golden = read(folder, "settings.json")
    environment = {name: text for name, (text, _) in golden.items()}
    found = read_settings({}, environment).model_dump(mode="json")
    assert unknown_variables(environment) == []
    assert {name: found[name.removeprefix("ATTEND_").lower()] for name in golden} == {
        name: value for name, (_, value) in golden.items()
    }


@each_version
def test_a_file_of_keys_opens_what_it_opened(folder, tmp_path):
    shutil.copy(folder / "keys.json", tmp_path)
    ring = KeyRing(tmp_path / "keys.json")
    alice, bob = (ring.authenticate(f"Bearer {name}'s key") for name in ("alice", "bob"))
    assert (alice.name, bob.name) == ("alice", "bob")
    assert (alice.limits.requests_per_minute, alice.limits.concurrent) == (60, 4)


@needs_helm
@each_version
@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`")  # Ray Serve's own models
@pytest.mark.parametrize("mode", ["rayservice", "standalone"])
def test_values_of_the_chart_render_to_what_passes_the_checks(folder, mode):
    done = render.helm("--values", str(folder / f"values-{mode}.yaml"))
    assert done.returncode == 0, done.stderr
    assert problems(render.objects_of(done.stdout)) == []


@each_version
def test_requests_over_http_are_answered_with_the_fields_they_had(folder):
    server = chatting_server()
    for method, path, body, fields in read(folder, "requests.json"):
        answer = ask(server, method, path, json=body)
        assert answer.status_code == 200, (path, answer.text)
        if fields:
            assert set(fields) <= answer.json().keys(), path
        else:
            assert "data: [DONE]" in answer.text, path

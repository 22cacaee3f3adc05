"""The Dockerfile agrees with the manifests, and holds what KubeRay runs inside the container."""

import fnmatch
import re

from tests.deploy.manifests import DOCKERFILE, ROOT, pods, ray_env, serve


def instructions(name):
    joined = DOCKERFILE.replace("\\\n", " ")
    return [line.split(maxsplit=1)[1] for line in joined.splitlines() if line.startswith(f"{name} ")]


def runtime_env():
    [block] = [value for value in instructions("ENV") if "HOME=" in value]
    return dict(pair.split("=", 1) for pair in block.split())


def test_user_is_the_one_the_pods_ask_for():
    [user] = instructions("USER")
    for pod in pods:
        context = pod["securityContext"]
        assert user == f"{context['runAsUser']}:{context['runAsGroup']}" == "1000:1000"


def test_exposed_ports_are_the_served_ones():
    [exposed] = instructions("EXPOSE")
    assert [int(port) for port in exposed.split()] == [serve["http_options"]["port"], serve["grpc_options"]["port"]]


def test_the_tools_of_kuberays_readiness_probe_are_installed():
    [packages] = [run for run in instructions("RUN") if "apt-get install" in run]
    assert {"bash", "grep", "wget"} <= set(packages.split())


def test_nothing_is_written_outside_tmp():
    assert runtime_env()["HOME"] == runtime_env()["TMPDIR"] == "/tmp"
    assert all({"name": "tmp", "mountPath": "/tmp"} in pod["containers"][0]["volumeMounts"] for pod in pods)


def test_image_and_manifests_set_the_same_value_where_both_set_one():
    both = runtime_env().keys() & ray_env.keys()
    assert both == {"OMP_WAIT_POLICY", "RAY_USAGE_STATS_ENABLED"}
    assert {name: runtime_env()[name] for name in both} == {name: ray_env[name] for name in both}


def test_the_image_leaves_the_data_plane_to_the_proxy_flag():
    """service.supervisor keeps what it finds in the environment: set here, `attend serve --proxy python` would do nothing."""
    assert not [name for name in runtime_env() if name.startswith("RAY_SERVE_")]


def test_there_is_a_cpu_and_a_gpu_image_and_the_cpu_one_is_the_default():
    stages = re.findall(r"^FROM \S+ AS (\S+)", DOCKERFILE, flags=re.MULTILINE)
    assert "gpu" in stages
    assert stages[-1] == "cpu"


def test_every_pip_install_is_constrained():
    installs = [run for run in instructions("RUN") if run.startswith("pip install")]
    assert len(installs) == 4
    assert all("-c constraints.txt" in run for run in installs)


def test_the_build_context_holds_what_the_build_reads_and_no_more():
    ignore = (ROOT / "deploy/docker/Dockerfile.dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in ignore if line.startswith("!")}
    assert ignore[1] == "*"
    assert {"constraints.txt", "pyproject.toml", "README.md", "model", "protos", "service"} <= allowed
    assert not any(fnmatch.fnmatch("tests", name) for name in allowed)

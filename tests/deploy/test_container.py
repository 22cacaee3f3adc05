"""What the image's containers need of their packages, their file system and their first process, tried in namespaces."""

import importlib.util
import itertools
import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from tests.deploy.containers import PYTHON, USER, contained, make_root, needs_namespaces
from tests.deploy.manifests import ROOT, attend_env
from tests.deploy.test_image import instructions, runtime_env

SMALL = {"ATTEND_NUM_THREADS": "1", "ATTEND_KV_CACHE_MEMORY": str(64 << 20)}
COMPILE = """
import shutil, tempfile
from pathlib import Path
import triton.backends.nvidia.driver as driver
from triton.runtime.build import _build

folder = Path(tempfile.mkdtemp())
shutil.copy("/lib/x86_64-linux-gnu/libz.so.1", folder / "libcuda.so.1")  # the real one comes with a GPU; any can be linked
source = folder / "cuda_utils.c"
source.write_text((Path(driver.__file__).parent / "driver.c").read_text())
places = [driver.libdevice_dir, str(folder)], driver.include_dirs, driver.libraries
print("BUILT", _build("cuda_utils", str(source), str(folder), *places, []))
"""


def packages_of(target):
    """What `apt-get install` puts into an image."""
    runs = [*instructions("RUN", "runtime"), *instructions("RUN", target)]
    return {name for run in runs for name in re.search(r"--no-install-recommends ([^&]+)", run)[1].split()}


@pytest.fixture
def compiled_with(tmp_path):
    """Runs Triton's own build of its module for CUDA in a root that has these packages alone; gives what it said."""
    triton = importlib.util.find_spec("triton")
    if triton is None:
        pytest.skip("NOT CHECKED: Triton is not installed here")
    needs_namespaces()
    site = Path(triton.origin).parents[1]
    command = ["env", "-i", "PATH=/usr/bin:/bin", f"PYTHONPATH={site}", f"{PYTHON}/bin/python3", "-c", COMPILE]

    def run(packages):
        make_root(tuple(sorted(packages)), tmp_path)
        mounts = [f"mkdir -p {tmp_path}/tmp && mount -t tmpfs tmpfs {tmp_path}/tmp"]  # first: this tree may lie below /tmp
        mounts += [f"mkdir -p {tmp_path}{path} && mount --rbind {path} {tmp_path}{path}" for path in (PYTHON, site, "/dev")]
        return contained("\n".join([*mounts, f"chroot {tmp_path} {shlex.join(command)}"]), 120).stdout

    yield run
    shutil.rmtree(tmp_path)  # hundreds of megabytes


@pytest.mark.timeout(200)
def test_the_gpu_image_holds_what_triton_compiles_with(compiled_with):
    output = compiled_with(packages_of("gpu"))
    assert "BUILT" in output, output


# --- the printed `docker run`


def printed_run():
    """The words of the first `docker run` line of the page, up to the image's name."""
    lines = [line.strip() for line in (ROOT / "deploy/README.md").read_text().splitlines()]
    words = shlex.split(next(line for line in lines if line.startswith("docker run ")))
    return words[2 : words.index("attend:0.1.0")]


def mounts_of(words):
    """Shell that mounts what these options of `docker run` mount; a tmpfs is noexec unless it says otherwise."""
    values = dict(itertools.pairwise(words))
    path, _, options = values["--tmpfs"].partition(":")
    given = options.split(",") if options else []
    defaults = [option for option in ("noexec", "nosuid", "nodev") if option.removeprefix("no") not in given]
    lines = around(path, f"mount -t tmpfs -o {','.join(['mode=1777', *defaults, *given])} tmpfs {path}")
    lines += [f"mount -t tmpfs -o mode=1777,size={values['--shm-size']} tmpfs /dev/shm", "ip link set lo up"]
    return "\n".join([*lines, *(["mount -o remount,bind,ro /"] if "--read-only" in words else [])])


def around(path, mount):
    """Shell that mounts over `path`, and keeps this tree and its environment in sight where they lie below."""
    ours = {tree for tree in (ROOT, Path(sys.prefix)) if tree.is_relative_to(path)}
    trees = sorted(tree for tree in ours if not any(tree.is_relative_to(other) for other in ours - {tree}))
    before = [f"mkdir -p /run/kept{at} && mount --rbind {tree} /run/kept{at}" for at, tree in enumerate(trees)]
    after = [f"mkdir -p {tree} && mount --rbind /run/kept{at} {tree}" for at, tree in enumerate(trees)]
    return [*before, mount, *after]


def in_the_image(words, script):
    """Run a script as the image's user, with its variables, under these options of `docker run`."""
    variables = {name: value for name, value in runtime_env.items() if name != "PATH"}
    return contained(f"{mounts_of(words)}\ncd /tmp\n{USER} bash -c {shlex.quote(script)}", 150, **variables, **SMALL)


SERVE_AND_CHECK = """
python -m attend.service.commands.cli serve & server=$!
for second in $(seq 100); do wget -q -O /dev/null http://127.0.0.1:8000/readyz && break; sleep 1; done
python -m attend.service.commands.cli check http://127.0.0.1:8000; status=$?
kill -TERM $server; wait $server; echo "checked $status ended $?"
"""


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(200)
def test_the_printed_docker_run_starts_a_server_that_passes_attend_check():
    output = in_the_image(printed_run(), SERVE_AND_CHECK).stdout
    assert output.splitlines()[-1] == "checked 0 ended 0", output[-3000:]


def test_a_folder_that_runs_no_programs_ends_the_container_with_its_name():
    words = [word.removesuffix(":exec") for word in printed_run()]
    done = in_the_image(words, "python -m attend.service.commands.cli serve")
    assert done.returncode == 2, done.stdout[-2000:]
    assert done.stdout.splitlines()[-1].startswith("attend: /tmp is mounted noexec")


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_standalone_pod_serves_where_tmp_runs_no_programs_and_shared_memory_is_docker_s(standalone_env):
    """One process, as its Deployment has it: read-only root, /tmp for data alone, the 64 MiB of /dev/shm that a pod has."""
    words = ["--read-only", "--tmpfs", "/tmp", "--shm-size", "64m"]
    script = f"export {shlex.join(f'{name}={value}' for name, value in (standalone_env | SMALL).items())}\n{SERVE_AND_CHECK}"
    output = in_the_image(words, script).stdout
    assert output.splitlines()[-1] == "checked 0 ended 0", output[-3000:]


@pytest.fixture
def standalone_env():
    lines = (ROOT / "deploy/base/standalone/attend.env").read_text().splitlines()
    variables = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
    assert variables["ATTEND_SINGLE"] == "true"
    return variables


# --- where the log lines of a pod's replicas go


NODE = """
import os, subprocess, sys
# As a raylet: its workers' standard output and error are files.
subprocess.run([sys.executable, "-c", os.environ["REPLICA"]], start_new_session=True,
               stdout=open("/dev/shm/worker.out", "w"), stderr=open("/dev/shm/worker.err", "w"), check=True)
print(open("/dev/shm/worker.err").read())
"""
REPLICA = """
import logging, os
from attend.service.observe import logs
logs.configure("info", os.environ["ATTEND_LOG_FORMAT"], os.environ.get("ATTEND_LOG_FILE", ""))
logging.getLogger("attend.calls").info("call", extra={"request_id": "r-1"})
"""


def test_a_replicas_log_lines_come_out_of_its_pods_first_process():
    """KubeRay's container is `bash -c -- "ulimit ...; ray start ..."`, in a process namespace of its own, as user 1000."""
    first = 'ulimit -n 1024; python -c "$NODE" > /dev/null'
    script = f"mount -t tmpfs -o mode=1777 tmpfs /dev/shm\nexec {USER} bash -c -- {shlex.quote(first)}"
    names = {"ATTEND_LOG_FILE", "ATTEND_LOG_FORMAT"} & attend_env.keys()
    done = contained(script, 60, NODE=NODE, REPLICA=REPLICA, **{name: attend_env[name] for name in names})
    assert done.returncode == 0, done.stdout
    [line] = done.stdout.splitlines()
    assert json.loads(line)["request_id"] == "r-1"

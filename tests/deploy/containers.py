"""Containers as far as a machine without a container engine has them: namespaces, mounts, and roots made of packages."""

import functools
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.manifests import ROOT

USER = "setpriv --reuid=1000 --regid=1000 --clear-groups --inh-caps=-all --bounding-set=-all --no-new-privs"
"""A pod's user, without a capability."""
OF_THE_BASE = ("apt", "libbz2-1.0", "libffi8", "liblzma5", "libncursesw6", "libreadline8", "libsqlite3-0", "libssl3", "zlib1g")
"""What the base image has, for its Python above all, beside Debian's essential packages."""
PYTHON = Path(sys.base_prefix)
NAMESPACES = ("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private")


@functools.cache
def needs_namespaces() -> None:
    """Skip the test where this machine lets nobody make namespaces."""
    programs = ("unshare", "setpriv", "ip", "mount")
    if os.geteuid() or not all(map(shutil.which, programs)):
        pytest.skip(f"NOT CHECKED: needs root, and {', '.join(programs)}")
    tried = [*NAMESPACES, "sh", "-c", "mount -t tmpfs tmpfs /tmp && mount -o remount,bind,ro /"]
    if subprocess.run(tried, capture_output=True, check=False).returncode:
        pytest.skip("NOT CHECKED: no namespaces can be made here")


def contained(script: str, seconds: float, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script with mounts, processes and network of its own; nothing of it outlives it."""
    needs_namespaces()
    plain = {"PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH": str(ROOT)}
    plain |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}
    read, write = os.pipe()
    os.fchown(write, 1000, 1000)  # as runc and crun do with what a container writes to
    with open(read, encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            [*NAMESPACES, "bash", "-c", f"set -e\n{readable()}\n{script}"],
            env=plain | environment,
            stdin=subprocess.DEVNULL,
            stdout=write,
            stderr=write,
            cwd="/",
        )
        os.close(write)
        try:
            text = _all_of(output, process, seconds)
        finally:
            process.kill()
            process.wait()
    return subprocess.CompletedProcess(NAMESPACES, process.returncode, text, "")


def _all_of(output, process: subprocess.Popen[bytes], seconds: float) -> str:
    """What a process and its children wrote until it ended."""
    process.wait(seconds)
    return output.read()


def readable() -> str:
    """Shell that makes this Python readable for every user, where it lies in a home folder of root's."""
    if PYTHON.parts[1] != "root":
        return ""
    kept = shlex.quote(str(PYTHON))
    return f"""mkdir -p /run/python && mount --bind {kept} /run/python
mount -t tmpfs -o mode=0755 tmpfs /root && mkdir -p {kept} && mount --move /run/python {kept}"""


def installed(packages: tuple[str, ...]) -> set[str]:
    """These packages of Debian's and all that they depend on, as installed here. Skips the test where one is not."""
    known = _status()
    essential = {name for name, (is_essential, _) in known.items() if is_essential}
    todo, found = [*essential, *packages], set()
    while todo:
        name = todo.pop()
        if name in found:
            continue
        if name not in known:
            pytest.skip(f"NOT CHECKED: the package {name} is not installed here")
        found.add(name)
        todo += [each for each in known[name][1] if each in known]
    return found


@functools.cache
def _status() -> dict[str, tuple[bool, list[str]]]:
    """True if it is essential, and what it depends on, of each installed package."""
    if shutil.which("dpkg-query") is None:
        pytest.skip("NOT CHECKED: this is no Debian")
    fields = "${Package}\t${Essential}\t${Pre-Depends}, ${Depends}\n"
    text = subprocess.run(["dpkg-query", "-W", "-f", fields], capture_output=True, text=True, check=True).stdout
    found = {}
    for line in text.splitlines():
        name, essential, needs = line.split("\t")
        options = [option.split("(")[0].split(":")[0].strip() for need in needs.split(",") for option in need.split("|")]
        found[name] = (essential == "yes", options)
    return found


def make_root(packages: tuple[str, ...], folder: Path) -> None:
    """Fill a folder with the files of these packages and of what they depend on: what `apt-get install` would leave."""
    names = sorted(installed((*packages, *OF_THE_BASE)))
    listed = subprocess.run(["dpkg-query", "-L", *names], capture_output=True, text=True, check=True).stdout.split("\n")
    skipped = ("/usr/share/doc", "/usr/share/man", "/usr/share/locale", "/usr/share/zoneinfo")
    files = {path for path in listed if path.startswith("/") and not path.startswith(skipped)}
    # Debian's merged /usr: /bin and its like are links, through which packages name files.
    links = {f"/{name}" for name in ("bin", "sbin", "lib", "lib64", "lib32", "libx32") if Path(f"/{name}").is_symlink()}
    real = {path for path in files if os.path.lexists(path) and not any(path == each for each in links)}
    targets = sorted({os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path)) for path in real} | links)
    alternatives = sorted(str(path) for path in Path("/etc/alternatives").iterdir())
    wanted = "\0".join(path.lstrip("/") for path in (*targets, *alternatives, "/etc/ld.so.cache") if path != "/")
    archive = ["tar", "-C", "/", "--null", "--no-recursion", "--files-from=-", "-cf", "-"]
    made = subprocess.run(archive, input=wanted.encode(), capture_output=True, check=True).stdout
    subprocess.run(["tar", "-C", str(folder), "-xf", "-"], input=made, check=True)

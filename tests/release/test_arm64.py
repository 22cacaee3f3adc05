"""The whole product on arm64, in an emulator: `make test-arm64`, as root, with mmdebstrap and qemu-user-static.

Debian's packages for arm64 are unpacked into a folder, PyPI's wheels are put beside them, and the wheel of this tree is built
there by its g++. In a user namespace the kernel runs such programs by the emulator: the machine's own settings stay as they are.
"""

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from attend.v1 import generation_pb2 as pb
from attend.v1 import generation_pb2_grpc as rpc
from tests.release.lock import TAGS
from tests.service.server import Server, running
from tests.service.sse import events_of

FOLDER = os.environ.get("ATTEND_TEST_ARM64", "")
if not FOLDER:
    pytest.skip("no folder for arm64 is given: make test-arm64", allow_module_level=True)
pytestmark = pytest.mark.timeout(3600)
TREE = Path(__file__).parents[2]
SOURCES = ("/etc/apt/sources.list.d/debian.sources", "/etc/apt/sources.list")
PACKED = ("attend", "model", "service", "protos", "setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "NOTICE", "README.md")
CPUS = {"cortex-a72": "portable", "neoverse-n1": "neon-dotprod", "max": "neon-i8mm-bf16"}
"""What is emulated, and the instruction set of the native decoder that it has."""
PROMPT = "def fibonacci(n):"
GENERATE = ("generate", PROMPT, "--json", "--logprobs", "0", "--max-tokens", "48")
ENTER = r"""
mount -t binfmt_misc none /proc/sys/fs/binfmt_misc
magic='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
printf %s ":arm64:M::$magic:$mask:$(command -v qemu-aarch64-static):F" > /proc/sys/fs/binfmt_misc/register
for name in dev proc; do mount --rbind /$name $0/$name; done
mount --bind $0/etc/cpuinfo $0/proc/cpuinfo
exec chroot $0 env -C /tmp HOME=/root PATH=/opt/attend/bin:/usr/bin:/bin "$@"
"""
CPUINFO = "processor\t: {}\nFeatures\t: fp asimd asimddp i8mm bf16\nCPU implementer\t: 0x41\nCPU part\t: 0xd49\n\n"
"""What Linux says of a Neoverse N2; the emulator shows the file of this machine. torch reads it with /sys/devices/system/cpu."""


def inside(root: Path, *command: str) -> list[str]:
    """The words that run a command of the root."""
    return ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec", ENTER, str(root), *command]


def output(*command: str, **variables: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | variables).stdout


def unpack(root: Path) -> None:
    """Debian's files, with what the kernel of an arm64 machine shows of its processors."""
    hooks = ("--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr", '--customize-hook=ln -sf dash "$1/usr/bin/sh"')
    packages = "--include=python3-venv,g++,?essential"
    sources = next(path for path in SOURCES if os.path.exists(path))
    subprocess.run(["mmdebstrap", "--arch=arm64", "--variant=extract", packages, *hooks, "bookworm", root, sources], check=True)
    (root / "etc/cpuinfo").write_text("".join(map(CPUINFO.format, range(os.cpu_count() or 1))))
    cores = root / "sys/devices/system/cpu"
    cores.mkdir(parents=True)
    for name in ("possible", "present"):
        (cores / name).write_text(f"0-{(os.cpu_count() or 1) - 1}\n")


def install(root: Path, archive: bytes) -> None:
    """The packages, which the pip of this machine fetches and unpacks: the emulator would take ten times as long. Then the
    wheel, whole as its users get it.
    """
    subprocess.run(inside(root, "python3", "-m", "venv", "--without-pip", "/opt/attend"), check=True)
    [site] = root.glob("opt/attend/lib/python3.*/site-packages")
    needs = tomllib.loads((TREE / "pyproject.toml").read_text())["project"]["dependencies"]
    platforms = [word for tag in TAGS for word in ("--platform", f"{tag}_aarch64")]
    version = site.parent.name.removeprefix("python")
    where = [
        "--target",
        str(site),
        "--python-version",
        version,
        "--only-binary=:all:",
        *platforms,
        "-c",
        str(TREE / "constraints.txt"),
    ]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile"]
    subprocess.run([*pip, *where, *needs, "pip", "setuptools"], check=True)
    (root / "src").mkdir()
    subprocess.run(["tar", "-x", "-C", root / "src"], input=archive, check=True)
    options = ["--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run(inside(root, "python", "-m", "pip", "wheel", *options, "-w", "/dist", "/src"), check=True)
    [wheel] = (root / "dist").iterdir()
    assert wheel.name.endswith("-py3-none-linux_aarch64.whl")
    subprocess.run(inside(root, "python", "-m", "pip", "install", *options[:2], f"/dist/{wheel.name}"), check=True)


@pytest.fixture(scope="module")
def root() -> Path:
    """Made again when the packages, the tree or this file have changed."""
    names = output("git", "-C", str(TREE), "ls-files", *PACKED).splitlines()
    archive = subprocess.run(["tar", "-c", "--mtime=@0", "-C", TREE, *names], check=True, capture_output=True).stdout
    digest = hashlib.sha256(archive + (TREE / "constraints.txt").read_bytes() + Path(__file__).read_bytes()).hexdigest()[:12]
    root, unfinished = Path(FOLDER) / digest, Path(FOLDER) / "unfinished"
    if not root.exists():
        shutil.rmtree(FOLDER, ignore_errors=True)
        unfinished.parent.mkdir(parents=True)
        unpack(unfinished)
        install(unfinished, archive)
        unfinished.rename(root)
    return root


@pytest.fixture(scope="module")
def server(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    script = folder / "attend"
    script.write_text(f'#!/bin/sh\nexec {shlex.join(inside(root, "attend"))} "$@"\n')
    script.chmod(0o755)
    with running(folder / "log", "--single", script=script) as server:
        yield server


@pytest.fixture(scope="module")
def wanted() -> dict:
    """What this machine's own processor makes of the prompt."""
    return json.loads(output(sys.executable, "-m", "attend.service.commands.cli", *GENERATE))["choices"][0]


def test_every_package_that_a_package_asks_for_is_there(root):
    """The package of cusparselt names another platform in its wheel than in the wheel's name."""
    done = subprocess.run(inside(root, "python", "-m", "pip", "check"), check=False, capture_output=True, text=True)
    assert {line for line in done.stdout.splitlines() if "cusparselt" not in line} <= {"No broken requirements found."}


@pytest.mark.parametrize("cpu", CPUS)
def test_generate_has_the_tokens_of_x86(root, wanted, cpu):
    found = json.loads(output(*inside(root, "attend", *GENERATE), QEMU_CPU=cpu, ATTEND_BACKEND="native"))["choices"][0]
    assert found["logprobs"]["tokens"] == wanted["logprobs"]["tokens"]
    assert found["logprobs"]["token_logprobs"] == pytest.approx(wanted["logprobs"]["token_logprobs"], abs=0.05)


def test_doctor_names_the_processor_and_the_decoder(root):
    """It has a minute, in which an emulator measures no speed."""
    done = subprocess.run(inside(root, "attend", "doctor", "--json"), check=False, capture_output=True, text=True)
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["processor"]["detail"].startswith("aarch64 with I8MM, BF16, DOTPROD; ")
    assert checks["native library"]["detail"] == "built, its best variant here: neon-i8mm-bf16"
    assert checks["backend"]["detail"] == "bfloat16 by the native-neon-i8mm-bf16 backend"
    assert {name for name, check in checks.items() if check["outcome"] == "failed"} <= {"device speed", "model speed"}


def test_http_streams_the_text_of_x86(server, wanted):
    body = json.dumps({"prompt": PROMPT, "max_tokens": 48, "temperature": 0, "stream": True}).encode()
    call = urllib.request.Request(f"{server.url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(call, timeout=200) as answer:
        assert "".join(event["choices"][0]["text"] for event in events_of(answer.read().decode())) == wanted["text"]


def test_grpc_streams_the_text_of_x86(server, wanted):
    with grpc.insecure_channel(server.target) as channel:
        call = rpc.GenerationServiceStub(channel).GenerateStream(pb.GenerateRequest(text=PROMPT, max_tokens=48, temperature=0))
        assert "".join(message.outputs[0].text for message in call) == wanted["text"]


def test_sigterm_ends_the_server(server):
    server.stop()
    assert server.process.returncode == 0

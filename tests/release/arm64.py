"""A root of Debian for arm64 that has the wheel of this tree, on a machine of another kind: root, mmdebstrap, qemu-user-static.

Debian's packages are unpacked, PyPI's wheels are put beside them, and the wheel of this tree is built there by its g++. The
kernel runs such programs by the emulator in a user namespace alone: the machine's own settings stay as they are.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.release.lock import ROOT, TAGS

SOURCES = ("/etc/apt/sources.list.d/debian.sources", "/etc/apt/sources.list")
PACKED = ("attend", "model", "service", "protos", "setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "NOTICE")
PAGES = (":(exclude,glob)model/*.md", ":(exclude,glob)service/*.md")
ENTER = r"""
mount -t binfmt_misc none /proc/sys/fs/binfmt_misc
magic='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
printf %s ":arm64:M::$magic:$mask:$(command -v qemu-aarch64-static):F" > /proc/sys/fs/binfmt_misc/register
for name in dev proc; do mount --rbind /$name $0/$name; done
mount --bind $0/etc/cpuinfo-${QEMU_CPU:-max} $0/proc/cpuinfo
exec chroot $0 env -C /tmp HOME=/root PATH=/opt/attend/bin:/usr/bin:/bin "$@"
"""
CPUS = {
    "cortex-a72": (0xD08, "fp asimd"),
    "neoverse-n1": (0xD0C, "fp asimd asimddp"),
    "max": (0xD49, "fp asimd asimddp i8mm bf16"),
}
"""What is emulated (QEMU_CPU), a CPU of each instruction set of the native decoder: its number, and what it can do."""
CPUINFO = "processor\t: {}\nFeatures\t: {}\nCPU implementer\t: 0x41\nCPU part\t: {:#x}\n\n"
"""What Linux says of a core. The emulator shows this machine's; torch reads it, and /sys/devices/system/cpu."""


def inside(root: Path, *command: str) -> list[str]:
    """The words that run a command in the root."""
    return ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec", ENTER, str(root), *command]


def unpack(root: Path) -> None:
    """Debian's files, with what the kernel of an arm64 machine shows of its processors."""
    hooks = ("--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr", '--customize-hook=ln -sf dash "$1/usr/bin/sh"')
    options = ("--quiet", "--arch=arm64", "--variant=extract", "--include=python3-venv,g++,?essential", *hooks)
    sources = next(path for path in SOURCES if os.path.exists(path))
    subprocess.run(["mmdebstrap", *options, "bookworm", root, sources], check=True)
    cores = os.cpu_count() or 1
    for name, (part, features) in CPUS.items():
        (root / f"etc/cpuinfo-{name}").write_text("".join(CPUINFO.format(core, features, part) for core in range(cores)))
    folder = root / "sys/devices/system/cpu"
    folder.mkdir(parents=True)
    for name in ("possible", "present"):
        (folder / name).write_text(f"0-{cores - 1}\n")


def install(root: Path, archive: bytes) -> None:
    """The packages, which the pip of this machine unpacks: in the emulator that takes ten times as long. Then the wheel."""
    subprocess.run(inside(root, "python3", "-m", "venv", "--without-pip", "/opt/attend"), check=True)
    [site] = root.glob("opt/attend/lib/python3.*/site-packages")
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    kind = ["--only-binary=:all:", "--python-version", site.parent.name.removeprefix("python")]
    kind += [word for tag in TAGS for word in ("--platform", f"{tag}_aarch64")]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--target", str(site), *kind]
    subprocess.run([*command, "-c", str(ROOT / "constraints.txt"), *needs, "pip", "setuptools"], check=True)
    (root / "src").mkdir()
    subprocess.run(["tar", "-x", "-C", root / "src"], input=archive, check=True)
    pip = ("python", "-m", "pip", "--quiet")
    subprocess.run(
        inside(root, *pip, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", "/dist", "/src"), check=True
    )
    [wheel] = (root / "dist").iterdir()
    subprocess.run(inside(root, *pip, "install", "--no-deps", "--no-index", f"/dist/{wheel.name}"), check=True)


def provide(folder: Path) -> Path:
    """The root in this folder, made again where the tree, its constraints or this file have changed."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", *PACKED, *PAGES], check=True, capture_output=True, text=True)
    command = ["tar", "-c", "--mtime=@0", "-C", str(ROOT), *listed.stdout.splitlines()]
    archive = subprocess.run(command, check=True, capture_output=True).stdout
    inputs = archive + (ROOT / "constraints.txt").read_bytes() + Path(__file__).read_bytes()
    root, unfinished = folder / hashlib.sha256(inputs).hexdigest()[:12], folder / "unfinished"
    if not root.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        unpack(unfinished)
        install(unfinished, archive)
        unfinished.rename(root)
    return root

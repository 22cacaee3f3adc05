"""`make check`: the proto is well made, breaks no caller of the released one, and the committed code is what it generates."""

import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from grpc_tools import protoc

PROTO = "attend/v1/generation.proto"
"""Its name under `protos/`, which is the name that every caller's protoc gives it too."""
BASE = "tests/wire/base.binpb"
"""The released wire: what `buf breaking` compares with. It is replaced on purpose, by `python -m tests.wire.record --base`."""
ROOT = Path(__file__).parent.parent


def main(root: Path = ROOT) -> int:
    """How many of the three checks of the proto under `root` fail."""
    complaints = [*lint(root), *breaking(root), *generated(root)]
    print(*complaints, sep="\n", file=sys.stderr, end="\n" * bool(complaints))
    return len(complaints)


def lint(root: Path) -> list[str]:
    """What `buf lint` says, or nothing."""
    found = _buf(root, "lint")
    return [f"buf lint:\n{found}"] if found else []


def breaking(root: Path) -> list[str]:
    """What `buf breaking` says, or nothing."""
    found = _buf(root, "breaking", "--against", BASE)
    how = "Callers of the released proto would break. If none can exist: `python -m tests.wire.record --base`"
    return [f"buf breaking:\n{found}\n{how}"] if found else []


def generated(root: Path) -> list[str]:
    """The committed code that differs from what this version of grpcio-tools generates."""
    with tempfile.TemporaryDirectory() as out:
        flags = [f"--{kind}={out}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
        assert protoc.main(["protoc", f"-I{root}/protos", *flags, PROTO]) == 0
        made = sorted(path for path in Path(out).rglob("*.py*"))
        assert len(made) == 3, made
        differing = [path.name for path in made if path.read_bytes() != (root / "protos" / path.relative_to(out)).read_bytes()]
    return [f"{differing} differ from what protos/{PROTO} generates: run `make protos`"] if differing else []


def build_base(root: Path = ROOT) -> None:
    """Make the proto as it stands the released one. Raises RuntimeError where it does not compile."""
    if said := _buf(root, "build", "--exclude-source-info", "--output", BASE):
        raise RuntimeError(said)


def _buf(root: Path, *arguments: str) -> str:
    """What buf has to complain of."""
    command = [f"{sysconfig.get_path('scripts')}/buf", *arguments]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    said = (done.stdout + done.stderr).strip()
    return said or (f"exit status {done.returncode}" if done.returncode else "")


if __name__ == "__main__":
    sys.exit(main())

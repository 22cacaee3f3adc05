"""`make check`: the committed code of the proto is what this version of grpcio-tools generates."""

import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

PROTO = "protos/attend/v1/generation.proto"


def main() -> int:
    """0 if nothing differs."""
    root = Path(__file__).parent.parent
    with tempfile.TemporaryDirectory() as out:
        flags = [f"--{kind}={out}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
        assert protoc.main(["protoc", f"-I{root}", *flags, str(root / PROTO)]) == 0
        made = sorted(path for path in Path(out).rglob("*.py*"))
        assert len(made) == 3, made
        differing = [path.name for path in made if path.read_bytes() != (root / path.relative_to(out)).read_bytes()]
    if differing:
        print(f"{differing} differ from what {PROTO} generates: run `make protos`", file=sys.stderr)
    return len(differing)


if __name__ == "__main__":
    sys.exit(main())

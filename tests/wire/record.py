"""`python -m tests.wire.record` writes what the server says now into the golden files.

With `--base` it only makes the proto as it stands the one that `buf breaking` compares with.
"""

import argparse
import shutil
from difflib import unified_diff
from pathlib import Path

from tests.check_protos import build_base
from tests.wire.cases import HTTP
from tests.wire.rpc_cases import RPC

GOLDEN = Path(__file__).parent / "golden"
EXCHANGES = {f"http/{case.name}.txt": case for case in HTTP} | {f"grpc/{case.name}.txt": case for case in RPC}
"""Each exchange by its file in GOLDEN."""
HOW_TO_ACCEPT = "the wire has changed. Where that is meant: `python -m tests.wire.record`, and read what git shows"


def difference(path: Path, now: str) -> str:
    """What the golden file at `path` says otherwise, as a unified diff and a way out; empty where nothing."""
    kept = path.read_bytes().decode("utf-8") if path.exists() else ""
    name = str(path.relative_to(GOLDEN.parent))
    lines = unified_diff(kept.splitlines(), now.splitlines(), name, "what the server says now", lineterm="")
    return "" if kept == now else "\n".join([*lines, "", HOW_TO_ACCEPT])


def record() -> None:
    """Write every golden file anew, and no other."""
    for kind in ("http", "grpc"):
        shutil.rmtree(GOLDEN / kind, ignore_errors=True)
        (GOLDEN / kind).mkdir(parents=True)
    for name, exchange in EXCHANGES.items():
        (GOLDEN / name).write_bytes(exchange.transcript().encode("utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description="write the golden files anew")
    parser.add_argument("--base", action="store_true", help="only replace the proto that `buf breaking` compares with")
    build_base() if parser.parse_args().base else record()


if __name__ == "__main__":
    main()

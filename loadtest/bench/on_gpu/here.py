"""What is here: packages, versions, the GPU. As a program it prints a line of JSON for each thing that it finds out."""

import hashlib
import importlib
import json
import os
import platform
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attend.model.machine import ask_driver
from loadtest.bench.contestant import TREE

ENGINE = ("torch", "numpy", "safetensors")
LAWS = (*ENGINE, "pytest", "pytest_timeout", "hypothesis", "tokenizers", "transformers", "triton")
PEER = ("torch", "transformers")
NEEDED = {
    "torch": "everything",
    "numpy": "everything",
    "triton": "the kernels: their laws, and Attend's answers and speed on a GPU",
    "safetensors": "the shipped model, and the engine round it",
    "pytest": "all laws",
    "pytest_timeout": "all laws: pyproject.toml sets its limit",
    "hypothesis": "the tests' own tools",
    "tokenizers": "the tests' own tools",
    "transformers": "the tests' own tools, and the peer beside Attend",
    "xdist": "laws on all cores: without it they take one, and may be cut",
}
"""What each package is for. Others that Attend has (gguf, llguidance, pydantic, ray) are not needed here."""


def missing() -> dict[str, str]:
    """The packages that are not here, and what each is for."""
    return {name: what for name, what in NEEDED.items() if find_spec(name) is None}


def commit() -> str:
    """The commit of this tree, `+` where files were changed since; a digest of the model's code where there is no git."""
    try:
        git = ["git", "-C", str(TREE)]
        where, name, changed = (
            subprocess.run([*git, *words], capture_output=True, text=True, timeout=5, check=True).stdout.strip()
            for words in (["rev-parse", "--show-toplevel"], ["rev-parse", "HEAD"], ["status", "--porcelain", "-uno"])
        )
        if Path(where) == TREE.resolve():
            return name[:12] + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        pass
    digest = hashlib.sha256()
    for path in sorted((TREE / "model").rglob("*.py")):
        digest.update(path.read_bytes())
    return f"no git; model/**/*.py {digest.hexdigest()[:12]}"


def gpu() -> dict[str, str]:
    """What nvidia-smi says of the first GPU; nothing without it."""
    asked = ("name", "driver_version", "memory.total", "compute_cap")
    return dict(zip(asked, ask_driver(asked), strict=False))


def plain() -> dict[str, Any]:
    """What is known without any package, at once."""
    return {"python": platform.python_version(), "cores": len(os.sched_getaffinity(0)), "commit": commit()} | gpu()


def versions() -> dict[str, str]:
    """Of the packages, as they say themselves; what one raises as it is imported. The tools are not imported: it takes long."""
    found = {}
    for name in ("transformers", "pytest"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    for name in ("torch", "triton", "numpy", "safetensors"):
        try:
            found[name] = str(importlib.import_module(name).__version__)
        except ModuleNotFoundError as error:
            if error.name != name:  # one that is not here is told by `missing`
                found[f"{name} error"] = str(error)
        except Exception as error:  # a library that does not load raises what it likes
            found[f"{name} error"] = f"{type(error).__name__}: {error}"
    return found


def device() -> dict[str, Any]:
    """What torch says of the first GPU, or why it sees none."""
    from attend.model.devices import gpu

    return gpu()


def kernel() -> dict[str, str]:
    """True if Triton compiles a kernel here, and the kernel computes."""
    import torch

    try:
        from loadtest.bench.on_gpu.kernel import double

        given = torch.arange(256, dtype=torch.float32, device="cuda")
        right = torch.equal(double(given), 2 * given)
    except Exception as error:  # of Triton, its compiler, or the driver
        return {"kernel error": f"{type(error).__name__}: {error}".splitlines()[0]}
    return {"kernel": "compiled, and right"} if right else {"kernel error": "what it computed is wrong"}


def main() -> None:
    """Each line is printed at once: whatever comes next may hang."""
    found = versions()
    print(json.dumps(found), flush=True)
    if "torch" in found and sys.argv[1] == "cuda":
        about = device()
        print(json.dumps(about), flush=True)
        if "device" in about and "triton" in found:
            print(json.dumps(kernel()), flush=True)


if __name__ == "__main__":
    main()

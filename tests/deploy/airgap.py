"""The list in deploy/AIRGAP.md: `make docs` writes it (`python -m tests.deploy.airgap`), test_airgap.py compares it.

Images are those of the chart's renderings, of the page's other commands, and of the builds; packages are those of the lock.
"""

import re

import yaml

from tests.deploy import render
from tests.deploy.manifests import ROOT, constraint

PAGE = ROOT / "deploy/AIRGAP.md"
LIST = re.compile(r"(<!-- begin list -->\n).*?(<!-- end list -->)", re.DOTALL)
OURS = "registry.example.com/attend"


def operator() -> str:
    """The version of KubeRay that the page installs."""
    found = re.search(r"kuberay-operator --version (\S+)", (ROOT / "deploy/README.md").read_text())
    assert found, "deploy/README.md installs the operator"
    return found[1]


def rendered() -> set[str]:
    """Every image that some rendering names."""
    found: set[str] = set()
    for name in render.RENDERED:
        objects = render.render(name)
        for pods in [*render.pods_of(objects), *render.jobs_of(objects)]:
            found |= {container["image"] for container in pods.containers}
    return found


def base() -> str:
    """What the images are built from."""
    found = re.search(r"^ARG BASE=(\S+)", (ROOT / "deploy/docker/Dockerfile").read_text(), re.MULTILINE)
    assert found, "the Dockerfile names its base in ARG BASE"
    return found[1]


def packages() -> int:
    """How many packages the lock has."""
    return sum("==" in line for line in (ROOT / "deploy/docker/requirements.txt").read_text().splitlines())


def listing() -> str:
    """The rows."""
    ours = sorted({image.rpartition("/")[2] for image in rendered()})
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    others = sorted({each["image"] for each in compose.values()} - set(ours))
    lines = ["| what | for |", "|---|---|"]
    lines += [f"| image `{image}` | the chart; built by `make image` |" for image in ours]
    lines += [
        f"| image `quay.io/kuberay/operator:v{operator()}`, chart `kuberay-operator` {operator()} | mode: rayservice |",
        *(f"| image `{image}` | compose.yaml alone |" for image in others),
        f"| image `{base()}`, Debian's packages bash, grep, wget, g++, and for GPUs gcc and libc6-dev | to build the images |",
        f"| {packages()} packages of `deploy/docker/requirements.txt`, by SHA-256 | to build the images |",
        f"| torch {constraint('torch')}: the wheel `+cpu`, or that for CUDA and what it names of NVIDIA's | to build them |",
    ]
    return "\n".join(lines) + "\n"


def page() -> str:
    """AIRGAP.md with the list of this tree."""
    return LIST.sub(lambda match: match[1] + listing() + match[2], PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(page())

"""What the CPU image takes on a node's disk, by the files of the packages here, torch's build for the CPU above all."""

import re
from importlib.metadata import version

import pytest

from tests.deploy.images import packages
from tests.deploy.manifests import ROOT
from tests.deploy.test_image import instructions, requirements

LARGEST = 1300
BASE = 160
"""MB of the base image with Debian's packages, as published: not measured here."""
BUILDS = 30
"""MB of our own code with its decoder and the default model."""


def removed():
    """Patterns of the paths below site-packages that the build deletes."""
    found = []
    for line in [part.strip() for stage in ("packages", "packages-cpu") for part in instructions("RUN", stage)[0].split("&&")]:
        words = [word.strip('"*') for word in line.replace("${PACKAGES}/", "").replace('"', "").split()]
        if words[:2] == ["rm", "-r"]:
            found += [f"{path}/.*" for path in words[2:]]
        elif words[0] == "find":
            found.append(f"{words[1]}/(?!{words[-2]}).*" if "!" in words else f"{words[1]}/.*{words[-2]}")
    return found


def sizes():
    """MB of each package with what Python compiles of it, and of what is removed by each pattern."""
    patterns, kept, gone = removed(), {}, {}
    for name, each in packages("torch", *requirements()).items():
        for file in each.files or ():
            size = (file.size or 0) * (2 if file.suffix == ".py" else 1) / 1e6  # as its wheel says
            matching = [pattern for pattern in patterns if re.fullmatch(pattern, str(file))]
            for pattern in matching:
                gone[pattern] = gone.get(pattern, 0) + size
            if not matching:
                kept[name] = kept.get(name, 0) + size
    return kept, gone


@pytest.mark.skipif("+cpu" not in version("torch"), reason="NOT CHECKED: this torch is no build for the CPU")
def test_the_cpu_image_takes_no_more_than_a_node_can_spare():
    kept, gone = sizes()
    largest = sorted(kept.items(), key=lambda each: -each[1])[:12]
    assert gone.keys() == set(removed()), "something is removed that is not there"
    assert BASE + BUILDS + sum(kept.values()) <= LARGEST, largest


def test_nothing_that_is_removed_is_imported_by_a_server():
    """By the words of our own code and of Ray Serve's."""
    sources = [*(ROOT / "service").rglob("*.py"), *(ROOT / "model").rglob("*.py")]
    sources += [path.locate() for path in packages("ray")["ray[]"].files or () if str(path).startswith("ray/serve/_private")]
    text = "\n".join(path.read_text() for path in sources if path.suffix == ".py" and path.is_file())
    assert not re.search(r"^\s*(from|import) (ray\.rllib|torch\.(test|include|bin))\b", text, re.MULTILINE)

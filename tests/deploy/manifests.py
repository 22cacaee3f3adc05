"""What is under deploy/, read once: each test states a law over these."""

from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "deploy/base/rayservice"
SERVE_TEXT = (ROOT / "deploy/serve/attend.yaml").read_text()
DOCKERFILE = (ROOT / "deploy/docker/Dockerfile").read_text()

serve = yaml.safe_load(SERVE_TEXT)
rayservice = yaml.safe_load((BASE / "rayservice.yaml").read_text())
cluster = rayservice["spec"]["rayClusterConfig"]
groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
pods = [group["template"]["spec"] for group in groups]


def env_file(name):
    lines = (BASE / name).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


ray_env = env_file("ray.env")
attend_env = env_file("attend.env")


def constraint(package):
    """The version that constraints.txt pins, such as 2.60.0 for a line `ray==2.60.0`."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line.partition("==")[2].split()[0] for line in lines if line.startswith(f"{package}=="))

"""Writes deploy/monitoring/prometheusrule.yaml out of the rules.yaml beside it.

Prometheus refuses a rule file with other keys, and kustomize cannot copy a tree of values from one file into another.
Run: python -m tests.deploy.prometheus_rule
"""

import yaml

from tests.deploy.manifests import ROOT

RULES = ROOT / "deploy/monitoring/rules.yaml"
TARGET = ROOT / "deploy/monitoring/prometheusrule.yaml"
HEAD = """\
# Written by `python -m tests.deploy.prometheus_rule`, out of deploy/monitoring/rules.yaml: change that one.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata: {name: attend, labels: {release: kube-prometheus-stack}}
spec:
"""


def text() -> str:
    """The manifest."""
    return HEAD + "".join(f"  {line}\n" if line else "\n" for line in _groups().splitlines())


def _groups() -> str:
    """The rule file without the comment at its head."""
    whole = RULES.read_text()
    return whole[whole.index("groups:") :]


if __name__ == "__main__":
    assert yaml.safe_load(text())["spec"] == yaml.safe_load(RULES.read_text())
    TARGET.write_text(text())

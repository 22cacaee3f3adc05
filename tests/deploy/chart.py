"""The settings in values.schema.json: `make docs` writes them (`python -m tests.deploy.chart`), test_chart.py compares them."""

import json
import re
from itertools import pairwise
from typing import Any

from attend.service.settings import Settings
from tests.deploy.manifests import ROOT

CHART = ROOT / "deploy/chart"
SCHEMA, VALUES = CHART / "values.schema.json", CHART / "values.yaml"
OWN = {
    *("device", "num_threads", "kv_cache_memory", "log_format", "log_file", "expose_docs", "model", "tensor_parallel"),
    *("api_keys_file", "tls_cert", "tls_key", "kv_disk_folder", "kv_disk_bytes", "otel_endpoint", "single", "replicas"),
    *("max_replicas", "host", "port", "grpc_port", "request_timeout_seconds", "drain_seconds"),
}
"""Settings that the chart itself derives from its other values: given under `settings` too, one of the two would lose."""


def schema() -> str:
    """values.schema.json with the settings of this version."""
    whole = json.loads(SCHEMA.read_text())
    one: dict[str, Any] = {"type": ["string", "number", "boolean"]}
    whole["properties"]["settings"]["properties"] = dict.fromkeys(sorted(Settings.model_fields.keys() - OWN), one)
    return json.dumps(whole, indent=1) + "\n"


def uncommented() -> list[str]:
    """The lines of values.yaml whose value has no comment above it. The members of a group have their own."""
    lines = ["", *VALUES.read_text().splitlines()]
    return [line for before, line in pairwise(lines) if re.match(r" *\w+: *\S", line) and not before.lstrip().startswith("#")]


if __name__ == "__main__":
    SCHEMA.write_text(schema())

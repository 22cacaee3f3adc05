"""What follows of the chart from elsewhere: `make docs` writes it (`python -m tests.deploy.chart`), test_chart.py compares it.

values.schema.json knows the service's settings by name, and README.md has a row for each value.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml

from attend.service.settings import Settings
from tests.deploy.manifests import ROOT

CHART = ROOT / "deploy/chart"
SCHEMA, README, VALUES = CHART / "values.schema.json", CHART / "README.md", CHART / "values.yaml"
OWN = {
    *("device", "num_threads", "kv_cache_memory", "log_format", "log_file", "expose_docs", "model", "tensor_parallel"),
    *("api_keys_file", "tls_cert", "tls_key", "kv_disk_folder", "kv_disk_bytes", "otel_endpoint", "single", "replicas"),
    *("max_replicas", "host", "port", "grpc_port", "request_timeout_seconds", "drain_seconds", "proxy"),
}
"""Settings that the chart itself derives from its other values: given under `settings` too, one of the two would lose."""
TABLE = re.compile(r"(<!-- begin values -->\n).*?(<!-- end values -->)", re.DOTALL)


def schema() -> str:
    """values.schema.json with the settings of this version."""
    whole = json.loads(SCHEMA.read_text())
    one: dict[str, Any] = {"type": ["string", "number", "boolean"]}
    whole["properties"]["settings"]["properties"] = dict.fromkeys(sorted(Settings.model_fields.keys() - OWN), one)
    return json.dumps(whole, indent=1) + "\n"


def rows() -> Iterator[tuple[str, str, str]]:
    """(name, default, comment) of each value in values.yaml, by its order."""
    values, path, comment = yaml.safe_load(VALUES.read_text()), [], []
    for line in VALUES.read_text().splitlines():
        if line.lstrip().startswith("#"):
            comment.append(line.strip().lstrip("# "))
            continue
        if match := re.match(r"( *)(\w+):", line):
            path = [*path[: len(match[1]) // 2], match[2]]
            value: Any = values
            for name in path:
                value = value[name]
            if ":" in line and line.rstrip().endswith(":"):
                comment = []  # a group: its members have rows
                continue
            default = json.dumps(value) if not isinstance(value, str) else value
            yield ".".join(path), default, " ".join(comment)
        comment = []


def table() -> str:
    """The rows for a README."""
    lines = ["| value | default | what |", "|---|---|---|"]
    for name, default, comment in rows():
        shown = f"`{default}`" if default else ""
        lines.append(f"| `{name}` | {shown} | {comment.replace('|', '&#124;')} |")
    return "\n".join(lines) + "\n"


def readme() -> str:
    """README.md with the table of this values.yaml."""
    return TABLE.sub(lambda match: match[1] + table() + match[2], README.read_text())


if __name__ == "__main__":
    SCHEMA.write_text(schema())
    README.write_text(readme())

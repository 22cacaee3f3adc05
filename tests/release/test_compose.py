"""compose.yaml: a linter finds nothing, what it mounts is there, they find each other; no other machine reaches them."""

import json
import shutil

import pytest
import yaml

from attend.service.settings import Settings
from tests.deploy.monitoring_prometheus import promtool
from tests.release.linters import MODULES, ROOT, node
from tests.release.version import version

PATH = ROOT / "compose.yaml"
COMPOSE = yaml.safe_load(PATH.read_text())
SERVICES = COMPOSE["services"]
PROMETHEUS = yaml.safe_load((ROOT / "deploy/compose/prometheus.yaml").read_text())
GRAFANA = ROOT / "deploy/compose/grafana"


def mounts(name):
    """Where each file of this tree is in the container."""
    found = [volume.split(":") for volume in SERVICES[name].get("volumes", [])]
    return {inside: ROOT / source for source, inside, *_ in found if source.startswith("./")}


def dclint(path):
    return node(MODULES / "dclint/bin/dclint.cjs", "--max-warnings", "0", path)


def test_dclint_finds_nothing():
    done = dclint(PATH)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("good", "bad", "rule"),
    [
        (SERVICES["prometheus"]["image"], "prom/prometheus", "service-image-require-explicit-tag"),
        ("'127.0.0.1:3000:3000'", "'3000:3000'", "no-unbound-port-interfaces"),
        ("restart: unless-stopped", "restarts: unless-stopped", "invalid-schema"),
        ("'127.0.0.1:9090:9090'", "'127.0.0.1:3000:9090'", "no-duplicate-exported-ports"),
    ],
)
def test_what_is_planted_is_found(tmp_path, good, bad, rule):
    text = PATH.read_text()
    assert good in text
    path = tmp_path / "compose.yaml"
    path.write_text(text.replace(good, bad))
    done = dclint(path)
    assert done.returncode > 0
    assert rule in done.stdout


def test_the_servers_image_has_the_version_and_the_others_have_exact_ones():
    images = {name: service["image"] for name, service in SERVICES.items()}
    assert images.pop("attend") == f"attend:{version()}"
    assert all(len(image.partition(":")[2].split(".")) == 3 for image in images.values()), images


def test_every_port_is_published_on_this_machine_alone():
    ports = {name: service["ports"] for name, service in SERVICES.items()}
    settings = Settings()
    ours = (settings.port, settings.grpc_port)
    assert ports == {
        "attend": [f"127.0.0.1:{port}:{port}" for port in ours],
        "grafana": ["127.0.0.1:3000:3000"],
        "prometheus": ["127.0.0.1:9090:9090"],
    }


def test_no_container_writes_its_root_or_gets_more_rights():
    for name, service in SERVICES.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "privileged" not in service, name
        assert all(volume.endswith(":ro") for volume in service.get("volumes", []) if volume.startswith("./")), name


def test_what_is_mounted_is_there():
    for name in SERVICES:
        assert all(source.exists() for source in mounts(name).values()), name


def test_readiness_is_what_the_health_check_asks_for_and_the_stop_waits_for_the_drain():
    service = SERVICES["attend"]
    assert f"http://127.0.0.1:{Settings().port}/readyz" in service["healthcheck"]["test"]
    assert int(service["stop_grace_period"].removesuffix("s")) > Settings().drain_seconds + 10


def test_the_settings_exist():
    ours = {f"ATTEND_{name.upper()}" for name in Settings.model_fields}
    assert SERVICES["attend"]["environment"].keys() <= ours


def test_every_host_that_asks_the_server_by_this_file_is_allowed_and_no_other():
    hosts = SERVICES["attend"]["environment"]["ATTEND_ALLOWED_HOSTS"].split(",")
    [job] = PROMETHEUS["scrape_configs"]
    scraped = [target.partition(":")[0] for config in job["static_configs"] for target in config["targets"]]
    assert hosts == ["localhost", "127.0.0.1", *scraped]


def test_prometheus_scrapes_the_server_once_under_the_name_that_the_rules_expect():
    assert PROMETHEUS["scrape_configs"] == [
        {"job_name": "attend", "static_configs": [{"targets": [f"attend:{Settings().port}"]}]}
    ]


def test_promtool_takes_the_configuration_with_the_rules_beside_it(tmp_path):
    for inside, source in mounts("prometheus").items():
        shutil.copy(source, tmp_path / inside.rpartition("/")[2])
    done = promtool("check", "config", tmp_path / "prometheus.yml")
    assert done.returncode == 0, done.stdout
    assert "rules found" in done.stdout


def test_grafana_finds_prometheus_and_the_dashboard():
    [source] = yaml.safe_load((GRAFANA / "datasources/prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert source["type"] == "prometheus"
    assert source["isDefault"] is True
    [provider] = yaml.safe_load((GRAFANA / "dashboards/attend.yaml").read_text())["providers"]
    inside = {path: text for path, text in mounts("grafana").items() if path.startswith(provider["options"]["path"])}
    assert [json.loads(path.read_text())["uid"] for path in inside.values()] == ["attend"]
    assert SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] in inside
    assert mounts("grafana")["/etc/grafana/provisioning"] == GRAFANA

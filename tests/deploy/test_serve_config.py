"""deploy/serve/attend.yaml: Serve accepts it, nothing in it is a typo, and what it names exists."""

import importlib
from pathlib import Path

import pytest
import yaml

from attend.service.settings import read_settings
from tests.deploy.manifests import attend_env, serve
from tests.deploy.serve_schema import unknown_keys

arguments = serve["applications"][0]["args"]
pytestmark = pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`")  # Ray Serve's own models


@pytest.fixture(scope="module")
def schema():
    from ray.serve.schema import ServeDeploySchema

    return ServeDeploySchema


def resolve(dotted, separator):
    module, _, name = dotted.rpartition(separator)
    return getattr(importlib.import_module(module), name)


def test_the_builder_exists():
    assert callable(resolve(serve["applications"][0]["import_path"], ":"))


def test_grpc_speaks_the_same_services_as_attend_serve():
    assert serve["grpc_options"]["grpc_servicer_functions"] == resolve("attend.service.runtime.driver.SERVICERS", ".")


def test_the_builder_decides_about_gpus():
    assert "ray_actor_options" not in serve["applications"][0]["deployments"][0], "they would replace the builder's"


def test_a_setting_is_given_in_one_place():
    assert not {f"ATTEND_{name.upper()}" for name in arguments} & attend_env.keys(), "the argument would win in silence"


def test_the_configuration_of_several_models_is_that_of_one_but_for_its_applications(schema):
    several = yaml.safe_load((Path(__file__).parents[2] / "deploy" / "serve" / "models.yaml").read_text(encoding="utf-8"))
    schema.model_validate(several)
    assert unknown_keys(several, schema) == []
    assert {name: several[name] for name in serve if name != "applications"} == {
        name: serve[name] for name in serve if name != "applications"
    }
    for each in several["applications"]:
        assert each["route_prefix"] == f"/{each['name']}"
        assert read_settings(each["args"]).name == each["name"]
        assert {name: each["args"][name] for name in arguments} == arguments

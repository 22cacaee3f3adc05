"""deploy/serve/attend.yaml: Serve accepts it, nothing in it is a typo, and what it names exists."""

import copy
import importlib
import typing

import pydantic
import pytest

from service.settings import Settings, read_settings
from tests.deploy.manifests import SERVE_TEXT, attend_env, rayservice, serve

arguments = serve["applications"][0]["args"]
pytestmark = pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`")  # Ray Serve's own models


def models_in(annotation):
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return [annotation]
    return [model for inner in typing.get_args(annotation) for model in models_in(inner)]


def unknown_keys(value, annotation, path=""):
    """Paths of the keys that no schema knows. Serve itself ignores them; free dicts (args, user_config) have no schema."""
    if isinstance(value, list):
        return [bad for i, item in enumerate(value) for bad in unknown_keys(item, annotation, f"{path}[{i}]")]
    models = models_in(annotation)
    if not models or not isinstance(value, dict):
        return []
    fields = {name: field.annotation for model in models for name, field in model.model_fields.items()}
    inner = {key: item for key, item in value.items() if key in fields}
    return [f"{path}.{key}" for key in value if key not in fields] + [
        bad for key, item in inner.items() for bad in unknown_keys(item, fields[key], f"{path}.{key}")
    ]


@pytest.fixture(scope="module")
def schema():
    from ray.serve.schema import ServeDeploySchema

    return ServeDeploySchema


def test_rayservice_embeds_the_serve_config_word_for_word():
    assert rayservice["spec"]["serveConfigV2"] == SERVE_TEXT, (
        "copy deploy/serve/attend.yaml into rayservice.yaml, indented by 4"
    )


def test_serve_accepts_the_config(schema):
    schema.model_validate(serve)


def test_serve_knows_every_key(schema):
    assert unknown_keys(serve, schema) == []


@pytest.mark.parametrize(
    ("path", "typo"),
    [
        ([], "aplications"),
        (["http_options"], "prot"),
        (["grpc_options"], "grpc_servicer_function"),
        (["logging_config"], "encodin"),
        (["applications", 0], "rout_prefix"),
        (["applications", 0, "deployments", 0], "num_replica"),
    ],
)
def test_a_misspelt_key_is_found_wherever_it_stands(schema, path, typo):
    mutant = copy.deepcopy(serve)
    place = mutant
    for step in path:
        place = place[step]
    place[typo] = 1
    assert [bad.rpartition(".")[2] for bad in unknown_keys(mutant, schema)] == [typo]


def resolve(dotted, separator):
    module, _, name = dotted.rpartition(separator)
    return getattr(importlib.import_module(module), name)


def test_the_builder_exists():
    assert callable(resolve(serve["applications"][0]["import_path"], ":"))


@pytest.mark.parametrize("function", serve["grpc_options"]["grpc_servicer_functions"])
def test_each_grpc_servicer_function_exists(function):
    assert callable(resolve(function, "."))


def test_grpc_speaks_the_same_services_as_attend_serve():
    assert serve["grpc_options"]["grpc_servicer_functions"] == resolve("service.driver.SERVICERS", ".")


def test_the_builder_decides_about_gpus():
    assert "ray_actor_options" not in serve["applications"][0]["deployments"][0], "they would replace the builder's"


def test_settings_accepts_the_arguments_with_the_variables():
    settings = read_settings(arguments, attend_env)
    assert settings.drain_seconds == arguments["drain_seconds"]
    assert {name.removeprefix("ATTEND_").lower() for name in attend_env} <= Settings.model_fields.keys()


def test_a_setting_is_given_in_one_place():
    assert not {f"ATTEND_{name.upper()}" for name in arguments} & attend_env.keys(), "the argument would win in silence"

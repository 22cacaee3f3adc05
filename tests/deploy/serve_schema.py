"""Ray Serve's own schema, and the keys that it would ignore in silence."""

import typing
from typing import Any

import pydantic


def problems_of_serve_config(config: dict[str, Any]) -> list[str]:
    """What Ray Serve has against a configuration, and the keys that it does not know."""
    from ray.serve.schema import ServeDeploySchema

    unknown = [f"{path} is unknown" for path in unknown_keys(config, ServeDeploySchema)]
    try:
        ServeDeploySchema.model_validate(config)
    except pydantic.ValidationError as error:
        return [*unknown, *(f"{each['loc']}: {each['msg']}" for each in error.errors())]
    return unknown


def models_in(annotation: Any) -> list[type[pydantic.BaseModel]]:
    """The models in a type such as `Model | None` or `list[Model]`."""
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return [annotation]
    return [model for inner in typing.get_args(annotation) for model in models_in(inner)]


def unknown_keys(value: Any, annotation: Any, path: str = "") -> list[str]:
    """Paths of the keys that no schema knows. Free dicts (args, user_config) have no schema."""
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

"""The bodies of the OpenAI routes: names and JSON types, strictly. Ranges are checked in `model/params.py`.

null means absent everywhere. A field of the contract that this build does not carry out is listed with the values
that mean "off"; any other value is refused by name, never ignored.
"""

from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from model.errors import InvalidRequest, NotSupported
from model.params import MAX_BIASES, at_most, describe

Number = StrictInt | StrictFloat
T = TypeVar("T")
B = TypeVar("B", bound=BaseModel)
List = Annotated[list[T], Field(fail_fast=True)]
"""A list whose first wrong item is the only one that is looked at: a body may hold half a million."""


def _integers(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """A list of integers as it is, found to be one a part at a time: the validator would hold the interpreter for all of it."""
    if isinstance(value, list) and all({*map(type, value[at : at + PART])} == {int} for at in range(0, len(value), PART)):
        return value
    return check(value)


PART = 8192
"""Items that are looked at in one go: a tenth of a millisecond."""
TokenIds = Annotated[List[StrictInt], WrapValidator(_integers)]

OFF: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
}
"""Fields of the contract that are not carried out yet, and their values, beside null, that ask for nothing."""


def _few(biases: Any) -> Any:
    if isinstance(biases, dict):
        at_most("logit_bias", biases, MAX_BIASES, "entries")
    return biases


class StreamOptions(BaseModel):
    """What a stream carries beside the text."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: StrictBool | None = None
    """One more chunk at the end, with the token counts."""
    continuous_usage_stats: StrictBool | None = None


class Generation(BaseModel):
    """What the bodies of both generating routes have in common."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: StrictStr | None = None
    max_tokens: StrictInt | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    n: StrictInt | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    stop: StrictStr | List[StrictStr] | None = None
    seed: StrictInt | None = None
    user: Annotated[StrictStr, Field(max_length=256)] | None = None
    top_k: StrictInt | None = None
    min_p: Number | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: StrictBool | None = None
    ignore_eos: StrictBool | None = None
    min_tokens: StrictInt | None = None
    skip_special_tokens: StrictBool | None = None
    return_token_ids: StrictBool | None = None
    request_id: StrictStr | None = None
    deadline_ms: StrictInt | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: Annotated[dict[StrictStr, Number] | None, BeforeValidator(_few)] = None
    truncate_prompt_tokens: StrictInt | None = None
    priority: StrictInt | None = None
    cache_salt: Annotated[StrictStr, Field(min_length=1)] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: List[StrictStr] | None = None
    response_format: dict[StrictStr, Any] | None = None
    structured_outputs: dict[StrictStr, Any] | None = None
    timing: StrictBool | None = None


class CompletionRequest(Generation):
    """The body of POST /v1/completions."""

    prompt: StrictStr | List[StrictStr] | TokenIds | List[TokenIds] | None = None
    best_of: StrictInt | None = None
    logprobs: StrictInt | None = None
    echo: StrictBool | None = None
    prompt_logprobs: StrictInt | None = None
    resume_token_ids: TokenIds | None = None


def read_completion(document: dict[str, Any]) -> CompletionRequest:
    """A parsed body as a CompletionRequest. Raises InvalidRequest with the field named."""
    return validated(CompletionRequest, refuse_unbuilt(document))


def validated(kind: type[B], document: dict[str, Any]) -> B:
    """A parsed body as one of ours. Raises InvalidRequest with the field named."""
    unknown = document.keys() - kind.model_fields.keys()
    if len(unknown) > 1:  # each would be an error with a text of its own
        first = next(name for name in document if name in unknown)
        document = {name: value for name, value in document.items() if name == first or name not in unknown}
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        raise explained(error, document) from error


def refuse_unbuilt(document: dict[str, Any]) -> dict[str, Any]:
    """`document` without the fields of OFF. Raises NotSupported where one asks for something."""
    for name, value in document.items():
        if name not in OFF:
            continue
        means_off = value is None or any(kind_of(value) is kind_of(off) and value == off for off in OFF[name])
        if not means_off:
            raise NotSupported(f"{name} is not supported yet; got {describe(value)}", name)
    return {name: value for name, value in document.items() if name not in OFF}


def kind_of(value: Any) -> type:
    """1 and 1.0 are one kind: a number. true is not."""
    return float if type(value) is int else type(value)


def explained(error: ValidationError, document: dict[str, Any]) -> InvalidRequest:
    """pydantic's first complaint, as one sentence about one field."""
    found = error.errors(include_url=False, include_context=False)
    first = found[0]
    name = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        path = ".".join(str(part) for part in first["loc"])[:64]
        shown = path if path.strip() and path.isprintable() else repr(path)
        return InvalidRequest(f"{shown} is not a field of this request", path)
    value, place = document.get(name), ""
    inner = first["loc"][-1]
    if isinstance(value, dict) and str(inner) in value:
        name, value = f"{name}.{inner}", value[str(inner)]
    same = [item for item in found if item["loc"][0] == first["loc"][0]]
    if isinstance(value, list) and isinstance(inner, int) and len({item["loc"] for item in same}) == 1:
        place, value = f"{name}[{inner}]", value[inner]
    wanted = "; or ".join(dict.fromkeys(_wanted(item["type"], item["msg"]) for item in same))
    return InvalidRequest(f"{place or name} must be {wanted}; got {describe(value)}", name)


def _wanted(kind: str, message: str) -> str:
    known = {
        "missing": "given",
        "int_type": "an integer",
        "float_type": "a number",
        "string_type": "a string",
        "bool_type": "a boolean",
        "list_type": "a list",
        "dict_type": "an object",
        "model_type": "an object",
    }
    return known.get(kind) or message.replace("String should have", "a string of")

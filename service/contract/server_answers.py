"""Answers about the server: models, tokenizer, version, capacity."""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from attend.model.generation_config import NO_DEFAULTS
from attend.service.contract.answers import Count, Fingerprint, MaxModelLen, Seconds, ServedModel

Word = Annotated[str, Field(examples=["cpu"])]
Rate = Annotated[float, Field(description="Over the last ten seconds.", examples=[211.4])]


class Model(TypedDict):
    """A model that is served."""

    id: ServedModel
    object: Literal["model"]
    created: Seconds
    owned_by: Literal["attend"]
    max_model_len: NotRequired[MaxModelLen[int]]
    default_sampling: NotRequired[Annotated[dict[str, float], Field(examples=[NO_DEFAULTS.values()])]]
    """By field, what a call gets that leaves it out."""
    stop_token_ids: NotRequired[Annotated[list[int], Field(examples=[[2]])]]
    parent: NotRequired[str]
    """Of a LoRA adapter: the model that it changes."""
    status: NotRequired[Literal["unloaded", "loading", "loaded", "unloading", "failed"]]
    """Of a server of several models alone. One that is not loaded has none of the facts above."""


class ModelList(TypedDict):
    """The served models: one, and its LoRA adapters; or several."""

    object: Literal["list"]
    data: list[Model]


@with_config(ConfigDict(extra="allow", use_attribute_docstrings=True))
class TokenizerInfo(TypedDict):
    """The checkpoint's tokenizer_config.json, with these fields where it lacks them, and whatever else it holds."""

    eos_token: str | dict[str, Any] | None
    vocab_size: Count
    model_max_length: MaxModelLen[float]


class Version(TypedDict):
    """What is running."""

    version: Annotated[str, Field(examples=["0.1.0"])]
    model: ServedModel
    family: Word
    device: Word
    dtype: Word
    weights: Word
    """How its matrices are kept: as such numbers, or quantised to int8 or int4."""
    backend: Word
    slower_path: str | None
    """Why the fastest way of this machine does not serve; null where it does, or another was asked for by its name."""
    untested: Annotated[list[str], Field(examples=[[]])]
    """Installed packages outside the versions that Attend was tested with, a sentence each."""
    grpc_port: Count
    """The port of gRPC behind what stands in front of the server."""
    system_fingerprint: Fingerprint


class Replicas(TypedDict):
    """How many replicas there should be, and how many reported their load."""

    expected: Count
    answered: Count


class Capacity(TypedDict):
    """Sums over the replicas that answered, and the least wait of one of them."""

    replicas: Replicas
    free_blocks: Count
    """The share of the KV cache that is free in the fullest group of layers, in blocks of the first group."""
    num_blocks: Count
    """Blocks of the first group of layers, that of full attention where there is one."""
    block_size: int | None
    running: Count
    waiting: Count
    max_batch_requests: Count
    max_queued_requests: Count
    max_model_len: MaxModelLen[int | None]
    tokens_per_second: Rate
    estimated_wait_seconds: float | None
    """Until a call that comes now starts; null where that is not known."""

"""Answers about the server: models, tokenizer, version, capacity."""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from attend.model.generation_config import NO_DEFAULTS
from attend.service.contract.answers import Fingerprint, MaxModelLen, ObjectKind, ServedName, record


@record
class Model(TypedDict):
    """A model that is served."""

    id: Annotated[str, Field(examples=["attend"])]
    """Name of the model."""
    object: ObjectKind[Literal["model"]]
    created: Annotated[int, Field(examples=[1767225600])]
    """When the server started, in seconds since 1970."""
    owned_by: Literal["attend"]
    """The owner of the model: always `attend`."""
    max_model_len: NotRequired[MaxModelLen[int]]
    default_sampling: NotRequired[Annotated[dict[str, float], Field(examples=[NO_DEFAULTS.values()])]]
    """By field, what a call gets that leaves it out: generation_config.json's values with `generation_config=model`."""
    stop_token_ids: NotRequired[Annotated[list[int], Field(examples=[[2]])]]
    """The tokens that end an answer."""
    parent: NotRequired[str]
    """Of a LoRA adapter: the model that it changes."""
    status: NotRequired[Literal["unloaded", "loading", "loaded", "unloading", "failed"]]
    """Of a server of several models alone: whether it is loaded. One that is not has none of the facts above."""


@record
class ModelList(TypedDict):
    """The served models: one, and its LoRA adapters; or several."""

    object: ObjectKind[Literal["list"]]
    data: list[Model]
    """The served model, then its LoRA adapters."""


@with_config(ConfigDict(extra="allow", use_attribute_docstrings=True))
class TokenizerInfo(TypedDict):
    """The checkpoint's tokenizer_config.json, with these fields where it lacks them, and whatever else it holds."""

    eos_token: Annotated[str | dict[str, Any] | None, Field(examples=["<|endoftext|>"])]
    """The end-of-text token; null where there is none."""
    vocab_size: Annotated[int, Field(examples=[4096])]
    """Token ids go from 0 to one below."""
    model_max_length: MaxModelLen[float]


@record
class Version(TypedDict):
    """What is running."""

    version: Annotated[str, Field(examples=["0.1.0"])]
    """Attend's version."""
    model: ServedName
    family: Annotated[str, Field(examples=["llama"])]
    """The model's architecture."""
    device: Annotated[str, Field(examples=["cpu"])]
    """The device: `cpu`, or a GPU."""
    dtype: Annotated[str, Field(examples=["bfloat16"])]
    """The numbers that it is computed in."""
    weights: Annotated[str, Field(examples=["bfloat16"])]
    """How its matrices are kept: as such numbers, or quantised to int8 or int4."""
    backend: Annotated[str, Field(examples=["cpu"])]
    """The attention backend."""
    slower_path: Annotated[str | None, Field(examples=[None])]
    """Why the fastest way of this machine does not serve; null where it does, or another was asked for by its name."""
    untested: Annotated[list[str], Field(examples=[[]])]
    """Installed packages outside the versions that Attend was tested with, a sentence each."""
    grpc_port: Annotated[int, Field(examples=[9000])]
    """The port of gRPC, as the setting of this name has it. What stands in front of the server may have another."""
    system_fingerprint: Fingerprint


@record
class Replicas(TypedDict):
    """How many replicas reported their load."""

    expected: Annotated[int, Field(examples=[1])]
    """Those that there should be."""
    answered: Annotated[int, Field(examples=[1])]
    """Those whose load is in the sums."""


@record
class Capacity(TypedDict):
    """Sums over the replicas that answered, and what a call of the given length would wait for."""

    replicas: Replicas
    """How many replicas the sums are over."""
    free_blocks: Annotated[int, Field(examples=[900])]
    """The share of the KV cache that is free in the fullest group of layers, in blocks of the first group."""
    num_blocks: Annotated[int, Field(examples=[1024])]
    """Blocks of the first group of layers, that of full attention where there is one."""
    block_size: Annotated[int | None, Field(examples=[16])]
    """Tokens in a KV cache block."""
    running: Annotated[int, Field(examples=[3])]
    """Requests that run, in the batches of all replicas."""
    waiting: Annotated[int, Field(examples=[0])]
    """Requests that wait, in the queues of all replicas."""
    max_batch_requests: Annotated[int, Field(examples=[64])]
    """Requests that the batch may hold."""
    max_queued_requests: Annotated[int, Field(examples=[256])]
    """Requests that the queue may hold; more are refused with 429."""
    max_model_len: MaxModelLen[int | None]
    tokens_per_second: Annotated[float, Field(examples=[211.4])]
    """New tokens of answers, over the last ten seconds."""
    computed_tokens_per_second: Annotated[float, Field(examples=[498.0])]
    """Tokens of prompts and answers, over the last ten seconds."""
    prompt_tokens: Annotated[int, Field(examples=[100])]
    """Prompt tokens of the call, as asked for."""
    max_tokens: Annotated[int, Field(examples=[200])]
    """Answer tokens of the call, as asked for."""
    fits: Annotated[bool | None, Field(examples=[True])]
    """True if the context holds such a call; null where no replica answered."""
    estimated_wait_seconds: Annotated[float | None, Field(examples=[0.0])]
    """Until such a call starts; null where that is not known, or the call does not fit."""
    estimated_seconds: Annotated[float | None, Field(examples=[2.9])]
    """Until its last token; null where that is not known, or the call does not fit."""

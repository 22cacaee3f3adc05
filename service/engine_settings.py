"""The settings of the engine: lengths, batch size, queue, KV cache, speculative decoding, threads."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Field

from attend.service.values import size_in_bytes, to_integer


class EngineSettings(BaseModel):
    """What the engine reads, a part of `Settings`; `EngineOptions` has the same names."""

    max_model_len: Annotated[int, Field(ge=16)] | None = Field(
        None, description="context length: tokens of prompt and answer; default: the model's"
    )
    max_batch_requests: Annotated[int, Field(ge=1, le=4096)] | None = Field(
        None,
        description="maximum batch size in requests; default: 64, and 256 on a GPU; with more than 16 CPU threads 4 a thread, "
        "up to 256",
    )
    max_batch_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="token budget of a step; default: 1024, and 8192 on a GPU"
    )
    max_queued_requests: Annotated[int, Field(ge=0)] = Field(
        256, description="maximum queue length in requests; more are rejected with 429"
    )
    max_queued_tokens: Annotated[int, Field(ge=1)] = Field(
        1 << 19,
        description="maximum queue length in prompt tokens; beyond it requests are rejected with 429, unless it is empty",
    )
    block_size: Annotated[Literal[32, 64, 128], BeforeValidator(to_integer)] = Field(
        32, description="tokens in a KV cache block: what every backend takes"
    )
    kv_cache_memory: Annotated[int, Field(ge=1), BeforeValidator(size_in_bytes)] | None = Field(
        None,
        description="size of the KV cache of each rank in bytes, also as 512MiB; default: by the free memory",
    )
    kv_dtype: Literal["auto", "int8"] = Field(
        "auto",
        description="data type of the KV cache; auto: that of the computation; int8: half the memory of bfloat16, CPU only",
    )
    prefix_caching: bool = Field(
        True, description="prefix caching: reuse the KV cache of earlier requests with the same prefix"
    )
    state_cache_share: Annotated[float, Field(ge=0, le=0.5)] = Field(
        0.25,
        description="share of kv_cache_memory for snapshots of recurrent states, which prefix caching needs",
    )
    kv_disk_folder: str = Field(
        "",
        description="KV offloading: folder for KV blocks that the cache evicts; replicas may share it; it "
        "holds callers' data; empty: off",
    )
    kv_disk_bytes: Annotated[int, Field(ge=1), BeforeValidator(size_in_bytes)] = Field(
        10 << 30, description="maximum size of kv_disk_folder in bytes, also as 20GiB: least recently used blocks go first"
    )
    draft_tokens: Annotated[int, Field(ge=0, le=4096)] = Field(
        0,
        description="speculative decoding by prompt lookup in texts of the same API key: draft tokens of a step; "
        "answers do not change; 0: off",
    )
    deterministic: bool = Field(
        False,
        description="batch invariance: a request gets the same bits in any batch; the start fails where the backend cannot",
    )
    kernel_check: Literal["replace", "fail", "off"] = Field(
        "replace",
        description="compare kernels with torch at the start; replace: torch serves where they differ; fail: end",
    )
    num_threads: Annotated[int, Field(ge=0, le=1024)] = Field(
        0,
        description="CPU threads of the engine; 0: one a physical core that affinity and cgroup allow, divided among ranks",
    )

"""Every setting, and the only reader of the environment.

A setting comes from a flag of `attend serve`, else from ATTEND_<NAME>, else from its default. null, and an empty
variable, mean the default; but an empty `api_keys_file` is refused: where its value is lost, a server would be open.
"""

import difflib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from attend.model.config import DEFAULT_MODEL
from attend.model.engine.options import FLUSH_SECONDS
from attend.model.errors import SettingError
from attend.model.gguf.paths import SUFFIX, only_gguf
from attend.service.batch_settings import FOLDERS, BatchSettings
from attend.service.chat.forms import ReasoningParser, ToolParser
from attend.service.remarks import MaxTokensPolicy
from attend.service.values import (
    HUB,
    REFERENCE,
    Header,
    Hosts,
    Networks,
    Origins,
    origins,
    parse_pairs,
    size_in_bytes,
    to_integer,
)

PREFIX = "ATTEND_"
API_KEYS_FILE = f"{PREFIX}API_KEYS_FILE"
NO_SETTING = re.compile("API_KEY|(TEST|BENCH|FAULTS)_.+")
"""Variables with our prefix that are no settings: a caller's key, and the marks of our own tests and benchmarks."""
ALIKE = 0.75
"""How much of a name must be that of a setting to be taken for a mistyped one, as `difflib` counts it: SINGEL has 0.83 of
SINGLE. SERVICE_PORT, which Kubernetes may set, has 0.67 of GRPC_PORT."""
Port = Annotated[int, Field(ge=1, le=65535)]
PATHS = (*FOLDERS, "models", "chat_template", "adapters_folder", "api_keys_file", "tls_cert", "tls_key", "log_file")
"""Settings that name one file or folder. `model` may do so, and `adapter` names several."""
NEED_RAY = ("replicas", "max_replicas", "tensor_parallel", "prefix_routing")
"""Settings of Ray Serve and its HAProxy: with `single` and `models` they stay as they are."""
OF_ONE_MODEL = ("model", "served_model_name", "adapter", "adapters_folder")
"""Settings that the file of `models` has for each model."""


class Settings(BatchSettings):
    """What shapes a server. Sizes are in tokens, requests, bytes or seconds, as each line says.

    Those of batches are fields of the base class; what the engine reads has the same name in `EngineOptions`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: str = Field(
        "",
        description="checkpoint folder, .gguf file, or hf://ORG/NAME, also with @REVISION; empty: the shipped default model",
    )
    served_model_name: str = Field("", description="model name in the API; empty: the name of the folder or file, or ORG/NAME")
    host: str = Field("127.0.0.1", description="address that HTTP and gRPC listen on")
    port: Port = Field(8000, description="HTTP port")
    grpc_port: Port = Field(9000, description="gRPC port")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto takes a GPU if the cluster has one")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="auto is bfloat16 where a GPU, the native decoder or the CPU itself computes it fast; else float32",
    )
    backend: Literal["auto", "native", "triton", "torch", "reference"] = Field(
        "auto", description="attention backend; auto is the fastest that supports the model"
    )
    quantize: Literal["none", "int8", "int4"] = Field(
        "none",
        description="weight-only quantisation: half or a quarter of the memory; faster where the native decoder serves",
    )
    pooling: Literal["auto", "mean", "last", "cls"] = Field(
        "auto",
        description="pooling of embeddings: mean, last or first (cls) hidden state; auto: as the model's files say",
    )
    score: Literal["auto", "cosine", "yes_no"] = Field(
        "auto",
        description="scores of /v1/rerank: cosine of embeddings, or the probability of yes; auto: by the model's files",
    )
    generation_config: Literal["none", "model"] = Field(
        "model",
        description="default sampling parameters; model: of its generation_config.json; none: temperature 1",
    )
    chat_template: str = Field(
        "",
        description="Jinja file of the chat template, in place of the checkpoint's; empty: the checkpoint's",
    )
    tool_parser: ToolParser = Field(
        "auto", description="format of tool calls; auto: by the chat template; none: they stay text"
    )
    reasoning_parser: ReasoningParser = Field(
        "auto", description="format of reasoning; auto: by the chat template; none: it stays text"
    )
    special_tokens_in_content: bool = Field(
        False,
        description="let callers write control tokens in messages and tools; false: they are plain text",
    )
    json_whitespace: Literal["compact", "flexible"] = Field(
        "compact",
        description="white space in structured JSON output; compact: none; flexible: up to 16 characters in one place",
    )
    adapter: str = Field(
        "", description="LoRA adapter, NAME=FOLDER; repeat the flag for several; the variable is comma-separated"
    )
    adapters_folder: str = Field("", description="folder of LoRA adapters, each named as its folder; scanned once a second")
    max_adapters: Annotated[int, Field(ge=1, le=1024)] = Field(8, description="maximum number of loaded LoRA adapters")
    request_timeout_seconds: Annotated[float, Field(gt=0, le=86400)] = Field(600.0, description="maximum duration of a request")
    deadline_default_ms: Annotated[int, Field(ge=1, le=86_400_000)] | None = Field(
        None,
        description="deadline in ms of a request without deadline_ms: it ends with the tokens so far; default: none",
    )
    drain_seconds: Annotated[float, Field(ge=0, le=86400)] = Field(
        30.0, description="draining: how long a shutdown waits for running requests"
    )
    linger_seconds: Annotated[float, Field(ge=0, le=3600)] = Field(
        0.0, description="before draining: how long a shutdown still answers new calls, while the server is no longer ready"
    )
    replicas: Annotated[int, Field(ge=1, le=90)] = Field(1, description="replicas of the model; with autoscaling, the minimum")
    max_replicas: Annotated[int, Field(ge=1, le=90)] | None = Field(
        None, description="maximum number of replicas with autoscaling; default: replicas, without autoscaling"
    )
    tensor_parallel: Annotated[int, Field(ge=1, le=16)] = Field(
        1, description="tensor parallelism: ranks of each replica, on one node, each with a GPU or a CPU core of its own"
    )
    prefix_routing: bool = Field(
        True, description="prefix-aware routing by HAProxy: calls with a common prefix go to one replica, unless it is busier"
    )
    tls_cert: str = Field(
        "",
        description="PEM file of the certificate and its chain: HTTP and gRPC then accept only TLS, with single or models; "
        "empty: no TLS",
    )
    tls_key: str = Field("", validate_default=True, description="PEM file of the private key of tls_cert, without a password")
    single: bool = Field(False, description="one replica in one process, without Ray: starts faster, takes less memory")
    models: str = Field(
        "",
        description="YAML file of several models, each loaded at its first call in a process of its own, until it is idle; "
        "without Ray",
    )
    api_keys_file: str = Field("", description="file of API keys, made by `attend keys add`; empty: no authentication")
    trusted_proxies: Annotated[str, Networks] = Field(
        "",
        description="proxies (addresses, networks), comma-separated: without keys their tenant_header names the tenant",
    )
    tenant_header: Annotated[str, Header] = Field(
        "X-Forwarded-For",
        description="header in which trusted_proxies name the tenant; of X-Forwarded-For the last address that is not theirs",
    )
    allowed_hosts: Annotated[str, Hosts] = Field(
        "",
        description="names that a Host header may have, comma-separated, or *; empty: local names on a loopback address "
        "without API keys, else any",
    )
    strict_fields: bool = Field(
        False, description="refuse unknown fields of requests with 400; false: ignore them, and say so in x-attend-ignored"
    )
    max_tokens_beyond_context: MaxTokensPolicy = Field(
        "",
        description="a max_tokens beyond the context; empty: chat, responses, messages clamp it "
        "(x-attend-clamped), completions and Generate refuse",
    )
    cors_origins: Annotated[str, Origins] = Field(
        "", description="allowed CORS origins, as https://host:port, comma-separated, or *; empty: none"
    )
    expose_docs: bool = Field(True, description="serve the playground at /, /docs and /openapi.json")
    metrics_compat: Literal["", "vllm"] = Field(
        "", description="vllm: export the metrics under vLLM's names too; empty: only under Attend's"
    )
    otel_endpoint: str = Field(
        "", description="OTLP/HTTP URL of an OpenTelemetry collector, with or without /v1/traces; empty: no tracing"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="minimum severity of log lines")
    log_format: Literal["text", "json"] = Field("text", description="format of log lines")
    log_file: str = Field("", description="file to append log lines to; empty: standard error of `attend serve`")

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

    @field_validator("model")
    @classmethod
    def _is_reference(cls, value: str) -> str:
        if value.startswith(HUB) and not REFERENCE.fullmatch(value):
            raise PydanticCustomError(
                "reference", "it must be hf://ORG/NAME, hf://ORG/NAME/FILE.gguf, or one of them with @REVISION"
            )
        return value

    @field_validator("adapter")
    @classmethod
    def _are_adapters(cls, value: str) -> str:
        found = parse_pairs(value)
        if not all(name and folder for name, folder in found) or len(dict(found)) < len(found):
            raise PydanticCustomError(
                "adapter", "it must be NAME=FOLDER, or several of them with different names, comma-separated"
            )
        return value

    @field_validator("max_replicas")
    @classmethod
    def _at_least_replicas(cls, value: int | None, info: ValidationInfo) -> int | None:
        fewest = info.data.get("replicas", 1)
        if value is not None and value < fewest:
            raise PydanticCustomError("range", "it must be at least replicas, {fewest}", {"fewest": fewest})
        return value

    @field_validator("tls_key")
    @classmethod
    def _has_its_certificate(cls, value: str, info: ValidationInfo) -> str:
        if bool(value) != bool(info.data.get("tls_cert")):
            raise PydanticCustomError("tls", "tls_cert and tls_key must be set together")
        return value

    @field_validator("single", "models")
    @classmethod
    def _needs_no_ray(cls, value: bool | str, info: ValidationInfo) -> bool | str:
        found = [f"{name} = {info.data[name]}" for name in NEED_RAY if info.data.get(name) != cls.model_fields[name].default]
        if value and found:
            what = "it is one replica" if value is True else "each model is one replica on this machine"
            raise PydanticCustomError("single", "{what}, and {found} needs Ray", {"what": what, "found": " and ".join(found)})
        if isinstance(value, str) and value and (named := [name for name in OF_ONE_MODEL if info.data.get(name)]):
            raise PydanticCustomError("models", "it has {name} for each model: leave {name} out here", {"name": named[0]})
        return value

    @property
    def folder(self) -> Path:
        """The checkpoint folder, or the GGUF file; of a hub reference only `hub.with_folder` knows it."""
        assert not self.model.startswith(HUB), f"{self.model} was not downloaded"
        path = Path(self.model).absolute() if self.model else DEFAULT_MODEL
        return only_gguf(path) or path

    @property
    def name(self) -> str:
        """What callers write in `model`."""
        if self.served_model_name or not self.model:
            return self.served_model_name or "attend-default"
        if (match := REFERENCE.fullmatch(self.model)) is not None:
            return match["repository"]
        return Path(self.model).absolute().name.removesuffix(SUFFIX)

    @property
    def adapters(self) -> dict[str, Path]:
        """The folders of `adapter`, by name."""
        return {name: Path(folder).absolute() for name, folder in parse_pairs(self.adapter)}

    @property
    def shutdown_seconds(self) -> float:
        """How long a replica may take to end: draining, and writing the rest of its KV blocks to disk."""
        return self.drain_seconds + (FLUSH_SECONDS if self.kv_disk_folder else 0)

    @property
    def origins(self) -> tuple[str, ...]:
        """The origins of `cors_origins`, one by one."""
        return origins(self.cors_origins)

    def with_absolute_paths(self) -> "Settings":
        """The same settings for a process that works in another folder than the one that the relative paths start from."""
        found = {name: os.path.abspath(path) for name in PATHS if (path := getattr(self, name))}
        if self.model and not self.model.startswith(HUB):
            found["model"] = os.path.abspath(self.model)
        found["adapter"] = ",".join(f"{name}={folder}" for name, folder in self.adapters.items())
        return self.model_copy(update=found)

    def to_json(self) -> str:
        """The settings for another process; `from_json` reads them."""
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str) -> "Settings":
        """Settings from the JSON that `to_json` made."""
        return cls(**json.loads(text))


def read_settings(arguments: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Settings:
    """Settings from flags (or a Serve config's `args`) and the environment. Raises SettingError naming the culprit.

    A variable whose name resembles a setting's is refused too: `unknown_variables` has the others.
    """
    _refuse_mistyped(environment)
    values: dict[str, Any] = {}
    for name in Settings.model_fields:
        text = environment.get(PREFIX + name.upper(), "")
        if text:
            values[name] = text
    values |= {name: value for name, value in arguments.items() if value is not None}
    if values.get("api_keys_file", environment.get(API_KEYS_FILE)) == "":
        raise SettingError(f"api_keys_file, or {API_KEYS_FILE}, is empty: leave it out if callers need no key")
    try:
        return Settings(**values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        source = f"{PREFIX}{name.upper()}" if name not in arguments or arguments[name] is None else name
        shown = str(first["input"])[:64]
        words = re.sub("^[A-Z](?=[a-z ])", lambda first: first[0].lower(), first["msg"])  # TLS stays TLS
        raise SettingError(f"{source} = {shown!r} cannot be used: {words}") from error


def unknown_variables(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The variables with our prefix that nobody reads, sorted."""
    known = {name.upper() for name in Settings.model_fields}
    names = [name.removeprefix(PREFIX) for name in sorted(environment) if name.startswith(PREFIX)]
    return [PREFIX + name for name in names if name not in known and not NO_SETTING.fullmatch(name)]


def _refuse_mistyped(environment: Mapping[str, str]) -> None:
    """Raise SettingError for an unknown variable that resembles a setting: `ATTEND_API_KEY_FILE` would leave a server open."""
    known = [name.upper() for name in Settings.model_fields]
    for name in unknown_variables(environment):
        near = difflib.get_close_matches(name.removeprefix(PREFIX).upper(), known, 1, ALIKE)
        if near:
            raise SettingError(f"{name} is not a setting: did you mean {PREFIX}{near[0]}?")

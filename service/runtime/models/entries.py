"""The YAML file of `--models`: names, checkpoints, settings, and shared limits. Errors name the field."""

import difflib
import os
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from attend.model.errors import AttendError, SettingError
from attend.model.gguf.paths import SUFFIX, part_paths
from attend.model.machine import available_memory
from attend.model.params import describe
from attend.service.runtime.model_path import check_model, resolve_model
from attend.service.runtime.terminal_lines import print_line
from attend.service.settings import ALIKE, NEED_RAY, Settings, read_settings
from attend.service.values import HUB, size_in_bytes

OF_SERVER = (
    *("host", "port", "grpc_port", "tls_cert", "tls_key", "api_keys_file", "trusted_proxies", "tenant_header", "allowed_hosts"),
    *("cors_origins", "expose_docs", "single", "models", "log_level", "log_format", "log_file", "otel_endpoint"),
    *("linger_seconds", "drain_seconds", "model", "served_model_name", *NEED_RAY),
)
"""Settings that are of the server, or stand in an entry as `model` and `name`."""
FREE_SHARE = 0.9
"""Of the memory that is free at the start, where the file has no memory_budget."""
CACHE_SHARE = 0.1
"""Of the budget: what the KV cache of a model counts for that was never loaded, and whose settings do not say its size."""
PROCESS_BYTES = 300 << 20
"""Of a process, beside weights and KV cache."""
MAX_NAME = 256
Size = Annotated[int, Field(ge=1), BeforeValidator(size_in_bytes)]
Seconds = Annotated[float, Field(ge=0, le=86400 * 365)]


class Entry(BaseModel):
    """One model of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())

    name: str
    """What callers write in `model`."""
    model: str = ""
    """As `attend serve MODEL` takes it; empty: the shipped default model."""
    pin: bool = False
    """Loaded at the start, and never unloaded."""
    memory: Size | None = None
    """Bytes that it counts for; None: its files and its KV cache, and once it is loaded what it takes."""
    settings: dict[str, Any] = {}
    """Any settings of `attend serve` that are of one model."""


class ModelsFile(BaseModel):
    """The content of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())

    models: Annotated[list[Entry], Field(min_length=1)]
    default: str | None = None
    """The model of calls that name none; None: the first."""
    memory_budget: Size | None = None
    """Bytes for all loaded models together; None: nine tenths of what is free at the start."""
    idle_seconds: Seconds = 300.0
    """How long a model stays loaded that nobody calls; 0: until its memory is needed."""
    load_seconds: Annotated[float, Field(gt=0, le=86400)] = 900.0
    """How long a model may take to load, a download of the hub too."""


@dataclass(frozen=True)
class ServedModel:
    """One model that is served: its entry, and the settings of its process."""

    entry: Entry
    settings: Settings

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.entry.name

    def has_adapter(self, name: str) -> bool:
        """True if it has a LoRA adapter of this name, or will have it once it is loaded."""
        if name in self.settings.adapters:
            return True
        folder = self.settings.adapters_folder
        return bool(folder and name) and "/" not in name and name[0] != "." and os.path.isdir(os.path.join(folder, name))

    def expected_memory(self, budget: int) -> int:
        """Bytes that it counts for before it has been loaded once."""
        if self.entry.memory is not None:
            return self.entry.memory
        return PROCESS_BYTES + weight_bytes(self.settings) + (self.settings.kv_cache_memory or int(budget * CACHE_SHARE))


@dataclass(frozen=True)
class Plan:
    """What is to be served, and within which limits."""

    models: Mapping[str, ServedModel]
    file: ModelsFile
    budget: int

    @property
    def default(self) -> str:
        """The model of calls that name none."""
        return self.file.default or next(iter(self.models))


class _Loader(yaml.SafeLoader):
    """YAML's plain data, in which no key stands twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [str(key.value) for key, _ in node.value]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise yaml.YAMLError(f"the key {twice[0]!r} is there twice: line {node.start_mark.line + 1}")
        return super().construct_mapping(node, deep)


def read_plan(base: Settings, free: int | None = None) -> Plan:
    """The plan of the file that `models` names. Settings of `base` are those of each model that does not have its own.

    `free`: bytes of memory; None: what the machine has. Raises SettingError or CheckpointError.
    """
    path = Path(base.models)
    try:
        written = _Loader(path.read_bytes()).get_single_data()
        return _plan(_read(written), base, available_memory() if free is None else free)
    except OSError as error:
        raise SettingError(f"models {base.models!r} cannot be read: {error.strerror}") from error
    except AttendError as error:
        raise type(error)(f"{base.models}: {error}") from error
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        raise SettingError(f"{base.models} is not YAML: {' '.join(str(error).split())}") from error


def _read(written: object) -> ModelsFile:
    try:
        return ModelsFile.model_validate(written)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"]).removeprefix(".")
        fault = f"{where or 'it'} = {describe(first['input'])} cannot be used: {first['msg'][:1].lower()}{first['msg'][1:]}"
        if first["type"] == "extra_forbidden":
            near = _nearest(str(first["loc"][-1]), [*Entry.model_fields, *ModelsFile.model_fields])
            fault = f"{where} is not a field{near}"
        raise SettingError(f"{where} is missing" if first["type"] == "missing" else fault) from error


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, 1, ALIKE)
    return f": did you mean {near[0]}?" if near else ""


def _plan(file: ModelsFile, base: Settings, free: int) -> Plan:
    budget = int(free * FREE_SHARE) if file.memory_budget is None else file.memory_budget
    models: dict[str, ServedModel] = {}
    for at, entry in enumerate(file.models):
        where = f"models[{at}] ({entry.name[:64]!r})"
        if not 0 < len(entry.name) <= MAX_NAME or not entry.name.isprintable() or entry.name != entry.name.strip():
            raise SettingError(f"{where}: name must be 1 to {MAX_NAME} printable characters, without spaces around them")
        if entry.name in models:
            raise SettingError(f"{where}: another model has this name")
        models[entry.name] = ServedModel(entry, _settings(entry, base, where))
    if file.default is not None and file.default not in models:
        raise SettingError(f"default = {file.default[:64]!r} is none of the models{_nearest(file.default, models)}")
    owners = dict.fromkeys(models, "a model")
    for served in models.values():
        for name in served.settings.adapters:
            if name in owners:
                raise SettingError(f"the adapter {name!r} of {served.name!r} has the name of {owners[name]}")
            owners[name] = f"an adapter of {served.name!r}"
    return Plan(models, file, budget)


def _settings(entry: Entry, base: Settings, where: str) -> Settings:
    """The settings of a model's process: its own, and for the others those of the command line."""
    for name in entry.settings:
        if name in OF_SERVER:
            raise SettingError(f"{where}: settings.{name} is no setting of one model: it is a flag, or a field of the model")
        if name not in Settings.model_fields:
            raise SettingError(f"{where}: settings.{name} is not a setting{_nearest(str(name), Settings.model_fields)}")
    given = {name: getattr(base, name) for name in base.model_fields_set - {"models", "single"}}
    own = {name: ",".join(map(str, value)) if isinstance(value, list) else value for name, value in entry.settings.items()}
    try:
        settings = read_settings(given | own | {"model": entry.model, "served_model_name": entry.name}, {})
        settings = resolve_model(settings, lambda line: print_line(f"attend: {line}")).with_absolute_paths()
        if entry.pin:  # the files of others may come later
            check_model(settings)
        return settings
    except AttendError as error:
        raise type(error)(f"{where}: {error}") from error


def weight_bytes(settings: Settings) -> int:
    """Bytes of a checkpoint's weight files; 0 of one of the hub, which may not be here yet."""
    if settings.model.startswith(HUB):
        return 0
    folder = settings.folder
    files = part_paths(folder) if folder.suffix == SUFFIX else folder.glob("*.safetensors")
    return sum(path.stat().st_size for path in files if path.is_file())


def in_words(size: float) -> str:
    """Bytes as a person reads them: 2.5 GiB."""
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.1f} MiB"

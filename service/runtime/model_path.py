"""Resolves `model` to a checkpoint before large imports, with errors that say what is wrong."""

import re
from collections.abc import Callable
from pathlib import Path

from attend.model.errors import CheckpointError, SettingError
from attend.model.gguf.paths import SUFFIX, is_gguf, only_gguf
from attend.model.weights import TAKEN, open_safetensors, read_json, weight_files
from attend.service.settings import Settings
from attend.service.values import HUB, REFERENCE

PAGE = re.compile(
    r"https?://(?:huggingface\.co|hf\.co)/(?P<repository>[^/]+/[^/]+)(?:/(?:tree|blob|resolve)/(?P<rest>[^?#]+))?/?"
)
"""The address of a repository on the hub, and of a revision, or a file, in it."""


def resolve_model(settings: Settings, say: Callable[[str], None]) -> Settings:
    """The settings with hf://ORG/NAME where `model` is ORG/NAME, and no such path is here, or the hub's page of it.

    `say` is told so. Raises CheckpointError for a path that leads to no checkpoint.
    """
    model = settings.model
    if not model or model.startswith(HUB):
        return settings
    path = Path(model)
    try:
        found = _on_hub(model) if not path.exists() else None
    except OSError as error:
        raise CheckpointError(f"{model[:256]} cannot be read: {error.strerror}") from error
    if found is not None:
        say(f"{model} is not a path here: using {found}")
        return settings.model_copy(update={"model": found})
    _check(path)
    return settings


def check_model(settings: Settings, *, is_server: bool = True) -> None:
    """Read what the files of a checkpoint say before their weights, without torch. A model of the hub, which may not be here
    yet, is left out, and those of the file of `models`.

    Raises CheckpointError, and for a server SettingError where `max_model_len` is beyond the model's positions.
    """
    if settings.models or settings.model.startswith(HUB):
        return
    from attend.model.net.families.table import config_of  # each family is a module, and --help needs none
    from attend.model.text.tokenizer_files import tokenizer_path

    folder = settings.folder
    positions = config_of(folder).max_positions
    if not is_gguf(folder):
        for path in weight_files(folder):
            open_safetensors(path, "numpy")
        tokenizer_path(folder)
    if is_server and (asked := settings.max_model_len) is not None and asked > positions:
        raise SettingError(f"max_model_len is {asked}, but this model has only {positions} positions")


def _on_hub(model: str) -> str | None:
    """The reference that a name means which is no path here; None where it means none."""
    if (page := PAGE.fullmatch(model)) is not None:
        revision, _, file = (page["rest"] or "").strip("/").partition("/")
        reference = HUB + page["repository"] + (f"/{file}" if file else "") + (f"@{revision}" if revision else "")
    else:
        reference = HUB + model
        parts = model.split("/")
        if len(parts) != 2 or model.endswith(SUFFIX) or Path(parts[0]).exists():
            return None  # rather a path with a mistake in it
    return reference if REFERENCE.fullmatch(reference) else None


def _check(path: Path) -> None:
    """Raise CheckpointError where a path leads to no checkpoint."""
    if not path.exists():
        bare = str(path) == path.name and path.suffix != SUFFIX and REFERENCE.fullmatch(f"{HUB}ORG/{path}")
        guess = f"; did you mean {HUB}ORG/{path}?" if bare else ""
        raise CheckpointError(f"{path.absolute()} does not exist: {TAKEN}{guess}")
    if not path.is_dir():
        if path.suffix != SUFFIX:
            raise CheckpointError(f"{path.absolute()} is a file, and not a {SUFFIX} file: {TAKEN}")
    elif only_gguf(path) is None:
        read_json(path.absolute(), "config.json")

"""Checkpoints named hf://ORG/NAME[/FILE.gguf][@REVISION]: downloaded once into the cache of huggingface_hub, served from there.

The library resumes a download after a cut connection, keeps the files that are whole, and reads its own variables: HF_TOKEN,
HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE. It checks sizes; SHA-256 is checked here. The layout of its cache is described in
"Understand caching" of its guide.
"""

import errno
import glob
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

from attend.model.errors import CheckpointError
from attend.model.gguf.paths import SUFFIX, part_paths
from attend.model.weights import INDEX, way_out, weight_names
from attend.service.runtime.model_path import resolve_model
from attend.service.runtime.terminal_lines import print_line
from attend.service.settings import Settings
from attend.service.values import HUB, REFERENCE

SMALL = ["config.json", "generation_config.json", "tokenizer*.json", "special_tokens_map.json", "added_tokens.json"]
SMALL += ["modules.json", "sentence_bert_config.json", "*_Pooling/config.json"]
SMALL += ["chat_template*", "additional_chat_templates/*", "tokenizer.model", "tekken.json", "vocab.json", "merges.txt", INDEX]
"""Files that are read beside the weights, or that show why a repository cannot be served."""
SHA256, COMMIT = re.compile("[0-9a-f]{64}"), re.compile("[0-9a-f]{40}")
LOOK_UP_SECONDS = 10.0
Say = Callable[[str], None]


class Entry(NamedTuple):
    """A file in a repository of the hub."""

    size: int
    sha256: str | None
    """Of a large file, as the hub names it."""


def with_folder(settings: Settings, say: Say = print_line) -> Settings:
    """The settings with a folder in place of a hub reference, downloaded if need be, and the name that callers use.

    Raises CheckpointError.
    """
    settings = resolve_model(settings, say)
    if not settings.model.startswith(HUB):
        return settings
    return settings.model_copy(update={"model": str(fetch_model(settings.model, say)), "served_model_name": settings.name})


def pin_revision(settings: Settings, warn: Say) -> Settings:
    """The settings with a commit in place of the branch or tag of a hub reference: replicas that start later, after a push,
    serve the same weights. Where the hub does not name one here, `warn` is told, and each replica looks it up.
    """
    import httpx2
    from huggingface_hub import HfApi, errors

    match = REFERENCE.fullmatch(settings.model)
    if match is None or COMMIT.fullmatch(match["revision"] or ""):
        return settings
    repository, file = match["repository"], match["file"]
    try:
        info = HfApi().model_info(repository, revision=match["revision"] or "main", timeout=LOOK_UP_SECONDS)
    except (errors.HfHubHTTPError, httpx2.HTTPError, OSError, ValueError) as error:
        warn(f"{settings.model} is not pinned to a commit, and replicas may serve different ones: it {_why(error, repository)}")
        return settings
    return settings.model_copy(update={"model": f"{HUB}{repository}{f'/{file}' if file else ''}@{info.sha}"})


def cached_folder(reference: str) -> Path | None:
    """The folder of hf://ORG/NAME in the cache, or its GGUF file, without asking the hub; None without its weights."""
    from huggingface_hub import errors, snapshot_download

    match = REFERENCE.fullmatch(reference)
    assert match is not None, "the settings refuse another"
    repository, file, revision = match["repository"], match["file"], match["revision"]
    with suppress(errors.LocalEntryNotFoundError):
        folder = Path(snapshot_download(repository, revision=revision, allow_patterns=SMALL, local_files_only=True))
        place = folder if file is None else folder / file
        return place if place.is_file() or any(folder.glob("*.safetensors")) else None
    return None


def fetch_model(reference: str, say: Say) -> Path:
    """The folder of hf://ORG/NAME in the cache, with the files that are read, or its GGUF file. Raises CheckpointError.

    A branch is looked up anew each time; if the hub cannot be reached, the commit that is cached is taken.
    """
    import httpx2
    from huggingface_hub import constants, errors

    match = REFERENCE.fullmatch(reference)
    assert match is not None, "the settings refuse another"
    repository, file, revision = match["repository"], match["file"], match["revision"]
    try:
        lock = Path(constants.HF_HUB_CACHE) / ".locks" / _home(repository).name / "attend.lock"
        waiting = f"Another process is downloading {HUB}{repository}: waiting for it"
        with hold_lock(lock, lambda: say(waiting)), _ended_by_interrupt(), _bars():
            return _fetch(repository, file, revision, say)
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, httpx2.HTTPError, OSError, ValueError) as error:
        raise CheckpointError(f"{reference} {_why(error, repository)}") from error


def _fetch(repository: str, file: str | None, revision: str | None, say: Say) -> Path:
    from huggingface_hub import snapshot_download

    folder = _small(repository, revision)
    entries = _listing(repository, folder)
    wanted = _weight_names(repository, file, folder, entries)
    missing = {name: entries.get(name, Entry(0, None)) for name in wanted if not (folder / name).is_file()}
    if missing:
        _remove_partial(_home(repository))
        size, free = sum(each.size for each in missing.values()), shutil.disk_usage(folder).free
        if size > free:
            raise OSError(errno.ENOSPC, f"it needs {size / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free")
        say(f"Downloading {HUB}{repository} at {folder.name[:12]}: {size / 1e9:.2f} GB to {folder}")
        started = time.perf_counter()
        snapshot_download(repository, revision=folder.name, allow_patterns=[glob.escape(name) for name in wanted])
        seconds = time.perf_counter() - started
        say(f"Downloaded {size / 1e9:.2f} GB in {seconds:.0f} s ({size / 1e6 / seconds:.0f} MB/s)")
    _verify(folder, entries, say)
    return folder if file is None else folder / file


def _small(repository: str, revision: str | None) -> Path:
    """The folder of the commit, with its small files; without a hub that answers, as it is cached."""
    import httpx2
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=SMALL))
    except httpx2.TransportError:  # the library itself uses the cache where no hub answers, but not where a connection breaks
        with suppress(errors.LocalEntryNotFoundError):
            return Path(snapshot_download(repository, revision=revision, allow_patterns=SMALL, local_files_only=True))
        raise


def _listing(repository: str, folder: Path) -> Mapping[str, Entry]:
    """The files of the commit; those in the folder alone, where the hub was never asked for the others."""
    from huggingface_hub import errors, get_cached_repo_tree

    sums: dict[str, Any] = {}
    with suppress(
        OSError, ValueError, KeyError, AttributeError
    ):  # the library keeps SHA-256, and its own function leaves it out
        tree = (folder.parent.parent / "trees" / f"{folder.name}.json").read_text(encoding="utf-8")
        sums = {name: each.get("lfs_sha256") for name, each in json.loads(tree)["files"].items()}
    try:
        files = get_cached_repo_tree(repository, revision=folder.name)
        return {file.path: Entry(file.size, sums.get(file.path)) for file in files}
    except errors.CachedRepoTreeNotFoundError:
        return {path.name: Entry(path.stat().st_size, None) for path in folder.iterdir()}


def _blob(path: Path) -> str | None:
    """The SHA-256 by which the hub named a large file in the cache: there it is a link to a blob of this name."""
    name = Path(os.readlink(path)).name if path.is_symlink() else ""
    return name if SHA256.fullmatch(name) else None


def _weight_names(repository: str, file: str | None, folder: Path, entries: Mapping[str, Entry]) -> list[str]:
    """The names of the weight files, all of which are there."""
    names = weight_names(folder, entries) if file is None else [path.name for path in part_paths(Path(file))]
    if not (absent := [name for name in names if name not in entries]):
        return names
    out = ""
    if file is None:
        whole = [name for name in entries if "/" not in name]
        ggufs = [name for name in whole if name.endswith(SUFFIX)]
        out = f"; name a GGUF file, as in {HUB}{repository}/{min(ggufs)}" if ggufs else way_out(folder, whole)
    raise CheckpointError(f"{HUB}{repository} has no {absent[0]}{out}")


@contextmanager
def hold_lock(lock: Path, busy: Callable[[], None]) -> Iterator[None]:
    """One process of this machine, or of all that share the file system, holds the lock; a second one calls `busy` and waits.

    Where nothing can be written there is nothing to wait for, and a file system without locks has none.
    """
    from filelock import FileLock, Timeout

    with ExitStack() as stack:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(lock, timeout=0))
        except Timeout:
            busy()
            stack.enter_context(FileLock(lock))
        except (OSError, NotImplementedError):  # the library copes, and so do the names of partial files
            pass
        yield


def _remove_partial(home: Path) -> None:
    """Remove the partial files of killed processes, which hold their locks no more. The library would not go on with one."""
    from filelock import FileLock, Timeout

    for path in home.glob("blobs/*.incomplete"):
        lock = home.parent / ".locks" / home.name / f"{path.name.partition('.')[0]}.lock"
        with suppress(OSError, NotImplementedError, Timeout), FileLock(lock, timeout=0):
            path.unlink()


def _bars() -> AbstractContextManager[object]:
    """Show the library's progress bars only on a terminal: in a log they would be many lines."""
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import disable_progress_bars

    told = constants.HF_HUB_DISABLE_PROGRESS_BARS is not None  # by the variable of this name, which wins
    return nullcontext() if told or sys.stderr.isatty() else disable_progress_bars()


@contextmanager
def _ended_by_interrupt() -> Iterator[None]:
    """Ctrl-C ends the process at once: Python would wait for the library's threads, which wait for the hub."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _home(repository: str) -> Path:
    """The repository's folder in the cache."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type="model")


def _verify(folder: Path, entries: Mapping[str, Entry], say: Say) -> None:
    """Check the SHA-256 of each large file that is new to us; one that differs is removed. Raises CheckpointError.

    A checked file is noted beside the blobs. A cache that cannot be written to was checked by the process that filled it.
    """
    done = folder.parent.parent / ".attend-verified"
    sums = {path: (path.name in entries and entries[path.name].sha256) or _blob(path) for path in folder.iterdir()}
    known = {(record.name, record.read_text(encoding="ascii")) for record in done.glob("*")}
    new = {path: name for path, name in sums.items() if name and (name, _stamp(path)) not in known}
    if not new or not os.access(done.parent, os.W_OK):
        return
    size = sum(path.stat().st_size for path in new)
    if size > 1e9:
        say(f"Checking the SHA-256 of {size / 1e9:.2f} GB")
    done.mkdir(exist_ok=True)
    for path, name in new.items():
        if (found := sha256(path)) != name:
            path.resolve().unlink()
            path.unlink(missing_ok=True)
            raise CheckpointError(f"{path} is damaged: the hub names the SHA-256 {name}, and it had {found}; it was removed")
        (done / name).write_text(_stamp(path), encoding="ascii")


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _stamp(path: Path) -> str:
    """Changes whenever a file is written again."""
    status = path.stat()
    return f"{status.st_size} {status.st_mtime_ns}"


def _why(error: Exception, repository: str) -> str:
    """The rest of a sentence that begins with the reference."""
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    match error:
        case errors.GatedRepoError():
            return f"is gated: accept its terms at {hub}/{repository}, and set HF_TOKEN to a token of that account"
        case errors.RevisionNotFoundError():
            return "names a revision that the repository does not have"
        case errors.RepositoryNotFoundError():
            return f"was not found on {hub}: check the name, and set HF_TOKEN if the repository is private"
        case errors.HfHubHTTPError():
            status = error.response.status_code
            return f"could not be downloaded: {hub} answered with status {status}" + ": check HF_TOKEN" * (status in (401, 403))
        case errors.LocalEntryNotFoundError():
            if isinstance(error.__cause__, errors.HfHubHTTPError):
                return _why(error.__cause__, repository)
            cause = str(error.__cause__ or error).splitlines()[0]
            reason = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else f"{hub} cannot be reached ({cause})"
            return f"is not in the cache {constants.HF_HUB_CACHE}, and {reason}"
        case OSError() if error.errno == errno.ENOSPC:
            return f"does not fit on the disk of {constants.HF_HUB_CACHE}: {error.strerror}"
        case _:
            return f"could not be downloaded: {str(error).splitlines()[0]}; files that are whole are kept, try again"

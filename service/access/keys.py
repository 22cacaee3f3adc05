"""API keys: the file of their hashes, and the KeyRing that authenticates callers by it.

The file is one JSON object, `{name: {"sha256": hex, "requests_per_minute": N, "tokens_per_minute": N, "concurrent": N,
"max_priority": N, "weight": X, "share_prefixes": group}}`; a limit that is null or absent does not hold. A key is 256 random
bits, so one round of SHA-256 cannot be searched.

**Limits are per replica**: each replica counts only its own calls, so that N replicas together admit at most N times as much.
"""

import errno
import fcntl
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from stat import S_IMODE, S_ISDIR, S_ISREG
from threading import Lock
from typing import Any

from attend.model.errors import SettingError, Unauthenticated
from attend.model.params import MAX_PRIORITY, describe
from attend.service.access.quota import LIMITS, SHARES, Clock, Key, Limits, Share

log = logging.getLogger("attend.keys")

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""Names stand in messages and log lines, so they hold neither spaces nor line ends."""
SHA256 = re.compile(r"[0-9a-f]{64}")
SECRET_BYTES = 32
KEY_HEADERS = ("authorization", "x-api-key")
OnUnknown = Callable[[str, str], None] | None
"""Is told of a key that is not known beside one that is: the name of the known one, and the header of the other."""
MAX_LIMIT = 10**9
MIN_WEIGHT, MAX_WEIGHT = 0.01, 100
CHECK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Entry:
    """What the file says of one key."""

    digest: bytes
    limits: Limits = field(default_factory=Limits)
    share: Share = field(default_factory=Share)


# The file


def new_secret() -> str:
    """A fresh key. It is shown once; only its `digest_of` is kept."""
    return "att_" + secrets.token_urlsafe(SECRET_BYTES)


def digest_of(secret: bytes) -> bytes:
    """The SHA-256 of an API key, 32 bytes: all that the file keeps of it."""
    return hashlib.sha256(secret).digest()


def _number(name: str, value: object, least: float, most: int, kind: type = int) -> Any:
    """A number that can be kept. Raises SettingError naming it as `name`."""
    if type(value) not in (int, kind) or not least <= value <= most:  # type: ignore[operator]  # it is a number
        what = "an integer" if kind is int else "a number"
        raise SettingError(f"{name} must be {what} from {least} to {most}; got {describe(value)}")
    return kind(value)


def _group(name: str, value: object) -> str:
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise SettingError(f"{name} must be the name of a group, 1 to 64 letters, digits and . _ -; got {describe(value)}")
    return value


FIELDS: dict[str, Callable[[str, object], Any]] = {
    **dict.fromkeys(LIMITS, partial(_number, least=1, most=MAX_LIMIT)),
    "max_priority": partial(_number, least=0, most=MAX_PRIORITY),
    "weight": partial(_number, least=MIN_WEIGHT, most=MAX_WEIGHT, kind=float),
    "share_prefixes": _group,
}
"""What the file may say of a key beside its hash, and what reads it. Raises SettingError."""


def read_name(name: str) -> str:
    """A name that a key may have, or a SettingError."""
    if not NAME.fullmatch(name):
        raise SettingError(f"the name of an API key must be 1 to 64 letters, digits and . _ -; got {name[:64]!r}")
    return name


def read_keys(text: bytes) -> dict[str, Entry]:
    """The keys of a file's text. Raises SettingError naming the key and the field."""
    try:
        written = json.loads(text.decode("utf-8"), object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:
        # ValueError is bad JSON, bad UTF-8 and an endless number alike. Its text may quote the file, so it is not repeated.
        raise SettingError("not JSON") from error
    if not isinstance(written, dict):
        raise SettingError("not a JSON object of names")
    entries = {read_name(name): _entry(name, value) for name, value in written.items()}
    owners: dict[bytes, str] = {}
    for name, entry in entries.items():
        if owners.setdefault(entry.digest, name) != name:
            raise SettingError(f"keys {owners[entry.digest]!r} and {name!r} have the same sha256")
    return entries


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise SettingError(f"{next(name for name in names if names.count(name) > 1)[:64]!r} is there twice")
    return found


def _entry(name: str, value: object) -> Entry:
    if not isinstance(value, dict):
        raise SettingError(f"key {name!r} must be an object with sha256 and limits")
    unknown = sorted(value.keys() - {"sha256", *FIELDS})
    if unknown:
        raise SettingError(f"key {name!r} has an unknown field {unknown[0][:64]!r}")
    digest = value.get("sha256")
    if not isinstance(digest, str) or not SHA256.fullmatch(digest):
        # The value is not shown: who errs here may have written the key itself.
        raise SettingError(f"key {name!r}: sha256 must be 64 digits of 0-9 and a-f")
    given = {field: value[field] for field in FIELDS if value.get(field) is not None}
    return entry_of(bytes.fromhex(digest), {field: FIELDS[field](f"key {name!r}: {field}", n) for field, n in given.items()})


def entry_of(digest: bytes, fields: Mapping[str, Any]) -> Entry:
    """An entry of the key file, from the hash of a key and the FIELDS that are given."""
    limits, share = ({name: fields[name] for name in names if name in fields} for names in (LIMITS, SHARES))
    return Entry(digest, Limits(**limits), Share(**share))


def fields_of(entry: Entry) -> dict[str, Any]:
    """All of FIELDS; null is no limit."""
    return asdict(entry.limits) | asdict(entry.share)


def load_keys(path: Path) -> dict[str, Entry]:
    """The keys of a file. Raises SettingError naming the file."""
    with _naming(path), open(path, "rb", opener=_open_regular) as file:
        return read_keys(file.read())


def _open_regular(path: str, flags: int) -> int:
    """A handle of a file. Raises OSError for a FIFO or a device, which could keep whoever reads it waiting for ever."""
    handle = os.open(path, flags | os.O_NONBLOCK)
    if S_ISREG(mode := os.fstat(handle).st_mode) or S_ISDIR(mode):
        return handle
    os.close(handle)
    raise OSError(errno.EINVAL, "not a regular file")


def write_keys(path: Path, entries: Mapping[str, Entry]) -> None:
    """Replace the file whole: a reader sees the old file or the new one. Owner, group and mode stay those of the old file,
    since the server may run as another user than who edits; a new file is readable by its owner only.

    Raises SettingError naming the file, also where its owner cannot be kept.
    """
    target = path.resolve()  # a link stays a link
    written = {name: {"sha256": entry.digest.hex(), **fields_of(entry)} for name, entry in entries.items()}
    with _naming(path):
        handle, fresh = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)  # mode 0600
        try:
            with open(handle, "w", encoding="utf-8") as file:
                _own_as(target, handle)
                file.write(json.dumps(written, indent=2) + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(fresh, target)
        except BaseException:
            os.unlink(fresh)
            raise


def _own_as(path: Path, handle: int) -> None:
    """Give an open file the owner, group and mode of the file at `path`, where there is one."""
    with suppress(FileNotFoundError):
        known, fresh = path.stat(), os.fstat(handle)
        if (known.st_uid, known.st_gid) != (fresh.st_uid, fresh.st_gid):
            os.fchown(handle, known.st_uid, known.st_gid)
        os.fchmod(handle, S_IMODE(known.st_mode))


@contextmanager
def editing(path: Path) -> Iterator[dict[str, Entry]]:
    """The file's keys to change, written when the block ends well; no file is no keys. Editors wait for each other."""
    with _alone(path):
        entries = load_keys(path) if path.exists() else {}
        yield entries
        write_keys(path, entries)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold the lock of the file's folder; the file itself cannot carry it, because it is replaced."""
    with _naming(path):
        handle = os.open(path.resolve().parent, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Every error of the file names it."""
    try:
        yield
    except SettingError as error:
        raise SettingError(f"the API key file {str(path)!r} cannot be used: {error}") from error
    except OSError as error:
        raise SettingError(f"the API key file {str(path)!r} cannot be used: {error.strerror or error}") from error


# Who calls


class KeyRing:
    """The keys of a file, looked at once a second. One that became bad leaves the last good keys in force, and is logged."""

    def __init__(self, path: str | Path, clock: Clock = time.monotonic) -> None:
        self.path = Path(path)
        self._clock = clock
        self._lock = Lock()
        self._seen: tuple[int, int, int] | None = None
        self._complaint = ""
        self._keys: dict[bytes, Key] = {}
        try:
            self._load()
        except SettingError as error:
            log.error("this replica cannot start: %s", error)
            raise
        self._next_look = clock() + CHECK_SECONDS

    def authenticate(
        self, *authorization: bytes | str, x_api_key: Sequence[bytes | str] = (), on_unknown: OnUnknown = None
    ) -> Key:
        """The caller behind the values of a call's headers `Authorization: Bearer KEY` and `x-api-key: KEY`.

        Of two keys the one that is known is taken, as clients send a login of another server beside it: `on_unknown` is told
        the name of the key, and the header of the other. Raises Unauthenticated, also for two keys that are known, and for two
        values of one header: HAProxy and a replica could judge different ones. Takes as long for a key that is nearly right as
        for one that is wholly wrong.
        """
        self._look()
        for name, values in (("Authorization", authorization), ("x-api-key", x_api_key)):
            if len(values) > 1:
                raise Unauthenticated(f"send one API key: there is more than one {name} header")
        given = {name: key for name, key in zip(KEY_HEADERS, (_bearer(authorization), _first(x_api_key)), strict=True) if key}
        if not given:
            raise Unauthenticated("this server needs an API key: send the header Authorization: Bearer KEY, or x-api-key: KEY")
        found = {secret: self._find(secret) for secret in given.values()}
        known = [key for key in found.values() if key is not None]
        if not known:
            which = "the API key is" if len(found) == 1 else "the API key in Authorization and that in x-api-key are"
            raise Unauthenticated(f"{which} not known to this server")
        if len(known) > 1:
            raise Unauthenticated("send one API key: Authorization and x-api-key have different ones, and both are known")
        if len(found) > 1 and on_unknown is not None:
            on_unknown(known[0].name, next(name for name, secret in given.items() if found[secret] is None))
        return known[0]

    def _find(self, secret: bytes) -> Key | None:
        """The key of a secret. Every stored hash is compared, whichever matches."""
        given, found = digest_of(secret), None
        for digest, key in self._keys.items():
            if hmac.compare_digest(digest, given):
                found = key
        return found

    def among(self, headers: Iterable[tuple[str, str]], on_unknown: OnUnknown = None) -> Key:
        """The caller behind a call's headers or metadata, with names in lower case. As `authenticate`."""
        sent = [(name, value) for name, value in headers if name in KEY_HEADERS]
        authorization, x_api_key = ([value for name, value in sent if name == wanted] for wanted in KEY_HEADERS)
        return self.authenticate(*authorization, x_api_key=x_api_key, on_unknown=on_unknown)

    def find_by_name(self, name: str) -> Key | None:
        """The key of this name; None where it is not in force any more."""
        self._look()
        return next((key for key in self._keys.values() if key.name == name), None)

    @property
    def file_ok(self) -> bool:
        """True if the keys in force are those of the file: a replica can start with it."""
        self._look()
        return not self._complaint

    def _look(self) -> None:
        """Read the file again where it has changed."""
        with self._lock:
            now = self._clock()
            if now < self._next_look:
                return
            self._next_look = now + CHECK_SECONDS
            try:
                self._load()
                self._complaint = ""
            except SettingError as error:
                if str(error) != self._complaint:
                    self._complaint = str(error)
                    log.error("the keys that were read before stay in force, and no replica can start: %s", error)

    def _load(self) -> None:
        with _naming(self.path):
            with open(self.path, "rb", opener=_open_regular) as file:
                stat = os.fstat(file.fileno())
                seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
                if seen == self._seen:
                    return
                entries = read_keys(file.read())
            self._seen = seen  # only of a good file: a bad one is read until it is good
        usages = {key.name: key.usage for key in self._keys.values()}
        # One assignment, so that a reader in another thread sees the old keys or the new ones.
        self._keys = {
            entry.digest: Key(name, entry.limits, usages.get(name), self._clock, entry.share) for name, entry in entries.items()
        }


def _first(values: Sequence[bytes | str]) -> bytes:
    """The one value of a header; empty where there is none that a key could be."""
    raw = next((value for value in values if value.isascii()), b"")
    return raw.encode("ascii") if isinstance(raw, str) else raw


def _bearer(authorization: Sequence[bytes | str]) -> bytes:
    """The key in an Authorization header; empty where it has another scheme."""
    scheme, _, secret = _first(authorization).partition(b" ")
    return secret if scheme.lower() == b"bearer" else b""

"""API keys: a file of their hashes, the ring that knows a caller by it, and what each caller may take.

The file is one JSON object, `{name: {"sha256": hex, "requests_per_minute": N, "tokens_per_minute": N, "concurrent": N}}`;
a limit that is null or absent does not hold. A key is 256 random bits, so one round of SHA-256 cannot be searched.

**Limits are per replica**: each replica counts only its own calls, so that N replicas together admit at most N times as much.
"""

import fcntl
import hashlib
import hmac
import json
import logging
import math
import os
import re
import secrets
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from threading import Lock
from typing import Any

from model.errors import InvalidRequest, RateLimited, SettingError, Unauthenticated
from model.params import describe

log = logging.getLogger("attend.keys")

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""Names stand in messages and log lines, so they hold neither spaces nor line ends."""
SHA256 = re.compile(r"[0-9a-f]{64}")
SECRET_BYTES = 32
MAX_LIMIT = 10**9
WINDOW_SECONDS = 60.0
CHECK_SECONDS = 1.0
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Limits:
    """What one key may take of one replica; None is no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None


LIMITS = tuple(limit.name for limit in fields(Limits))


@dataclass(frozen=True, slots=True)
class Entry:
    """What the file says of one key."""

    digest: bytes
    limits: Limits = field(default_factory=Limits)


# The file


def new_secret() -> str:
    """A fresh key. It is shown once; only its `digest_of` is kept."""
    return "att_" + secrets.token_urlsafe(SECRET_BYTES)


def digest_of(secret: bytes) -> bytes:
    """What is stored of a key."""
    return hashlib.sha256(secret).digest()


def read_limit(name: str, value: object) -> int:
    """A limit that can be kept. Raises SettingError naming it as `name`."""
    if type(value) is not int or not 1 <= value <= MAX_LIMIT:
        raise SettingError(f"{name} must be an integer from 1 to {MAX_LIMIT}; got {describe(value)}")
    return value


def read_name(name: str) -> str:
    """A name that a key may have, or a SettingError."""
    if not NAME.fullmatch(name):
        raise SettingError(f"the name of an API key must be 1 to 64 letters, digits and . _ -; got {name[:64]!r}")
    return name


def read_keys(text: bytes) -> dict[str, Entry]:
    """The keys of a file's text. Raises SettingError naming the key and the field."""
    try:
        document = json.loads(text.decode("utf-8"), object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:
        # ValueError is bad JSON, bad UTF-8 and an endless number alike. Its text may quote the file, so it is not repeated.
        raise SettingError("not JSON") from error
    if not isinstance(document, dict):
        raise SettingError("not a JSON object of names")
    entries = {read_name(name): _entry(name, value) for name, value in document.items()}
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
    unknown = sorted(value.keys() - {"sha256", *LIMITS})
    if unknown:
        raise SettingError(f"key {name!r} has an unknown field {unknown[0][:64]!r}")
    digest = value.get("sha256")
    if not isinstance(digest, str) or not SHA256.fullmatch(digest):
        # The value is not shown: who errs here may have written the key itself.
        raise SettingError(f"key {name!r}: sha256 must be 64 digits of 0-9 and a-f")
    given = {limit: value[limit] for limit in LIMITS if value.get(limit) is not None}
    return Entry(
        bytes.fromhex(digest), Limits(**{limit: read_limit(f"key {name!r}: {limit}", n) for limit, n in given.items()})
    )


def load_keys(path: Path) -> dict[str, Entry]:
    """The keys of a file. Raises SettingError naming the file."""
    with _naming(path):
        return read_keys(path.read_bytes())


def write_keys(path: Path, entries: Mapping[str, Entry]) -> None:
    """Replace the file whole, readable by its owner only: a reader sees the old file or the new one.

    Raises SettingError naming the file.
    """
    target = path.resolve()  # a link stays a link
    document = {name: {"sha256": entry.digest.hex(), **asdict(entry.limits)} for name, entry in entries.items()}
    with _naming(path):
        handle, fresh = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)  # mode 0600
        try:
            with open(handle, "w", encoding="utf-8") as file:
                file.write(json.dumps(document, indent=2) + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(fresh, target)
        except BaseException:
            os.unlink(fresh)
            raise


@contextmanager
def editing(path: Path) -> Iterator[dict[str, Entry]]:
    """The file's keys to change, written when the block ends well; no file is no keys. Raises SettingError naming the file.

    Editors wait for each other, so that none undoes what another did.
    """
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


# What a caller has taken


@dataclass(slots=True, eq=False)
class _Charge:
    leaves: float
    amount: int


class _Window:
    """What was taken in the last minute. Each charge leaves a minute after it was made, so no minute ever holds more than
    the limit; a token bucket would let twice as much through around its edge."""

    def __init__(self) -> None:
        self.charges: deque[_Charge] = deque()
        self.spent = 0

    def wait(self, amount: int, limit: int | None, now: float) -> float:
        """Seconds until `amount` fits; 0 where it fits now. `amount` is at most the limit."""
        while self.charges and self.charges[0].leaves <= now:
            gone = self.charges.popleft()
            self.spent -= gone.amount
            gone.amount = 0
        if limit is None:
            return 0.0
        excess, leaves = self.spent + amount - limit, now
        for charge in self.charges:
            if excess <= 0:
                break
            excess, leaves = excess - charge.amount, charge.leaves
        return leaves - now

    def take(self, amount: int, now: float) -> _Charge:
        """Charge `amount`, to be settled later."""
        charge = _Charge(now + WINDOW_SECONDS, amount)
        self.charges.append(charge)
        self.spent += amount
        return charge

    def settle(self, charge: _Charge, used: int) -> None:
        """Give back what a charge did not use; one that has left the window has nothing to give."""
        back = max(0, charge.amount - used)
        charge.amount -= back
        self.spent -= back


class _Usage:
    """What one name has taken; it outlives a change of its key or its limits."""

    def __init__(self) -> None:
        self.lock = Lock()  # a route's dependency may run in a worker thread
        self.requests = _Window()
        self.tokens = _Window()
        self.running = 0


class Lease:
    """One admitted call. `tokens` is what it is charged for when it ends: all that it reserved, until `used` says less."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def used(self, tokens: int) -> None:
        """How many tokens the call has taken so far; the last word counts, up to what was reserved."""
        assert tokens >= 0
        self.tokens = tokens


class Key:
    """A known caller. `name` is fit for logs; the key itself is not kept."""

    def __init__(self, name: str, limits: Limits, usage: _Usage, clock: Clock) -> None:
        self.name = name
        self.limits = limits
        self._usage = usage
        self._clock = clock

    @contextmanager
    def admit(self, tokens: int) -> Iterator[Lease]:
        """Hold the key's share of this replica for one call, which may take up to `tokens` (prompt and max_tokens).

        Entering raises RateLimited where a limit of this minute is reached, and InvalidRequest where the call is larger than
        a whole minute's tokens; both take nothing. Leaving, by whatever way, ends the call and gives back the tokens that
        `Lease.used` does not claim. Tokens count in the minute in which the call was admitted.
        """
        assert tokens >= 0
        usage = self._usage
        with usage.lock:
            now = self._clock()
            self._check(tokens, now)
            usage.requests.take(1, now)
            charge = usage.tokens.take(tokens, now)
            usage.running += 1
        lease = Lease(tokens)
        try:
            yield lease
        finally:
            with usage.lock:
                usage.running -= 1
                usage.tokens.settle(charge, lease.tokens)

    def _check(self, tokens: int, now: float) -> None:
        limits, usage = self.limits, self._usage
        most = limits.tokens_per_minute
        if most is not None and tokens > most:
            whose = f"the tokens_per_minute of API key {self.name!r}"
            raise InvalidRequest(f"prompt plus max_tokens must be at most {most}, {whose}; got {tokens}", "max_tokens")
        full = limits.concurrent is not None and usage.running >= limits.concurrent
        waits = {
            "concurrent": 1.0 if full else 0.0,
            "requests_per_minute": usage.requests.wait(1, limits.requests_per_minute, now),
            "tokens_per_minute": usage.tokens.wait(tokens, most, now),
        }
        limit = max(waits, key=waits.__getitem__)
        if waits[limit] > 0:
            seconds = max(1, math.ceil(waits[limit]))
            raise RateLimited(
                f"API key {self.name!r} has reached its limit {limit} = {getattr(limits, limit)}; try again in {seconds} s",
                retry_after=seconds,
            )


# Who calls


class KeyRing:
    """The keys of a file, which may change while the server runs. Raises SettingError if the file is bad at the start.

    The file is looked at no more than once a second. One that became bad leaves the last good keys in force.
    """

    def __init__(self, path: str | Path, clock: Clock = time.monotonic) -> None:
        self.path = Path(path)
        self._clock = clock
        self._lock = Lock()
        self._seen: tuple[int, int, int] | None = None
        self._complaint = ""
        self._keys: dict[bytes, Key] = {}
        self._load()
        self._next_look = clock() + CHECK_SECONDS

    def authenticate(self, authorization: bytes | str | None) -> Key:
        """The caller behind the value of an `Authorization: Bearer KEY` header. Raises Unauthenticated.

        Takes as long for a key that is nearly right as for one that is wholly wrong.
        """
        self._look()
        raw = authorization if authorization and authorization.isascii() else b""
        scheme, _, secret = (raw.encode("ascii") if isinstance(raw, str) else raw).partition(b" ")
        if scheme.lower() != b"bearer" or not secret:
            raise Unauthenticated("this server needs an API key: send the header Authorization: Bearer KEY")
        given, found = digest_of(secret), None
        for digest, key in self._keys.items():
            if hmac.compare_digest(digest, given):
                found = key
        if found is None:
            raise Unauthenticated("the API key is not known to this server")
        return found

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
                    log.error("the keys that were read before stay in force: %s", error)

    def _load(self) -> None:
        with _naming(self.path):
            with self.path.open("rb") as file:
                stat = os.fstat(file.fileno())
                seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
                if seen == self._seen:
                    return
                entries = read_keys(file.read())
            self._seen = seen  # only of a good file: a bad one is read until it is good
        usages = {key.name: key._usage for key in self._keys.values()}
        # One assignment, so that a reader in another thread sees the old keys or the new ones.
        self._keys = {
            entry.digest: Key(name, entry.limits, usages.get(name) or _Usage(), self._clock) for name, entry in entries.items()
        }

"""API keys: who is let in, what each caller may take, and the commands that keep the file."""

import hmac
import json
import logging
import os
import re
import stat
import threading
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from model.errors import InvalidRequest, RateLimited, SettingError, Unauthenticated
from service import keys
from service.keys import (
    LIMITS,
    MAX_LIMIT,
    Entry,
    Key,
    KeyRing,
    Limits,
    _Usage,
    digest_of,
    editing,
    load_keys,
    new_secret,
    read_keys,
    write_keys,
)
from service.keys_cli import app

law = settings(max_examples=150, derandomize=True, deadline=None)
SECRET = "att_correct-horse"
HASH = digest_of(SECRET.encode()).hex()


class ManualClock:
    """Time that moves when told, in eighths of a second, which floats add without error."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def key(clock, **limits):
    return Key("ci", Limits(**limits), _Usage(), clock)


def bearer(secret):
    return f"Bearer {secret}"


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def path(tmp_path):
    """A file with one key, SECRET of "ci", and another of "dev"."""
    write_keys(tmp_path / "keys.json", {"ci": Entry(digest_of(SECRET.encode())), "dev": Entry(digest_of(b"att_other"))})
    return tmp_path / "keys.json"


# Who is let in


@pytest.mark.parametrize("header", [bearer(SECRET), bearer(SECRET).encode(), f"bearer {SECRET}", f"BEARER {SECRET}"])
def test_a_key_of_the_file_is_known_by_its_name(path, clock, header):
    assert KeyRing(path, clock).authenticate(header).name == "ci"


@pytest.mark.parametrize(
    "header",
    [
        None, "", "Bearer", "Bearer ", " ", SECRET, f"Basic {SECRET}", f"Bearer{SECRET}", f" Bearer {SECRET}",
        f"Bearer  {SECRET}", f"Bearer {SECRET} ", f"Bearer {SECRET}\t", f"Bearer {SECRET}\n", f"Bearer {SECRET[:-1]}",
        f"Bearer {SECRET}x", f"Bearer {SECRET.upper()}", f"Bearer {HASH}", f"Bearer {SECRET}é", "Bearer ключ", "Bearer \ud800",
        f"Bearer {SECRET}, Bearer {SECRET}", f"Bearer {SECRET}\0",
    ],
)  # fmt: skip
@pytest.mark.parametrize("encoded", [False, True])
def test_anything_else_is_refused_in_words_that_say_api_key_and_never_repeat_it(path, clock, header, encoded):
    if encoded and header is not None:
        header = header.encode("utf-8", "surrogatepass")
    with pytest.raises(Unauthenticated, match="API key") as refusal:
        KeyRing(path, clock).authenticate(header)
    assert SECRET[:-1] not in str(refusal.value)
    assert refusal.value.__cause__ is refusal.value.__context__ is None


@law
@given(st.one_of(st.text(), st.binary()))
def test_no_header_at_all_breaks_the_ring_or_opens_it(tmp_path_factory, header):
    path = tmp_path_factory.getbasetemp() / "fuzz.json"
    if not path.exists():
        write_keys(path, {"ci": Entry(digest_of(SECRET.encode()))})
    for value in (header, f"Bearer {header}" if isinstance(header, str) else b"Bearer " + header):
        with pytest.raises(Unauthenticated):
            KeyRing(path).authenticate(value)


@pytest.mark.parametrize("secret", [SECRET, "att_other", "att_unknown"])
def test_every_stored_hash_is_compared_whichever_matches(path, clock, monkeypatch, secret):
    """An early exit would tell by time how far down the list a key stands."""
    ring, compared, genuine = KeyRing(path, clock), [], hmac.compare_digest

    def compare(left, right):
        compared.append(type(left) is type(right) is bytes and len(left) == len(right) == 32)
        return genuine(left, right)

    monkeypatch.setattr(keys.hmac, "compare_digest", compare)
    with pytest.raises(Unauthenticated) if secret == "att_unknown" else ExitStack():
        ring.authenticate(bearer(secret))
    assert [True, True] == compared


def test_a_file_without_keys_lets_nobody_in(tmp_path, clock):
    write_keys(tmp_path / "keys", {})
    with pytest.raises(Unauthenticated):
        KeyRing(tmp_path / "keys", clock).authenticate(bearer(SECRET))


def test_a_fresh_key_holds_256_random_bits_behind_its_prefix():
    found = {new_secret() for _ in range(100)}
    assert len(found) == 100
    assert all(re.fullmatch(r"att_[A-Za-z0-9_-]{43}", secret) for secret in found)


# The file


def test_the_file_holds_hashes_only_and_is_its_owners_alone(path):
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert SECRET not in path.read_text()
    assert json.loads(path.read_text())["ci"] == {"sha256": HASH, **dict.fromkeys(LIMITS)}


limit = st.none() | st.integers(1, MAX_LIMIT)
entries = st.dictionaries(
    st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True),
    st.builds(Entry, st.binary(min_size=32, max_size=32), st.builds(Limits, limit, limit, limit)),
)


@law
@given(entries.filter(lambda found: len({entry.digest for entry in found.values()}) == len(found)))
def test_what_is_written_is_what_is_read(tmp_path_factory, found):
    path = tmp_path_factory.getbasetemp() / "round-trip"
    write_keys(path, found)
    assert found == load_keys(path)


def test_an_absent_limit_is_a_null_limit():
    assert read_keys(json.dumps({"ci": {"sha256": HASH}}).encode()) == {"ci": Entry(bytes.fromhex(HASH), Limits())}


def one(**fields):
    return json.dumps({"ci": {"sha256": HASH, **fields}}).encode()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b'\xef\xbb\xbf{"a": {}}', "not JSON"),
        (b'{"\xff": {}}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"9" * 5000, "not JSON"),
        (b"[]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'{"ci": []}', "'ci' must be an object"),
        (b'{"ci": {}}', "'ci': sha256"),
        (b'{"a b": {}}', "'a b'"),
        (b'{"": {}}', "name"),
        (b'{"a\\n": {}}', r"'a\n'"),
        (b'{"ci": {}, "ci": {}}', "'ci' is there twice"),
        (b'{"ci": {"sha256": 1, "sha256": 1}}', "'sha256' is there twice"),
        (json.dumps({"a": {"sha256": HASH}, "b": {"sha256": HASH}}).encode(), "'a' and 'b' have the same sha256"),
        (one(sha256=None), "sha256"),
        (one(sha256=HASH.upper()), "sha256"),
        (one(sha256=HASH[:-1]), "sha256"),
        (one(sha256=HASH + "\n"), "sha256"),
        (one(tokens=3), "'ci' has an unknown field 'tokens'"),
        *((one(**{name: bad}), name) for name in LIMITS for bad in (0, -1, MAX_LIMIT + 1, 1.0, "5", True, [], {})),
    ],
)
def test_a_damaged_file_is_a_sentence_that_names_file_and_culprit(tmp_path, clock, text, told):
    path = tmp_path / "keys.json"
    path.write_bytes(text)
    with pytest.raises(SettingError, match=re.escape(str(path))) as refusal:
        KeyRing(path, clock)
    assert told in str(refusal.value)
    assert str(refusal.value).isprintable()


def test_a_key_written_in_place_of_its_hash_is_not_repeated(tmp_path, clock):
    (tmp_path / "keys").write_bytes(one(sha256=SECRET))
    with pytest.raises(SettingError) as refusal:
        KeyRing(tmp_path / "keys", clock)
    assert SECRET not in str(refusal.value)


def test_a_missing_file_stops_the_start(tmp_path, clock):
    with pytest.raises(SettingError, match=r"absent.*No such file"):
        KeyRing(tmp_path / "absent", clock)


def test_a_write_that_fails_leaves_the_old_file_and_no_other(path, monkeypatch):
    before = path.read_bytes()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(keys.os, "fsync", fail)
    with pytest.raises(SettingError, match=r"keys\.json.*No space left"):
        write_keys(path, {})
    assert before == path.read_bytes()
    assert [path] == list(path.parent.iterdir())


def test_a_link_stays_a_link(path, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(path)
    write_keys(link, {})
    assert link.is_symlink()
    assert {} == load_keys(path)


def test_editors_at_the_same_time_undo_nothing_of_each_other(path):
    def add(i):
        with editing(path) as found:
            found[f"k{i}"] = Entry(digest_of(b"%d" % i))

    threads = [threading.Thread(target=add, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {"ci", "dev", *(f"k{i}" for i in range(12))} == load_keys(path).keys()


def test_an_edit_that_fails_writes_nothing(path):
    before = path.read_bytes()
    with pytest.raises(KeyError), editing(path) as found:  # noqa: PT012 - the block is what fails
        del found["ci"]
        del found["ci"]
    assert before == path.read_bytes()


# The file changes while the server runs


def test_a_change_is_followed_within_a_second_and_looked_for_no_more_often(path, clock):
    ring = KeyRing(path, clock)
    write_keys(path, {"new": Entry(digest_of(b"att_new"))})
    clock.now += 0.875
    assert ring.authenticate(bearer(SECRET)).name == "ci"
    clock.now += 0.125
    assert ring.authenticate(bearer("att_new")).name == "new"
    with pytest.raises(Unauthenticated):
        ring.authenticate(bearer(SECRET))


def test_a_file_that_did_not_change_is_not_read_again(path, clock, monkeypatch):
    ring, known = KeyRing(path, clock), KeyRing.authenticate
    monkeypatch.setattr(keys, "read_keys", None)
    for _ in range(5):
        clock.now += 10
        assert known(ring, bearer(SECRET)).name == "ci"


@pytest.mark.parametrize("damage", ["text", "absent", "folder"])
def test_a_file_that_became_bad_keeps_the_old_keys_says_so_once_and_is_followed_again_when_it_is_good(
    path, clock, damage, caplog
):
    ring, aside = KeyRing(path, clock), path.with_suffix(".good")
    os.rename(path, aside)
    if damage == "text":
        path.write_text("{" + SECRET)
    elif damage == "folder":
        path.mkdir()
    with caplog.at_level(logging.INFO):
        for _ in range(5):
            clock.now += 1
            assert ring.authenticate(bearer(SECRET)).name == "ci"
    (record,) = caplog.records
    assert (record.levelname, str(path) in record.message, SECRET in record.message) == ("ERROR", True, False)
    if damage == "folder":
        path.rmdir()
    os.replace(aside, path)
    write_keys(path, {"new": Entry(digest_of(b"att_new"))})
    clock.now += 1
    assert ring.authenticate(bearer("att_new")).name == "new"
    assert len(caplog.records) == 1
    path.unlink()
    clock.now += 1
    assert ring.authenticate(bearer("att_new")).name == "new"
    assert len(caplog.records) == 2, "the same trouble after a good spell is news"


def test_what_a_name_has_taken_outlives_a_change_of_its_key_and_limits(path, clock):
    """Otherwise each edit of the file would hand out a fresh minute."""
    write_keys(path, {"ci": Entry(digest_of(b"old"), Limits(requests_per_minute=2, concurrent=2))})
    ring = KeyRing(path, clock)
    with ring.authenticate(bearer("old")).admit(1):
        write_keys(path, {"ci": Entry(digest_of(b"new"), Limits(requests_per_minute=2, concurrent=1))})
        clock.now += 1
        renewed = ring.authenticate(bearer("new"))
        with pytest.raises(RateLimited, match="concurrent = 1"), renewed.admit(1):
            pass
    with renewed.admit(1):
        pass
    with pytest.raises(RateLimited, match="requests_per_minute = 2"), renewed.admit(1):
        pass


# What a caller may take

MINUTE = 60.0
small = st.none() | st.integers(1, 4)
steps = st.lists(
    st.tuples(st.integers(0, 30 * 8), st.integers(0, 12), st.none() | st.integers(0, 15), st.booleans()),
    min_size=1,
    max_size=40,
)


class Ledger:
    """The calls that were let in, kept the slow way: [when, what it is charged for, whether it runs]."""

    def __init__(self, limits):
        self.limits = limits
        self.rows = []

    def fits(self, now, requests, tokens, running):
        last = [row for row in self.rows if row[0] > now - MINUTE]
        taken = {
            "requests_per_minute": len(last) + requests,
            "tokens_per_minute": sum(row[1] for row in last) + tokens,
            "concurrent": sum(row[2] for row in self.rows) + running,
        }
        return all(getattr(self.limits, name) is None or taken[name] <= getattr(self.limits, name) for name in LIMITS)


def end(lease, row, used):
    """What a call does last: say what it used, or die without a word."""
    if used is not None:
        lease.used(used)
        row[1] = min(used, row[1])
    row[2] = False


@law
@given(st.builds(Limits, small, st.none() | st.integers(1, 20), small), steps)
def test_a_call_is_let_in_if_and_only_if_every_limit_holds_in_every_minute(limits, arrivals):
    """No pattern of arrivals exceeds a limit, and none is refused that would not; so refusals take nothing."""
    clock, ledger = ManualClock(), Ledger(limits)
    caller, running = Key("ci", limits, _Usage(), clock), []
    for eighths, tokens, used, stays in arrivals:
        clock.now += eighths / 8
        if limits.tokens_per_minute is not None and tokens > limits.tokens_per_minute:
            with pytest.raises(InvalidRequest), caller.admit(tokens):
                pass
            continue
        held = caller.admit(tokens)
        if not ledger.fits(clock.now, 1, tokens, 1):
            with pytest.raises(RateLimited):
                held.__enter__()
        else:
            row = [clock.now, tokens, True]
            running.append((held, held.__enter__(), row, used))
            ledger.rows.append(row)
        assert ledger.fits(clock.now, 0, 0, 0)
        if running and not stays:
            held, lease, row, used = running.pop(0)
            end(lease, row, used)
            held.__exit__(None, None, None)
    for held, *_ in running:
        held.__exit__(None, None, None)
    assert caller._usage.running == 0


@law
@given(st.builds(Limits, small, st.none() | st.integers(12, 20), st.none()), steps)
def test_who_waits_as_long_as_the_refusal_says_is_let_in(limits, arrivals):
    clock = ManualClock()
    caller = Key("ci", limits, _Usage(), clock)
    for eighths, tokens, used, _ in arrivals:
        clock.now += eighths / 8
        clock.now += refused_for(caller, tokens)
        with caller.admit(tokens) as lease:
            lease.used(tokens if used is None else used)


def refused_for(caller, tokens):
    """Seconds to wait, or 0 where the call would be let in now; asking takes nothing."""
    try:
        caller._check(tokens, caller._clock())
    except RateLimited as refusal:
        return refusal.retry_after
    return 0


@law
@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from([None, ValueError, KeyboardInterrupt, GeneratorExit])), max_size=20)
)
def test_every_way_out_of_a_call_frees_its_place(ways):
    caller = key(ManualClock(), concurrent=1, tokens_per_minute=1000)
    for tokens, way in ways:
        with pytest.raises(way) if way else ExitStack(), caller.admit(tokens) as lease:
            lease.used(tokens // 2)
            if way:
                raise way
    assert caller._usage.running == 0
    assert caller._usage.tokens.spent == sum(tokens // 2 for tokens, _ in ways)


@pytest.mark.parametrize(
    ("name", "wait"), [("requests_per_minute", 60), ("tokens_per_minute", 60), ("concurrent", 1)]
)  # fmt: skip
def test_a_refusal_names_the_limit_and_the_key_and_the_wait(clock, name, wait):
    caller = key(clock, **{name: 5})
    with ExitStack() as running:
        for _ in range(5):
            running.enter_context(caller.admit(1))
        with pytest.raises(RateLimited, match=f"'ci' has reached its limit {name} = 5; try again in {wait} s") as refusal:
            running.enter_context(caller.admit(1))
    assert refusal.value.retry_after == wait


def test_a_wait_is_rounded_up(clock):
    caller = key(clock, requests_per_minute=1)
    with caller.admit(1):
        pass
    for later, wait in ((0.125, 60), (58.875, 1), (0.875, 1)):
        clock.now += later
        with pytest.raises(RateLimited) as refusal, caller.admit(1):
            pass
        assert refusal.value.retry_after == wait
    clock.now += 0.125
    with caller.admit(1):
        pass


def test_of_several_limits_the_longest_wait_is_told(clock):
    caller = key(clock, requests_per_minute=1, concurrent=1)
    with caller.admit(1), pytest.raises(RateLimited, match="requests_per_minute"), caller.admit(1):
        pass


def test_a_call_larger_than_a_whole_minute_is_refused_for_good(clock):
    caller = key(clock, tokens_per_minute=10, requests_per_minute=1)
    with (
        pytest.raises(InvalidRequest, match=r"at most 10, the tokens_per_minute of API key 'ci'; got 11") as refusal,
        caller.admit(11),
    ):
        pass  # fmt: skip
    assert refusal.value.field == "max_tokens"
    with caller.admit(10):
        pass


def test_tokens_are_held_whole_while_a_call_runs_and_given_back_when_it_ends(clock):
    caller = key(clock, tokens_per_minute=10)
    with caller.admit(8) as lease:
        lease.used(1)
        with pytest.raises(RateLimited), caller.admit(3):
            pass
    with caller.admit(9):
        pass
    with pytest.raises(RateLimited), caller.admit(1):
        pass


def test_a_call_that_never_says_what_it_used_is_charged_for_all_and_none_for_more(clock):
    caller = key(clock, tokens_per_minute=10)
    with caller.admit(4):
        pass
    with caller.admit(4) as lease:
        lease.used(40)
    assert caller._usage.tokens.spent == 8


def test_a_call_longer_than_a_minute_gives_nothing_back_twice(clock):
    caller = key(clock, tokens_per_minute=10)
    with caller.admit(10) as lease:
        clock.now += MINUTE
        with caller.admit(10):
            lease.used(0)
    assert caller._usage.tokens.spent == 10


def test_a_call_that_was_not_entered_took_nothing(clock):
    caller = key(clock, requests_per_minute=1)
    for _ in range(3):
        caller.admit(1)
    with caller.admit(1):
        pass


def test_a_key_without_limits_keeps_no_more_than_a_minute(clock):
    caller = key(clock)
    for _ in range(1000):
        clock.now += 1
        with caller.admit(5):
            pass
    assert len(caller._usage.requests.charges) == len(caller._usage.tokens.charges) == 60


def test_keys_do_not_take_from_each_other(path, clock):
    write_keys(path, {name: Entry(digest_of(name.encode()), Limits(1, 1, 1)) for name in ("a", "b")})
    ring = KeyRing(path, clock)
    with ring.authenticate(bearer("a")).admit(1), ring.authenticate(bearer("b")).admit(1):
        pass


# The command


@pytest.fixture
def attend(tmp_path, monkeypatch):
    """Run `attend keys ...` on a file of its own."""
    monkeypatch.setenv("ATTEND_API_KEYS_FILE", str(tmp_path / "made.json"))
    return lambda *words: CliRunner().invoke(app, words)


def test_add_prints_the_key_alone_and_the_ring_knows_it(attend, tmp_path, clock):
    done = attend("add", "ci", "--requests-per-minute", "60", "--tokens-per-minute", "9000", "--concurrent", "2")
    assert (done.exit_code, done.stdout.count("\n")) == (0, 1)
    secret = done.stdout.strip()
    assert secret.startswith("att_")
    assert secret not in done.stderr
    assert "once" in done.stderr
    known = KeyRing(tmp_path / "made.json", clock).authenticate(bearer(secret))
    assert (known.name, known.limits) == ("ci", Limits(60, 9000, 2))
    assert stat.S_IMODE((tmp_path / "made.json").stat().st_mode) == 0o600


def test_list_shows_names_and_limits_and_neither_keys_nor_hashes(attend, tmp_path):
    secret = attend("add", "ci", "--concurrent", "2").stdout.strip()
    attend("add", "dev")
    lines = attend("list").stdout.splitlines()
    assert [["NAME", *(name.upper() for name in LIMITS)], ["ci", "-", "-", "2"], ["dev", "-", "-", "-"]] == list(
        map(str.split, lines)
    )
    assert not any(secret in line or digest_of(secret.encode()).hex() in line for line in lines)


def test_remove_takes_one_key_away(attend, tmp_path):
    attend("add", "ci")
    attend("add", "dev")
    done = attend("remove", "ci")
    assert (done.exit_code, done.stdout) == (0, "")
    assert ["dev"] == list(load_keys(tmp_path / "made.json"))


def test_the_flag_wins_over_the_variable(attend, tmp_path):
    assert attend("add", "ci", "--file", str(tmp_path / "other.json")).exit_code == 0
    assert ["other.json"] == [found.name for found in tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("add", "ci"), "there is a key 'ci'"),
        (("add", "a b"), "1 to 64 letters"),
        (("add", "x", "--concurrent", "0"), "--concurrent must be an integer from 1 to 1000000000; got 0"),
        (("add", "x", "--concurrent", "many"), "--concurrent must be an integer from 1 to 1000000000; got 'many'"),
        (("add", "x", "--tokens-per-minute", "1_000"), "--tokens-per-minute must be"),
        (("add", "x", "--tokens-per-minute", "-5"), "--tokens-per-minute must be"),
        (("add", "x", "--requests-per-minute", "9" * 5000), "--requests-per-minute must be"),
        (("add", "x", "--file", "/nowhere/keys"), "'/nowhere/keys' cannot be used: No such file"),
        (("list", "--file", "/nowhere/keys"), "'/nowhere/keys' cannot be used: No such file"),
        (("remove", "dev"), "there is no key 'dev'"),
    ],
)
def test_a_mistake_is_a_sentence_and_changes_nothing(attend, tmp_path, words, told):
    attend("add", "ci")
    before = (tmp_path / "made.json").read_bytes()
    done = attend(*words)
    assert isinstance(done.exception, SettingError)
    assert told in str(done.exception)
    assert done.stdout == ""
    assert before == (tmp_path / "made.json").read_bytes()


@pytest.mark.parametrize("command", [("add", "ci"), ("list",), ("remove", "ci")])
def test_without_a_file_the_command_says_how_to_name_one(attend, monkeypatch, command):
    for unset in (lambda: monkeypatch.setenv("ATTEND_API_KEYS_FILE", ""), lambda: monkeypatch.delenv("ATTEND_API_KEYS_FILE")):
        unset()
        done = attend(*command)
        assert isinstance(done.exception, SettingError)
        assert "ATTEND_API_KEYS_FILE" in str(done.exception)

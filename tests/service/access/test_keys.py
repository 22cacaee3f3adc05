"""API keys: who is let in, what each caller may take, and the commands that keep the file."""

import hmac
import json
import logging
import os
import re
import stat
import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from attend.model.errors import RateLimited, SettingError, Unauthenticated
from attend.service.access import keys
from attend.service.access.keys import (
    FIELDS,
    MAX_LIMIT,
    MAX_WEIGHT,
    MIN_WEIGHT,
    Entry,
    KeyRing,
    digest_of,
    editing,
    load_keys,
    new_secret,
    write_keys,
)
from attend.service.access.quota import LIMITS, Limits, Share
from attend.service.commands.keys import app
from tests.conftest import examples
from tests.model.engine.machines import Clock

law = settings(max_examples=examples(150), derandomize=True, deadline=None)
SECRET = "att_correct-horse"
HASH = digest_of(SECRET.encode()).hex()


def bearer(secret):
    return f"Bearer {secret}"


@pytest.fixture
def clock():
    return Clock(1000.0)


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
        KeyRing(path, clock).authenticate(*() if header is None else (header,))
    assert SECRET[:-1] not in str(refusal.value)
    assert refusal.value.__cause__ is refusal.value.__context__ is None


def test_two_headers_are_refused_also_where_both_hold_the_key(path, clock):
    with pytest.raises(Unauthenticated, match="more than one") as refusal:
        KeyRing(path, clock).authenticate(bearer(SECRET), bearer(SECRET))
    assert SECRET not in str(refusal.value)


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


def test_a_fresh_key_holds_256_random_bits_behind_its_prefix():
    found = {new_secret() for _ in range(100)}
    assert len(found) == 100
    assert all(re.fullmatch(r"att_[A-Za-z0-9_-]{43}", secret) for secret in found)


# The file


def test_the_file_holds_hashes_only_and_is_its_owners_alone(path):
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert SECRET not in path.read_text()
    assert json.loads(path.read_text())["ci"] == {"sha256": HASH, **dict.fromkeys(FIELDS), "weight": 1.0}


limit, name = st.none() | st.integers(1, MAX_LIMIT), st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True)
shares = st.builds(Share, st.none() | st.integers(0, 9), st.floats(MIN_WEIGHT, MAX_WEIGHT), st.none() | name)
entries = st.dictionaries(
    name,
    st.builds(Entry, st.binary(min_size=32, max_size=32), st.builds(Limits, limit, limit, limit), shares),
)


@law
@given(entries.filter(lambda found: len({entry.digest for entry in found.values()}) == len(found)))
def test_what_is_written_is_what_is_read(tmp_path_factory, found):
    path = tmp_path_factory.getbasetemp() / "round-trip"
    write_keys(path, found)
    assert found == load_keys(path)


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
        (b'{"a": {}, "ci": {}, "ci": {}}', "'ci' is there twice"),
        (b'{"ci": {"sha256": 1, "sha256": 1}}', "'sha256' is there twice"),
        (json.dumps({"a": {"sha256": HASH}, "b": {"sha256": HASH}}).encode(), "'a' and 'b' have the same sha256"),
        (one(sha256=None), "sha256"),
        (one(sha256=HASH.upper()), "sha256"),
        (one(sha256=HASH[:-1]), "sha256"),
        (one(sha256=HASH + "\n"), "sha256"),
        (one(tokens=3), "'ci' has an unknown field 'tokens'"),
        *((one(**{name: bad}), name) for name in LIMITS for bad in (0, -1, MAX_LIMIT + 1, 1.0, "5", True, [], {})),
        *((one(max_priority=bad), "max_priority must be an integer from 0 to 9") for bad in (-1, 10, 1.0, "5", True, [])),
        *((one(weight=bad), "weight must be a number from 0.01 to 100") for bad in (0, 0.001, 101, -1, "1", True, [], 10**400)),
        (b'{"ci": {"sha256": "%s", "weight": NaN}}' % HASH.encode(), "weight must be"),
        (b'{"ci": {"sha256": "%s", "weight": 1e999}}' % HASH.encode(), "weight must be"),
        *(
            (one(share_prefixes=bad), "share_prefixes must be the name of a group")
            for bad in ("", "a b", "x" * 65, 1, [], "a\0")
        ),
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


def test_a_missing_file_stops_the_start_and_the_log_names_it(tmp_path, clock, caplog):
    with pytest.raises(SettingError, match=r"absent.*No such file"):
        KeyRing(tmp_path / "absent", clock)
    (record,) = caplog.records
    assert (record.levelname, str(tmp_path / "absent") in record.message) == ("ERROR", True)


def test_a_fifo_or_a_device_for_a_file_stops_the_start_at_once(tmp_path, clock):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero")):
        for read in (load_keys, partial(KeyRing, clock=clock)):
            with pytest.raises(SettingError, match=f"'{path}' cannot be used: not a regular file"):
                read(path)


def test_a_write_that_fails_leaves_the_old_file_and_no_other(path, monkeypatch):
    before = path.read_bytes()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(keys.os, "fsync", fail)
    with pytest.raises(SettingError, match=r"keys\.json.*No space left"):
        write_keys(path, {})
    assert before == path.read_bytes()
    assert [path] == list(path.parent.iterdir())


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664])
def test_an_edit_keeps_the_mode_of_the_file(path, mode):
    path.chmod(mode)
    with editing(path) as found:
        del found["ci"]
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_an_edit_keeps_owner_and_group_of_the_file_or_does_nothing(path, monkeypatch):
    """root edits a file that the server reads as another user."""
    genuine, theirs, asked = keys.os.fstat, (path.stat().st_uid + 7, path.stat().st_gid + 9), []

    class Status:
        st_uid, st_gid, st_mode = *theirs, 0o100640

    monkeypatch.setattr(keys.Path, "stat", lambda *_, **__: Status)
    monkeypatch.setattr(keys.os, "fchown", lambda handle, *owner: asked.append((owner, genuine(handle).st_size)))
    write_keys(path, {})
    assert asked == [(theirs, 0)], "before a word is in it"

    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(keys.os, "fchown", refuse)
    with pytest.raises(SettingError, match=r"keys\.json.*not permitted"):
        write_keys(path, {"x": Entry(digest_of(b"x"))})
    monkeypatch.undo()
    assert {} == load_keys(path)
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


@pytest.mark.parametrize("damage", ["text", "absent", "folder", "fifo", "device"])
def test_a_file_that_became_bad_keeps_the_old_keys_until_it_is_good(path, clock, damage, caplog):
    ring, aside = KeyRing(path, clock), path.with_suffix(".good")
    assert ring.file_ok
    os.rename(path, aside)
    if damage == "text":
        path.write_text("{" + SECRET)
    elif damage == "folder":
        path.mkdir()
    elif damage == "fifo":
        os.mkfifo(path)
    elif damage == "device":
        path.symlink_to("/dev/zero")
    with caplog.at_level(logging.INFO):
        for _ in range(60):
            clock.now += 1
            assert ring.authenticate(bearer(SECRET)).name == "ci"
            assert not ring.file_ok
    (record,) = caplog.records
    assert (record.levelname, str(path) in record.message, SECRET in record.message) == ("ERROR", True, False)
    if damage == "folder":
        path.rmdir()
    os.replace(aside, path)
    write_keys(path, {"new": Entry(digest_of(b"att_new"))})
    clock.now += 1
    assert ring.file_ok
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
    old = ring.authenticate(bearer("old"))
    old.arrive()
    with old.admit(1):
        write_keys(path, {"ci": Entry(digest_of(b"new"), Limits(requests_per_minute=2, concurrent=1))})
        clock.now += 1
        renewed = ring.authenticate(bearer("new"))
        with pytest.raises(RateLimited, match="concurrent = 1"):
            renewed.arrive()
    renewed.arrive()
    with pytest.raises(RateLimited, match="requests_per_minute = 2"):
        renewed.arrive()


# The command


@pytest.fixture
def attend(tmp_path, monkeypatch):
    """Run `attend keys ...` on a file of its own."""
    monkeypatch.setenv("ATTEND_API_KEYS_FILE", str(tmp_path / "made.json"))
    return lambda *words: CliRunner().invoke(app, words)


def test_add_prints_the_key_alone_and_the_ring_knows_it(attend, tmp_path, clock):
    shares = ("--max-priority", "0", "--weight", "2.5", "--share-prefixes", "team")
    done = attend("add", "ci", "--requests-per-minute", "60", "--tokens-per-minute", "9000", "--concurrent", "2", *shares)
    assert (done.exit_code, done.stdout.count("\n")) == (0, 1)
    secret = done.stdout.strip()
    assert secret.startswith("att_")
    assert secret not in done.stderr
    assert "once" in done.stderr
    known = KeyRing(tmp_path / "made.json", clock).authenticate(bearer(secret))
    assert (known.name, known.limits, known.share) == ("ci", Limits(60, 9000, 2), Share(0, 2.5, "team"))
    assert stat.S_IMODE((tmp_path / "made.json").stat().st_mode) == 0o600


def test_list_shows_names_and_limits_and_neither_keys_nor_hashes(attend, tmp_path):
    secret = attend("add", "ci", "--concurrent", "2", "--max-priority", "0", "--weight", "0.5").stdout.strip()
    attend("add", "dev")
    lines = attend("list").stdout.splitlines()
    assert list(map(str.split, lines)) == [
        ["NAME", *(name.upper() for name in FIELDS)],
        ["ci", "-", "-", "2", "0", "0.5", "-"],
        ["dev", "-", "-", "-", "-", "1", "-"],
    ]
    assert not any(secret in line or digest_of(secret.encode()).hex() in line for line in lines)


def test_set_changes_what_is_given_takes_none_away_and_keeps_the_rest(attend, tmp_path, clock):
    secret = attend("add", "ci", "--concurrent", "2", "--weight", "3", "--share-prefixes", "team").stdout.strip()
    attend("add", "dev")
    ring = KeyRing(tmp_path / "made.json", clock)
    done = attend("set", "ci", "--weight", "0.25", "--concurrent", "none", "--max-priority", "7")
    assert (done.exit_code, done.stdout) == (0, "")
    clock.now += 1
    known = ring.authenticate(bearer(secret))
    assert (known.limits, known.share) == (Limits(), Share(7, 0.25, "team")), "a running server follows"
    assert load_keys(tmp_path / "made.json")["dev"].share == Share()
    assert attend("set", "ci", "--weight", "none", "--share-prefixes", "none").exit_code == 0
    assert load_keys(tmp_path / "made.json")["ci"].share == Share(7)


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
        (("add", "x", "--max-priority", "10"), "--max-priority must be an integer from 0 to 9; got 10"),
        (("add", "x", "--weight", "0"), "--weight must be a number from 0.01 to 100; got 0"),
        (("add", "x", "--weight", "nan"), "--weight must be a number from 0.01 to 100; got 'nan'"),
        (("add", "x", "--weight", "1e2"), "--weight must be a number from 0.01 to 100; got '1e2'"),
        (("add", "x", "--share-prefixes", "a b"), "--share-prefixes must be the name of a group, 1 to 64 letters"),
        (("set", "ci"), "say what to change: --requests-per-minute, --tokens-per-minute, --concurrent, --max-priority"),
        (("set", "dev", "--weight", "2"), "there is no key 'dev'"),
        (("set", "ci", "--weight", "-2"), "--weight must be a number"),
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


@pytest.mark.parametrize("command", [("add", "ci"), ("set", "ci", "--weight", "2"), ("list",), ("remove", "ci")])
def test_without_a_file_the_command_says_how_to_name_one(attend, monkeypatch, command):
    for unset in (lambda: monkeypatch.setenv("ATTEND_API_KEYS_FILE", ""), lambda: monkeypatch.delenv("ATTEND_API_KEYS_FILE")):
        unset()
        done = attend(*command)
        assert isinstance(done.exception, SettingError)
        assert "ATTEND_API_KEYS_FILE" in str(done.exception)

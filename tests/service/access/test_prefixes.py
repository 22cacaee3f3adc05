"""Cached prefixes are shared within a key, its group or a tenant, and nobody learns another's prompt from `cached_tokens`."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

from attend.model.engine.build import EngineOptions, build_engine
from attend.service.access.caller import Caller, networks
from attend.service.access.keys import Entry, KeyRing, digest_of, write_keys
from attend.service.access.quota import Key, Limits, Share
from tests.fakes import Server, build_server
from tests.model.checkpoints import write_checkpoint

KEYS = {"ann": None, "bob": None, "team": None, "carl": "team", "dora": "team", "eve": "ann", "fred": "fred"}
"""Keys and their groups. The groups `team`, `ann` and `fred` have the names of keys."""
PROMPT = [*range(3, 73)]
KNOWN = 64
"""Of its tokens, those in whole blocks."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory) -> Iterator[dict[str, Server]]:
    """A real engine: with keys, and with a gateway's tenants."""
    folder: Path = tmp_path_factory.mktemp("prefixes")
    write_keys(
        folder / "keys",
        {name: Entry(digest_of(name.encode()), share=Share(share_prefixes=group)) for name, group in KEYS.items()},
    )
    options = EngineOptions(device="cpu", dtype="float32", backend="torch", kv_cache_memory=1 << 22)
    engine = build_engine(write_checkpoint("qwen3", folder), options)
    engine.start()
    tenants = {"trusted": networks("127.0.0.1"), "tenant_header": "X-Tenant"}
    yield {"keys": build_server(engine, keys=KeyRing(folder / "keys")), "tenants": build_server(engine, **tenants)}
    engine.close()


@pytest.fixture(autouse=True)
def another_prompt(servers) -> list[int]:
    """A prompt that no test before it has sent."""
    PROMPT[0] += 1
    return PROMPT


def cached(server: Server, headers: dict[str, str], **more: object) -> int:
    """How many tokens of the prompt were in the cache, as the caller is told."""
    answer = server.post({"prompt": PROMPT, "max_tokens": 1, **more}, headers=headers)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def by_key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


def test_a_key_finds_its_own_prompt_again_and_no_other_key_does(servers):
    server = servers["keys"]
    assert [cached(server, by_key(name)) for name in ("ann", "bob", "ann", "bob", "eve", "fred", "team")] == [
        0,
        0,
        KNOWN,
        KNOWN,
        0,
        0,
        0,
    ]


def test_a_group_shares_and_is_no_key_of_its_name(servers):
    server = servers["keys"]
    assert [cached(server, by_key(name)) for name in ("carl", "dora", "team", "ann", "eve")] == [0, KNOWN, 0, 0, 0]


def test_the_callers_own_salt_separates_within_the_key(servers):
    server = servers["keys"]
    salts = [{}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a"}]
    assert [cached(server, by_key("carl"), **salt) for salt in salts] == [0, 0, 0, KNOWN]
    assert [cached(server, by_key("dora"), **salt) for salt in salts] == [KNOWN] * 4


FORGED = ["key ann\0", "key ann", "\0key ann\0", "ann", "group team\0", "tenant acme\0", "tenant acme", "\0", "\0\0"]


@pytest.mark.parametrize("salt", FORGED)
def test_no_salt_leads_to_the_prompts_of_another(servers, salt):
    keys, tenants = servers["keys"], servers["tenants"]
    assert cached(keys, by_key("ann")) == cached(keys, by_key("carl")) == cached(tenants, {"x-tenant": "acme"}) == 0
    assert cached(keys, by_key("bob"), cache_salt=salt) == 0
    assert cached(tenants, {"x-tenant": "other"}, cache_salt=salt) == 0
    assert cached(tenants, {}, cache_salt=salt) == 0


def test_a_tenant_counts_as_a_key_does_and_all_without_one_share(servers):
    server = servers["tenants"]
    who = [{"x-tenant": "acme"}, {"x-tenant": "other"}, {}, {"x-tenant": "acme"}, {}, {"x-tenant": "not one"}]
    assert [cached(server, headers) for headers in who] == [0, 0, 0, KNOWN, KNOWN, KNOWN]


def test_no_two_who_share_nothing_have_a_salt_in_common():
    callers = [Caller(), Caller(tenant="a"), Caller(tenant="key a"), Caller(tenant="a b")]
    keys = [Key(name, Limits(), share=Share(share_prefixes=group)) for name in ("a", "b") for group in (None, "a", "b")]
    salts = ["", "a", "\0", "key a\0", "tenant a\0", "group a\0", "key a", "\0key a\0"]
    made = {}
    for caller in [*callers, *(replace(Caller(), key=key) for key in keys)]:
        group = caller.key and caller.key.share.share_prefixes
        mine = ("group", group) if group else ("owner", caller.key is None, caller.owner)
        made.setdefault(mine, set()).update(caller.salt(salt) for salt in salts)
        assert len({caller.salt(salt) for salt in salts}) == len(salts)
    for one, other in permutations(made.values(), 2):
        assert not one & other

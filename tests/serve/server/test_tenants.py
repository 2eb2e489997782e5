"""Each API key has a prefix cache of its own, and so has each `cache_salt`."""

from __future__ import annotations

import secrets
from typing import Any

import pytest
from helpers.serving import TEXT

from vmkv.serve.server.guard import ApiKeys, tenant_of

KEYS = ["alice-key", "bob-key"]
ALICE, BOB = KEYS
PROMPT = " ".join(TEXT) * 4


def cached(server: Any, key: str, path: str = "completions", **options: Any) -> int:
    """The number of cached prompt tokens that an answer reports to a client with this key."""
    prompt: dict[str, Any] = {"prompt": PROMPT}
    if path == "chat/completions":
        prompt = {"messages": [{"role": "user", "content": PROMPT}]}
    body = {"model": "tiny", "max_tokens": 1, **prompt, **options}
    answer = server.post(body, f"/v1/{path}", Authorization=f"Bearer {key}")
    assert 200 == answer.status_code, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_prefixes_are_cached_per_key_and_salt(run_server: Any, path: str) -> None:
    """`cached_tokens` does not reveal prompts of another key or salt."""
    with run_server(api_keys=KEYS) as server:
        askers = [(key, salt) for key in KEYS for salt in (None, "salt", "pepper")]
        for is_known in (False, True):
            for key, salt in askers:
                found = cached(server, key, path, cache_salt=salt)
                assert is_known == bool(found), (key, salt)


def test_share_prefixes_leaves_salts_apart(run_server: Any) -> None:
    with run_server(api_keys=KEYS, share_prefixes=True) as server:
        assert 0 == cached(server, ALICE)
        assert cached(server, BOB)
        assert 0 == cached(server, ALICE, cache_salt="salt")
        assert cached(server, BOB, cache_salt="salt")


def test_salts_separate_prefixes_without_keys(server: Any) -> None:
    """An empty or malformed salt is refused, as by vLLM."""
    salt = secrets.token_hex()
    assert [0, 0] == [cached(server, "any", cache_salt=salt + each) for each in "ab"]
    assert cached(server, "any", cache_salt=salt + "a")
    for wrong in ("", 7, ["salt"]):
        answer = server.post({"model": "tiny", "prompt": "A row", "cache_salt": wrong})
        assert (400, "cache_salt") == (answer.status_code, answer.json()["error"]["param"])


def test_a_tenant_is_a_digest() -> None:
    """Each pair of key and salt has its own tenant, which does not contain the key."""
    keys = ApiKeys(KEYS)
    digests = [keys.digest_of(f"Bearer {key}".encode()) for key in KEYS]
    pairs = [(digest, salt) for digest in (b"", *digests) for salt in (None, "a", "b", "\ud800")]
    tenants = [tenant_of(digest, salt) for digest, salt in pairs]
    assert tenants[0] is None
    assert len(pairs) == len(set(tenants))
    assert not any(key in str(tenant) for key in KEYS for tenant in tenants)
    assert [None, b""] == [
        ApiKeys(KEYS, share_prefixes=True).digest_of(each)
        for each in (b"Bearer x", b"Bearer bob-key")
    ]

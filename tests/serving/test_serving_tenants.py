"""Keys, limits, and what belongs to whom."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from outpace.core.errors import BadInput
from outpace.serving.errors import ApiError
from outpace.serving.tenants import Tenant, Tenants, Terms, read_keys
from serving_support import CHAT, USER, chat, client, service

KEYS = {"ann": Terms(key="key-of-ann"), "bob": Terms(key="key-of-bob", priority=3)}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_key_opens_and_no_other_does() -> None:
    with client(service(keys=KEYS)) as to:
        for header in (None, "Bearer", "Bearer ", "Bearer key-of-an", "Basic key-of-ann", "Bearer k\u00fc"):
            headers = {} if header is None else {b"Authorization": header.encode("latin-1")}
            for answer in (to.get("/v1/models", headers=headers), to.post(CHAT, json={}, headers=headers)):
                assert answer.status_code == 401
                assert answer.json()["error"]["type"] == "authentication_error"
                assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert to.get("/v1/models", headers={"Authorization": "Bearer key-of-ann"}).status_code == 200
        assert to.get("/health").status_code == to.get("/ready").status_code == to.get("/metrics").status_code == 200


def test_keys_may_be_digests() -> None:
    digest = hashlib.sha256(b"key-of-ann").hexdigest()
    tenants = Tenants({"ann": Terms(key=f"sha256:{digest}")})
    assert tenants.find("Bearer key-of-ann").name == "ann"
    with pytest.raises(ApiError):
        tenants.find(f"Bearer sha256:{digest}")


def test_limits_of_requests_and_tokens() -> None:
    clock = Clock()
    tenant = Tenant("ann", Terms(key="x", requests_per_minute=2, tokens_per_minute=60), clock)
    tenant.admit(10)
    tenant.admit(10)
    with pytest.raises(ApiError, match="requests per minute") as refusal:
        tenant.admit(10)
    assert refusal.value.status == 429
    assert refusal.value.headers == {"Retry-After": "30"}
    clock.now += 30
    tenant.admit(10)
    tenant.charge(130)  # 50 were left, and 30 came back up to the whole 60: 80 too many are used
    clock.now += 30
    with pytest.raises(ApiError, match="tokens per minute") as refusal:
        tenant.admit(1)
    assert refusal.value.headers == {"Retry-After": "51"}
    clock.now += 50.8
    with pytest.raises(ApiError, match="try again in 1 s"):
        tenant.admit(1)
    clock.now += 0.2
    tenant.admit(1)


def test_a_prompt_longer_than_a_minute_waits_for_a_full_allowance() -> None:
    clock = Clock()
    tenant = Tenant("ann", Terms(key="x", tokens_per_minute=60), clock)
    tenant.admit(100)
    with pytest.raises(ApiError):
        tenant.admit(1)
    clock.now += 101
    tenant.admit(100)


def test_a_limit_reaches_the_caller_with_the_time_to_wait() -> None:
    limited = {"ann": Terms(key="key-of-ann", requests_per_minute=1)}
    with client(service(keys=limited)) as to:
        to.headers["Authorization"] = "Bearer key-of-ann"
        chat(to)
        answer = to.post(CHAT, json={"model": "toy", "messages": USER})
    assert answer.status_code == 429
    assert answer.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(answer.headers["Retry-After"]) <= 60


def test_a_priority_is_the_keys_at_most() -> None:
    with client(service(keys=KEYS)) as to:
        for key, priority, status in (("ann", 1, 400), ("ann", -1, 200), ("bob", 3, 200), ("bob", 4, 400)):
            to.headers["Authorization"] = f"Bearer key-of-{key}"
            body = {"model": "toy", "messages": USER, "max_tokens": 2, "priority": priority}
            assert to.post(CHAT, json=body).status_code == status


def test_namespaces_and_cached_prefixes_belong_to_a_tenant() -> None:
    ann, bob = Tenant("ann"), Tenant("bob")
    assert ann.namespace(None) == ""
    assert ann.namespace("x") != bob.namespace("x")
    assert ann.prefix_owner(None) != bob.prefix_owner(None)
    assert ann.prefix_owner("x") == bob.prefix_owner("x")
    assert Tenant("shared").prefix_owner(None) != ann.prefix_owner("shared")


def test_what_one_tenant_taught_is_not_drafted_for_another() -> None:
    def accepted(key: str) -> int:
        to.headers["Authorization"] = f"Bearer key-of-{key}"
        wish = {"method": "cacheback", "namespace": "notes"}
        count: int = chat(to, speculation=wish, max_tokens=40)["usage"]["speculation"]["accepted"]
        return count

    with client(service(keys=KEYS)) as to:
        first, again, other = accepted("ann"), accepted("ann"), accepted("bob")
    assert first == other < again


def test_a_timeline_is_its_tenants_alone() -> None:
    with client(service(keys=KEYS)) as to:
        to.headers["Authorization"] = "Bearer key-of-ann"
        answer = to.post(CHAT, json={"model": "toy", "messages": USER, "n": 2, "seed": 1, "max_tokens": 4})
        place = f"/v1/requests/{answer.json()['id']}/timeline"
        assert answer.headers["X-Request-Id"] == answer.json()["id"]
        choices = to.get(place).json()["choices"]
        assert [[one["event"] for one in choice] for choice in choices] == [
            ["waiting", "admitted", "decoding", "ended"]
        ] * 2
        for choice in choices:
            assert [one["ms"] for one in choice] == sorted(one["ms"] for one in choice)
        to.headers["Authorization"] = "Bearer key-of-bob"
        assert to.get(place).status_code == 404


def test_files_of_keys(tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    lines.write_text("# who may ask\nann  key-of-ann\n\nbob key-of-bob\n")
    assert {name: one.key for name, one in read_keys(lines).items()} == {"ann": "key-of-ann", "bob": "key-of-bob"}
    objects = tmp_path / "objects"
    objects.write_text('{"ann": "key-of-ann", "bob": {"key": "key-of-bob", "tokens_per_minute": 5, "priority": 2}}')
    found = read_keys(objects)
    assert (found["bob"].tokens_per_minute, found["bob"].priority, found["ann"].tokens_per_minute) == (5, 2, None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no keys"),
        ("{}", "no keys"),
        ("ann", "line 1"),
        ("ann key-of-ann more", "line 1"),
        ("ann key-of-ann\nann key-of-bob", "twice"),
        ("ann key-of-ann\nbob key-of-ann", "same key"),
        ("ann short", "8 ASCII"),
        ("a/b key-of-ann", "a name has"),
        ("ann sha256:12345678", "64 hexadecimal"),
        ('{"ann": ', "not valid JSON"),
        ('{"ann": 5}', "must be a key"),
        ('{"ann": {"key": "key-of-ann", "tokens": 5}}', "tokens"),
        ('{"ann": {"key": "key-of-ann", "requests_per_minute": 0}}', "requests_per_minute"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(BadInput, match=said) as refusal:
        read_keys(file)
    assert "key-of-ann" not in str(refusal.value)  # a message may be copied to where a key must not go


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        read_keys(tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(BadInput, match="UTF-8"):
        read_keys(tmp_path / "bytes")

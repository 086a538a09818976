"""Where a request goes: what it shares with earlier ones decides, and load overrides it."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from outpace.core.errors import BadInput
from outpace.integrations.ray.cluster import check_version
from outpace.integrations.ray.deployment import Deployed, Scale
from outpace.integrations.ray.ingress_metrics import merged
from outpace.integrations.ray.prefix_routing import affinity_key, ranked

IDLE = dict.fromkeys((f"replica-{number}" for number in range(5)), 0)


def key(tenant: str = "ann", **body: Any) -> str:
    return affinity_key(tenant, json.dumps({"model": "toy", **body}).encode())


def chat(*texts: str) -> list[dict[str, str]]:
    roles = ("system", "user", "assistant", "user")
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def test_the_turns_of_a_conversation_have_one_key_and_other_conversations_another() -> None:
    first = key(messages=chat("be brief", "hello"))
    assert first == key(messages=chat("be brief", "hello", "hi", "and now?"))
    assert first != key(messages=chat("be brief", "goodbye"))
    assert first != key(messages=chat("be long", "hello"))


def test_keys_belong_to_a_tenant_unless_the_prefix_is_shared() -> None:
    asked = {"messages": chat("be brief", "hello")}
    assert key("ann", **asked) != key("bob", **asked)
    assert key("ann", shared_prefix="s", **asked) == key("bob", shared_prefix="s", **asked)


def test_a_namespace_decides_alone_because_its_drafters_learn_in_one_replica() -> None:
    speculation = {"namespace": "contracts"}
    first = key(messages=chat("a", "b"), speculation=speculation)
    assert first == key(prompt="something else", speculation=speculation)
    assert first != key("bob", messages=chat("a", "b"), speculation=speculation)


def test_texts_with_the_same_beginning_have_one_key() -> None:
    same = "x" * 256
    assert key(prompt=same + "a") == key(prompt=same + "b") == key(prompt=[same + "c", "other"])
    assert key(prompt="a") != key(prompt="b")
    assert key(prompt=[1, 2, 3]) != key(prompt=[1, 2, 4])


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"text"', b'{"messages": ["x"]}', b'{"prompt": 5}', b"\xff"])
def test_a_body_without_a_prompt_has_no_key(body: bytes) -> None:
    assert affinity_key("ann", body) == ""


def test_the_same_key_stays_and_keys_spread_over_all_replicas() -> None:
    chosen = {f"key-{number}": ranked(f"key-{number}", IDLE, 4)[0] for number in range(400)}
    assert chosen == {name: ranked(name, IDLE, 4)[0] for name in chosen}
    counts = Counter(chosen.values())
    assert set(counts) == set(IDLE)
    assert min(counts.values()) > 400 / 5 / 2


def test_a_replica_that_leaves_moves_only_its_own_keys() -> None:
    fewer = {name: load for name, load in IDLE.items() if name != "replica-3"}
    keys = [f"key-{number}" for number in range(200)]
    before = {one: ranked(one, IDLE, 4)[0] for one in keys}
    moved = [one for one in keys if ranked(one, fewer, 4)[0] != before[one]]
    assert moved == [one for one in keys if before[one] == "replica-3"]


def test_load_overrides_the_preference_beyond_the_slack() -> None:
    preferred = ranked("k", IDLE, 4)[0]
    assert ranked("k", {**IDLE, preferred: 4}, 4)[0] == preferred
    busy = ranked("k", {**IDLE, preferred: 5}, 4)
    assert busy[0] != preferred
    assert busy[-1] == preferred
    assert sorted(busy) == sorted(IDLE)


def test_without_a_key_the_least_loaded_comes_first() -> None:
    assert ranked("", {"a": 2, "b": 0, "c": 1}, 4) == ["b", "c", "a"]
    assert ranked("k", {}, 4) == []


def test_a_number_of_replicas_or_a_range() -> None:
    assert Scale.parse("3") == Scale(3, 3)
    assert Scale.parse("1..4") == Scale(1, 4)
    for text in ("0", "-1", "2..1", "a", "", "0..3", "1...4", "99999"):
        with pytest.raises(BadInput, match="--replicas"):
            Scale.parse(text)


def test_a_range_scales_by_the_queue_and_a_number_does_not() -> None:
    fixed = Deployed(Scale(2, 2), 8, 256, 1).options()
    assert fixed["num_replicas"] == 2
    assert "autoscaling_config" not in fixed
    range_ = Deployed(Scale(1, 4), 8, 256, 1).options()
    assert "num_replicas" not in range_ or range_["num_replicas"] is None
    assert range_["autoscaling_config"]["max_replicas"] == 4
    assert range_["autoscaling_config"]["target_ongoing_requests"] == 8


def test_versions_of_ray() -> None:
    check_version("x", "2.60.0")
    check_version("x", "2.61.1")
    for version in ("2.9.3", "2.59.1", "2.64.0", "3.0.0.dev0", "1.13"):
        with pytest.raises(BadInput, match=r"pip install 'outpace\[ray\]'"):
            check_version("x", version)


def test_metrics_of_replicas_are_told_apart_and_each_family_is_there_once() -> None:
    one = '# HELP outpace:a_total Text.\n# TYPE outpace:a_total counter\noutpace:a_total{m="x"} 1.0\n'
    one += '# HELP outpace:h Text.\n# TYPE outpace:h histogram\noutpace:h_bucket{le="1"} 2.0\noutpace:h_sum 3.0\n'
    text = merged({"r0": one, "r1": one.replace("1.0", "5.0")})
    assert text.count("# TYPE outpace:a_total counter") == 1
    assert 'outpace:a_total{replica="r0",m="x"} 1.0\noutpace:a_total{replica="r1",m="x"} 5.0\n' in text
    assert 'outpace:h_sum{replica="r1"} 3.0' in text
    assert text.index("outpace:h_bucket") > text.index("# TYPE outpace:h histogram")

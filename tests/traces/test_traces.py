"""Traces: what bench and serve write, the simulator reads; nothing of it tells a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from cli_support import Run, refused
from outpace.core.errors import BadInput
from outpace.simulate.draft_times import looks_up
from outpace.traces.trace_format import COLUMNS, KEY, Rounds, TracedRequest, TraceHeader, read_trace
from outpace.traces.trace_records import PrefixHashes
from outpace.traces.trace_writer import TraceLog, write_trace
from serving_support import USER, chat, client, service

HEADER = TraceHeader({"name": "toy", "vocab_size": 30}, "closed", 2, "bench", "0", {"cpu": "x"}, {"command": "c"})
SECRET = "the quick brown fox"
TOP_BETA = "sam@top-beta(criterion=gap,beta=3,tau=0.5,distance=1)"


def rounds_strategy() -> st.SearchStrategy[Rounds]:
    one = st.integers(0, 8).flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted)))
    return st.lists(st.tuples(one, st.integers(1, 9), st.floats(0, 1e4), st.floats(0, 1e3)), min_size=1).map(
        lambda rows: Rounds(
            tuple(pair[0] for pair, *_ in rows),
            tuple(pair[1] for pair, *_ in rows),
            tuple(pair[1] + 1 for pair, *_ in rows),
            tuple(batch for _, batch, *_ in rows),
            tuple(round(ms, 6) for *_, ms, _ in rows),
            tuple(round(ms, 6) for *_, ms in rows),
        )
    )


@given(st.lists(rounds_strategy(), min_size=1, max_size=4))
def test_a_trace_comes_back_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, rounds: list[Rounds]) -> None:
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    requests = tuple(
        TracedRequest(
            f"q{at}", "pld", 3 + at, sum(one.committed), one, "math", 0.5 * at, 0.25, 1.5, prefix=("ab", "cd")
        )
        for at, one in enumerate(rounds)
    )
    write_trace(path, HEADER, requests)
    found = read_trace(path)
    assert found.header == HEADER
    assert found.requests == requests
    assert found.notes == ()


def test_levels_of_drafts_are_read_where_a_trace_has_them(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rounds = Rounds((8, 0), (2, 0), (3, 1), (1, 1), (1.0, 1.0), (0.5, 0.0), (3, 0))
    write_trace(path, HEADER, [TracedRequest("q", "eagle3", 3, 4, rounds)])
    assert read_trace(path).requests[0].rounds == rounds
    lines = path.read_text().splitlines(keepends=True)
    for wrong in ("[9,0]", "[0,0]", "[3,1]"):
        path.write_text(lines[0] + lines[1].replace('"levels":[3,0]', f'"levels":{wrong}'))
        with pytest.raises(BadInput, match=r"line 2: .*levels?"):
            read_trace(path)


def written(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(lines))
    return path


def request(**other: Any) -> str:
    columns = {name: [1] for name in COLUMNS}
    line = {
        "id": "a",
        "method": "pld",
        "prompt_tokens": 3,
        "output_tokens": 1,
        "rounds": columns | other.pop("rounds", {}),
    }
    return json.dumps(line | other) + "\n"


HEAD = json.dumps(HEADER.public()) + "\n"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "no trace"),
        (["{}\n"], "no trace"),
        (["what\n"], "line 1: not valid JSON"),
        ([HEAD.replace(f'"{KEY}": 1', f'"{KEY}": 7'), request()], "format 7"),
        ([HEAD], "no answered request"),
        ([HEAD, "[]\n"], "line 2: not a JSON object"),
        ([HEAD, request(prompt_tokens=0)], "line 2: 'prompt_tokens' must be a whole number of at least 1"),
        ([HEAD, request(output_tokens=5)], "'output_tokens' is 5, and the rounds committed 1"),
        ([HEAD, request(rounds={"drafted": [0]})], "accepts more tokens than it drafted"),
        ([HEAD, request(rounds={"batch": [1, 2]})], "differ in length"),
        ([HEAD, request(rounds={"committed": ["1"]})], "'rounds.committed' holds '1'"),
        ([HEAD, request(rounds={"committed": [10**9]})], "'rounds.committed' holds 1,000,000,000, which is more"),
        ([HEAD, request(prompt_tokens=10**12)], "'prompt_tokens' must be at most 10,000,000"),
        ([HEAD, request(arrival=-1)], "'arrival' must be a number of seconds"),
        ([HEAD, '{"id": "a"}\n'], "there is no 'rounds'"),
        ([HEAD.replace("closed", "ajar"), request()], "must be open or closed"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(tmp_path: Path, lines: list[str], said: str) -> None:
    with pytest.raises(BadInput) as error:
        read_trace(written(tmp_path, *lines))
    assert said in str(error.value)


def test_a_missing_file_and_one_that_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        read_trace(tmp_path / "none")
    (tmp_path / "t").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="not UTF-8"):
        read_trace(tmp_path / "t")


def test_a_last_line_that_was_cut_is_left_out_and_said(tmp_path: Path) -> None:
    found = read_trace(written(tmp_path, HEAD, request(), request()[:20]))
    assert len(found.requests) == 1
    assert "cut off" in found.notes[0]
    whole = read_trace(written(tmp_path, HEAD, request(), request(id="last").rstrip("\n")))
    assert ([one.id for one in whole.requests], whole.notes) == (["a", "last"], ())


def test_requests_without_rounds_are_left_out_and_said(tmp_path: Path) -> None:
    empty: dict[str, list[int]] = {name: [] for name in COLUMNS}
    found = read_trace(written(tmp_path, HEAD, request(), request(method="smcsd", output_tokens=0, rounds=empty)))
    assert list(found.by_method()) == ["pld"]
    assert found.notes == ("1 requests without rounds are left out: not answered, or of several sequences",)


def test_prefixes_tell_what_begins_alike_and_nothing_else() -> None:
    hashes, prompt = PrefixHashes(), list(range(100))
    other = [*prompt[:70], 5, *prompt[71:]]
    mine, theirs = hashes.of(prompt), hashes.of(other)
    assert len(mine) == 3
    assert mine[:2] == theirs[:2]
    assert mine[2] != theirs[2]
    assert set(mine).isdisjoint(hashes.of(prompt, "another owner"))
    assert set(mine).isdisjoint(PrefixHashes().of(prompt))  # another file


def test_bench_writes_a_trace_of_every_counted_answer(cli: Run, tmp_path: Path) -> None:
    prompts, path = tmp_path / "p.jsonl", tmp_path / "t.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"{SECRET} {one}", "category": "c"}) for one in "xyz"))
    ran = cli(
        "bench", "--prompts", str(prompts), "--methods", "pld", "-n", "20", "--batch-size", "2", "--trace", str(path),
        "--json", "-",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    rows = {row["method"]: row for row in json.loads(ran.out)["methods"]}
    trace = read_trace(path)
    assert (trace.header.kind, trace.header.at_once, trace.header.model_name) == ("closed", 2, "smollm2")
    assert set(trace.by_method()) == {"none", "pld"}
    for method, requests in trace.by_method().items():
        assert len(requests) == 3
        rounds = sum(len(one.rounds) for one in requests)
        committed = sum(one.output_tokens for one in requests)
        assert committed / rounds == pytest.approx(rows[method]["mean_acceptance_length"])
        assert all(1 <= batch <= 2 for one in requests for batch in one.rounds.batch)
        assert all(one.seconds is not None and one.first_token is not None for one in requests)
        assert all(0 < one.first_token <= one.seconds for one in requests if one.first_token and one.seconds)
    assert not any(word in path.read_text() for word in SECRET.split())


def test_a_trace_names_lossy_rules_with_their_settings(cli: Run, tmp_path: Path) -> None:
    prompts, path = tmp_path / "p.txt", tmp_path / "t.jsonl"
    prompts.write_text(SECRET)
    common = ("bench", "--prompts", str(prompts), "--rule", "margin", "-n", "4", "--trace", str(path))
    assert cli(*common, "--methods", "pld,pld#two,sam@top-beta(tau=0.5),sam@rejection").code == 0
    margin, found = "margin(theta=0.9)", read_trace(path).by_method()
    assert set(found) == {"none", f"pld@{margin}", f"pld#two@{margin}", "sam@rejection", TOP_BETA}
    assert all(looks_up(name) for name in found)  # the simulator still knows the methods
    played = cli("simulate", "--trace", str(path), "--hardware", "h100", "--method", TOP_BETA, "--json")
    assert [row["method"] for row in json.loads(played.out)["simulations"]] == [TOP_BETA]


def test_texts_are_in_a_trace_only_if_asked_for(cli: Run, tmp_path: Path) -> None:
    prompts, path = tmp_path / "p.txt", tmp_path / "t.jsonl"
    prompts.write_text(SECRET)
    common = ("bench", "--prompts", str(prompts), "--methods", "none", "-n", "4", "--trace", str(path))
    assert cli(*common, "--trace-texts").code == 0
    assert all(one.prompt and SECRET in one.prompt for one in read_trace(path).requests)
    refused(cli("bench", "--trace-texts"), "--trace-texts adds to the lines of --trace")
    refused(cli("bench", "--trace", str(tmp_path / "no" / "t")), "there is no folder")


def test_a_server_writes_each_request_when_it_has_ended(tmp_path: Path) -> None:
    served, path = service(max_batch=2), tmp_path / "t.jsonl"
    served.trace = TraceLog(path, HEADER)
    with client(served) as to:
        first = chat(to, max_tokens=9)
        chat(to, n=2, max_tokens=5, speculation={"method": "none"})
        chat(to, max_tokens=5, speculation={"rule": "margin"})
        chat(to, max_tokens=5, speculation={"method": "none", "rule": "margin"})  # nothing is drafted for it to judge
    served.trace.close()
    lines = path.read_text().splitlines()
    assert len(lines) == 6
    trace = read_trace(path)
    assert trace.requests[0].id == f"{first['id']}/0"
    assert [one.method for one in trace.requests] == ["pld", "none", "none", "pld@margin(theta=0.9)", "none"]
    usage = first["usage"]
    assert trace.requests[0].prompt_tokens == usage["prompt_tokens"]
    assert abs(trace.requests[0].output_tokens - usage["completion_tokens"]) <= 1  # the end-of-sequence token
    arrivals = [one.arrival or 0.0 for one in trace.requests]
    assert arrivals == sorted(arrivals)
    assert not any(word in path.read_text() for word in USER[0]["content"].split() if len(word) > 3)


def test_a_method_of_several_sequences_is_refused_before_a_bench_with_a_trace(cli: Run, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("earlier")
    common = ("bench", "--methods", "pld,smcsd", "-n", "4", "--limit", "1", "--draft-model", "other")
    refused(cli(*common, "--trace", str(path)), "--trace: method 'smcsd' decodes several sequences")
    assert path.read_text() == "earlier"


def test_a_server_does_not_write_over_a_trace(cli: Run, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("mine")
    refused(cli("serve", "--trace", str(path)), "exists already")
    assert path.read_text() == "mine"
    refused(cli("serve", "--trace", str(tmp_path / "no" / "t")), "there is no folder")
    refused(cli("serve", "--trace-texts"), "--trace-texts adds to the lines of --trace")
    two = ("serve", "--model", "smollm2", "--model", "other")
    refused(cli(*two, "--trace", str(tmp_path / "new")), "--trace records the requests to one model")
    refused(cli("serve", "--engine", "vllm", "--trace", str(tmp_path / "new")), "--trace")
    assert not (tmp_path / "new").exists()

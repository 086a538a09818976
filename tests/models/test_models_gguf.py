"""GGUF files: converted exactly, once, atomically; broken files and full caches refused in one line."""

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import outpace.loading
from gguf_support import reference, write_gguf
from outpace.core.errors import BadInput
from outpace.model import Model
from outpace.models import gguf_cache, gguf_convert
from outpace.models.gguf_header import read_header
from outpace.models.source import resolve


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "cache"
    monkeypatch.setenv("OUTPACE_CACHE", str(place))
    return place


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", reference())


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files converted in this test."""
    done: list[Path] = []
    read = gguf_convert.read

    def counted(header: Any, dtype: torch.dtype) -> Any:
        done.append(header.path)
        return read(header, dtype)

    monkeypatch.setattr(gguf_convert, "read", counted)
    return done


# The subject here is the conversion: looked at through the model that transformers makes of it.
load = partial(outpace.loading.load, target="generic")


def entries(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "gguf").iterdir() if path.is_dir())


def refused(match: str, file: Path, **options: Any) -> None:
    with pytest.raises(BadInput, match=match) as caught:
        load(file, **options)
    assert "\n" not in str(caught.value)


def logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        inner: Any = model.target if isinstance(model, Model) else None
        inner = inner.model if inner else model
        found: torch.Tensor = inner(torch.tensor([ids])).logits
    return found


def test_converted_exactly_silently_and_once(
    cache: Path, file: Path, conversions: list[Path], capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = load(file, dtype="float32"), load(file, dtype="float32")
    ids = [1, 50, 90, 33, 2]
    torch.testing.assert_close(logits(first, ids), logits(reference(), ids), atol=1e-6, rtol=1e-5)
    assert torch.equal(logits(first, ids), logits(second, ids))
    assert conversions == [file]
    assert capfd.readouterr() == ("", "")
    inner: Any = second.target
    inner = inner.model
    assert inner.lm_head.weight is inner.model.embed_tokens.weight
    assert first.info["source"] == "gguf" and first.eos_ids == {2, 3}


def test_every_dtype_has_its_own_conversion(cache: Path, file: Path) -> None:
    assert load(file, dtype="float32").info["dtype"] == "float32"
    assert load(file, dtype="bfloat16").info["dtype"] == "bfloat16"
    assert [name.split("-")[-2] for name in entries(cache)] == ["bfloat16", "float32"]


def test_found_by_content_wherever_the_file_lies(cache: Path, file: Path, conversions: list[Path]) -> None:
    load(file, dtype="float32")
    other = file.parent / "elsewhere"
    other.mkdir()
    load(Path(shutil.copy(file, other)), dtype="float32")
    assert len(conversions) == 1
    changed = reference()
    with torch.no_grad():
        changed.model.norm.weight.mul_(2)
    write_gguf(file, changed)  # another content under the same name
    torch.testing.assert_close(
        logits(load(file, dtype="float32"), [5, 6]), logits(changed, [5, 6]), atol=1e-6, rtol=1e-5
    )
    assert len(conversions) == 2


def test_digest_is_remembered_until_the_file_changes(cache: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_cache, "_SETTLED", -1.0)
    before = gguf_cache.content_digest(file)
    with monkeypatch.context() as without:
        without.setattr(hashlib, "file_digest", None)
        assert gguf_cache.content_digest(file) == before
    time.sleep(0.02)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert gguf_cache.content_digest(file) != before


@pytest.mark.parametrize("damage", ["truncate", "remove", "manifest", "empty", "weight", "config"])
def test_a_damaged_entry_is_made_anew(
    cache: Path, file: Path, conversions: list[Path], damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole = logits(load(file, dtype="float32"), [5, 6])
    entry = cache / "gguf" / entries(cache)[0]
    if damage in ("weight", "config"):  # the size stays
        path = entry / ("model.safetensors" if damage == "weight" else "config.json")
        data = bytearray(path.read_bytes())
        data[-100 if damage == "weight" else data.index(b'"num_attention_heads": 4') + 23] ^= 2
        path.write_bytes(data)
    elif damage == "truncate":
        os.truncate(entry / "model.safetensors", 1000)
    elif damage == "remove":
        (entry / "tokenizer.json").unlink()
    elif damage == "manifest":
        (entry / "manifest.json").write_text('{"digest": ')
    else:
        shutil.rmtree(entry)
        entry.mkdir()
    assert torch.equal(logits(load(file, dtype="float32"), [5, 6]), whole)
    assert len(conversions) == 2 and entries(cache) == [entry.name]
    assert damage == "empty" or "is damaged or of an earlier version: it is converted again" in caplog.text


def test_a_complete_cache_may_be_read_only(cache: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(file, dtype="float32")
    shutil.rmtree(cache / "digests", ignore_errors=True)
    (cache / "gguf" / ".tmp-left").mkdir()

    def read_only(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    for name in ("mkdir", "write_text"):
        monkeypatch.setattr(Path, name, read_only)
    monkeypatch.setattr(gguf_cache, "FileLock", read_only)
    monkeypatch.setattr(gguf_cache, "_SETTLED", -1.0)
    load(file, dtype="float32")


# --- kills, races, full disks

CHILD = """
import sys, time
from pathlib import Path
from outpace.core.errors import BadInput
from outpace.models import gguf_cache, gguf_convert
import torch
file, log = Path(sys.argv[1]), Path(sys.argv[2])
write, read = gguf_convert.write, gguf_convert.read
{patch}
try:
    print(gguf_cache.converted(file, torch.float32))
except BadInput as error:
    print(error)
    sys.exit(2)
"""


def child(patch: str, file: Path, log: Path) -> "subprocess.Popen[str]":
    code = CHILD.replace("{patch}", textwrap.dedent(patch))
    return subprocess.Popen([sys.executable, "-c", code, str(file), str(log)], stdout=subprocess.PIPE, text=True)


def test_killed_in_the_middle(cache: Path, file: Path, tmp_path: Path) -> None:
    hang = """
    def hang(model, tokenizer, folder):
        write(model, tokenizer, folder)
        log.write_text("written")
        time.sleep(600)
    gguf_convert.write = hang
    """
    log = tmp_path / "log"
    process = child(hang, file, log)
    for _ in range(600):
        if log.exists() or process.poll() is not None:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    left = entries(cache)
    assert len(left) == 1 and left[0].startswith(".tmp-"), "nothing but the unfinished one"
    torch.testing.assert_close(logits(load(file, dtype="float32"), [5]), logits(reference(), [5]), atol=1e-6, rtol=1e-5)
    assert len(entries(cache)) == 1 and not entries(cache)[0].startswith(".tmp-")


def test_leftovers_go_with_the_next_load_of_a_converted_file(cache: Path, file: Path) -> None:
    load(file, dtype="float32")
    residual_distribution = cache / "gguf" / ".tmp-killed"
    residual_distribution.mkdir()
    (residual_distribution / "model.safetensors").write_bytes(b"half")
    load(file, dtype="float32")
    assert not residual_distribution.exists()


def test_two_at_once_convert_once(cache: Path, file: Path, tmp_path: Path) -> None:
    slow = """
    def slow(header, dtype):
        with log.open("a") as out:
            out.write("x")
        time.sleep(1)
        return read(header, dtype)
    gguf_convert.read = slow
    """
    log = tmp_path / "log"
    both = [child(slow, file, log) for _ in range(2)]
    said = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert said[0] == said[1] and log.read_text() == "x" and len(entries(cache)) == 1


def test_a_disk_that_fills_up_while_writing(cache: Path, file: Path, tmp_path: Path) -> None:
    limit = """
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    """
    process = child(limit, file, tmp_path / "log")
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 2
    assert said.startswith("cannot write the converted model to") and "OUTPACE_CACHE" in said and said.count("\n") == 1
    assert entries(cache) == []


def test_a_disk_without_room_is_seen_before_the_work(
    cache: Path, file: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_cache.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))  # type: ignore[attr-defined]
    refused("the disk is full; free some space or set OUTPACE_CACHE", file)
    assert conversions == [] and entries(cache) == []


def test_a_cache_that_cannot_be_written(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flat").write_text("a file")
    for place in (tmp_path / "flat" / "cache", Path("/proc/no/cache")):
        monkeypatch.setenv("OUTPACE_CACHE", str(place))
        refused("cannot write the converted model to .* OUTPACE_CACHE", file)


# --- broken files


@pytest.mark.parametrize("part", [0.0, 4, 20, 1000, 0.2, 0.5, 0.999])
def test_truncated(cache: Path, file: Path, part: float) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: part if isinstance(part, int) else int(len(data) * part)])
    refused("is broken: .*download it again", file)
    assert not (cache / "gguf").exists()


def test_garbage(cache: Path, file: Path) -> None:
    rng = np.random.default_rng(0)
    data = file.read_bytes()
    for _ in range(40):
        bad = bytearray(data)
        at = int(rng.integers(4, 3000))
        bad[at : at + 8] = rng.bytes(8)
        file.write_bytes(bad)
        try:
            read_header(file)
        except BadInput as error:
            assert "\n" not in str(error)
    file.write_bytes(b"GGUF" + rng.bytes(5000))
    refused("GGUF", file)
    file.write_bytes(rng.bytes(5000))
    refused("does not begin as a GGUF", file)


def test_weights_that_are_not_numbers(cache: Path, tmp_path: Path) -> None:
    model = reference()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    refused("values that are not finite in .*up_proj.weight", write_gguf(tmp_path / "nan.gguf", model))
    assert entries(cache) == []


def test_unknown_architecture_and_split_files(cache: Path, tmp_path: Path) -> None:
    out = gguf.GGUFWriter(tmp_path / "odd.gguf", "warpdrive")
    out.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    for write in (out.write_header_to_file, out.write_kv_data_to_file, out.write_tensors_to_file, out.close):
        write()
    refused("architecture warpdrive", tmp_path / "odd.gguf")
    part = write_gguf(tmp_path / "part.gguf", reference(), lambda out: out.add_uint16("split.count", 3))
    refused("one of 3 parts; join them", part)


# --- what transformers' converter leaves out


def test_digits_are_split_before_white_space_as_in_training(cache: Path, file: Path) -> None:
    words = load(file, dtype="float32").tokenizer
    assert [words.token_text(token) for token in words.encode("x  12")] == ["x", "  ", "1", "2"]


def test_llama3_rotary_scaling(cache: Path, tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = reference(rope_parameters=rope, head_dim=32)
    plain = 1 / 500000.0 ** (np.arange(0, 32, 2) / 32)
    factors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert factors.max() == pytest.approx(8) and factors.min() == pytest.approx(1)
    made = write_gguf(tmp_path / "l3.gguf", model, lambda out: out.add_tensor("rope_freqs.weight", factors))
    ids = list(range(4, 204))
    torch.testing.assert_close(logits(load(made, dtype="float32"), ids), logits(model, ids), atol=1e-5, rtol=1e-4)
    odd = write_gguf(tmp_path / "odd.gguf", model, lambda out: out.add_tensor("rope_freqs.weight", factors + 0.5))
    refused("rotary scaling .* load the model's safetensors", odd)


def test_linear_rotary_scaling(cache: Path, tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    model = reference(rope_parameters=rope)

    def scaling(out: gguf.GGUFWriter) -> None:
        out.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        out.add_rope_scaling_factor(4.0)

    ids = list(range(4, 104))
    made = load(write_gguf(tmp_path / "linear.gguf", model, scaling), dtype="float32")
    torch.testing.assert_close(logits(made, ids), logits(model, ids), atol=1e-5, rtol=1e-4)


# --- the embedded model


@pytest.mark.model
def test_embedded_model_and_its_tokenizer() -> None:
    header = read_header(resolve("smollm2").path)
    assert header.architecture == "llama" and header.parameters == 134_515_008
    model = load("smollm2")
    words = model.tokenizer
    assert model.eos_ids == {2} and model.info["context_length"] == 8192
    chat = words.chat([{"role": "user", "content": "Hi"}])
    text = "".join(map(words.token_text, chat))
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    for sample in ("def f(x):\n\n    return x  + 12345\n", " naïve café — 日本語 🙂\t!", "It's  1,024.50 %"):
        assert words.decode(words.encode(sample)) == sample
    assert words.encode("Hello") == [19556], "no BOS before a text"
    logits_after = logits(model, words.encode("The capital of France is"))[0, -1]
    assert words.token_text(int(logits_after.argmax())) == " Paris"


@pytest.mark.slow
@pytest.mark.model
def test_the_benchmark_of_loading() -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "load.py"
    command = [sys.executable, str(script), "--repeat", "1", "--threads", "1", "--json"]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    medians = json.loads(out.stdout)["medians"]
    assert all(medians[which]["total"] > medians[which]["load"] > 0 for which in ("first", "later"))


def test_too_little_memory_does_not_look_like_a_damaged_entry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def read(_: Path) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(gguf_cache, "read_json", read)
    with pytest.raises(BadInput, match="not enough memory"):
        gguf_cache.is_whole(tmp_path, "digest")

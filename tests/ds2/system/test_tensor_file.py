"""Files that are whole or old, open without pickle, and say what is wrong with a foreign one."""

import errno
import itertools
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ds2.system import tensor_file
from ds2.system.cuda_graph import GraphRecorder
from ds2.system.tensor_file import (
    CheckpointError,
    TensorCopies,
    load,
    prepare_save,
    read_digest,
    read_header,
    read_metadata,
    save,
    write_copies,
    write_tensors,
)


def test_tensors_and_metadata_come_back(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(3, 2), "n": torch.tensor(7), "view": torch.arange(6.0).view(2, 3).t()}
    save(tmp_path / "a.safetensors", tensors, {"kind": "model", "text": "é"})
    loaded, metadata = load(tmp_path / "a.safetensors")
    assert metadata["text"] == "é" and set(loaded) == set(tensors)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_bytes_are_those_of_the_formats_own_library(tmp_path: Path) -> None:
    types = (
        torch.float32,
        torch.int64,
        torch.bfloat16,
        torch.float64,
        torch.bool,
        torch.float16,
        torch.int32,
        torch.uint8,
    )
    tensors = {f"{number}.é": torch.arange(6).view(2, 3).to(dtype) for number, dtype in enumerate(types)}
    tensors |= {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 4), "int8": torch.ones(3, dtype=torch.int8),
                "int16": torch.ones(3, dtype=torch.int16)}  # fmt: skip
    header = {"ds2": '{"text": "é\\n\\u0001"}'}
    save_file(tensors, tmp_path / "theirs", header)
    write_tensors(tensors, tmp_path / "ours", header)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_a_file_that_is_replaced_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opens = tmp_path / "a.safetensors", []

    def replaced_after_opening(*arguments: Any, **options: Any) -> Any:
        opened = safe_open(*arguments, **options)
        opens.append(opened)
        if len(opens) == 1:
            save(path, {"w": torch.full((2,), 2.0)}, {"step": 2})
            tensors = load_file(path)  # as safetensors does, which opens the file again for its contents
            return nullcontext(SimpleNamespace(metadata=opened.metadata, keys=opened.keys, get_tensor=tensors.get))
        return opened

    save(path, {"w": torch.ones(2)}, {"step": 1})
    monkeypatch.setattr(tensor_file, "safe_open", replaced_after_opening)
    tensors, metadata = load(path)
    assert metadata["step"] == 2 and tensors["w"].tolist() == [2.0, 2.0] and len(opens) == 2


def test_a_full_disk_keeps_the_old_file_and_leaves_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.safetensors"
    save(path, {"w": torch.ones(2)}, {})

    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tensor_file, "write_tensors", fails)
    free = r"\d+\.\d MiB are free there: free some space"
    with pytest.raises(CheckpointError, match=rf"No space left.*previous file is untouched; {free} and start"):
        save(path, {"w": torch.zeros(2)}, {})
    assert torch.equal(load(path)[0]["w"], torch.ones(2))
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


def test_a_folder_that_went_away_is_named_and_not_taken_for_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is no longer there: its folder can neither be found nor made."""

    def fails(folder: Path, **_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(folder))

    monkeypatch.setattr(Path, "mkdir", fails)
    says = r"run/a could not be written .*Read-only file system.*; when its folder can be written, start"
    with pytest.raises(CheckpointError, match=says):
        save(tmp_path / "run" / "a", {"w": torch.zeros(2)}, {})


@pytest.mark.parametrize(
    ("content", "says"), [(b"", "not a whole"), (b"\x80\x04pickle", "not a whole"), (b"\0" * 64, "not")]
)
def test_a_foreign_file_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=says):
        load(path)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save(path, {"w": torch.ones(1000)}, {})
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        load(path)


def test_another_programs_safetensors_file_is_refused(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match="not written by ds2"):
        load(tmp_path / "b.safetensors")


def test_a_newer_format_asks_for_a_newer_ds2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "FORMAT_VERSION", 99)
    save(tmp_path / "a.safetensors", {"w": torch.ones(1)}, {})
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="install a newer ds2"):
        load(tmp_path / "a.safetensors")


def test_shards_are_files_of_the_same_folder_and_a_format_of_their_own(tmp_path: Path) -> None:
    save(tmp_path / "b", {"w": torch.ones(2)}, {})
    save(tmp_path / "a", {"v": torch.ones(1)}, {"kind": "trainer", "shards": {"b": read_digest(tmp_path / "b")}})
    tensors, metadata = load(tmp_path / "a")
    assert tensors.keys() == {"v", "w"} and metadata == {"format": 3, "kind": "trainer"}
    assert read_metadata(tmp_path / "a") == metadata
    for shards in ({f"../{tmp_path.name}/b": read_digest(tmp_path / "b")}, ["b"], {"b": 1}):
        save(tmp_path / "a", {}, {"shards": shards})
        with pytest.raises(CheckpointError, match=r"metadata\.shards"):
            load(tmp_path / "a")
    (tmp_path / "b").write_bytes(b"not a file of ours")
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        read_digest(tmp_path / "b")


def test_every_changed_byte_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {"w": torch.randn(5, 3), "n": torch.tensor([7]), "half": torch.ones(3, dtype=torch.bfloat16)}
    save(path, tensors, {"kind": "model", "text": "abc"})
    whole = path.read_bytes()
    size = 8 + int.from_bytes(whole[:8], "little")
    for place in range(8, len(whole)):
        if place < size and whole[place] == ord(" "):
            continue  # padding between JSON tokens says nothing
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(CheckpointError, match=r"a\.safetensors"):
            load(path)


def test_missing_tensors_are_detected(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save(path, {"w": torch.ones(2), "v": torch.ones(2)}, {})
    with safe_open(path, "pt") as opened:
        header = opened.metadata()
    save_file({"w": torch.ones(2)}, path, header)
    with pytest.raises(CheckpointError, match="digest: the file was damaged after it was written"):
        load(path)
    header = {"ds2": json.dumps(read_header(header, 2))}
    save_file({"w": torch.ones(2), "v": torch.ones(2)}, path, header)
    with pytest.raises(CheckpointError, match="digest"):
        load(path)


def test_equal_files_have_equal_bytes(tmp_path: Path) -> None:
    for index in range(8):  # safetensors writes several entries of a header in any order
        save(tmp_path / f"{index}", {"w": torch.ones(2), "v": torch.ones(2)}, {"kind": "model"})
    assert len({(tmp_path / f"{index}").read_bytes() for index in range(8)}) == 1


def test_a_file_without_digest_loads(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors", {"ds2": '{"format": 1, "kind": "model"}'})
    assert load(tmp_path / "a.safetensors")[1]["kind"] == "model"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "metadata: is not JSON"),
        ("[" * 100_000, "metadata: is not JSON"),
        ("[]", "format: is missing"),
        ('{"format": "1"}', "format: is missing or not a whole number"),
        ('{"format": 0}', "format: is 0, formats are numbered from 1"),
        ('{"format": -5}', "format: is -5, formats are numbered from 1"),
        ('{"format": null}', "format: is missing or not a whole number"),
    ],
)
def test_damaged_metadata_is_named(tmp_path: Path, text: str, says: str) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors", {"ds2": text})
    with pytest.raises(CheckpointError, match=rf"a\.safetensors: {says}.*copy it again"):
        load(tmp_path / "a.safetensors")


def test_few_threads_hash_whatever_the_number_of_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    def executor(count: int) -> ThreadPoolExecutor:
        counts.append(count)
        return ThreadPoolExecutor(count)

    monkeypatch.setattr(tensor_file, "ThreadPoolExecutor", executor)
    tensors = {f"{number}": torch.full((number,), float(number)) for number in range(11)}
    for cores in (1, 2, 8, 128):
        monkeypatch.setattr(tensor_file, "usable_cores", lambda cores=cores: cores)
        save(tmp_path / f"{cores}", tensors, {})
    assert counts == [1, 1, 3, 4] and len({path.read_bytes() for path in tmp_path.iterdir()}) == 1


def test_a_header_of_many_tensors_is_made_in_pieces_between_which_steps_have_the_interpreter_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[int] = []  # how often each call names a tensor or its type; 0 is a pause
    to_json = json.dumps

    def count(*values: Any, **options: Any) -> str:
        text = to_json(*values, **options)
        listed.append(text.count("torch.float"))
        return text

    monkeypatch.setattr("time.sleep", lambda seconds: listed.append(0))
    monkeypatch.setattr("json.dumps", count)
    tensors = {f"torch.float{number}": torch.ones(1) for number in range(579)}
    save(tmp_path / "many", tensors, {})
    assert sum(listed) == 3 * len(tensors)  # two in the digest, one in the header
    assert max(listed) <= 128
    assert all(after == 0 for before, after in itertools.pairwise(listed) if before > 2)
    assert load(tmp_path / "many")[0].keys() == tensors.keys() == load_file(tmp_path / "many").keys()


class OnGpu(torch.Tensor):
    """A tensor of the CPU that says that it is a GPU's."""

    is_cuda = True  # type: ignore[assignment]


def tensors_of_a_run(device: str) -> dict[str, torch.Tensor]:
    picture = torch.randn(2, 3, 4, 5, device=device).to(memory_format=torch.channels_last)
    counts = torch.tensor(7, device=device)
    return {
        "w": torch.randn(30, 20, device=device),
        "n": counts,
        "c": picture,
        "h": torch.ones(3, device=device).half(),
    }


def saved_late(path: Path, tensors: dict[str, torch.Tensor], copies: TensorCopies | None = None) -> None:
    """Save tensors that change before another thread writes them; the file has them as they were."""
    expected = {name: value.detach().cpu().clone() for name, value in tensors.items()}
    write = partial(write_copies, path, (copies or TensorCopies()).start(tensors), {})
    for value in tensors.values():
        value.zero_()
    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    loaded, _ = load(path)
    assert all(torch.equal(loaded[name], value) for name, value in expected.items()) and set(loaded) == set(expected)


def simulate_gpu(monkeypatch: pytest.MonkeyPatch, free: int) -> list[str]:
    """Let tensors of `OnGpu` be copied as those of a GPU with so many bytes free; returns what streams were asked."""
    events: list[str] = []
    stream = SimpleNamespace(record_event=lambda: events.append("recorded") or "event", wait_event=events.append)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2**40))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(tensor_file, "_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda entered: nullcontext())
    return events


@pytest.mark.parametrize("free", [0, 2**40])
def test_tensors_of_a_gpu_are_brought_to_the_host_where_the_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    events = simulate_gpu(monkeypatch, free)
    tensors = {name: value.as_subclass(OnGpu) for name, value in tensors_of_a_run("cpu").items()}
    saved_late(tmp_path / "a.safetensors", tensors)
    assert events == (["recorded", "event"] if free else [])  # without room for a copy the step waits


def change(tensors: dict[str, torch.Tensor], how: str) -> None:
    """Change tensors of a run from one save to the next."""
    for value in tensors.values():
        value.add_(1)
    if how == "a tensor is replaced":
        tensors["w"] = tensors["w"] + 1
    elif how == "a tensor is new":
        tensors["z"] = tensors["w"] + 1
    elif how == "a tensor is gone":
        del tensors["w"]
    else:
        assert how == "values"


CHANGES = ("values", "a tensor is replaced", "a tensor is new", "a tensor is gone")


@pytest.mark.parametrize("how", CHANGES)
def test_each_save_has_the_tensors_as_they_are_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    simulate_gpu(monkeypatch, 2**40)
    tensors = {name: value.as_subclass(OnGpu) for name, value in tensors_of_a_run("cpu").items()}
    tensors["host"], copies = torch.ones(2), TensorCopies()
    saved_late(tmp_path / "a.safetensors", tensors, copies)
    change(tensors, how)
    saved_late(tmp_path / "a.safetensors", tensors, copies)


@pytest.mark.gpu
@pytest.mark.parametrize("how", CHANGES)
def test_each_save_has_a_gpu_s_tensors_as_they_are_then(tmp_path: Path, how: str) -> None:
    tensors, copies = tensors_of_a_run("cuda"), TensorCopies()
    saved_late(tmp_path / "a.safetensors", tensors, copies)
    change(tensors, how)
    saved_late(tmp_path / "a.safetensors", tensors, copies)


def test_copies_leave_a_gpu_on_a_stream_that_is_made_with_the_gpu_as_the_current_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[object] = []

    @contextmanager
    def current(index: int) -> Iterator[None]:
        calls.append(f"current {index}")
        yield
        calls.append("the one before")

    monkeypatch.setattr(tensor_file.runtime, "current", current)
    monkeypatch.setattr(tensor_file.runtime, "call", lambda *call: calls.append(call) or 7)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda *stream: stream)
    gpu = torch.device("cuda", 3)
    assert tensor_file._stream.__wrapped__(gpu) == (7, gpu)
    assert calls == ["current 3", ("cuStreamCreate", 1), "the one before"]


@pytest.mark.gpu
@pytest.mark.parametrize("room", [False, True])
def test_a_file_has_a_gpu_s_tensors_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: bool) -> None:
    if not room:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    saved_late(tmp_path / "a.safetensors", tensors_of_a_run("cuda"))


@pytest.mark.gpu
def test_a_file_is_written_while_graphs_are_recorded(tmp_path: Path) -> None:
    """More often than torch has streams: one of those that it hands out is the recorder's."""
    tensors = tensors_of_a_run("cuda")
    writes = [prepare_save(tmp_path / f"{number}.safetensors", tensors, {}) for number in range(40)]
    recorder, x = GraphRecorder(), torch.ones(8, device="cuda")
    with ThreadPoolExecutor(1) as thread, recorder.recording() as graph:
        y = x + 1
        for write in writes:
            thread.submit(write).result()
    graph.replay()
    assert torch.equal(y, torch.full_like(y, 2.0))
    loaded, _ = load(tmp_path / "39.safetensors")
    assert all(torch.equal(loaded[name], tensor.cpu()) for name, tensor in tensors.items())

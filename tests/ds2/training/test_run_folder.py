"""A run folder is there when something is in it, and not before."""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast
from unittest.mock import Mock

import pytest
import torch

from ds2.cli import main
from ds2.config.schema import Config
from ds2.distributed.communicator import Communicator
from ds2.distributed.process_group import LostRankError
from ds2.system import tensor_file
from ds2.system.files import atomic_file
from ds2.system.tensor_file import CheckpointError, TensorCopies, load, save, write_copies
from ds2.training import loop, run_folder
from ds2.training.loop import train
from ds2.training.run_folder import BackgroundWriter, RunFiles, check_shared, make_folder, sole_use
from ds2.training.state import Shard, prepare_state, state_file
from ds2.training.trainer import Trainer

T = TypeVar("T")


@pytest.mark.parametrize(
    "refused", ["batching=auto", "data.train=[none.jsonl]", "model.backend=persistent", "train.freeze=[nothing]"]
)
def test_a_refused_run_leaves_nothing(
    refused: str, tiny_overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path.relative_to(tmp_path) for path in tmp_path.rglob("*")}
    overrides = [*tiny_overrides, "device=cpu", refused, f"run_dir={tmp_path / 'runs' / 'of' / 'mine'}"]
    assert main(["train", *overrides]) == 2
    assert capsys.readouterr().err.startswith("ds2: ")
    assert {path.relative_to(tmp_path) for path in tmp_path.rglob("*")} == before


def test_ranks_save_by_the_time_that_they_have_alike(
    tiny_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their own clocks they would save after different steps, and a sharded save would wait for ever."""
    own_counts, saves = loop._own_counts, list[int]()
    monkeypatch.setattr(loop, "_own_counts", lambda *arguments: [25.0, *own_counts(*arguments)[1:]])
    monkeypatch.setattr(RunFiles, "save_in_epoch", lambda files: saves.append(files.state.progress.step))
    train(tiny_config("batching.utterances=1", "checkpoint.every_minutes=1", "train.max_steps=9"), tmp_path / "run")
    assert saves == [4, 8]


@pytest.mark.parametrize(
    ("setting", "value", "other", "without", "with_it"),
    [
        ("data.cache_gb", 1.0, "data.cache", "none", "disk"),
        ("alphabet.locale", "tr", "alphabet.case", "keep", "upper"),
        ("augment.noise_snr_db", [1.0, 2.0], "augment.noise_probability", 0.0, 0.5),
        ("augment.noise", ["x.jsonl"], "augment.babble_share", 1.0, 0.5),
        ("augment.noise_colours", [0.0], "augment.noise", ["x.jsonl"], []),
        ("augment.room_rt60_s", [0.2, 0.3], "augment.room_probability", 0.0, 0.5),
        ("augment.codecs", ["mp3"], "augment.codec_probability", 0.0, 0.5),
        ("augment.frequency_masks", 2, "augment.frequency_width", 0, 5),
        ("augment.frequency_width", 5, "augment.frequency_masks", 0, 2),
        ("augment.time_masks", 2, "augment.time_width_s", 0.0, 0.1),
        ("augment.time_masks", 2, "augment.time_fraction", 0.0, 0.1),
        ("augment.time_width_s", 0.1, "augment.time_masks", 0, 2),
        ("features.mels", 40, "features.kind", "log_spectrogram", "log_mel"),
        ("model.nonlinearity", "tanh", "model.cell", "lstm", "rnn"),
        ("model.start", "plain", "model.cell", "lstm", "rnn"),
        ("model.row_conv_context", 5, "model.row_convs", 0, 4),
        ("model.skip_first", "projection", "model.skip", 0, 4),
        ("model.batch_norm_momentum", 0.2, "model.batch_norm", False, True),
        ("optim.momentum", 0.5, "optim.name", "adamw", "sgd"),
        ("optim.betas", [0.9, 0.9], "optim.name", "sgd", "adamw"),
        ("optim.anneal", 2.0, "optim.schedule", "cosine", "anneal"),
        ("train.ctc_weight", 0.2, "train.objective", "ctc", "ctc_crf"),
        ("train.intermediate_weight", 0.2, "model.intermediate", [], [1]),
        ("train.early_stop_epochs", 2, "data.dev", [], ["x.jsonl"]),
        ("train.delay_penalty_after_epochs", 2, "train.delay_penalty", 0.0, 0.1),
        ("comm.wait_s", 3.0, "comm.max_ranks", 0, 2),
    ],
)
def test_a_setting_without_the_one_that_it_needs_has_no_effect(
    setting: str, value: object, other: str, without: object, with_it: object, caplog: pytest.LogCaptureFixture
) -> None:
    warnings = []
    for needed in (without, with_it):
        config = Config(run_dir="x")
        for key, number in ((setting, value), (other, needed)):
            section, _, name = key.partition(".")
            setattr(getattr(config, section), name, number)
        caplog.clear()
        loop._warn_of_lone_settings(config, cast(Any, torch.nn.Linear(1, 1)), on_gpu=False)
        warnings.append(caplog.text.count(f"{setting}={value} has no effect: it needs"))
    assert warnings[0] == warnings[1] + 1


def test_settings_that_need_another_one_are_named(
    tiny_config: Callable[..., Config], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lone = ("augment.babble_share=0.5", "train.early_stop_epochs=3", "data.dev=[]", "train.denominator_order=3")
    lone += ("optim.name=adamw", "optim.momentum=0.5", "augment.room_rt60_s=[0.2,0.3]", "augment.time_fraction=0.1")
    lone += ("model.row_convs=0", "model.row_conv_context=2", "train.freeze=[convs]")
    lone += ("optim.layer_rates={convs:0.5,recurrent_modules.0:0.5,weight_hh:0.3}", "train.intermediate_lexicon=x.txt")
    lone += ("train.calibrate=3",)
    train(tiny_config("train.max_steps=1", *lone), tmp_path / "run")
    assert "augment.babble_share=0.5 has no effect: it needs augment.noise_probability above 0" in caplog.text
    assert "train.early_stop_epochs=3 has no effect: it needs a dev set (data.dev)" in caplog.text
    assert "train.denominator_order=3 has no effect: it needs train.objective=ctc_crf" in caplog.text
    assert "optim.momentum=0.5 has no effect: it needs optim.name=sgd" in caplog.text
    assert "augment.room_rt60_s=[0.2, 0.3] has no effect: it needs augment.room_probability above 0" in caplog.text
    assert "augment.time_fraction=0.1 has no effect: it needs augment.time_masks above 0" in caplog.text
    assert caplog.text.count("has no effect: it needs") == 9
    assert "train.intermediate_lexicon=x.txt has no effect: it needs model.intermediate" in caplog.text
    assert "train.calibrate=3 has no effect: it needs a GPU (device)" in caplog.text
    assert "model.row_conv_context=2 has no effect: it needs model.row_convs above 0" in caplog.text
    assert "optim.layer_rates={convs: 0.5} has no effect: all weights of that name are in train.freeze" in caplog.text
    assert caplog.text.count("optim.layer_rates") == 1


@pytest.mark.parametrize("others_go_on", [False, True])
def test_a_process_that_others_go_on_without_ends_neither_at_its_start_nor_as_if_it_had_saved(
    others_go_on: bool, tiny_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def removed(*_: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(loop, "report_changes", removed)
    monkeypatch.setattr(Communicator, "superseded", lambda _: others_go_on)
    with pytest.raises(LostRankError if others_go_on else FileNotFoundError):  # of which ranks that go on join again
        train(tiny_config("train.max_steps=1"), tmp_path / "run")


def test_what_was_there_and_what_was_left_stay(tmp_path: Path) -> None:
    comm = Communicator(torch.device("cpu"))
    for folder, left in ((tmp_path / "empty", ""), (tmp_path / "new" / "run", "log.jsonl")):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(KeyError), make_folder(folder), sole_use(folder, comm):
            (folder / left).touch()
            raise KeyError
    assert not list((tmp_path / "empty").iterdir())
    assert {path.name for path in (tmp_path / "new" / "run").iterdir()} == {"lock", "log.jsonl"}


def test_the_lock_of_a_folder_that_goes_away_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: object) -> None:
        (tmp_path / "lock").unlink()  # by the job that failed, between our opening of the file and our locking it

    monkeypatch.setattr("fcntl.lockf", late)
    with (
        pytest.raises(CheckpointError, match="start this one again"),
        sole_use(tmp_path, Communicator(torch.device("cpu"))),
    ):
        pass


def test_a_writer_keeps_the_order_and_after_an_error_writes_nothing_more() -> None:
    writer, go_on = BackgroundWriter(), threading.Event()
    written: list[int] = []

    def fail() -> None:
        raise CheckpointError("the disk is full")

    writer.run(lambda: written.append(0) if go_on.wait(60) else None)
    writer.run(lambda: written.append(1))
    assert writer.busy() and not written
    go_on.set()
    writer.wait()
    assert written == [0, 1] and not writer.busy()
    writer.run(fail)
    writer.run(lambda: written.append(2))
    writer.run(lambda: written.append(3))
    with pytest.raises(CheckpointError, match="the disk is full"):
        writer.wait()
    assert written == [0, 1]


def test_a_file_that_is_written_later_holds_the_tensors_of_the_call(tmp_path: Path) -> None:
    copies = TensorCopies()
    value = torch.arange(6.0).view(2, 3)
    write = partial(write_copies, tmp_path / "first", copies.start({"a": value.t(), "b": torch.ones(1)}), {})
    value.zero_()
    write()
    assert torch.equal(load(tmp_path / "first")[0]["a"], torch.arange(6.0).view(2, 3).t())
    write_copies(tmp_path / "second", copies.start({"a": torch.ones(2, dtype=torch.int64)}), {})
    assert load(tmp_path / "second")[0].keys() == {"a"}
    assert torch.equal(load(tmp_path / "second")[0]["a"], torch.ones(2, dtype=torch.int64))


class Ranks(Communicator):
    """Rank 0 of two that come and go, as its run folder sees them."""

    elastic, world = True, 2
    left_behind = False

    def superseded(self) -> bool:
        return self.left_behind


@pytest.fixture(name="files")
def _files(tiny_config: Callable[..., Config], tmp_path: Path) -> RunFiles:
    trainer = Trainer(tiny_config(), tmp_path / "run")
    comm = Ranks(torch.device("cpu"))
    return RunFiles(tmp_path / "run", trainer.config, trainer.state, trainer.alphabet, "fp32", trainer.dev_data, comm)


def test_a_save_waits_for_the_state_before_it_and_not_for_models(
    files: RunFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, states = threading.Event(), threading.Event()

    def write() -> None:
        if not models.wait(60):
            pytest.fail("the save waited for a model")

    monkeypatch.setattr(run_folder, "prepare_model", lambda *_: write)
    files.keep_last({})
    files.save()
    assert not state_file(files.run_dir).exists()
    second = threading.Thread(target=lambda: (files.save(), states.set()))
    second.start()
    assert not states.wait(0.2)  # the memory that it copies to is that of the first one
    models.set()
    assert states.wait(60) and saved_step(files) == 0
    second.join()


def test_the_newest_models_of_epochs_stay_and_a_user_may_remove_some(
    files: RunFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove_first(path: Path, **options: Any) -> None:
        os.remove(path)
        os.remove(path)

    files.config.checkpoint.keep_last = 2
    for epoch in (9998, 9999, 10000, 10001):
        files.state.progress.epoch = epoch
        if epoch == 9001:
            monkeypatch.setattr(Path, "unlink", remove_first)
        files.keep_last({})
        files.wait()
    assert {path.name for path in files.run_dir.glob("epoch-*")} == {f"epoch-{n}.safetensors" for n in (10000, 10001)}


def saved_step(files: RunFiles) -> int | None:
    files.wait()
    path = state_file(files.run_dir)
    return load(path)[1]["progress"]["step"] if path.is_file() else None


def test_a_state_whose_step_another_rank_may_not_have_ended_is_not_in_the_folder(files: RunFiles) -> None:
    """If this rank was lost, the others would take step 54 with fewer ranks; who resumed would have another."""
    state = files.state
    state.progress.step = 54
    files.save_in_epoch()
    assert saved_step(files) is None
    state.progress = dataclasses.replace(state.progress, step=55)
    files.write_held()  # step 55 needed both
    assert saved_step(files) == 54
    state.progress.step = 56
    files.save_in_epoch()
    files.drop_held()  # the others went on from step 55
    files.write_held()
    assert saved_step(files) == 54
    files.comm.world = 1
    files.save_in_epoch()
    assert saved_step(files) == 56


def test_a_rank_that_is_stopped_before_it_writes_does_not_write_when_it_goes_on(
    files: RunFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.save()
    assert saved_step(files) == 0
    files.state.progress.step = 2

    @contextmanager
    def stopped_here(path: Path) -> Iterator[Path]:
        files.comm.left_behind = True  # type: ignore[attr-defined]
        with atomic_file(path) as partial:
            yield partial

    monkeypatch.setattr(tensor_file, "atomic_file", stopped_here)
    files.save()
    assert saved_step(files) == 0


def test_the_log_is_on_the_disk_before_a_state_that_counts_on_its_lines(
    files: RunFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    flush, replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        flush(descriptor)
        calls.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    def rename(source: Path, target: Path) -> None:
        replace(source, target)
        calls.append(f"is {target.name}")

    files.run_dir.mkdir()
    (files.run_dir / "log.jsonl").write_text("{}\n")
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", rename)
    files.save()
    assert saved_step(files) == 0
    content, name, *rest = calls[calls.index("log.jsonl") :]
    assert (content, name) == ("log.jsonl", files.run_dir.name) and "is trainer.safetensors" in rest


@pytest.mark.parametrize("removed", [True, False])
def test_a_rank_0_that_wakes_up_removes_no_file_of_the_next_one(files: RunFiles, removed: bool) -> None:
    """It is stopped when it begins to look for files of ranks that were lost: before a next one writes, or after."""
    older, newer = (files.run_dir / f".a.host.1.{digit * 16}.partial" for digit in "01")
    older.mkdir(parents=True)

    def stopped_here() -> bool:
        if not removed:
            files.comm.left_behind = True  # type: ignore[attr-defined]
        superseded = Ranks.superseded(files.comm)  # type: ignore[arg-type]
        newer.mkdir()
        return superseded

    files.comm.superseded = stopped_here  # type: ignore[method-assign]
    files.remove_partial_files()
    assert newer.is_dir() and older.is_dir() != removed


class SharedRanks(Ranks):
    """A rank of several that come and go: what rank 0 broadcast last is what the others receive."""

    broken = False
    sent: ClassVar[list[Any]] = []

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(torch.device("cpu"))
        self.rank, self.world = rank, world

    def broadcast(self, value: T) -> T:
        if self.rank == 0:
            self.sent.append(value)
        return cast(T, self.sent[-1])

    def check(self) -> None:
        if self.broken:
            raise LostRankError("rank 1 on host ended")


MakeRanks = Callable[[int], list[RunFiles]]


@pytest.fixture(name="make_ranks")
def _make_ranks(tiny_config: Callable[..., Config], tmp_path: Path) -> Iterator[MakeRanks]:
    """Make the run folders of so many ranks, which write shards of one state."""
    made: list[RunFiles] = []

    def make(world: int, *settings: str) -> list[RunFiles]:
        trainer = Trainer(tiny_config("checkpoint.sharded=true", *settings), tmp_path / "run")
        rest = (trainer.config, trainer.state, trainer.alphabet, "fp32", trainer.dev_data)
        made.extend(RunFiles(tmp_path / "run", *rest, SharedRanks(rank, world)) for rank in range(world))
        return made[-world:]

    yield make
    for files in made:
        files.give_up_shards()


def shards(files: RunFiles) -> int:
    return len({*files.run_dir.glob("*.shard")})


def test_a_state_of_shards_is_complete_once_all_ranks_have_written_theirs(make_ranks: MakeRanks) -> None:
    first, second, third = make_ranks(3)
    state = first.state
    first.save(alone=True)
    first.wait()
    whole, _ = load(state_file(first.run_dir))
    for step in (1, 2):
        state.progress.step = step
        for files in (first, second):
            files.save()
        second.wait()
        time.sleep(0.2)
        assert load(state_file(first.run_dir))[1]["progress"]["step"] == step - 1
        third.save()
        assert saved_step(first) == step and shards(first) == 3
        parts, _ = load(state_file(first.run_dir))
        assert parts.keys() == whole.keys() and all(torch.equal(parts[name], whole[name]) for name in whole)
    first.save(alone=True)
    first.wait()
    assert shards(first) == 0 and load(state_file(first.run_dir))[0].keys() == whole.keys()


@pytest.mark.parametrize("how", ["lost", "regroup", "error"])
def test_a_save_whose_rank_is_gone_leaves_the_state_before_it_and_is_made_up_for(
    make_ranks: MakeRanks, how: str
) -> None:
    first, second = make_ranks(2)
    for files in (first, second):
        files.save()
    assert saved_step(first) == 0 and not first.unsaved
    first.state.progress.step = 1
    first.save()
    if how == "lost":
        cast(SharedRanks, first.comm).broken = True
    elif how == "regroup":
        for _ in range(2):  # another rank may be lost before the next step ends
            first.give_up_shards()
            assert first.unsaved
    else:
        first.__exit__(KeyError, KeyError(), None)
    assert saved_step(first) == 0
    cast(SharedRanks, first.comm).broken = False
    first.state.progress.step = 2
    for files in (first, second):
        files.save()
    assert saved_step(first) == 2 and shards(first) == 2 and not first.unsaved


def test_shards_of_a_step_that_former_ranks_held_back_are_not_written(make_ranks: MakeRanks) -> None:
    files = make_ranks(2)[1]
    cast(SharedRanks, files.comm).sent.append("save")
    files.save_in_epoch()
    files.give_up_shards()
    files.write_held()
    files.wait()
    assert shards(files) == 0


def rank_of_two(rank: int, written: str, other: str) -> Any:
    """A rank to which rank 0 sends what it wrote; `other` is the host of the other one where that sees no such file."""
    comm = Mock(rank=rank, world=2, elastic=False, host=f"host{rank}")
    comm.broadcast.side_effect = lambda value: value if rank == 0 else written
    comm.allgather.side_effect = lambda own: [own, other]
    return comm


def test_ranks_that_do_not_see_the_folder_of_rank_0_are_named_at_the_start(
    tiny_config: Callable[..., Config], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, sharded = tiny_config(), tiny_config("checkpoint.sharded=true")
    run_dir, elsewhere, written = tmp_path / "run", tmp_path / "elsewhere", f"process {os.getpid()} on host0"
    run_dir.mkdir()
    lock = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    with sole_use(run_dir, rank_of_two(0, written, "")):
        for folder, rank, other in ((run_dir, 0, "host1"), (elsewhere, 1, "")):
            with pytest.raises(CheckpointError, match=r"1 of 2 ranks, such as on host1, do not see .* that all hosts"):
                check_shared(folder, sharded, rank_of_two(rank, written, other))
            caplog.clear()
            check_shared(folder, whole, rank_of_two(rank, written, other))
            assert ("host1, do not see" in caplog.text) is (rank == 0)
        done = subprocess.run(
            [sys.executable, "-c", lock, run_dir / "lock"], capture_output=True, text=True, check=False
        )
        assert "BlockingIOError" in done.stderr  # rank 0 still has it
        caplog.clear()
        for rank in (0, 1):
            check_shared(run_dir, sharded, rank_of_two(rank, written, ""))
        assert not caplog.text


def test_a_run_folder_that_hosts_do_not_share_is_named(make_ranks: MakeRanks) -> None:
    first = make_ranks(2, "comm.timeout_s=0.2")[0]
    first.save()
    with pytest.raises(CheckpointError, match=r"1-of-2\.shard within comm\.timeout_s=0\.2 s: give a run_dir that all"):
        first.wait()


def test_a_state_that_is_replaced_while_its_shards_are_read_is_read_again(
    make_ranks: MakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = make_ranks(2)
    for files in ranks:
        files.save()
    assert saved_step(ranks[0]) == 0
    read, opened = tensor_file.safe_open, list[str]()

    def replaced_before_the_second_file(path: str, **options: str) -> Any:
        opened.append(path)
        if len(opened) == 2:
            monkeypatch.undo()
            ranks[0].state.progress.step = 1
            for files in ranks:
                files.save()
            ranks[0].wait()
        return read(path, **options)

    monkeypatch.setattr(tensor_file, "safe_open", replaced_before_the_second_file)
    assert load(state_file(ranks[0].run_dir))[1]["progress"]["step"] == 1 and opened[1].endswith(".shard")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda shard: shard.unlink(), "has a shard that is missing or damaged: there is no checkpoint"),
        (lambda shard: shard.write_bytes(shard.read_bytes()[:-9]), "missing or damaged: .* not a whole safetensors"),
        (lambda shard: save(shard, {"model.x": torch.ones(1)}, {}), "is another file than was written there"),
    ],
)
def test_a_state_without_one_of_its_shards_is_refused(
    make_ranks: MakeRanks, damage: Callable[[Path], None], says: str
) -> None:
    ranks = make_ranks(2)
    for files in ranks:
        files.save()
    ranks[0].wait()
    damage(next(ranks[0].run_dir.glob("*.1-of-2.shard")))
    with pytest.raises(CheckpointError, match=says):
        load(state_file(ranks[0].run_dir))


def test_each_tensor_is_in_the_shard_of_one_rank() -> None:
    tensors = {str(size): torch.ones(size) for size in (5, 1, 0, 700, 3, 300, 40, 300, 0)}
    for world in (1, 2, 3, 20):
        of_ranks = [Shard("a", rank, world, 1.0, lambda: False).of(tensors) for rank in range(world)]
        assert sorted(name for part in of_ranks for name in part) == sorted(tensors)
    assert all(sum(map(torch.numel, Shard("a", rank, 2, 1.0, bool).of(tensors).values())) > 300 for rank in (0, 1))


def test_steps_have_short_garbage_collections(
    tiny_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, left_out = Trainer.step, list[bool]()

    def observed(trainer: Trainer, *arguments: Any) -> float | None:
        left_out.append(gc.get_freeze_count() > len(gc.get_objects()))
        return step(trainer, *arguments)

    monkeypatch.setattr(Trainer, "step", observed)
    assert train(tiny_config("data.dev=[]", "train.max_steps=2"), tmp_path / "run") == 0
    assert left_out == [True, True]


def test_steps_go_on_while_a_state_is_written_and_a_slow_disk_is_named(
    tiny_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned = threading.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "the run waits for its saves" in record.getMessage():
                warned.set()

    def prepare_slowly(*arguments: Any, **options: Any) -> Callable[[], None]:
        write = prepare_state(*arguments, **options)
        return lambda: write() if warned.wait(60) else None  # it comes with the save after the next step

    listener = Listener()
    logging.getLogger("ds2").addHandler(listener)
    monkeypatch.setattr(run_folder, "prepare_state", prepare_slowly)
    settings = ("data.dev=[]", "train.epochs=2", "checkpoint.every_steps=1")
    assert train(tiny_config(*settings), tmp_path / "slow") == 0
    logging.getLogger("ds2").removeHandler(listener)
    assert warned.is_set()
    monkeypatch.undo()
    assert train(tiny_config(*settings), tmp_path / "fast") == 0
    ends = [load(tmp_path / name / "trainer.safetensors")[0] for name in ("slow", "fast")]
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])

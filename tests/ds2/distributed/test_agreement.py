"""What ranks must have in common: facts differ where the thing differs, and a rank that differs is named."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from support.launch import mpirun, torchrun
from torch import nn

from ds2.config.schema import Config
from ds2.data.manifest import Utterance, corpus, read_manifest
from ds2.distributed.communicator import Communicator, program, settings, sources, weights
from ds2.model.norm import SequenceBatchNorm
from ds2.system import UserError
from ds2.training import trainer
from ds2.training.reductions import NormStatistics
from ds2.training.trainer import Trainer, check_run

T = TypeVar("T")
UTTERANCES = [Utterance(Path("/data/a.wav"), 1.5, "abc"), Utterance(Path("/data/b.wav"), 2.0, "ca", offset_s=3.0)]


class OneOfThree(Communicator):
    """Rank 2 of 3: rank 0 holds `first`, rank 1 the same as this one."""

    rank, world = 2, 3

    def __init__(self, first: dict[str, object]) -> None:
        super().__init__(torch.device("cpu"))
        self.host, self.first = "node7", first

    def broadcast(self, value: T) -> T:
        return ("node1", self.first)  # type: ignore[return-value]

    def allgather(self, value: T) -> list[T]:
        return ["", value, value]  # type: ignore[list-item]


def test_equal_facts_pass_and_a_single_process_agrees_with_itself() -> None:
    OneOfThree({"a": 1}).agree({"a": 1}, "so what")
    Communicator(torch.device("cpu")).agree(program() | settings(Config()), "so what")
    assert program()["NumPy"] == np.__version__  # batches are drawn by each rank
    assert program()["Unicode of Python"] == unicodedata.unidata_version  # labels are made by each rank


def test_the_program_is_every_source_file_however_deep() -> None:
    names = {name for name, _ in sources()}
    assert {"cli.py", "distributed/communicator.py", "data/corpora/layouts.py"} <= names
    assert sum(name.endswith(".cuh") for name in names) >= 13


def test_a_rank_that_differs_is_named_with_what_and_the_remedy() -> None:
    with pytest.raises(UserError) as caught:
        OneOfThree({"a": 1, "b": 2, "c": 3}).agree({"a": 1, "b": 5}, "make them equal")
    expected = "rank 2 on node7 differs from rank 0 on node1: b: 5 instead of 2, c: None instead of 3; make them equal"
    assert str(caught.value) == expected


class BesideGpu(OneOfThree):
    """As `OneOfThree` on a CPU, where rank 0 is on a GPU and has the same settings."""

    def broadcast(self, value: tuple[str, dict[str, object]]) -> tuple[str, dict[str, object]]:  # type: ignore[override]
        return "node1", value[1] | ({"kind of device": "cuda"} if "kind of device" in value[1] else {})


def test_gpus_and_cpus_do_not_train_together() -> None:
    """They would round differently, so that weights drift apart."""
    with pytest.raises(UserError, match=r"rank 2 on node7 .*: kind of device: cpu instead of cuda; train on GPUs"):
        check_run(Config(), BesideGpu({}))


@pytest.mark.parametrize("reason", ["rank 1: the driver is too old", ""])
def test_one_rank_whose_gpu_runs_no_kernels_decides_for_all(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    comm = OneOfThree({})
    comm.device = torch.device("cuda", 0)
    monkeypatch.setattr(trainer, "why_no_gpu", lambda device: None)
    monkeypatch.setattr(comm, "allgather", lambda own: [own, reason, own])
    library = trainer.why_no_kernels(comm)
    assert library == reason
    norm = SequenceBatchNorm(8)
    NormStatistics(norm, comm, shared=True, kernels=not library)
    on_gpu: Any = Mock(is_cuda=True, dtype=torch.bfloat16)
    monkeypatch.setattr("ds2.model.norm.why_not", lambda dtype, channels, device: None)
    assert norm.fused(on_gpu) is (not reason)


def test_settings_leave_out_what_may_be_a_hosts_own() -> None:
    config = Config(run_dir="here", device="cuda:1")
    config.data.train, config.data.work_dir = ["/scratch/a.jsonl"], "/scratch"
    config.alphabet.lexicon = config.train.intermediate_lexicon = "/scratch/lexicon.txt"
    assert settings(config) == settings(Config())
    config.optim.learning_rate *= 2
    config.data.max_duration_s = 12
    mine, theirs = settings(config), settings(Config())
    assert {key for key in mine if mine[key] != theirs[key]} == {"optim.learning_rate", "data.max_duration_s"}


@pytest.mark.parametrize("change", [{"text": "abd"}, {"duration_s": 1.6}, {"audio_filepath": Path("/data/c.wav")}])
def test_a_corpus_is_known_by_names_times_and_texts(change: dict[str, object]) -> None:
    facts = corpus("training", UTTERANCES)
    assert str(facts["training"]).startswith("2 utterances")
    moved = [replace(u, audio_filepath=Path("/scratch") / u.audio_filepath.name) for u in UTTERANCES]
    assert corpus("training", moved) == facts
    changed = [replace(UTTERANCES[0], **change), UTTERANCES[1]]  # type: ignore[arg-type]
    assert corpus("training", changed) != facts
    assert corpus("training", UTTERANCES[::-1]) != facts


class Recording(Communicator):
    """A single process that records the facts in which ranks must agree."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.facts: dict[str, object] = {}

    def agree(self, facts: Mapping[str, object], remedy: str) -> None:
        self.facts.update(facts)


@pytest.mark.parametrize(
    ("settings_of_phones", "changed"),
    [
        (["alphabet.lexicon={lexicon}"], "pronunciations"),
        (["model.intermediate=[1]", "train.intermediate_lexicon={lexicon}"], "phones"),
    ],
)
def test_ranks_agree_in_the_content_of_lexicons(
    settings_of_phones: list[str], changed: str, tiny_config: Callable[..., Config], tone_lexicon: Path, tmp_path: Path
) -> None:
    config = tiny_config(*(setting.format(lexicon=tone_lexicon) for setting in settings_of_phones))
    lines = [line.split() for line in tone_lexicon.read_text("utf-8").splitlines()]
    before, after = Recording(), Recording()
    for comm, order in (before, 1), (after, -1):
        words = (" ".join((word, *phones[::order])) for word, *phones in lines)
        tone_lexicon.write_text("\n".join(words), encoding="utf-8")
        Trainer(config, tmp_path, comm)
    assert {name for name in before.facts if before.facts[name] != after.facts[name]} == {changed}


def test_ranks_agree_in_the_content_of_the_denominators_texts(
    tiny_config: Callable[..., Config], tone_manifest: Path, tmp_path: Path
) -> None:
    """The settings themselves are equal: files of a name may have another content on another host."""
    texts = tmp_path / "texts.txt"
    config = tiny_config("train.objective=ctc_crf", f"train.denominator_text=[{texts}]", "train.denominator_order=2")
    lines = [u.text for u in read_manifest(tone_manifest)]
    before, same, after = Recording(), Recording(), Recording()
    for comm, written in (before, lines), (same, lines), (after, lines[1:]):
        texts.write_text("\n".join(written), encoding="utf-8")
        Trainer(config, tmp_path, comm)
    assert before.facts == same.facts
    assert {name for name in before.facts if before.facts[name] != after.facts[name]} == {"denominator"}


def test_weights_are_known_to_the_last_bit() -> None:
    first = nn.Linear(3, 4)
    model = nn.Sequential(first, nn.BatchNorm1d(4))
    before = weights(model)
    assert before == weights(model)
    with torch.no_grad():
        first.weight[1, 2] = torch.nextafter(first.weight[1, 2], torch.tensor(9.0))
    assert weights(model) != before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("optim.learning_rate='0.01${oc.env:OMPI_COMM_WORLD_RANK}'", r"optim.learning_rate: 0.011 instead of 0.01"),
        (
            "data.train=['{folder}/part${oc.env:OMPI_COMM_WORLD_RANK}.jsonl']",
            r"training: 9 utterances .* instead of 10",
        ),
    ],
)
def test_ranks_that_were_started_differently_do_not_train(
    tiny_overrides: list[str], tone_manifest: Path, tmp_path: Path, override: str, told: str
) -> None:
    lines = tone_manifest.read_text().splitlines(keepends=True)
    for rank in range(2):
        part = tone_manifest.with_name(f"part{rank}.jsonl")
        part.write_text("".join(lines[: len(lines) - rank]))
    override = override.replace("{folder}", str(tone_manifest.parent))
    run = mpirun(2, "rank_job.py", "none", "0", "0", *tiny_overrides, override)
    assert run.returncode == 2, run.stdout
    assert "rank 1 on " in run.stdout and "differs from rank 0 on" in run.stdout
    assert re.search(told, run.stdout), run.stdout


@pytest.mark.slow
def test_ranks_that_ask_for_other_communicators_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """They would make other calls before the watchdog runs, and wait for ever."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import os\nfrom ds2.config.schema import CommConfig\nfrom ds2.distributed.launch import connect\n"
        "with connect(CommConfig(['auto', 'gloo'][int(os.environ['RANK'])]), 'cpu'): pass\n"
    )
    run = torchrun(2, str(script), timeout_s=60)
    assert "ranks were started with comm=auto and comm=gloo: start all with the same one" in run.stdout, run.stdout


@pytest.mark.slow
def test_a_rank_without_its_device_ends_the_job_under_mpi(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        "import os\nfrom ds2.config.schema import CommConfig\nfrom ds2.distributed.launch import connect\n"
        "device = ['cpu', 'cuda:99'][int(os.environ['OMPI_COMM_WORLD_RANK'])]\n"
        "with connect(CommConfig(), device): pass\n"
    )
    run = mpirun(2, str(script), timeout_s=60)
    assert run.returncode and run.stdout.count("rank 1: device='cuda:99'") >= 2, run.stdout

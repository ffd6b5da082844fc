"""Training on 1, 2 and 4 ranks: one answer, the same bits twice, clean stops, faults told with rank and step."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.launch import SUPPORT, TIMEOUT_S, mpirun
from support.rank_runs import SMOOTH, STEPS, Job, arguments, clean, same_bits, scores, state
from support.run_log import events, losses

from ds2.system.tensor_file import load

pytestmark = pytest.mark.slow


def train(ranks: int, *jobs: Job) -> subprocess.CompletedProcess[str]:
    return mpirun(ranks, "rank_job.py", *arguments(*jobs))


def test_any_number_of_ranks_gives_one_answer_and_the_same_bits_twice(
    tiny_overrides: list[str], tmp_path: Path
) -> None:
    names = ("one", "two", "adamw", "again", "plain", "four", "accumulated", "halves", "local")
    folders = {name: tmp_path / name for name in (*names, "drop1", "drop2", "drop4")}
    dropout = (*SMOOTH, "model.dropout=0.3", "augment.time_masks=1", "train.objective=ctc_crf")
    halved = (*SMOOTH, "train.accumulate=2", "batching.utterances=3")
    run = train(
        1,
        clean(tiny_overrides, folders["one"], *SMOOTH),
        clean(tiny_overrides, folders["accumulated"], *halved),
        clean(tiny_overrides, folders["drop1"], *dropout),
    )
    assert run.returncode == 0, run.stdout
    run = train(
        2,
        clean(tiny_overrides, folders["two"], *SMOOTH),
        clean(tiny_overrides, folders["adamw"]),
        clean(tiny_overrides, folders["again"]),
        clean(tiny_overrides, folders["plain"], "comm.overlap=false", "comm.bucket_mib=0.01"),
        clean(tiny_overrides, folders["halves"], *halved, "comm.bucket_mib=0.01"),
        clean(tiny_overrides, folders["local"], *SMOOTH, "comm.batch_norm=local"),
        clean(tiny_overrides, folders["drop2"], *dropout),
    )
    assert run.returncode == 0, run.stdout
    assert "2 ranks over mpi (comm=auto" in run.stdout and re.search(
        r"rank +host +process +threads +device", run.stdout
    )
    assert (
        len(re.findall(r"gradients travel from memory over mpi: [\d.e+]+ GB/s a rank in a sum of 4 MiB", run.stdout))
        == 7
    )
    assert run.stdout.count("epoch 1: dev WER") == 7  # seven trainings, each told by rank 0 alone
    run = train(4, clean(tiny_overrides, folders["four"], *SMOOTH), clean(tiny_overrides, folders["drop4"], *dropout))
    assert run.returncode == 0, run.stdout

    curve = losses(folders["one"])
    assert len(curve) == 9
    for name in ("two", "four"):
        assert losses(folders[name]) == pytest.approx(curve, rel=1e-4), name
        assert scores(folders[name]) == scores(folders["one"]), name
    assert losses(folders["halves"]) == pytest.approx(losses(folders["accumulated"]), rel=1e-4)
    assert same_bits(folders["adamw"], folders["again"]) and losses(folders["adamw"]) == losses(folders["again"])
    assert same_bits(folders["adamw"], folders["plain"])  # neither overlap nor bucket size changes a bit
    assert losses(folders["local"]) != pytest.approx(curve, rel=1e-3)  # a choice that does change the answer
    assert len(losses(folders["drop1"])) == 9
    for name in ("drop2", "drop4"):
        assert losses(folders[name]) == pytest.approx(losses(folders["drop1"]), rel=1e-4), name
    assert {p.name for p in (folders["four"] / "ranks").iterdir()} == {f"rank-000{rank}.log" for rank in range(4)}
    assert {"allreduce_total_s", "allreduce_exposed_s", "data_s", "forward_s", "backward_s"} <= set(
        events(folders["four"], "train")[0]
    )


def test_ranks_whose_layers_take_pieces_of_a_batch_learn_what_one_learns_from_whole_batches(
    tiny_overrides: list[str], tmp_path: Path
) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    rms = ("model.norm=rms", "model.dropout=0.2")
    assert train(1, clean(tiny_overrides, whole, *SMOOTH, *rms)).returncode == 0
    job = ("pieces", *clean(tiny_overrides, halves, *SMOOTH, *rms)[1:])
    run = train(2, job)
    assert run.returncode == 0, run.stdout
    assert len(losses(whole)) == 9 and losses(halves) == pytest.approx(losses(whole), rel=1e-4)
    assert scores(halves) == scores(whole)


def test_a_step_that_one_rank_cannot_take_is_skipped_by_all(tiny_overrides: list[str], tmp_path: Path) -> None:
    run = train(2, ("poison", "1", "4", *tiny_overrides, *STEPS))
    assert run.returncode == 0, run.stdout
    assert len(re.findall(r"step skipped: loss nan, .*utterances: tones\d", run.stdout)) == 1
    assert events(tmp_path / "run", "train")[-1]["skipped_steps"] == 1
    assert max(losses(tmp_path / "run")) == 8
    assert all(bool(torch.isfinite(tensor).all()) for tensor in state(tmp_path / "run").values())


def test_sigterm_at_one_rank_saves_and_another_number_of_ranks_goes_on(
    tiny_overrides: list[str], tmp_path: Path
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    job = ("signal", "1", "4", *tiny_overrides, *STEPS, *SMOOTH, f"run_dir={broken}")
    run = train(2, clean(tiny_overrides, whole, *SMOOTH), job)
    assert run.returncode == 128 + 15, run.stdout
    assert "stopped after step 5: SIGTERM" in run.stdout
    run = train(3, clean(tiny_overrides, broken, *SMOOTH))
    assert run.returncode == 0, run.stdout
    assert losses(broken) == pytest.approx(losses(whole), rel=1e-4)
    assert len(losses(broken)) == 9 and scores(broken) == scores(whole)


@pytest.mark.parametrize(
    ("fault", "rank", "told"),
    [
        ("kill", 1, r"rank 1 .*exited on\s+signal 9[\s\S]*|got SIGTERM while it waited; last reports: .*step 5"),
        ("throw", 0, r"ds2: rank 0 on \S+ failed at step 5, between steps: RuntimeError: thrown on purpose"),
        ("lose", 1, r"ds2: rank 1 on \S+ failed at step 5, .* was lost at step 5, .*: CUDA error: .*\. What was saved"),
        ("hang", 1, r"ds2: rank 1 on \S+ hangs: no progress for \d+ s at step 5, .*comm.timeout_s=8"),
        ("freeze", 0, r"ds2: rank 0 on \S+ has been silent for \d+ s, its last report: step \d, .*comm.timeout_s=8"),
    ],
)
def test_a_fault_of_one_rank_ends_the_job_with_rank_step_and_reason(
    tiny_overrides: list[str], tmp_path: Path, fault: str, rank: int, told: str
) -> None:
    # No limit that a rank of a busy machine could exceed; one that hangs or freezes lowers it when it does.
    job = (fault, str(rank), "5", *tiny_overrides, "checkpoint.every_steps=1", "comm.timeout_s=600")
    run = train(2, job)  # fails after TIMEOUT_S, far below the hour that the faults would take: the job must be ended
    assert run.returncode != 0
    assert re.search(told, run.stdout), run.stdout
    if fault == "kill":
        assert "got SIGTERM while it waited; last reports" in run.stdout and "step 5" in run.stdout
    saved = load(tmp_path / "run" / "trainer.safetensors")[1]["progress"]["step"]
    assert saved == 5 or (fault == "freeze" and saved == 4)  # frozen while the state of step 5 was being written


def test_a_mistake_that_all_ranks_meet_is_printed_once(tiny_overrides: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    run = train(2, ("none", "0", "0", *tiny_overrides, f"run_dir={tmp_path / 'file' / 'run'}"))
    assert run.returncode == 2, run.stdout
    assert (
        len(re.findall(r"ds2: rank 0 on \S+ failed at step 0, start-up: run folder .* cannot be written", run.stdout))
        == 1
    )
    assert "rank 1 on" not in run.stdout and "Traceback" not in run.stdout


def test_ranks_on_two_hosts_have_the_bits_of_ranks_on_one(tiny_overrides: list[str], tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    command = [str(SUPPORT.parent.parent / "tools" / "two_hosts.sh"), "2", "-n", "2", sys.executable]
    command += [str(SUPPORT / "rank_job.py"), *clean(tiny_overrides, two)]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    said = run.stdout + run.stderr
    if run.returncode == 77:
        pytest.skip("network namespaces are not permitted here")
    assert run.returncode == 0, said
    assert re.search(r"0 +host1 .*\n +1 +host2 ", said), said
    assert train(2, clean(tiny_overrides, one)).returncode == 0
    assert losses(one) == losses(two) and same_bits(one, two)

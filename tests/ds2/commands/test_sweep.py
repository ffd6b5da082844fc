"""A sweep ends with its jobs ranked, in folders that say what each is."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

from ds2.commands.train import ALL, Job, finish, folder_name, ranking


def job(folder: Path, name: str, *scores: tuple[int, float | None, float], status: int = 0) -> Job:
    (folder / name).mkdir(parents=True)
    events = [{"event": "dev", "step": step, "wer": wer, "cer": cer} for step, wer, cer in scores]
    lines = [json.dumps(event) for event in [{"event": "train", "step": 1, "loss": 2.0}, *events]]
    (folder / name / "log.jsonl").write_text("\n".join(lines) + "\n")
    return Job(name, folder / name, status)


def test_jobs_are_ranked_by_their_best_evaluation(tmp_path: Path) -> None:
    jobs = [
        job(tmp_path, "a=1", (10, 0.5, 0.2), (20, 0.6, 0.1)),
        job(tmp_path, "a=2", (10, 0.4, 0.3)),
        job(tmp_path, "a=3", status=2),
    ]
    by_wer = [line.split()[4:] for line in ranking(jobs, "wer").splitlines()[1:]]
    assert by_wer == [["a=2"], ["a=1"], ["a=3", "(status", "2)"]]
    by_cer = ranking(jobs, "cer").splitlines()[1:]
    assert by_cer[0].split() == ["1", "60.00", "10.00", "20", "a=1"]


def test_equal_rates_are_ranked_by_the_other_one(tmp_path: Path) -> None:
    jobs = [job(tmp_path, "a=1", (10, 1.0, 0.9), (20, 1.0, 0.8)), job(tmp_path, "a=2", (10, 1.0, 0.7))]
    rows = [line.split()[1:] for line in ranking(jobs, "wer").splitlines()[1:]]
    assert rows == [["100.00", "70.00", "10", "a=2"], ["100.00", "80.00", "20", "a=1"]]


def test_the_table_and_a_picture_lie_in_the_sweeps_folder(tmp_path: Path) -> None:
    shown = finish(tmp_path, [job(tmp_path, "a=1", (10, 0.5, 0.2))], "wer")
    assert (tmp_path / "ranking.txt").read_text().rstrip("\n") == shown.rsplit("\n", 1)[0]
    assert (tmp_path / "ranking.png").read_bytes().startswith(b"\x89PNG")


def test_a_job_that_never_started_has_no_score(tmp_path: Path) -> None:
    assert ranking([Job("x=1", tmp_path / "none", 2)], "wer").splitlines()[1].split()[1] == "-"


def test_a_sweep_of_one_run_has_a_name(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shown = finish(tmp_path, [job(tmp_path, ALL, (10, 0.5, 0.2))], "wer")
    assert shown.splitlines()[1].split()[4] == "all"


def test_a_line_that_a_kill_tore_is_left_out(tmp_path: Path) -> None:
    torn = job(tmp_path, "a=1", (10, 0.5, 0.2))
    with (torn.run_dir / "log.jsonl").open("a") as log:
        log.write('{"event": "dev", "step": 20, "wer"\n\n7\n' + "[" * 9999)
    assert torn.evaluations() == [{"event": "dev", "step": 10, "wer": 0.5, "cer": 0.2}]


def test_folder_names_suit_file_systems() -> None:
    assert folder_name("model.hidden=256,optim.learning_rate=0.001") == "model.hidden=256,optim.learning_rate=0.001"
    assert folder_name("data.train=[/a/b.jsonl]") == "data.train=_a_b.jsonl_"
    assert folder_name("++model.convs.0.causal=True") == "model.convs.0.causal=True"
    several = folder_name("++model.convs.0.causal=True,++optim.layer_rates.a=1,data.train=[a,b],model.hidden=3")
    assert several == "++optim.layer_rates.a=1,data.train=_a,b_,model.convs.0.causal=True,model.hidden=3"
    assert folder_name(f"++model.convs.0.causal=True,a={'y' * 300}") == folder_name(
        f"a={'y' * 300},model.convs.0.causal=True"
    )
    long = [folder_name(f"x={'y' * 300}{n}") for n in (1, 2)]
    assert all(len(name) <= 120 for name in long) and long[0] != long[1]
    wide = [folder_name(f"alphabet.symbols={'語' * 90}{n}") for n in (1, 2)]  # 3 bytes each
    assert all(len(name.encode()) <= 255 for name in wide) and wide[0] != wide[1]

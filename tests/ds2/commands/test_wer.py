"""`ds2 wer`: manifests, plain text and Kaldi text in; two systems compared; input that cannot be scored."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ds2 import cli
from ds2.scoring.report import format_alignments, format_report
from ds2.scoring.wer import corpus_report


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], str]:
    def write(name: str, content: str) -> str:
        (tmp_path / name).write_text(content, encoding="utf-8")
        return str(tmp_path / name)

    return write


def main(arguments: list[str]) -> int:
    return cli.main(["wer", *arguments])


Write = Callable[[str, str], str]
REFERENCES = "the cat sat\n\na dog\n"
HYPOTHESES = "the bat sat on\nnoise\na\n"
KALDI_LINE = "%WER 80.00 [ 4 / 5, 2 ins, 1 del, 1 sub ]"


def test_plain_text_is_matched_by_line(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([write("ref.txt", REFERENCES), write("hyp.txt", HYPOTHESES)]) == 0
    assert capsys.readouterr().out.startswith(KALDI_LINE + "\n%CER ")


def test_kaldi_text_is_matched_by_id_and_takes_speakers(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    references = write("ref", "u1 the cat sat\nu2\nu3 a dog\n")
    hypotheses = write("hyp", "u3 a\nu1 the bat sat on\nu2 noise\n")
    speakers = write("utt2spk", "u1 ann\nu2 ann\nu3 bob\n")
    assert main([references, hypotheses, "--ids", "--utt2spk", speakers]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(KALDI_LINE)
    assert "bootstrap over 2 speakers" in printed
    assert "\nann       100.00       3       3      1      0      2\n" in printed


def test_manifests_are_matched_by_audio(write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def manifest(key: str, texts: list[str], folder: str) -> str:
        lines = [{"audio_filepath": f"{folder}{i}.wav", key: text, "speaker": f"s{i}"} for i, text in enumerate(texts)]
        return "".join(json.dumps(line) + "\n" for line in lines)

    references = write("ref.jsonl", manifest("text", REFERENCES.split("\n")[:3], "audio/"))
    hypotheses = manifest("pred_text", HYPOTHESES.split("\n")[:3], f"{tmp_path}/audio/")
    assert main([references, write("hyp.jsonl", "".join(reversed(hypotheses.splitlines(keepends=True))))]) == 0
    assert capsys.readouterr().out.startswith(KALDI_LINE)


def test_two_systems_are_compared_and_reports_written(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [write("ref", "a b c\n" * 40), write("bad", "a x x\n" * 40), write("good", "a b C\n" * 40)]
    assert main([*files, "--lower", "--out", str(tmp_path / "out"), "--errors"]) == 0
    printed = capsys.readouterr().out
    assert "B - A: -66.67 % absolute" in printed
    assert "p = 0.0005" in printed
    assert "HYP: a x x" in printed
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"report.txt", "report.json", "errors.txt", "errors.html"}


def test_no_references_give_no_error_rate(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([write("ref", ""), write("hyp", "")]) == 2
    assert "ref: holds no utterances, so there is no error rate" in capsys.readouterr().err


def test_utterances_late_in_a_recording_stay_apart(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"audio_filepath": "a.wav", "offset": offset, "text": text} for offset, text in
             ((12345.61, "one"), (12345.64, "two"))]  # fmt: skip
    references = write("ref.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    assert main([references, write("hyp.jsonl", "".join(json.dumps(line) + "\n" for line in reversed(lines)))]) == 0
    assert capsys.readouterr().out.startswith("%WER 0.00 [ 0 / 2,")


def test_missing_hypotheses_stop_unless_allowed(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    files = [write("ref", "u1 a\nu2 b c\n"), write("hyp", "u1 a\n"), "--ids"]
    assert main(files) == 2
    assert "1 of 2 references have no hypothesis: u2" in capsys.readouterr().err
    assert main([*files, "--missing", "empty"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("%WER 66.67 [ 2 / 3, 0 ins, 2 del, 0 sub ]")
    assert "u2" in captured.err


def test_standard_input_is_one_of_the_files(capsys: pytest.CaptureFixture[str]) -> None:
    for files in (["-", "-"], ["-", __file__, "--ids", "--utt2spk", "-"]):
        assert main(files) == 2
        assert "can be one of the files only" in capsys.readouterr().err


def test_a_manifest_needs_no_ids(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.dumps({"audio_filepath": f"{text[0]}.wav", "text": text}) for text in ("one two", "three")]
    assert main([write("ref", "\n".join(lines)), write("hyp", "\n".join(lines))]) == 0
    assert not capsys.readouterr().err


def test_ids_that_were_not_declared_are_pointed_out(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([write("ref", "u1 a\nu2 b c\n"), write("hyp", "u1 a\nu2 b\n")]) == 0
    assert "use --ids" in capsys.readouterr().err
    assert main([write("ref", "u1 a\nu2 b c\n"), write("hyp", "u2 b\nu1 a\n")]) == 0  # in another order
    assert "first words" in capsys.readouterr().err
    assert main([write("ref", "a (u1)\nb c (u2)\n"), write("hyp", "b (u2)\na (u1)\n")]) == 0
    assert "last words of all lines" in capsys.readouterr().err
    assert main([write("ref", "so a\nso b c\n"), write("hyp", "so a\nb\n")]) == 0
    assert main([write("ref", "a x\nb y\n"), write("hyp", "c x\nb y\n")]) == 0
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("reference", "hypothesis", "options", "message"),
    [
        (b"a\n", b"a\nb\n", [], "1 hypothesis without a reference: 2"),
        (b"\xff\xfea\n", b"a\n", [], ":1: is not UTF-8 but UTF-16"),
        (
            b'{"text": "a", "audio_filepath": "x/1.wav"}\n',
            b'{"text": "a", "audio_filepath": "/y/1.wav"}\n',
            [],
            "1 hypothesis without a reference: 1; references have such names, but other paths",
        ),
        (b"a\n", b"a\n", ["--out", __file__], f"{Path(__file__) / 'report.txt'} could not be written"),
        (b"u1 a\nu1 b\n", b"u1 a\n", ["--ids"], "ref:2: u1 is listed twice"),
        (b'{"text": "a"}\nplain\n', b"a\n", [], "ref:2: not JSON"),
        (b'{"txt": "a"}\n', b"a\n", [], "ref:1: has no string 'text': {'txt': 'a'}"),
        (
            b'{"text": "a", "audio_filepath": 3}\n',
            b"a\n",
            [],
            "ref:1: audio_filepath must be a string and offset a number, not 3",
        ),
        (b'{"text": "a", "audio_filepath": "\\u0000"}\n', b"a\n", [], "ref:1: audio_filepath or offset is invalid"),
        (b'{"text": ' + b"[" * 100_000, b"a\n", [], "ref:1: not JSON"),
        (b'{"text": 1' + b"0" * 5000 + b"}", b"a\n", [], "ref:1: not JSON"),
    ],
)
def test_input_that_cannot_be_scored(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    reference: bytes,
    hypothesis: bytes,
    options: list[str],
    message: str,
) -> None:
    (tmp_path / "ref").write_bytes(reference)
    (tmp_path / "hyp").write_bytes(hypothesis)
    assert main([str(tmp_path / "ref"), str(tmp_path / "hyp"), *options]) == 2
    assert message in capsys.readouterr().err
    assert main([str(tmp_path / "none"), str(tmp_path / "hyp")]) == 2
    assert "none: No such file" in capsys.readouterr().err


def test_aligned_errors_and_tables_by_hand() -> None:
    texts = ["the cat sat down", "x"], ["so the bat sat", "x"]
    report = corpus_report(*texts, names=["u1", "u2"], speakers=["ann", "bob"])
    assert format_alignments(report) == (
        "u1 (speaker ann): 1 sub, 1 del, 1 ins of 4 words\n"
        "REF: ** the cat sat down\n"
        "HYP: so the bat sat ****\n"
        "     I      S       D\n"
    )
    text = format_report(report)
    assert "%SER 50.00 [ 1 / 2 ]" in text
    assert "      1  inserted so\n      1  substituted cat -> bat\n      1  deleted down\n" in text
    report = corpus_report(["a", "b"], ["a", "b"])
    assert [utterance.name for utterance in report.utterances] == ["1", "2"]
    assert format_alignments(report) == "no errors\n" and "times" not in format_report(report)


def test_a_report_of_no_utterances_and_of_no_words() -> None:
    assert format_report(corpus_report([], [])).startswith("%WER 0.00 [ 0 / 0, 0 ins, 0 del, 0 sub ]")
    assert "%WER inf [ 1 / 0, 1 ins, 0 del, 0 sub ]" in format_report(corpus_report([""], ["a"]))


def test_composed_and_decomposed_letters_are_the_same(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    """And JSON that nests without end is a message."""
    nested = write("deep.jsonl", "{" + '"a":{' * 100_000)
    one, other = write("a.txt", "caf\u00e9 ol\u00e9\n"), write("b.txt", "cafe\u0301 ole\u0301\n")
    assert cli.main(["wer", str(one), str(other)]) == 0
    assert "%WER 0.00" in capsys.readouterr().out
    one, other = (write(f"{n}.jsonl", json.dumps({"text": t}) + "\n") for n, t in (("a", "\u00e9"), ("b", "e\u0301")))
    assert cli.main(["wer", str(one), str(other)]) == 0
    assert "%WER 0.00" in capsys.readouterr().out
    assert cli.main(["wer", str(nested), str(nested)]) == 2
    assert "deep.jsonl:1: not JSON" in capsys.readouterr().err


def test_fold_scores_again_without_case_and_punctuation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ref.txt").write_text("Hello, world!\n")
    (tmp_path / "hyp.txt").write_text("hello world\n")
    assert cli.main(["wer", str(tmp_path / "ref.txt"), str(tmp_path / "hyp.txt"), "--fold"]) == 0
    shown = capsys.readouterr().out
    assert "%WER 100.00 [ 2 / 2" in shown and "%WER 0.00 [ 0 / 2" in shown.partition("without case")[2]


def test_references_with_capitals_and_hypotheses_without_are_pointed_out(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    capitals, lower = write("capitals.txt", "YES SIR\n"), write("lower.txt", "yes sir\n")
    for arguments, warned in (
        ((capitals, lower), True),
        ((capitals, lower, "--lower"), False),
        ((lower, lower), False),
    ):
        assert cli.main(["wer", *map(str, arguments)]) == 0
        assert ("--lower" in capsys.readouterr().err) == warned

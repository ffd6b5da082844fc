"""`ds2 data split | stats | filter | alphabet` as a user calls them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from ds2.cli import main
from ds2.commands.compose import compose_config, with_search_path
from ds2.data import manifest as manifest_module
from ds2.data.manifest import Utterance, read_manifest, write_manifest
from ds2.text.alphabet import Alphabet


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """Ten speakers, two utterances each, one of them with digits."""
    texts = ["Schöne Grüße!", "Öl für Äpfel", "Das Jahr 21"]
    write_manifest(
        tmp_path / "all.jsonl",
        [
            Utterance(tmp_path / f"s{s}-{i}.wav", 1.0 + s + i, texts[(s + i) % 3], speaker=f"s{s}")
            for s in range(10)
            for i in range(2)
        ],
    )
    return tmp_path / "all.jsonl"


def test_split_writes_a_manifest_a_part(manifest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = manifest.parent / "parts"
    assert main(["data", "split", str(manifest), "--out", str(out), "--shares", "train=0.8", "dev=0.2"]) == 0
    train, dev = read_manifest(out / "train.jsonl"), read_manifest(out / "dev.jsonl")
    assert len(train) + len(dev) == 20 and not {u.speaker for u in train} & {u.speaker for u in dev}
    assert "dev.jsonl" in capsys.readouterr().out
    assert main(["data", "split", str(manifest), "--out", str(out), "--shares", "train=most"]) == 2
    assert "not PART=SHARE" in capsys.readouterr().err
    assert main(["data", "split", str(manifest), "--out", str(out), "--shares", "a=0.8", "b=0.1", "b=0.1"]) == 2
    assert "give each part once" in capsys.readouterr().err
    assert main(["data", "split", str(manifest), "--out", str(out), "--by", "utterance", "--shares", "a=1", "b=1"]) == 0
    a, b = ({u.speaker for u in read_manifest(out / f"{part}.jsonl")} for part in "ab")
    assert a & b, "only speakers are not divided"


def test_split_names_the_parts_of_an_earlier_split(manifest: Path, caplog: pytest.LogCaptureFixture) -> None:
    out = manifest.parent / "parts"
    three = ["--shares", "train=0.6", "dev=0.2", "test=0.2"]
    assert main(["data", "split", str(manifest), "--out", str(out), *three]) == 0
    assert "earlier split" not in caplog.text
    assert main(["data", "split", str(manifest), "--out", str(out)]) == 0
    assert "also holds test.jsonl, which this split did not write" in caplog.text


def test_split_refuses_utterances_without_a_duration(manifest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest.write_text(manifest.read_text("utf-8").replace('"duration": 1.0', '"duration": 0'), "utf-8")
    assert main(["data", "split", str(manifest), "--out", str(manifest.parent / "parts")]) == 2
    assert "1 of 20 utterances last 0 s, the first at" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        "split {0} --out {1} --shares all=0.9 dev=0.1",
        "stats {0} --json {0}",
        "alphabet {0} --out {0}",
        "shards {0} {1}",
        "check data.train=[{0}] --json {0}",
        "pieces {0} data.train=[{0}] --count 30",
        "import csv {0} {0}",
        "lexicon {0} --dictionary {0}",
        "filter {0} {0} --max-s 2",
    ],
)
def test_results_do_not_replace_what_they_are_made_of(
    manifest: Path, arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if arguments.startswith("shards"):
        manifest = manifest.rename(manifest.with_name("manifest.jsonl"))
    before = manifest.read_bytes()
    assert main(["data", *arguments.format(manifest, manifest.parent).split()]) == 2
    assert f"{manifest} is read too" in capsys.readouterr().err
    assert manifest.read_bytes() == before


def test_stats_counts_and_draws(manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, figures = tmp_path / "a.png", tmp_path / "a.json"
    assert main(["data", "stats", str(manifest), "--picture", str(picture), "--json", str(figures)]) == 0
    shown = capsys.readouterr().out
    assert "utterances    20" in shown and "speakers      10" in shown and "s9: " in shown
    statistics = json.loads(figures.read_text())
    assert statistics["duration_s"][0] == 1.0 and statistics["duration_s"][-1] == 11.0
    assert statistics["hours"] == pytest.approx(sum(1.0 + s + i for s in range(10) for i in range(2)) / 3600)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_has_the_kind_of_its_name(manifest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    for name, head in (("a", b"\x89PNG"), ("a.b.PNG", b"\x89PNG"), ("a.pdf", b"%PDF")):
        assert main(["data", "stats", str(manifest), "--picture", str(manifest.with_name(name))]) == 0
        assert manifest.with_name(name).read_bytes().startswith(head)
    assert main(["data", "stats", str(manifest), "--picture", str(manifest.with_name("a.xyz"))]) == 2
    assert "a.xyz: .xyz is no kind of picture: end its name in one of" in capsys.readouterr().err


def test_filter_keeps_what_meets_the_conditions_and_counts_the_rest(
    manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "some.jsonl"
    assert main(["data", "filter", str(manifest), str(out), "--max-s", "6", "--without-text", r"\d"]) == 0
    filtered = read_manifest(out)
    assert filtered and all(u.duration_s <= 6 and "21" not in u.text for u in filtered)
    shown = capsys.readouterr().out
    assert "longer than --max-s" in shown and "with --without-text" in shown
    assert main(["data", "filter", str(manifest), str(out), "--speakers", "nobody"]) == 2
    assert "20 not of --speakers; relax them" in capsys.readouterr().err
    assert main(["data", "filter", str(manifest), str(out), "--text", "("]) == 2
    assert "is not a regular expression" in capsys.readouterr().err


def test_filter_ends_where_a_pattern_backtracks_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(manifest_module, "_MAX_MATCH_S", 0.2)
    manifest, out = tmp_path / "m.jsonl", tmp_path / "out.jsonl"
    write_manifest(manifest, [Utterance(tmp_path / "1.wav", 1.0, "a" * 60)])
    assert main(["data", "filter", str(manifest), str(out), "--text", "(a*)*x"]) == 2
    assert "m.jsonl:1: '(a*)*x' was not matched within 0.2 s" in capsys.readouterr().err
    assert not out.exists()


def test_filter_names_speakers_that_the_manifest_lacks(manifest: Path, caplog: pytest.LogCaptureFixture) -> None:
    arguments = ["data", "filter", str(manifest), str(manifest.with_name("some.jsonl")), "--without-speakers", "s1"]
    assert main(arguments) == 0 and not caplog.text
    assert main([*arguments, "S2", "s3"]) == 0
    assert f"{manifest} has no speaker S2\n" in caplog.text


def test_alphabet_writes_one_that_a_run_can_use(
    manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "conf" / "alphabet" / "mine.yaml"
    assert main(["data", "alphabet", str(manifest), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "digits: make them words with alphabet.numbers=de" in shown
    searched = f"hydra.searchpath=[file://{tmp_path / 'conf'}]"
    made = Alphabet.from_config(compose_config([searched, "alphabet=mine", "run_dir=x"]).alphabet)
    assert set("äöüß") < set(made.symbols) and "!" not in made.symbols and "2" not in made.symbols
    filtered = shown.partition("or keep them with ")[2].split()[0]
    assert main(["data", "alphabet", str(manifest), filtered]) == 0
    assert 'symbols: " 12' in capsys.readouterr().out
    assert made.normalise("Schöne Grüße!") == ("schöne grüße", {})
    assert main(["data", "alphabet", str(manifest), "alphabet.numbers=de", "--least", "7"]) == 0
    shown = capsys.readouterr().out
    assert "numbers: de" in shown and "left out, occurring less than 7 times" in shown
    out.unlink()
    assert main(["data", "alphabet", str(manifest), "--least", "1000", "--out", str(out)]) == 2
    assert "--least 1000: no letter occurs so often" in capsys.readouterr().err and not out.exists()
    assert main(["data", "alphabet", str(manifest), "--out", str(out.with_name("english.yaml"))]) == 2
    assert "alphabet=english is one of ds2: give yours another name" in capsys.readouterr().err


def test_normalise_shows_what_becomes_of_a_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["data", "normalise", "Im Jahr 1995: 50 %", "alphabet=german", "alphabet.numbers=de"]) == 0
    assert capsys.readouterr().out == "im jahr neunzehnhundertfünfundneunzig fünfzig prozent\n"
    assert main(["data", "normalise", "alphabet=english_text", "alphabet.numbers=en", "--", "-5 ñ", "24/7"]) == 1
    assert capsys.readouterr().out == "minus five ñ\n24 7\n"
    assert "no sure reading of '24/7'" in caplog.text and "'ñ' U+00F1" in caplog.text
    (tmp_path / "words.txt").write_text("hello HH AH L OW\n", encoding="utf-8")
    assert main(["data", "normalise", "Hello", f"alphabet.lexicon={tmp_path / 'words.txt'}"]) == 0
    assert main(["data", "normalise", "Hello hell", f"alphabet.lexicon={tmp_path / 'words.txt'}"]) == 1
    assert capsys.readouterr().out == "hello\nhello hell\n" and "without a pronunciation: hell" in caplog.text
    assert main(["data", "normalise", "x=3", "alphabet. X=3", "alphabet.case=lower"]) == 1
    assert capsys.readouterr().out == "x=3\nalphabet. x=3\n"


@pytest.mark.parametrize("name", ["conf/alphabet/mine.yaml", "conf/mine.yaml", "conf/alphabet/mine.txt"])
def test_the_use_that_alphabet_shows_works(
    name: str, manifest: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(manifest.parent)
    assert main(["data", "alphabet", str(manifest), "--out", name]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    if moved := re.search(r"move it to (\S+), then ", last):
        Path(moved[1]).parent.mkdir(parents=True)
        Path(name).rename(moved[1])
    use = re.search(r"--config-dir \S+ alphabet=\S+", last)
    assert use is not None
    assert "ö" in compose_config(with_search_path([*use[0].split(), "run_dir=x"])).alphabet.symbols


def test_digits_join_apostrophes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_manifest(tmp_path / "m.jsonl", [Utterance(tmp_path / "a.wav", 1.0, "don't say 42")])
    assert main(["data", "alphabet", str(tmp_path / "m.jsonl")]) == 0
    setting = shlex.split(capsys.readouterr().out.partition("or keep them with ")[2])[0]
    assert main(["data", "alphabet", str(tmp_path / "m.jsonl"), setting]) == 0
    assert 'symbols: " \'24adnosty"' in capsys.readouterr().out


def test_alphabet_of_blank_transcripts_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_manifest(tmp_path / "blank.jsonl", [Utterance(tmp_path / "a.wav", 1.0, " \t")])
    assert main(["data", "alphabet", str(tmp_path / "blank.jsonl")]) == 2
    assert "blank.jsonl: no transcript has a letter or digit; alphabet.punctuation=keep" in capsys.readouterr().err


def test_alphabet_without_a_manifest_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["data", "alphabet", "alphabet.case=keep"])
    assert "required: MANIFEST" in capsys.readouterr().err

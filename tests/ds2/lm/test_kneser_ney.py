"""Modified Kneser-Ney against plain dictionaries and lmplz's own output, and its promises on memory and bad input."""

from __future__ import annotations

import gzip
import io
import logging
import lzma
import math
import re
from pathlib import Path

import pytest
import torch
from support.kneser_ney_oracle import Oracle
from support.lm_cases import same, zipf_text
from support.paths import REAL_DATA

from ds2.commands.lm import run
from ds2.lm import kneser_ney
from ds2.lm.files import load_ngram
from ds2.lm.kneser_ney import Estimate, estimate
from ds2.lm.ngram import LanguageModelError, NGram
from ds2.lm.sentences import SentenceReader, perplexity
from ds2.system import UserError
from ds2.text.alphabet import Alphabet

TINY = [
    "the cat sat on the mat",
    "the dog sat on the log",
    "a cat saw the dog",
    "the dog saw a cat on the mat",
    "on the mat the cat sat",
    "the cat",
]
BOOKS = REAL_DATA / "text/books_norm_42mb.txt.xz"
ALPHABET = Alphabet(("", *" 'abcdefghijklmnopqrstuvwxyz"))


def tiny_model(order: int = 3, prune: tuple[int, ...] = ()) -> NGram:
    return estimate([line.split() for line in TINY], order, prune).model


@pytest.mark.parametrize(("order", "prune"), [(1, (0,)), (2, (0, 0)), (3, (0, 0, 1)), (4, (0, 1, 1, 2)), (5, (0,) * 5)])
def test_equals_the_published_equations(order: int, prune: tuple[int, ...]) -> None:
    sentences = zipf_text()
    oracle = Oracle(sentences, order, prune)
    result = estimate(sentences, order, prune)
    for found, wanted in zip(result.discounts, oracle.discounts, strict=True):
        assert found == pytest.approx(wanted[1:])
    assert sum(result.remaining_counts) == len(oracle.ngrams)
    for sentence in [*sentences[:40], *zipf_text(40, 90, seed=4)]:
        known = [token if token in result.model.ids else "<unk>" for token in sentence]
        scores = result.model.sentence(sentence)
        history = ["<s>"]
        for token, score in zip([*known, "</s>"], scores, strict=True):
            assert score == pytest.approx(math.log(oracle.probability(history, token)), abs=2e-5)
            history.append(token)


def test_probabilities_sum_to_one_after_every_history() -> None:
    for prune in ((0,), (0, 0, 1)):
        model = estimate(zipf_text(), 3, prune).model
        states = torch.arange(model.backoff.numel())
        mass = model.score_all(states)[0].double().exp()
        mass[:, model.ids["<s>"]] = 0  # never predicted
        torch.testing.assert_close(mass.sum(1), torch.ones(len(states), dtype=torch.float64), atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("prune", "values"),
    [  # log10 probability and back-off, as `lmplz -o 3 --discount_fallback` of KenLM 0.3.0 wrote them for TINY
        ((0,), {"<unk>": (-1.2655363, 0), "<s>": (0, -0.5633074), "the": (-0.83813184, -0.14066151),
                "<s> on": (-1.0908277, -0.17609128), "the cat": (-0.88379276, -0.1217336),
                "on the mat": (-0.9753865, 0), "<s> a cat": (-0.27189106, 0), "the cat </s>": (-0.57109237, 0)}),
        ((0, 1, 1), {"<s>": (0, -0.4202164), "cat": (-1.1996179, -0.036212165), "dog": (-1.0661153, 0),
                     "mat </s>": (-0.49694228, 0), "the cat": (-0.87274134, -0.062147934),
                     "sat on the": (-0.028644128, 0), "on the mat": (-0.92070174, 0)}),
    ],
)  # fmt: skip
def test_equals_lmplz(prune: tuple[int, ...], values: dict[str, tuple[float, float]], tmp_path: Path) -> None:
    from ds2.lm.files import write_arpa

    write_arpa(tiny_model(3, prune), tmp_path / "tiny.arpa")
    rows = [line.split("\t") for line in (tmp_path / "tiny.arpa").read_text().splitlines() if "\t" in line]
    written = {row[1]: (float(row[0]), float(row[2]) if len(row) > 2 else 0.0) for row in rows}
    assert len(written) == (61 if prune == (0,) else 27)
    for gram, wanted in values.items():
        assert written[gram] == pytest.approx(wanted, abs=1e-6), gram


@pytest.mark.slow
@pytest.mark.skipif(not BOOKS.is_file(), reason="needs the books text beside the checkout")
def test_equals_lmplz_on_books() -> None:
    """37,045 lines; figures as `lmplz -o 4` and `query` of KenLM 0.3.0 printed them."""
    reader = SentenceReader([BOOKS], alphabet=ALPHABET)
    sentences = [tokens for _, tokens in zip(range(37045), reader, strict=False)]
    result = estimate(sentences, 4)
    assert result.counts == (23794, 219142, 430219, 492320)
    assert result.discounts[0] == pytest.approx((0.578392, 1.05346, 1.53737), abs=1e-5)
    assert result.discounts[1] == pytest.approx((0.773133, 1.11112, 1.38084), abs=1e-5)
    log10 = [score / math.log(10) for score in result.model.sentence(["the", "cat", "sat", "on", "the", "zzyzx"])]
    wanted = (-1.0780909, -3.309754, -3.9400012, -1.9953386, -0.49816823, -6.152666, -1.4235086)
    assert log10 == pytest.approx(wanted, abs=5e-6)


def test_small_memory_gives_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    sentences = zipf_text(3000)
    runs: list[int] = []
    merged = kneser_ney.merge_runs

    def counting(parts: list[list[kneser_ney.Ints]], chunk: int) -> object:
        runs.append(len(parts))
        return merged(parts, chunk)

    whole = estimate(sentences, 4, (0, 0, 1))
    monkeypatch.setattr(kneser_ney, "merge_runs", counting)
    pieces = estimate(sentences, 4, (0, 0, 1), memory_bytes=1)
    assert runs and min(runs) > 5
    assert same(whole.model, pieces.model) and whole.discounts == pieces.discounts


def test_orders_without_discounts_are_named_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        estimate([["the", "cat"]], 3)
    assert len(caplog.records) == 1 and "1-grams, 2-grams, 3-grams: too few" in caplog.text


def test_characters_and_pieces(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("the cat\na hat\n")
    characters = list(SentenceReader([tmp_path / "t.txt"], "character"))
    assert characters == [[*"the", "<space>", *"cat"], ["a", "<space>", *"hat"]]
    model = estimate(characters, 3, unit="character").model
    assert model.sentence([*"a cat"]) == model.sentence(["a", "<space>", *"cat"])
    (tmp_path / "p.txt").write_text("▁the ▁c at\n▁A\n")
    assert list(SentenceReader([tmp_path / "p.txt"], "piece")) == [["▁the", "▁c", "at"], ["▁A"]]


def test_text_is_normalised_and_skipped_lines_are_counted(tmp_path: Path) -> None:
    text = "The  CAT\n\nna\u00efve 42 cats\ncat's\n"
    (tmp_path / "t.txt").write_text(text, encoding="utf-8-sig")
    (tmp_path / "t.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "t.xz").write_bytes(lzma.compress(text.encode()))
    for name in ("t.txt", "t.gz", "t.xz"):
        reader = SentenceReader([tmp_path / name], alphabet=ALPHABET)
        assert list(reader) == [["the", "cat"], ["cat's"]]
        assert (reader.lines, reader.empty_lines, reader.skipped_lines, reader.tokens) == (4, 1, 1, 3)
        assert reader.characters == {"\u00ef": 1, "4": 1, "2": 1}
        assert "1 line skipped" in reader.report() and "U+00EF" in reader.report()
    assert list(SentenceReader([tmp_path / "t.gz"], alphabet=ALPHABET, unknown="drop"))[1] == ["nave", "cats"]
    with pytest.raises(LanguageModelError, match=r"t\.gz:3 .*U\+00EF"):
        list(SentenceReader([tmp_path / "t.gz"], alphabet=ALPHABET, unknown="stop"))


def test_perplexity_counts_ends_and_unknown_words() -> None:
    model = tiny_model()
    sentences = [["the", "cat"], ["the", "zebra", "sat", "on", "a", "mat"], ["zebra"]]
    scores = [model.sentence(sentence) for sentence in sentences]
    result = perplexity(model, sentences)
    assert (result.tokens, result.sentences, result.unknown) == (9, 3, 2)
    assert result.log_prob == pytest.approx(sum(map(sum, scores)), abs=1e-5)
    assert result.unknown_log_prob == pytest.approx(scores[1][1] + scores[2][0], abs=1e-5)
    with_unknown = math.exp(-sum(map(sum, scores)) / 12)
    assert f"perplexity {with_unknown:.2f} with OOVs" in result.format()
    assert "22.22 % (2 of 9 tokens" in result.format()


def test_command_builds_converts_and_scores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, binary, arpa = tmp_path / "t.txt", tmp_path / "t.lm", tmp_path / "t.arpa"
    text.write_text("\n".join(TINY).upper())
    build = ["build", str(text), "--order", "3", "--output", str(binary), "--arpa", str(arpa), "--heldout", str(text)]
    run(build)
    built = capsys.readouterr().out
    assert "3-grams 26 of 26" in built and "OOV rate 0.00 %" in built
    run(["convert", str(arpa), str(tmp_path / "u.lm")])
    capsys.readouterr()
    perplexities = []
    for model in (binary, arpa, tmp_path / "u.lm"):
        text.write_text("\n".join(TINY))
        run(["ppl", str(model), str(text)])
        perplexities.append(capsys.readouterr().out.splitlines()[1])
    assert len(set(perplexities)) == 1 and perplexities[0] in built
    with pytest.raises(LanguageModelError, match=r"--arpa .* writes ARPA"):
        run(["build", str(text), "--output", str(tmp_path / "v.arpa")])
    assert not (tmp_path / "v.arpa").exists()


@pytest.mark.parametrize(
    ("order", "prune", "match"),
    [
        (0, (), "order 0 is not in"),
        (21, (), "order 21"),
        (3, (0, 0, 99), "pruning 3-grams with at most 99"),
        (3, (0, 2, 1), "never decrease"),
        (3, (1,), "unigram"),
        (2, (0, 0, 0), "at most 2 thresholds"),
        (12, (), "no 11-gram.*--order 10"),
    ],
)
def test_settings_that_cannot_work_are_named(order: int, prune: tuple[int, ...], match: str) -> None:
    with pytest.raises(LanguageModelError, match=match):
        estimate([line.split() for line in TINY], order, prune)


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("empty.txt", b"", r"empty\.txt: the text is empty"),
        ("blank.txt", b"\n \n", r"blank\.txt: the text is empty"),
        ("digits.txt", b"1\n2 a\n", "no line is left: 2 lines, .* outside the alphabet: .*; choose --unknown drop"),
        ("latin.txt", "the cat\ncaf\u00e9\n".encode("latin-1"), r"latin\.txt:2: byte 4 is not UTF-8"),
        ("wide.txt", "the cat".encode("utf-16-le"), "UTF-16"),
        ("wide_bom.txt", "the cat".encode("utf-16"), "not UTF-8"),
        ("cut.txt.gz", gzip.compress(b"the cat\n" * 99, mtime=0)[:-9], r"cut\.txt\.gz: cannot be read"),
        ("cut.txt.xz", lzma.compress(b"the cat\n" * 99)[:-20], r"cut\.txt\.xz: cannot be read"),
        ("plain.xz", b"the cat\n", r"plain\.xz: cannot be read"),
    ],
)
def test_bad_texts_are_named(name: str, content: bytes, match: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    (tmp_path / "good.txt").write_text("the cat sat\n")
    command = ["build", "--order", "2", "--output", str(tmp_path / "out.lm")]
    with pytest.raises((LanguageModelError, UserError), match=match):
        run([*command, str(tmp_path / name)])
    assert not (tmp_path / "out.lm").exists()
    with pytest.raises((LanguageModelError, UserError), match=match):
        run([*command, str(tmp_path / "good.txt"), "--heldout", str(tmp_path / name)])


def test_reserved_tokens_and_missing_texts_are_named(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("a b\nc <unk>\n")
    with pytest.raises(LanguageModelError, match=r"p\.txt:2 has the reserved token <unk>"):
        list(SentenceReader([tmp_path / "p.txt"], "piece"))
    with pytest.raises(LanguageModelError, match=r"no text .*absent\.txt"):
        run(["build", str(tmp_path / "absent.txt"), "--output", str(tmp_path / "out.lm")])


def test_a_text_that_is_there_twice_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text, link, out = tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "out.lm"
    text.write_text("a b c d e\n")
    link.symlink_to(text)
    with pytest.raises(LanguageModelError, match=r"b\.txt is the same text as .*a\.txt: .*Name each text once"):
        run(["build", str(text), str(link), "--output", str(out)])
    assert not out.exists()
    run(["build", str(text), "--output", str(out), "--heldout", str(link)])
    assert "b.txt is held out and also a text of the model" in caplog.text


def test_a_text_may_be_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.lm"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a b c\nb c d\n")))
    run(["build", "-", "--order", "2", "--output", str(out)])
    assert {"a", "b", "c", "d"} <= set(load_ngram(out).ids)
    with pytest.raises(LanguageModelError, match=r"standard input .* can be read once"):
        run(["build", "-", "--output", str(out), "--heldout", "-"])


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(LanguageModelError, match=r"No space left.*--temp-dir"):
        estimate([line.split() for line in TINY], 2, temp_dir=tmp_path)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    for folder in (tmp_path / "absent", None):
        with pytest.raises(LanguageModelError, match=r"no temporary folder can be created in .*/absent .*--temp-dir"):
            estimate([line.split() for line in TINY], 2, temp_dir=folder)


def test_an_estimate_has_counts_and_discounts() -> None:
    result: Estimate = estimate([line.split() for line in TINY], 3, (0, 1, 1))
    assert result.counts == (12, 23, 26) and result.remaining_counts == (12, 9, 6)


@pytest.mark.parametrize(
    ("unit", "tokens"),
    [
        ("word", "'ab', 'éa' OOV, '</s>'"),
        ("character", "'a', 'b', ' ', 'é' OOV, 'a', '</s>'"),
        ("piece", "'\u2581ab', 'éa' OOV, '</s>'"),
    ],
)
def test_a_query_marks_tokens_that_the_model_lacks(
    unit: str, tokens: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("ab abb\nba\n", encoding="utf-8")
    (tmp_path / "two.pieces").write_text("\u2581a\n\u2581ab\n\u2581\na\nb\n", encoding="utf-8")
    cut = ["--symbols", " ab", "--pieces", str(tmp_path / "two.pieces"), "--unit", unit]
    model = str(tmp_path / "out.lm")
    run(["build", str(tmp_path / "text.txt"), "--order", "2", "--output", model, *cut])
    monkeypatch.setattr("sys.stdin", io.StringIO("Ab  éa\n"))
    capsys.readouterr()
    run(["query", model])
    total, _, listed = capsys.readouterr().out.partition(": ")
    scores = [float(score) for score in re.findall(r"-\d+\.\d+", listed)]
    assert re.sub(r" -\d+\.\d+", "", listed).strip() == tokens and sum(scores) == pytest.approx(float(total), abs=1e-3)

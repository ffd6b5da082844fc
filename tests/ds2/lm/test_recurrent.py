"""The recurrent language model: beside torch's LSTM, as probabilities, what training makes of it, and bad input."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from ds2_ops import lstm
from torch import nn

from ds2.commands.lm import run
from ds2.config.schema import ConfigError
from ds2.lm.files import load_ngram
from ds2.lm.ngram import LanguageModelError
from ds2.lm.recurrent import RecurrentLM, RecurrentShape, load_recurrent, save_recurrent
from ds2.lm.recurrent_training import TrainingProgress, TrainingSettings, TrainingText, plan_batches, train
from ds2.model.checkpoint import load_model
from ds2.system.tensor_file import CheckpointError, save
from ds2.text.alphabet import Alphabet

AB = Alphabet(("", " ", "a", "b"))
PIECES = Alphabet(("", "\u2581a", "\u2581", "a", "b"))


def small(alphabet: Alphabet = AB, seed: int = 1, **shape: float) -> RecurrentLM:
    torch.manual_seed(seed)
    return RecurrentLM(alphabet, replace(RecurrentShape(hidden=16, layers=2), **shape)).eval()  # type: ignore[arg-type]


def test_layers_equal_torch_lstm_with_skips() -> None:
    model = small()
    tokens = torch.randint(4, (7, 3))
    with torch.no_grad():
        x = model.embedding(tokens)
        for layer in model.layers:
            assert isinstance(layer, nn.LSTM)
            x = x + layer(x)[0]
        found = model(tokens, torch.tensor([7, 7, 7]))
    # float32 sums of 16 terms, two layers of seven steps: each rounds to 2^-24 of values of about 1
    assert torch.allclose(found, model.classifier(x), atol=7 * 2 * 16 * 2**-24)


def test_dropout_of_recurrent_weights_applies_in_training_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are left out once a batch, the others as much larger (Merity et al. 2018); gradients follow them."""
    seen: list[torch.Tensor] = []

    def recorded(z: torch.Tensor, weight: torch.Tensor, **given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        seen.append(weight)
        return lstm(z, weight, **given)

    monkeypatch.setattr("ds2.lm.recurrent.lstm", recorded)
    model, tokens, lengths = small(dropout=0.25), torch.randint(4, (5, 3)), torch.tensor([5, 5, 5])
    model(tokens, lengths)
    whole = [layer.weight_hh_l0 for layer in model.layers if isinstance(layer, nn.LSTM)]
    assert all(given is weight for given, weight in zip(seen, whole, strict=True))
    seen.clear()
    model.train()(tokens, lengths).sum().backward()
    for given, weight in zip(seen, whole, strict=True):
        left_out = given == 0
        torch.testing.assert_close(given, (weight / 0.75).masked_fill(left_out, 0.0))
        spread = math.sqrt(0.25 * 0.75 / weight.numel())
        assert abs(float(left_out.float().mean()) - 0.25) < 5 * spread
        assert weight.grad is not None and not weight.grad[left_out].any() and weight.grad.any()
    torch.manual_seed(7)
    first = model(tokens, lengths)
    assert not torch.equal(first, model(tokens, lengths))


def test_scores_are_log_probs_of_texts() -> None:
    """All texts of up to three letters and spaces, and all longer ones, take one together."""
    model = small(seed=2)
    labels = range(1, len(AB))
    total, open_ended = 0.0, 0.0
    for count in range(4):
        texts = list(itertools.product(labels, repeat=count))
        targets = torch.tensor([[*text, 0] for text in texts]).t()
        scores = model.log_probs(targets, torch.full((len(texts),), count + 1)).detach().double()
        total += float(scores.sum(0).exp().sum())
        open_ended = float(scores[:-1].sum(0).exp().sum())  # of three labels without the end behind them
        if count == 3:
            total += open_ended - float(scores.sum(0).exp().sum())
    assert total == pytest.approx(1.0, abs=1e-5)


def test_a_score_does_not_depend_on_the_batch() -> None:
    model = small()
    texts = ["a", "ab ba", "", "b" * 40, "ab  BA "]
    together = model.score(texts)
    assert together[1] == together[4]  # normalised alike
    for text, score in zip(texts, together, strict=True):
        assert model.score([text])[0] == pytest.approx(score, rel=1e-5)
    assert model.score([]) == []


def test_pieces_are_tokens_too() -> None:
    model = small(PIECES)
    [score] = model.score(["ab a"])
    spelled = PIECES.spell("ab a")
    wanted = model.log_probs(torch.tensor([[*spelled, 0]]).t(), torch.tensor([len(spelled) + 1]))
    assert score == pytest.approx(float(wanted.detach().double().sum()), rel=1e-5)


def _text(folder: Path) -> Path:
    (folder / "text.txt").write_text("the cat sat\non the mat\n" * 20, encoding="utf-8")
    return folder / "text.txt"


def test_spans_cover_every_line_once() -> None:
    lines = [list(line) for line in ("a", "bb", "aba", "b", "aaaaaaaa")]
    text = TrainingText.of(([c if c != " " else "<space>" for c in line] for line in lines), AB)
    rng = np.random.default_rng(1)
    for join, longest in ((1, 100), (3, 100), (3, 4)):
        found = text.draw_spans(join, longest, rng)
        spelled = ["".join(AB.symbols[label] for label in text.labels[at : at + n]) for at, n in found.tolist()]
        assert all(1 <= n <= longest for _, n in found.tolist())
        joined = " ".join(spelled) if longest == 100 else "".join(spelled).replace(" ", "")
        assert joined == (" " if longest == 100 else "").join("".join(line) for line in lines)
        if join == 1 and longest == 100:
            assert spelled == ["".join(line) for line in lines]
    batches = plan_batches(text.draw_spans(3, 100, rng), 12, rng)
    assert sorted(row for batch in batches for row in batch.tolist()) == sorted(
        row for batch in plan_batches(np.concatenate(batches), 1, rng) for row in batch.tolist()
    )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_training_learns_a_regular_text(device: str) -> None:
    """Of words that alternate, all but the first and the end are certain: one bit and the end's are left."""
    lines = [["a", "b"] * 3, ["b", "a"] * 3] * 64
    model = small(seed=3, dropout=0.0).to(device)
    told: list[TrainingProgress] = []
    settings = TrainingSettings(epochs=40, learning_rate=1e-2, warmup_steps=5, batch_tokens=256)
    train(model, TrainingText.of(iter(lines), AB), settings, told.append, report_every_s=0.0)
    good, bad = model.score(["ababab", "abbaba"])
    assert good > -1.0 > bad  # ln 2 = 0.69 at the first letter, the rest learnt
    assert told[-1].part > 0.9 and told[-1].loss < told[0].loss and told[-1].epoch == 40


def test_equal_seeds_give_equal_models() -> None:
    text = TrainingText.of(iter([["a", "b", "<space>", "b"]] * 20), AB)
    found = []
    for _ in range(2):
        model = small()
        train(model, text, TrainingSettings(epochs=2, batch_tokens=32, join=2), lambda _: None)
        found.append(model.state_dict())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_the_time_limit_ends_training() -> None:
    model = small()
    text = TrainingText.of(iter([["a"]] * 5), AB)
    told: list[TrainingProgress] = []
    passed = train(model, text, TrainingSettings(epochs=10**9, max_minutes=1e-3), told.append)
    assert told == [passed] and 0 < passed.step == passed.epoch and passed.part < 1


def test_a_saved_model_loads(tmp_path: Path) -> None:
    model = small(PIECES)
    save_recurrent(tmp_path / "lm.safetensors", model, {"epoch": 3})
    loaded = load_recurrent(tmp_path / "lm.safetensors")
    assert loaded.shape == model.shape and loaded.alphabet == model.alphabet
    assert loaded.score(["ab"]) == model.score(["ab"])


def test_a_text_has_the_labels_of_a_large_alphabet() -> None:
    last = chr(0x2A6DF)
    many = Alphabet(
        ("", *map(chr, range(0x4E00, 0xA000)), *map(chr, range(0xAC00, 0xD7A4)), *map(chr, range(0x20000, 0x2A6E0)))
    )
    assert TrainingText.of(iter([[last, "\u4e00"]]), many).labels.tolist() == [len(many) - 1, 1]


def test_bad_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(LanguageModelError, match="does not know 'c'"):
        small().score(["abc"])
    with pytest.raises(ConfigError, match="hidden=0"):
        small(hidden=0)
    with pytest.raises(LanguageModelError, match=r"there is no recurrent language model .*none: `ds2 lm train TEXT"):
        load_recurrent(tmp_path / "none")
    save_recurrent(tmp_path / "lm", small(), {})
    for changes in ({"hidden": 65_536}, {"layers": 3}, {"hidden": 0}, {"hidden": "16"}):
        model = small()
        shape = {"hidden": 16, "layers": 2, "dropout": 0.1, **changes}
        metadata = {"kind": "recurrent-lm", "shape": shape, "alphabet": AB.to_dict(), "facts": {}}
        save(tmp_path / "misfit", model.state_dict(), metadata)
        with pytest.raises(CheckpointError, match="misfit: "):
            load_recurrent(tmp_path / "misfit")
    damaged = bytearray((tmp_path / "lm").read_bytes())
    damaged[-3] ^= 1
    (tmp_path / "damaged").write_bytes(damaged)
    with pytest.raises(CheckpointError, match="digest"):
        load_recurrent(tmp_path / "damaged")
    run(["build", str(_text(tmp_path)), "--output", str(tmp_path / "ngram"), "--order", "2"])
    with pytest.raises(LanguageModelError, match="ngram is of kind n-gram, not a recurrent language model"):
        load_recurrent(tmp_path / "ngram")  # whose digest is not of its tensors' content
    with pytest.raises(CheckpointError, match="ngram is of kind n-gram, not a model"):
        load_model(tmp_path / "ngram")
    with pytest.raises(LanguageModelError, match="lm: is a recurrent-lm, not an n-gram model: `ds2 lm build` writes"):
        load_ngram(tmp_path / "lm")


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, held = tmp_path / "text.txt", tmp_path / "held.jsonl"
    text.write_text("the cat sat\non the mat\n" * 20, encoding="utf-8")
    held.write_text('{"audio_filepath": "x.wav", "duration": 1, "text": "THE MAT"}\n', encoding="utf-8")
    lm = str(tmp_path / "lm.safetensors")
    sizes = ["--hidden", "8", "--layers", "1", "--epochs", "2", "--device", "cpu"]
    run(["train", str(text), "--output", lm, *sizes, "--heldout", str(held)])
    said = capsys.readouterr().out
    assert "40 lines, 420 characters" in said and "1 line, 2 words, 0 empty lines\nperplexity" in said
    run(["ppl", lm, str(held)])
    [first], [second] = (re.findall(r"perplexity ([\d.]+)", part) for part in (said, capsys.readouterr().out))
    assert math.isclose(float(first), float(second), rel_tol=1e-4)
    with pytest.raises(LanguageModelError, match="there is no text"):
        run(["train", str(tmp_path / "none"), "--output", lm])
    odd = tmp_path / "odd.txt"
    odd.write_text("caf\u00e9\n" + "ab" * 600 + "\n", encoding="utf-8")
    run(["ppl", lm, str(odd)])  # lines in other characters are skipped, as for n-grams
    printed = capsys.readouterr().out
    assert "2 lines, 1 word, 0 empty lines, 1 line skipped" in printed
    assert "perplexity inf a word" in printed  # a word may be a whole line: texts without spaces
    run(["ppl", lm, str(odd), "--unknown", "drop"])
    assert "2 lines, 2 words" in capsys.readouterr().out


def test_a_model_of_pieces_scores_texts_of_characters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, lm = tmp_path / "text.txt", str(tmp_path / "lm.safetensors")
    text.write_text("AB ABB\nBA\n" * 10, encoding="utf-8")
    (tmp_path / "two.pieces").write_text("\u2581a\n\u2581ab\n\u2581\na\nb\n", encoding="utf-8")
    cut = ["--symbols", " ab", "--pieces", str(tmp_path / "two.pieces")]
    sizes = ["--hidden", "8", "--layers", "1", "--epochs", "1", "--device", "cpu"]
    run(["train", str(text), "--output", lm, *cut, *sizes])
    assert "20 lines, 60 pieces" in capsys.readouterr().out  # _ab, _ab b, and _ b a
    alphabet = load_recurrent(Path(lm)).alphabet
    characters = Alphabet(("", " ", "a", "b"))
    assert characters.normalises_as(alphabet) and alphabet.normalises_as(characters)
    assert not characters.normalises_as(Alphabet(("", " ", "A", "B"), "upper"))
    assert not characters.normalises_as(Alphabet(("", " ", "a", "b"), replace=(("c", "a"),)))
    with pytest.raises(LanguageModelError, match="--pieces and --model exclude each other"):
        run(["train", str(text), "--output", lm, *cut, "--model", lm])


@pytest.mark.parametrize("command", [["train"], ["build", "--unit", "character"], ["build", "--unit", "piece"]])
def test_a_network_of_phones_has_no_letters_for_a_model(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("hello\n", encoding="utf-8")
    [kind, *options] = command
    with pytest.raises(LanguageModelError, match=r"--model english: this network writes phones.*: leave --model out"):
        run([kind, str(tmp_path / "text.txt"), "--output", str(tmp_path / "lm"), "--model", "english", *options])


@pytest.mark.gpu
def test_a_gpu_gives_the_same_scores() -> None:
    model = small(hidden=64)
    texts = ["ab ba", "b" * 30, "a b a b"]
    here = torch.tensor(model.score(texts))
    there = torch.tensor(model.cuda().score(texts))
    counts = torch.tensor([len(text) + 1 for text in texts])
    # bfloat16 rounds to 2^-9; a label's log-prob is a sum of 64 outputs below 2 layers + 1, with weights of 1 / 8
    assert ((here - there).abs() <= counts * 3 * 2**-9 * 8).all()

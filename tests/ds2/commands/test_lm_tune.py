"""`ds2 lm tune` as a user calls it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ds2.cli import main
from ds2.config.schema import Config
from ds2.data.manifest import read_manifest, write_manifest
from ds2.lm.files import write_arpa
from ds2.lm.kneser_ney import estimate
from ds2.recognition.settings import decode_settings, tuned_file


@pytest.mark.parametrize("method", ["beam", "native"])
def test_what_was_tuned_is_what_evaluate_takes(
    method: str,
    make_model: Callable[..., Path],
    tone_manifest: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, text, lm = make_model(), tmp_path / "text.txt", tmp_path / "text.lm"
    text.write_text("".join(f"{u.text}\n" for u in read_manifest(tone_manifest)), encoding="utf-8")
    assert main(["lm", "build", str(text), "--output", str(lm), "--order", "2", "--symbols", "abc "]) == 0
    tuned_file(model).write_text("method: [")  # damaged: tuning is the way out
    tune = ["lm", "tune", str(model), str(lm), str(tone_manifest), "--device", "cpu"]
    grid = ["--alphas", "0:1:2", "--betas", "0:1:2", "--beam", "8"]
    chosen = [] if method == "beam" else [f"decode={method}", "decode.threads=1", "decode.hot_words=[ab]"]
    assert main([*tune, *grid, *chosen]) == 0
    settings = decode_settings(model, Config(run_dir=""))
    assert settings.method == method and settings.lm == str(lm) and settings.hot_words == ["ab"] * bool(chosen)
    assert tuned_file(model).with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    assert main([*tune, *grid, "decode=greedy"]) == 2
    assert "no weights to tune: take decode=beam or decode=native" in capsys.readouterr().err


def test_a_network_of_phones_has_a_grid_of_its_own_and_the_beam_of_the_settings(
    make_model: Callable[..., Path], tone_manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    utterances = read_manifest(tone_manifest)[:2]
    words = sorted({word for u in utterances for word in u.text.split()})
    lexicon, lm, dev = tmp_path / "lexicon.txt", tmp_path / "words.arpa", tmp_path / "dev.jsonl"
    write_manifest(dev, utterances)
    lexicon.write_text("".join(f"{word} {' '.join(word.upper())}\n" for word in words), encoding="utf-8")
    write_arpa(estimate([words] * 3, 1, [0]).model, lm)
    model = make_model(f"alphabet.lexicon={lexicon}")
    command = ["lm", "tune", str(model), str(lm), str(dev), "--device", "cpu"]
    assert main([*command, "decode=phones", "decode.beam=4"]) == 0
    trials = [line.split() for line in capsys.readouterr().out.splitlines() if " alpha " in line and " beam " in line]
    grid = [(float(alpha), float(beta), int(beam)) for _, _, alpha, _, beta, _, beam, *_ in trials[:12]]
    assert grid == [(alpha, beta, 4) for alpha in (0.4, 0.8, 1.2, 1.6) for beta in (0.0, 0.5, 1.0)]


@pytest.mark.parametrize("values", ["0:1", "a:b:c", "0:1:2:3", "0:nan:2", "2:1:2", "0:1:1.5"])
def test_a_grid_says_how_it_is_written(values: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["lm", "tune", "english", "books.lm", "--alphas", values])
    assert f"{values!r} is not LOW:HIGH:COUNT with" in capsys.readouterr().err

"""Byte-pair pieces: learnt, spelled as sentencepiece spells, kept in configs, checkpoints and language models."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from ds2.cli import main
from ds2.commands.compose import compose_config
from ds2.config.schema import AlphabetConfig, Config, ConfigError
from ds2.lm.files import load_ngram
from ds2.lm.sentences import SentenceReader
from ds2.model.checkpoint import load_model
from ds2.text.alphabet import WORD_MARK, Alphabet, AlphabetError
from ds2.text.pieces import learn_pieces, read_pieces

sentencepiece = pytest.importorskip("sentencepiece")
BASE = Alphabet.from_config(AlphabetConfig())
TEXTS = ["the cat sat on the mat", "the other cat", "that hat, this hat", "a cat and the mat on the hat"] * 3


def alphabet(count: int = 40) -> Alphabet:
    return Alphabet.from_config(AlphabetConfig(pieces=learn_pieces(TEXTS, BASE, count)))


def test_pieces_of_words_equal_those_of_sentencepiece() -> None:
    draw = random.Random(1)
    texts = [" ".join("".join(draw.choices("abcde", k=draw.randint(1, 9))) for _ in range(6)) for _ in range(80)]
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=written, model_type="bpe", vocab_size=60, minloglevel=2,
        normalization_rule_name="identity", character_coverage=1.0, bos_id=-1, eos_id=-1,
    )  # fmt: skip
    theirs = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    pieces = learn_pieces(texts, Alphabet(("", *" abcde")), 59)
    ours = Alphabet.from_config(AlphabetConfig(symbols=" abcde", pieces=pieces))
    assert pieces == [theirs.id_to_piece(i) for i in range(1, theirs.get_piece_size())]
    for text in texts:
        assert [ours.symbols[label] for label in ours.encode(text)] == theirs.encode(text, out_type=str)
        assert ours.decode(ours.encode(text)).replace(WORD_MARK, " ").strip() == text


def test_long_transcripts_count_too() -> None:
    long = " ".join(["abab"] * 1000)
    assert "abab" in "".join(learn_pieces([long], Alphabet(("", *" abcd")), 8))
    assert f"{WORD_MARK}abab" in learn_pieces(["cd", long], Alphabet(("", *" abcd")), 12)


def test_every_character_of_the_alphabet_is_a_piece() -> None:
    ours = alphabet()
    assert len(ours) == 41
    assert ours.decode(ours.encode("quiz")) == f"{WORD_MARK}quiz"
    assert ours.normalise("hé the")[1] == {"é": 1}
    japanese = Alphabet(("", *" あいう龍"))  # which come after the word mark
    assert set("あいう龍") <= set(learn_pieces(["あい う"] * 9, japanese, 12))
    with pytest.raises(AlphabetError, match="use more"):
        alphabet(28)
    with pytest.raises(AlphabetError, match="no text"):
        learn_pieces(["", "..."], BASE, 40)
    with pytest.raises(AlphabetError, match=r"lacks \['b'\]"):
        Alphabet.from_config(AlphabetConfig(symbols="ab ", pieces=[WORD_MARK, "a"]))


def test_pieces_are_restored_from_a_checkpoint_and_a_config(tmp_path: Path) -> None:
    ours, file = alphabet(), tmp_path / "cat.pieces"
    assert Alphabet.from_dict(ours.to_dict()) == ours
    file.write_text("".join(piece + "\n" for piece in ours.symbols[1:]))
    assert Alphabet.from_config(compose_config([f"alphabet.pieces_file={file}"]).alphabet) == ours
    file.write_text("\ufeff" + "\n".join(ours.symbols[1:]), encoding="utf-8")  # as some editors save it
    assert read_pieces(file) == list(ours.symbols[1:])
    for text, message in (
        ("", "no file of pieces"),
        ("a b\n", "no file of pieces"),
        (None, "no file of pieces"),
    ):
        file.unlink(missing_ok=True)
        if text is not None:
            file.write_text(text)
        with pytest.raises(AlphabetError, match=message):
            read_pieces(file)


def test_a_model_of_sentencepiece_is_read(tmp_path: Path) -> None:
    for kind in ("bpe", "unigram"):
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS), model_prefix=str(tmp_path / kind), model_type=kind, vocab_size=30,
            hard_vocab_limit=False, minloglevel=2,
        )  # fmt: skip
    assert f"{WORD_MARK}the" in read_pieces(tmp_path / "bpe.model")
    with pytest.raises(AlphabetError, match="byte-pair"):
        read_pieces(tmp_path / "unigram.model")


def test_a_warning_says_if_transcripts_give_fewer_pieces(
    tone_manifest: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pieces = tmp_path / "tones.pieces"
    base = [f"data.train=[{tone_manifest}]", "alphabet.symbols='abc '"]
    assert main(["data", "pieces", str(pieces), *base, "--count", "500"]) == 0
    found = read_pieces(pieces)
    assert len(found) < 500 and f"only {len(found)} of 500 pieces" in caplog.text
    (tmp_path / "lexicon.txt").write_text("ab EY B\n", encoding="utf-8")  # as of a recipe of phones
    assert (
        main(["data", "pieces", str(pieces), *base, f"alphabet.lexicon={tmp_path / 'lexicon.txt'}", "--count", "500"])
        == 0
    )
    assert read_pieces(pieces) == found


def test_a_model_of_pieces_trains_decodes_and_gets_a_language_model(
    tiny_config: Callable[..., Config], tone_manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ds2.training.loop import train

    pieces = tmp_path / "tones.pieces"
    base = [f"data.train=[{tone_manifest}]", "alphabet.symbols='abc '"]
    assert main(["data", "pieces", str(pieces), *base, "--count", "7"]) == 0
    said = capsys.readouterr()
    assert "7 pieces" in said.out and "no more to join" not in said.err
    config = tiny_config(f"alphabet.pieces_file={pieces}", "train.epochs=1")
    train(config, Path(config.run_dir))
    loaded = load_model(config.run_dir)
    assert loaded.alphabet.symbols[1:] == tuple(read_pieces(pieces))
    text, lm = tmp_path / "text.txt", {unit: tmp_path / f"{unit}.lm" for unit in ("word", "piece")}
    text.write_text("abc cab\nab ba\nabc ab c\n" * 5)
    for unit, path in lm.items():
        arguments = ["lm", "build", str(text), "--unit", unit, "--model", config.run_dir, "--order", "2"]
        assert main([*arguments, "--output", str(path)]) == 0
    assert set(load_ngram(lm["piece"]).vocabulary) <= {*loaded.alphabet.symbols, "<unk>", "<s>", "</s>"}
    evaluate = ["evaluate", config.run_dir, str(tone_manifest), "--device", "cpu", "--workers", "0"]
    for settings in (
        ["decode=greedy"],
        ["decode=beam", f"decode.lm={lm['word']}"],
        ["decode=beam", f"decode.lm={lm['word']}", "decode.lexicon=true"],
        ["decode=beam", f"decode.lm={lm['piece']}"],
    ):
        assert main([*evaluate, *settings]) == 0
    pieces.write_text(pieces.read_text() + "abcabc\n")
    with pytest.raises(ConfigError, match=r"alphabet\.pieces"):
        changed = tiny_config(f"alphabet.pieces_file={pieces}", "train.epochs=2")
        train(replace(changed, run_dir=config.run_dir), Path(config.run_dir))


def test_text_is_split_into_pieces_or_at_white_space(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("The CAT\n")
    ours = alphabet()
    [tokens] = SentenceReader([tmp_path / "t.txt"], "piece", ours)
    assert tokens == [ours.symbols[label] for label in ours.encode("the cat")]
    [as_is] = SentenceReader([tmp_path / "t.txt"], "piece", None)
    assert as_is == ["The", "CAT"]


def test_decoders_read_pieces_as_words() -> None:
    from ds2.config.schema import DecodeConfig
    from ds2.decoding.methods import make_decoder

    ours = alphabet()
    labels = ours.encode("the other cat")
    path = [label for one in labels for label in (one, 0)]
    log_probs = torch.full((len(path), 1, len(ours)), 1e-6)
    log_probs[range(len(path)), 0, path] = 1.0
    for method in ("greedy", "beam", "native"):
        if method == "native":
            pytest.importorskip("ctc_beam_decoder")
        [[found]] = make_decoder(DecodeConfig(method=method), ours, 0.02, torch.device("cpu")).decode(
            log_probs.log().log_softmax(2), torch.tensor([len(path)])
        )
        assert found.text == "the other cat" and found.labels == tuple(labels)
        assert [word.text for word in found.words] == ["the", "other", "cat"]


def test_merging_equals_one_merge_after_the_other() -> None:
    rng = random.Random(3)
    symbols = ["", WORD_MARK, "a", "b", "c"]
    for _ in range(40):
        piece = rng.choice(symbols[1:]) + rng.choice([s for s in symbols[2:] if not s.startswith(WORD_MARK)])
        if piece not in symbols:
            symbols.append(piece)
    alphabet = Alphabet(("", *symbols[4:], *symbols[1:4]))
    ranks = {symbol: rank for rank, symbol in enumerate(alphabet.symbols)}
    for _ in range(300):
        parts = [WORD_MARK, *rng.choices("abc", k=rng.randrange(1, 30))]
        word = "".join(parts[1:])
        while found := [(ranks[a + b], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]:
            _, at = min(found)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        assert [alphabet.symbols[label] for label in alphabet.spell(word)] == parts


def test_a_word_of_half_a_million_characters_is_split_into_pieces() -> None:
    alphabet = Alphabet(("", WORD_MARK, "a", "b", "ab", "abab"))
    assert len(alphabet.spell("ab" * 250_000)) == 1 + 125_000

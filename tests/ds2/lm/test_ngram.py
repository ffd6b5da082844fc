"""The n-gram automaton: batched, dense and single queries agree with a walk over the ARPA text; files; alphabets."""

from __future__ import annotations

import json
import logging
import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support.lm_cases import same, zipf_text

from ds2.config.schema import DecodeConfig
from ds2.decoding.methods import make_decoder
from ds2.lm import ngram as language_model
from ds2.lm.files import load_ngram, save_ngram, write_arpa
from ds2.lm.kneser_ney import estimate
from ds2.lm.ngram import LanguageModelError, NGram, from_levels, to_levels
from ds2.lm.sentences import perplexity
from ds2.system.tensor_file import make_header, read_header
from ds2.text.alphabet import Alphabet


@pytest.fixture(scope="module", params=[1, 2, 4])
def model(request: pytest.FixtureRequest) -> NGram:
    order: int = request.param
    return estimate(zipf_text(), order, (0, 0, 1)[:order]).model


class ArpaWalk:
    """Back-off by the definition, over the text of an ARPA file."""

    def __init__(self, model: NGram, folder: Path) -> None:
        write_arpa(model, folder / "m.arpa")
        self.order, self.entries = model.order, {}
        for line in (folder / "m.arpa").read_text().splitlines():
            if "\t" in line:
                log_prob, gram, *backoff = line.split("\t")
                self.entries[tuple(gram.split())] = (float(log_prob), float(backoff[0]) if backoff else 0.0)

    def log10(self, history: tuple[str, ...], word: str) -> float:
        history = history[max(0, len(history) - self.order + 1) :]
        if (*history, word) in self.entries:
            return self.entries[*history, word][0]
        return self.entries.get(history, (0.0, 0.0))[1] + self.log10(history[1:], word)


def test_queries_agree(model: NGram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walk = ArpaWalk(model, tmp_path)
    draw = random.Random(5)
    size, rows = len(model.vocabulary), 30
    states, singles = torch.full((rows,), model.start()), [model.start()] * rows
    histories: list[tuple[str, ...]] = [("<s>",)] * rows
    for _ in range(12):
        words = [draw.randrange(size) for _ in range(rows)]
        tokens = [model.vocabulary[word] for word in words]
        dense = model.score_all(states)
        with monkeypatch.context() as patch:
            patch.setattr(language_model, "DENSE_LIMIT_BYTES", 0)
            searched = model.score_all(states)
        torch.testing.assert_close(dense[0], searched[0])
        assert torch.equal(dense[1], searched[1])
        scores, following = model.score_batch(states, torch.tensor(words))
        at = torch.arange(rows), torch.tensor(words)
        torch.testing.assert_close(scores, dense[0][at])
        assert torch.equal(following, dense[1][at])
        for row, token in enumerate(tokens):
            score, singles[row] = model.score(singles[row], token)
            wanted = walk.log10(histories[row], token) * math.log(10)
            assert score == pytest.approx(wanted, abs=1e-5) and scores[row].item() == pytest.approx(wanted, abs=1e-5)
            histories[row] = (*histories[row], token)
        states = following
        assert states.tolist() == singles
    ends = [model.finish(state) for state in singles]
    wanted_ends = [walk.log10(history, "</s>") * math.log(10) for history in histories]
    assert ends == pytest.approx(wanted_ends, abs=1e-5)


def test_histories_with_equal_continuations_share_a_state(model: NGram) -> None:
    unseen = model.score(model.start(), "never-seen")[1]
    assert unseen == 0
    if model.order > 1:
        assert model.start() != 0
        rare_then_common = [model.score(model.score(s, "never-seen")[1], "w1")[1] for s in (0, model.start())]
        assert rare_then_common[0] == rare_then_common[1]


def test_levels_to_automaton_and_back(model: NGram) -> None:
    levels = to_levels(model)
    assert [len(level) for level in levels] == [
        b - a for a, b in zip(model.entry_starts, model.entry_starts[1:], strict=False)
    ]
    assert same(from_levels(levels, model.vocabulary, model.unit), model)


def test_a_binary_is_memory_mapped_and_equal_to_the_model(model: NGram, tmp_path: Path) -> None:
    save_ngram(model, tmp_path / "m.lm")
    loaded = load_ngram(tmp_path / "m.lm")
    assert same(loaded, model) and (loaded.order, loaded.unit) == (model.order, model.unit)
    assert [path.name for path in tmp_path.iterdir()] == ["m.lm"]


@pytest.mark.slow
def test_opening_reads_no_pages(tmp_path: Path) -> None:
    model = estimate(zipf_text(), 2).model
    tensors = {name: getattr(model, name) for name in language_model.TENSORS}
    padded: dict[str, Any] = {
        n: torch.cat((t, torch.full((1 << 22,), 2**31 - 1, dtype=t.dtype))) for n, t in tensors.items()
    }
    ends = {f"{name}_starts": (*getattr(model, f"{name}_starts")[:-1], padded[tensor].numel())
            for name, tensor in (("entry", "keys"), ("state", "suffix"))}  # fmt: skip
    large = replace(model, **padded, **ends)
    save_ngram(large, tmp_path / "m.lm")
    code = (
        "import resource, sys; from pathlib import Path; from ds2.lm.files import load_ngram\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak(); m = load_ngram(Path(sys.argv[1])); m.sentence(['w1', 'w2']); print(peak() - before)"
    )
    grown_kib = int(subprocess.check_output([sys.executable, "-c", code, str(tmp_path / "m.lm")]))
    assert (tmp_path / "m.lm").stat().st_size > 96 << 20 and grown_kib < 24 << 10


def test_broken_binaries_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.lm"
    with pytest.raises(LanguageModelError, match=r"there is no language model .*: `ds2 lm build TEXT"):
        load_ngram(path)
    save_ngram(estimate(zipf_text(), 3).model, path)
    whole = path.read_bytes()
    for length in (0, 5, 200, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(LanguageModelError, match="no language model or is truncated"):
            load_ngram(path)
    save_file({"weight": torch.zeros(3)}, path)
    with pytest.raises(LanguageModelError, match="was not written by ds2"):
        load_ngram(path)
    path.write_bytes(whole.replace(b'\\"format\\": 2', b'\\"format\\": 9'))
    with pytest.raises(LanguageModelError, match="format: is 9, this ds2 reads up to 2: install a newer ds2"):
        load_ngram(path)


def test_an_unwritable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LanguageModelError, match="could not be written"):
        save_ngram(estimate(zipf_text(), 1).model, tmp_path / "file" / "m.lm")


def test_an_alphabet_that_cannot_write_the_vocabulary_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    model = estimate([["ab", "cd"], ["abe"]], 1).model
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        model.check_alphabet(Alphabet(("", *"abcde")))
        assert not caplog.records
        for _ in range(2):  # a search of settings makes a decoder for each
            model.check_alphabet(Alphabet(("", *"abcd")))
    assert len(caplog.records) == 1 and "'abe'" in caplog.text and "U+0065" in caplog.text
    with pytest.raises(LanguageModelError, match=r"3 of the language model's 3 words.*--model"):
        model.check_alphabet(Alphabet(("", *"ABCDE"), case="upper"))
    characters = estimate([["a", "<space>", "b"]], 1, unit="character").model
    characters.check_alphabet(Alphabet(("", *" ab")))


def test_a_model_of_other_labels_than_the_networks_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    of_characters, of_pieces = Alphabet(("", *" ab")), Alphabet(("", "▁a", "▁b", "c"))
    characters = estimate([["a", "<space>", "b"]], 1, unit="character").model
    pieces = estimate([["▁a", "c", "▁b"]], 1, unit="piece").model
    with pytest.raises(LanguageModelError, match="one of characters, the labels of the network are pieces"):
        characters.check_alphabet(of_pieces)
    with pytest.raises(LanguageModelError, match="one of pieces, the labels of the network are characters"):
        pieces.check_alphabet(of_characters)
    with pytest.raises(LanguageModelError, match=r"2 of the language model's 3 pieces .*'c'.* --model MODEL"):
        pieces.check_alphabet(Alphabet(("", "▁a", "▁ab")))
    caplog.clear()
    pieces.check_alphabet(of_pieces)
    assert not caplog.records
    pieces.check_alphabet(Alphabet(("", "▁a", "c")))
    assert "1 of the language model's 3 pieces are no labels of the network, such as '▁b'" in caplog.text


def test_vocabularies_need_their_special_tokens() -> None:
    model = estimate([["a"]], 1).model
    with pytest.raises(LanguageModelError, match="lacks </s>"):
        from_levels(to_levels(model), ["<unk>", "<s>", "a", "b"], "word")
    with pytest.raises(LanguageModelError, match="twice"):
        from_levels(to_levels(model), ["<unk>", "<s>", "</s>", "<s>"], "word")


@pytest.mark.gpu
def test_scores_on_a_gpu_equal_those_on_the_cpu(model: NGram) -> None:
    states = torch.randint(0, model.backoff.numel(), (4096,))
    words = torch.randint(0, len(model.vocabulary), (4096,))
    device_model, device_states, device_words = model.to("cuda"), states.cuda(), words.cuda()
    device_model.score_all(device_states)  # makes the dense table
    torch.cuda.set_sync_debug_mode("error")
    try:
        scores, following = device_model.score_batch(device_states, device_words)
        every, _ = device_model.score_all(following)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wanted = model.score_batch(states, words)
    torch.testing.assert_close(scores.cpu(), wanted[0])
    assert torch.equal(following.cpu(), wanted[1])
    torch.testing.assert_close(every.cpu(), model.score_all(wanted[1])[0])


def test_damaged_metadata_of_a_binary_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.lm"
    save_ngram(estimate(zipf_text(), 3).model, path)
    with safe_open(path, "pt") as opened:
        header, tensors = opened.metadata(), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    metadata = read_header(header, 2)
    starts = metadata["entry_starts"]
    for change, says in (
        ({"unit": "letter"}, "metadata.unit: is 'letter', expected one of word"),
        ({"unit": None}, "metadata.unit: is None"),
        ({"entry_starts": starts[:-1]}, r"metadata.entry_starts: is \("),
        ({"entry_starts": "abc"}, "metadata.entry_starts: is 'abc', expected a list"),
        ({"entry_starts": [0, starts[1] + 1, *starts[2:]]}, "do not fit"),
        ({"state_starts": [0, 1, 2**62]}, "metadata.state_starts"),
        ({"alphabet": {"case": "lower"}}, "metadata.alphabet.replace: is missing"),
        ({"alphabet": 7}, "metadata.alphabet: is 7"),
        ({"format": "x"}, "format: is missing or not a whole number"),
        ({"format": 99}, "install a newer ds2"),
    ):
        save_file(tensors, path, make_header(metadata | change, tensors, content=False))
        with pytest.raises(LanguageModelError, match=rf"m\.lm: .*{says}"):
            load_ngram(path)
    save_file(tensors, path, header | {"ds2": header["ds2"].replace('"word"', '"piece"')})
    with pytest.raises(LanguageModelError, match="digest"):
        load_ngram(path)
    save_file(tensors, path, {"ds2": json.dumps(metadata | {"format": 1})})  # of before digests
    assert load_ngram(path).order == 3
    for name, wrong in (("keys", tensors["keys"].float()), ("suffix", tensors["suffix"][:-1]),
                        ("vocabulary", tensors["vocabulary"].flip(0))):  # fmt: skip
        bad = tensors | {name: wrong.contiguous()}
        save_file(bad, path, make_header(metadata, bad, content=False))
        with pytest.raises(LanguageModelError, match=r"m\.lm: "):
            load_ngram(path)


def test_an_automaton_with_a_cycle_or_invalid_state_ends_queries_and_is_refused_by_searches(tmp_path: Path) -> None:
    model = estimate(zipf_text(), 3).model
    last = model.suffix.numel() - 1
    for name, place, value in (
        ("suffix", last, last), ("suffix", 1, last), ("suffix", last, -1), ("next_state", 5, last + 1),
        ("next_state", 5, -1), ("keys", 3, 0),
    ):  # fmt: skip
        tensor = getattr(model, name).clone()
        tensor[place] = value
        bad = replace(model, **{name: tensor})
        with pytest.raises(LanguageModelError, match="suffixes form a cycle"):
            bad.check()
        if name == "suffix":
            bad.score(last, "w1")  # returns
    save_ngram(replace(model, suffix=torch.full_like(model.suffix, last)), tmp_path / "m.lm")
    with pytest.raises(LanguageModelError, match="suffixes form a cycle"):
        make_decoder(
            DecodeConfig(method="beam", lm=str(tmp_path / "m.lm")), Alphabet(("", "a", " ")), 0.01, torch.device("cpu")
        )
    assert model.check() is model


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.5])
def test_a_model_with_invalid_log_probs_is_refused_by_every_user(value: float, tmp_path: Path) -> None:
    """Digests of these files, of which only what is needed is read, do not cover the numbers."""
    sound = estimate(zipf_text(), 2).model
    save_ngram(replace(sound, log_prob=torch.full_like(sound.log_prob, value)), tmp_path / "bad.lm")
    bad = load_ngram(tmp_path / "bad.lm")
    alphabet = Alphabet(("", *"w0123456789 "))
    for method in ("beam", "native"):
        with pytest.raises(LanguageModelError, match=r"damaged: .*invalid log-probs"):
            make_decoder(DecodeConfig(method=method, lm=str(tmp_path / "bad.lm")), alphabet, 0.02, torch.device("cpu"))
    with pytest.raises(LanguageModelError, match="damaged: the mean log-prob"):
        perplexity(bad, [["w1", "w2"]]).format()
    if not math.isfinite(value):
        with pytest.raises(LanguageModelError, match="invalid log-probs"):
            bad.sentence(["w1"])
    hole = sound.backoff.clone()
    hole[-1] = math.nan
    with pytest.raises(LanguageModelError, match="invalid log-probs"):
        replace(sound, backoff=hole).check()


def test_a_query_of_a_damaged_model_raises_an_error() -> None:
    sound = estimate(zipf_text(), 3).model
    astray = replace(sound, next_state=torch.full_like(sound.next_state, 2**31 - 1))
    with pytest.raises(LanguageModelError, match="damaged"):
        astray.sentence(["w1", "w2", "w3"])


def test_a_file_with_unaligned_tensors_is_queried(tmp_path: Path) -> None:
    sound = estimate(zipf_text(), 3).model
    save_ngram(sound, tmp_path / "m.lm")
    content = (tmp_path / "m.lm").read_bytes()
    size = int.from_bytes(content[:8], "little")
    for shift in range(1, 8):
        header = content[8 : 8 + size].rstrip() + b" " * shift
        (tmp_path / "m.lm").write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])
        assert load_ngram(tmp_path / "m.lm").sentence(["w1", "w2"]) == sound.sentence(["w1", "w2"])

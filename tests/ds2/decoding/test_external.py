"""Lexicon-bound decoding on real paths: dead ends, endings inside words, and the C++ search beside brute force."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import select
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.decoding_cases import CHARACTERS, CPU, PIECES, WIDE, brute_force, random_log_probs, speechlike, word_worth
from torch import Tensor

from ds2.config.schema import DecodeConfig
from ds2.decoding.beam.fusion import Fusion
from ds2.decoding.hypothesis import DecodeError
from ds2.decoding.lexicon import OFF, ROOT, SessionTrie, Spelling, walk
from ds2.decoding.methods import make_decoder
from ds2.decoding.phrases import LexiconError
from ds2.lm.files import read_arpa, write_arpa
from ds2.lm.kneser_ney import estimate
from ds2.lm.ngram import NGram

NATIVE = replace(WIDE, method="native", lexicon=True, beam=500, nbest=3, threads=1)
WAIT_S = 600.0  # a last resort: what is waited for comes by itself, on a busy machine late


@pytest.fixture(scope="module")
def lm() -> NGram:
    """A model in which every short history is a state of its own, so that a search joins no two texts."""
    words = ("a", "ab", "ba")
    return estimate([list(s) for n in (1, 2, 3, 3) for s in itertools.product(words, repeat=n)], 5).model


def arpa(lm: NGram, folder: Path) -> str:
    write_arpa(lm, folder / "words.arpa")
    return str(folder / "words.arpa")


def path_log_probs(path: list[int], sure: float = 0.99999) -> Tensor:
    log_probs = torch.full((len(path), 1, 4), (1 - sure) / 3)
    log_probs[range(len(path)), 0, path] = sure
    return log_probs.log()


@pytest.mark.parametrize("written", [False, True], ids=["binary", "ARPA"])
def test_native_search_equals_brute_force(lm: NGram, written: bool, tmp_path: Path) -> None:
    pytest.importorskip("flashlight.lib.text")
    options = replace(NATIVE, lm=arpa(lm, tmp_path) if written else "")
    log_probs, lengths = random_log_probs(5, 3, 4), torch.tensor([5, 4, 3])
    rows = make_decoder(options, CHARACTERS, 0.02, CPU, lm).decode(log_probs, lengths)
    for row, found in enumerate(rows):
        expected = brute_force(log_probs[: lengths[row], row], CHARACTERS, word_worth(lm, options, CHARACTERS))
        texts = [h.text for h in found]
        assert texts == [text for text, _ in expected[: len(found)]]
        assert [h.score for h in found] == pytest.approx([score for _, score in expected[: len(found)]], abs=1e-4)
        assert [h.lm for h in found] == pytest.approx([sum(lm.sentence(h.text.split())) for h in found], abs=1e-4)
        assert found[0].score == pytest.approx(
            found[0].acoustic + options.alpha * found[0].lm + found[0].bonus, abs=1e-6
        )


def test_processes_change_nothing(lm: NGram) -> None:
    pytest.importorskip("flashlight.lib.text")
    log_probs, lengths = speechlike(80, 6, 4), torch.tensor([80, 70, 33, 1, 80, 64])
    options = replace(NATIVE, beam=16, prune=10.0, label_min_log_prob=-5.0)
    alone = make_decoder(options, CHARACTERS, 0.02, CPU, lm).decode(log_probs, lengths)
    together = make_decoder(replace(options, threads=2), CHARACTERS, 0.02, CPU, lm)
    assert together.decode(log_probs, lengths) == alone
    assert together.decode(log_probs, lengths) == alone  # the same workers, again


@pytest.mark.parametrize("method", ["beam", "native"])
@pytest.mark.parametrize(
    ("path", "text"),
    [
        ([2, 3, 1, 3, 3, 0, 3, 1, 2], "ab ba"),  # "bb" and "b " begin no word: blanks lead on
        ([2, 1, 3], "a"),  # ends inside "ba"
        ([3], ""),
    ],
)
def test_a_path_outside_the_lexicon_leaves_the_words_around_it(
    method: str, path: list[int], text: str, lm: NGram
) -> None:
    if method == "native":
        pytest.importorskip("flashlight.lib.text")
    options = DecodeConfig(method=method, lexicon=True, beam=32, label_min_log_prob=-2.0, threads=1)
    [[found]] = make_decoder(options, CHARACTERS, 0.02, CPU, lm).decode(path_log_probs(path), torch.tensor([len(path)]))
    assert found.text == text == CHARACTERS.decode(found.labels) == " ".join(word.text for word in found.words)


def test_what_the_native_search_cannot_do_is_named(lm: NGram) -> None:
    pytest.importorskip("flashlight.lib.text")
    with pytest.raises(LexiconError, match="language model of words"):
        make_decoder(NATIVE, CHARACTERS, 0.02, CPU)
    with pytest.raises(DecodeError, match=r"hot words.*decode\.method=beam"):
        make_decoder(replace(NATIVE, hot_words=["ab"]), CHARACTERS, 0.02, CPU, lm)
    with pytest.raises(DecodeError, match="characters"):
        make_decoder(NATIVE, PIECES, 0.02, CPU, lm)


def test_a_killed_process_of_the_native_search_ends_one_search(lm: NGram) -> None:
    pytest.importorskip("flashlight.lib.text")
    decoder = make_decoder(replace(NATIVE, threads=2), CHARACTERS, 0.02, CPU, lm)
    log_probs, lengths = random_log_probs(5, 3, 4), torch.tensor([5, 4, 3])
    rows, others = decoder.decode(log_probs, lengths), multiprocessing.active_children()
    for process in others:
        process.kill()
    with pytest.raises(DecodeError, match=r"was killed, as where memory runs out: take fewer decode\.threads"):
        decoder.decode(log_probs, lengths)
    assert others and decoder.decode(log_probs, lengths) == rows


def test_processes_of_the_native_search_end_with_it(lm: NGram) -> None:
    pytest.importorskip("flashlight.lib.text")
    before = set(multiprocessing.active_children())
    decoder = make_decoder(replace(NATIVE, threads=2), CHARACTERS, 0.02, CPU, lm)
    decoder.decode(random_log_probs(5, 3, 4), torch.tensor([5, 4, 3]))
    processes = set(multiprocessing.active_children()) - before
    gc.disable()  # `ds2 lm tune` has a decoder for each trial
    try:
        del decoder
        deadline_s = time.monotonic() + WAIT_S
        while any(process.exitcode is None for process in processes) and time.monotonic() < deadline_s:
            time.sleep(0.01)
    finally:
        gc.enable()
    assert [process.exitcode for process in processes] == [0, 0]


def test_a_process_ends_that_has_a_native_search(lm: NGram) -> None:
    pytest.importorskip("flashlight.lib.text")
    decoders = []

    def decode() -> None:
        torch.set_num_threads(1)  # the threads of this process are not in a forked one, which would wait for them
        decoders.append(make_decoder(replace(NATIVE, threads=2), CHARACTERS, 0.02, CPU, lm))
        decoders[0].decode(random_log_probs(5, 3, 4), torch.tensor([5, 4, 3]))

    process = multiprocessing.get_context("fork").Process(target=decode)
    process.start()
    process.join(WAIT_S)
    status = process.exitcode
    process.kill()
    assert status == 0


def test_processes_of_the_native_search_leave_ctrl_c_to_their_parent_and_end_after_it(lm: NGram) -> None:
    pytest.importorskip("flashlight.lib.text")
    log_probs, lengths = random_log_probs(5, 3, 4), torch.tensor([5, 4, 3])
    before, (read, write) = multiprocessing.active_children(), os.pipe()

    def decode_on() -> None:
        torch.set_num_threads(1)
        decoder = make_decoder(replace(NATIVE, threads=2), CHARACTERS, 0.02, CPU, lm)
        rows = decoder.decode(log_probs, lengths)
        for process in set(multiprocessing.active_children()) - set(before):
            os.kill(process.pid or 0, signal.SIGINT)
        assert decoder.decode(log_probs, lengths) == rows
        os.write(write, b"decoded")
        time.sleep(60.0)

    parent = multiprocessing.get_context("fork").Process(target=decode_on)
    parent.start()
    os.close(write)  # its processes have it open too
    assert os.read(read, 7) == b"decoded"
    parent.kill()
    assert select.select([read], [], [], WAIT_S)[0] and os.read(read, 1) == b""
    os.close(read)


def test_every_node_looks_ahead_to_the_likeliest_word_below_it() -> None:
    generator = np.random.default_rng(3)
    drawn = {"".join(generator.choice(["a", "b"], generator.integers(1, 9))) for _ in range(60)}
    words = {word: position for position, word in enumerate(sorted(drawn), start=2)}
    unigrams = generator.normal(-9.0, 3.0, len(words) + 2).astype(np.float32)
    known, unknown = min(words, key=lambda word: unigrams[words[word]]), "abbabbabba"
    spelling = Spelling.of(CHARACTERS)
    searched = SessionTrie({**words, "c": 0}, unigrams, spelling, 0.0, 1.0, -31.0, CPU)
    assert searched.lookahead[OFF] == searched.lookahead[ROOT] == 0.0
    nodes = np.count_nonzero(searched.children)  # each is the child of one
    root = searched.add_phrases({known: None, unknown: None})

    values = [(word, float(unigrams[at])) for word, at in words.items()]
    shares = {unknown[:size]: -31.0 * size / len(unknown) for size in range(1, len(unknown) + 1)}
    for first, spelled, charged in ((ROOT, [*words], {}), (root, [*words, unknown], shares)):
        prefixes = {word[:size] for word in spelled for size in range(1, len(word) + 1)}
        for prefix in prefixes:
            codes = torch.tensor([spelling.codes[character] for character in prefix])
            node = walk(searched.nodes.children, torch.tensor(first), codes)
            below = [value for word, value in values if word.startswith(prefix)]
            wanted = max([*below, charged.get(prefix, -np.inf)])
            assert float(searched.nodes.unfinished[node]) == pytest.approx(wanted, rel=1e-6)
        assert first == root or nodes == len(prefixes)


def rare_and_common(folder: Path) -> NGram:
    grams = "-3\t<unk>\n-99\t<s>\n-0.5\t</s>\n-6\taaa\n-0.2\tbbb\n"
    (folder / "rare.arpa").write_text(f"\\data\\\nngram 1=5\n\n\\1-grams:\n{grams}\n\\end\\\n", encoding="utf-8")
    return read_arpa(folder / "rare.arpa")


def letters(path: str, first: float) -> Tensor:
    """Log-probs (2 T, 1, 4) of a path, blanks between: each letter has the probability `first`, the other the rest."""
    probs = torch.full((2 * len(path), 1, 4), 0.001)
    probs[1::2, 0, 0] = 0.997
    for at, letter in enumerate(path):
        own, other = CHARACTERS.encode(letter + {"a": "b", "b": "a"}[letter])
        probs[2 * at, 0, own], probs[2 * at, 0, other] = first, 0.998 - first
    return probs.log()


@pytest.mark.parametrize("lexicon", [False, True])
@pytest.mark.parametrize("order", [1, 7])
def test_a_model_that_the_native_search_cannot_read_is_named(order: int, lexicon: bool, tmp_path: Path) -> None:
    pytest.importorskip("flashlight.lib.text" if lexicon else "ctc_beam_decoder")
    longer = range(2, order + 1)
    counts = "".join(f"ngram {n}=1\n" for n in longer)
    grams = "".join(f"\n\\{n}-grams:\n-1\t{' '.join('a' * n)}\n" for n in longer)
    path = tmp_path / "a.arpa"
    path.write_text(
        f"\\data\\\nngram 1=4\n{counts}\n\\1-grams:\n-1\t<s>\n-1\t</s>\n-1\t<unk>\n-1\ta\n{grams}\n\\end\\\n"
    )
    with pytest.raises(
        DecodeError, match=rf"words of orders 2 to 6, .* words of order {order}: take decode\.method=beam"
    ):
        make_decoder(replace(NATIVE, lexicon=lexicon), CHARACTERS, 0.02, CPU, read_arpa(path))


@pytest.mark.parametrize("lexicon", [False, True])
def test_kenlm_prints_no_progress(lm: NGram, lexicon: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("flashlight.lib.text" if lexicon else "ctc_beam_decoder")
    make_decoder(replace(NATIVE, lexicon=lexicon, lm=arpa(lm, tmp_path)), CHARACTERS, 0.02, CPU, lm)
    assert capfd.readouterr() == ("", "")


def test_a_narrow_beam_keeps_the_likely_word_of_the_lexicon(tmp_path: Path) -> None:
    options = DecodeConfig(method="beam", lexicon=True, beam=1, alpha=1.0, beta=0.0)
    lm, log_probs = rare_and_common(tmp_path), letters("aaa", 0.6)
    [[found]] = make_decoder(options, CHARACTERS, 0.02, CPU, lm).decode(log_probs, torch.tensor([6]))
    [[wide]] = make_decoder(replace(options, beam=100), CHARACTERS, 0.02, CPU, lm).decode(log_probs, torch.tensor([6]))
    assert found.text == wide.text == "bbb"
    assert found.lm == pytest.approx(sum(lm.sentence(["bbb"])), abs=1e-5)


def test_a_narrow_beam_keeps_an_unknown_hot_word_whose_bonus_outweighs_its_charge(tmp_path: Path) -> None:
    options = DecodeConfig(
        method="beam", lexicon=True, beam=2, alpha=1.0, beta=0.0, hot_words=["baab"], hot_word_bonus=32.0
    )
    lm, log_probs = rare_and_common(tmp_path), letters("baab", 0.9)
    [[found]] = make_decoder(options, CHARACTERS, 0.02, CPU, lm).decode(log_probs, torch.tensor([8]))
    assert found.text == "baab"


def test_the_open_vocabulary_does_not_look_ahead(lm: NGram) -> None:
    assert not Fusion(CHARACTERS, DecodeConfig(method="beam"), lm, CPU).trie.nodes.unfinished.any()

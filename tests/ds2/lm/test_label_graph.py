"""The graph of label sequences: its weights are the probabilities of the n-gram, whatever order, pruning and labels."""

import io
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from ds2_ops.ctc.denominator import Denominator, LabelGraph

from ds2.commands.lm import run
from ds2.config.schema import AlphabetConfig
from ds2.lm import label_graph
from ds2.lm.files import save_ngram
from ds2.lm.label_graph import LabelScorer, label_model
from ds2.lm.ngram import TENSORS, LanguageModelError
from ds2.text.alphabet import Alphabet

CHARACTERS = Alphabet(("", *"abcd "))
TEXTS = ["ab ca", "aab", "b", "cab abba", "bcb", "abc abc", "aab ba"]  # without d


def weight(graph: LabelGraph, labels: tuple[int, ...]) -> float:
    """The sum over the ways of a label sequence through a graph, label by label."""
    ways = np.zeros(len(graph.labels))
    ways[graph.start] = 1.0
    for label in labels:
        leaving = ways.copy()
        np.add.at(leaving, graph.parents, ways * graph.shares)
        arcs = graph.labels[graph.targets] == label
        ways = np.zeros_like(ways)
        np.add.at(ways, graph.targets[arcs], leaving[graph.sources[arcs]] * graph.weights[arcs])
    return float(ways @ graph.ends)


@pytest.mark.parametrize(("order", "prune"), [(1, 0), (2, 0), (3, 0), (3, 1), (4, 0), (4, 1), (5, 0)])
def test_a_sequence_weighs_what_the_model_says(order: int, prune: int) -> None:
    model = label_model(CHARACTERS, order, prune, transcripts=TEXTS)
    scorer, graph = LabelScorer(model, CHARACTERS), label_graph.label_graph(model, CHARACTERS)
    assert (graph.shares > 0).any() == (order > 2)
    assert not graph.shares[graph.parent_nodes].any() and (graph.labels == graph.labels[graph.parents]).all()
    for length in range(5):
        for labels in itertools.product(range(1, 6), repeat=length):
            assert weight(graph, labels) == pytest.approx(math.exp(scorer(labels)), rel=1e-5 + 2 * length / 4096)


def test_the_sum_over_all_paths_of_ctc_is_one_where_the_audio_says_nothing() -> None:
    """Uniform probabilities: the expected share of each sequence, path by path."""
    model = label_model(CHARACTERS, 3, 0, transcripts=TEXTS)
    scorer = LabelScorer(model, CHARACTERS)
    total = sum(
        math.exp(scorer(label for label, _ in itertools.groupby(path) if label)) / 6**5
        for path in itertools.product(range(6), repeat=5)
    )
    graph = label_graph.label_graph(model, CHARACTERS)
    got = Denominator(graph, 6)(torch.zeros(5, 1, 6, dtype=torch.float64), torch.tensor([5]))
    assert float(got) == pytest.approx(math.log(total), abs=2 * 5 / 4096)


def test_labels_that_the_text_lacks_share_its_unknown_token() -> None:
    model = label_model(Alphabet(("", *"abcdef ")), 2, 0, transcripts=TEXTS)
    scorer = LabelScorer(model, Alphabet(("", *"abcdef ")))
    unknown = math.exp(model.score(model.start(), "<unk>")[0])
    for label in (4, 5, 6):
        after = model.score(model.start(), "<unk>")[1]
        assert math.exp(scorer([label]) - model.finish(after)) == pytest.approx(unknown / 3, rel=1e-5)


def test_pieces_and_text_files(tmp_path: Path) -> None:
    pieces = Alphabet(("", "\u2581", "a", "b", "c", "\u2581a", "ab"))
    (tmp_path / "text.txt").write_text("ab abc\nxyz\ncab\n")
    model = label_model(pieces, 2, 0, texts=[tmp_path / "text.txt"])
    assert model.unit == "piece" and "\u2581a" in model.ids
    graph = label_graph.label_graph(model, pieces)
    labels = tuple(pieces.encode("ab"))
    exact = math.exp(LabelScorer(model, pieces)(labels))
    assert weight(graph, labels) == pytest.approx(exact, rel=1e-5 + 2 * len(labels) / 4096)


@pytest.mark.parametrize("alphabet", ["characters", "pieces", "phones"])
def test_texts_give_the_model_of_equal_transcripts(alphabet: str, tmp_path: Path) -> None:
    (tmp_path / "lexicon.txt").write_text("ab EY B\nabc EY B IY S IY\ncab K AE B\n")
    (tmp_path / "text.txt").write_text("ab abc\nxyz\ncab\ncab  ab\n")
    labels = {
        "characters": CHARACTERS,
        "pieces": Alphabet(("", "\u2581", "a", "b", "c", "\u2581a", "ab")),
        "phones": Alphabet.from_config(AlphabetConfig(lexicon=str(tmp_path / "lexicon.txt"))),
    }[alphabet]
    of_texts = label_model(labels, 2, 0, texts=[tmp_path / "text.txt"])
    of_transcripts = label_model(labels, 2, 0, transcripts=["ab abc", "cab", "cab ab"])
    assert of_texts.vocabulary == of_transcripts.vocabulary and set(of_texts.tokens) <= {"<space>", *labels.symbols}
    for name in TENSORS:
        assert torch.equal(getattr(of_texts, name), getattr(of_transcripts, name))


def test_a_model_of_phones_is_not_asked_for_letters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lexicon.txt").write_text("ab EY B\n")
    phones = Alphabet.from_config(AlphabetConfig(lexicon=str(tmp_path / "lexicon.txt")))
    save_ngram(label_model(phones, 2, 0, transcripts=["ab ab"]), tmp_path / "phones.lm")
    monkeypatch.setattr("sys.stdin", io.StringIO("ab\n"))
    for command in (["query", str(tmp_path / "phones.lm")], ["ppl", str(tmp_path / "phones.lm"), __file__]):
        with pytest.raises(LanguageModelError, match=r"one of phones.*: name a model of words"):
            run(command)


def test_a_graph_of_the_same_texts_is_the_same() -> None:
    one, other = (
        label_graph.label_graph(label_model(CHARACTERS, 4, 0, transcripts=TEXTS), CHARACTERS) for _ in range(2)
    )
    for a, b in zip(vars(one).values(), vars(other).values(), strict=True):
        assert np.array_equal(a, b)


def test_graphs_that_are_too_large_are_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = label_model(CHARACTERS, 4, 0, transcripts=TEXTS)
    monkeypatch.setattr(label_graph, "MAX_ARCS", 100)
    with pytest.raises(LanguageModelError, match=r"more than 100 arcs: lower train\.denominator_order, raise"):
        label_graph.label_graph(model, CHARACTERS)
    with pytest.raises(LanguageModelError, match=r"reserved symbol </s>"):
        label_model(Alphabet(("", "a", "</s>")), 2, 0, transcripts=TEXTS)

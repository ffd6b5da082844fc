"""A graph of label sequences weighted by an n-gram model of labels, for the denominator of CTC-CRF.

A node is a state of the model with the last label, which decides whether the next label needs a blank before it.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from ds2_ops.ctc.denominator import LabelGraph, round_weights

from ds2.lm.kneser_ney import estimate
from ds2.lm.ngram import END, RESERVED, SPACE, UNKNOWN, LanguageModelError, NGram
from ds2.lm.sentences import SentenceReader
from ds2.text.alphabet import BLANK, Alphabet

MAX_ARCS = 500_000


def label_tokens(labels: Iterable[int], alphabet: Alphabet) -> list[str]:
    """Return labels as the tokens of a model of characters or pieces."""
    return [SPACE if alphabet.symbols[label] == " " else alphabet.symbols[label] for label in labels]


def label_model(
    alphabet: Alphabet, order: int, prune: int, *, texts: Sequence[Path] = (), transcripts: Iterable[str] = ()
) -> NGram:
    """Estimate an n-gram model of labels.

    Args:
        alphabet: whose labels are the tokens.
        order: the longest n-gram, in labels.
        prune: n-grams of three and more labels are dropped that occur at most so often.
        texts: text files or manifests. Lines with characters outside the alphabet are skipped, and of a network of
            phones those with words without a pronunciation.
        transcripts: used where there are no `texts`.

    Raises:
        LanguageModelError: as `estimate`; or a symbol of the alphabet is reserved.
    """
    if reserved := set(RESERVED).intersection(alphabet.symbols):
        raise LanguageModelError(f"the alphabet has the reserved symbol {', '.join(sorted(reserved))}: rename it")
    labels: Iterable[list[int]] = map(alphabet.encode, transcripts)
    if texts:
        spoken = None if alphabet.pronunciations is None else alphabet.pronunciations.words.keys()
        lines = (line for line in SentenceReader(texts, "word", alphabet) if spoken is None or spoken >= set(line))
        labels = (alphabet.spell(" ".join(line)) for line in lines)
    thresholds = [0, 0, prune][:order]
    sentences = (label_tokens(of_one, alphabet) for of_one in labels)
    return estimate(sentences, order, thresholds, unit=alphabet.unit, alphabet=alphabet.to_dict()).model


class LabelScorer:
    """Log-probs of label sequences; labels that the model lacks share its unknown token."""

    def __init__(self, model: NGram, alphabet: Alphabet) -> None:
        self.model = model
        tokens = label_tokens(range(1, len(alphabet)), alphabet)
        lacking = sum(token not in model.ids for token in tokens)
        unknown = model.ids[UNKNOWN]
        self.ids = np.array([unknown, *(model.ids.get(token, unknown) for token in tokens)])
        self.log_share = np.where(self.ids == unknown, -np.log(max(1, lacking)), 0.0)  # (V,), of each label

    def __call__(self, labels: Iterable[int]) -> float:
        """Return the log-prob of a label sequence and of its end, in nats."""
        state, total = self.model.start(), 0.0
        for label in labels:
            log_prob, state = self.model.query(state, int(self.ids[label]))
            total += log_prob + float(self.log_share[label])
        return total + self.model.finish(state)


def label_graph(model: NGram, alphabet: Alphabet) -> LabelGraph:
    """Compose a model of `label_model`, which is interpolated, with the topology of CTC.

    The weight of a label sequence is its probability, the end included, apart from the rounding of weights. A node of a
    longest history has arcs only for the labels of its n-grams, weighted by what the n-gram adds to the back-off
    probability; its parent is the node of the shorter history. All other nodes have arcs to all labels.

    Raises:
        LanguageModelError: the graph would have more than `MAX_ARCS` arcs.
    """
    scorer, labels = LabelScorer(model, alphabet), len(alphabet)
    size, order = len(model.vocabulary), model.order
    first_longest = model.state_starts[order - 1] if order > 2 else model.backoff.numel()
    _check_size(first_longest, labels - 1, model.keys.numel())
    probs_of_words, following = (table.numpy() for table in model.score_all(torch.arange(model.backoff.numel())))
    probs_of_words = np.exp(probs_of_words.astype(np.float64))
    probs = probs_of_words[:, scorer.ids] * np.exp(scorer.log_share)  # (S, V)
    keys = model.keys.numpy()
    entries = np.searchsorted(keys, np.arange(first_longest, model.backoff.numel() + 1) * size)
    unknown = model.ids[UNKNOWN]
    label_of = {int(word): label for label, word in enumerate(scorer.ids) if word != unknown}
    backoff, suffix = np.exp(model.backoff.numpy().astype(np.float64)), model.suffix.numpy()
    nodes: dict[tuple[int, int], int] = {(model.start(), BLANK): 0}
    pending = [(model.start(), BLANK)]
    arcs: list[tuple[int, int, float]] = []  # source, target, weight
    parents: list[tuple[int, float]] = []  # of each node, with its share

    def node(state: int, label: int) -> int:
        number = nodes.setdefault((state, label), len(nodes))
        if number == len(pending):
            pending.append((state, label))
        return number

    for number, (state, last) in enumerate(pending):  # grows
        if state < first_longest:
            leaving = [
                (label, probs[state, label], int(following[state, scorer.ids[label]])) for label in range(1, labels)
            ]
            parents.append((number, 0.0))
        else:
            leaving = []
            shorter, share = int(suffix[state]), float(backoff[state])
            at = state - first_longest
            for key in keys[entries[at] : entries[at + 1]]:
                label = label_of.get(int(key) % size)
                if label is None:
                    continue
                whole, rest = probs[state, label], share * probs[shorter, label]
                own = max(0.0, whole - rest)  # less than 0 by rounding only
                leaving.append((label, own, int(following[state, scorer.ids[label]])))
            parents.append((node(shorter, last), share))
        arcs += [(number, node(after, label), weight) for label, weight, after in leaving if weight > 0]
    ends = probs_of_words[[state for state, _ in pending], model.ids[END]]
    shares = np.array([share for _, share in parents])
    return LabelGraph(
        np.array([label for _, label in pending]),
        ends,
        np.array([source for source, _, _ in arcs], np.int64),
        np.array([target for _, target, _ in arcs], np.int64),
        round_weights(np.array([weight for _, _, weight in arcs])),
        np.array([parent for parent, _ in parents]),
        np.where(shares > 0, round_weights(shares), 0.0),
        0,
    )


def _check_size(histories: int, labels: int, ngrams: int) -> None:
    if histories * labels + ngrams > MAX_ARCS:
        raise LanguageModelError(
            f"the denominator of CTC-CRF has {histories} histories x {labels} labels and {ngrams} n-grams, more than "
            f"{MAX_ARCS} arcs: lower train.denominator_order, raise train.denominator_prune, or use an alphabet of "
            "fewer labels"
        )

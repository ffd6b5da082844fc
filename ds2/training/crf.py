"""CTC-CRF: the label model, denominator and losses of `train.objective=ctc_crf`."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from ds2_ops.ctc.denominator import Denominator
from torch import Tensor

from ds2.config.schema import TrainConfig
from ds2.data.manifest import Utterance
from ds2.lm.label_graph import LabelScorer, label_graph, label_model
from ds2.lm.ngram import NGram
from ds2.text.alphabet import Alphabet

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Crf:
    """Parts of the loss of CTC-CRF, - log p(labels | audio) = CTC loss - log p(labels) + log denominator.

    The labels follow an n-gram model; the denominator sums over all label sequences (Xiang and Ou 2019, "CRF-based
    single-stage acoustic modeling with CTC topology", equations 3 and 4).

    Attributes:
        model: of labels.
        denominator: over the model.
        label_log_probs: (U,) float64 of the transcript of each training utterance, in nats.
    """

    model: NGram
    denominator: Denominator
    label_log_probs: Tensor

    @classmethod
    def of(cls, train: TrainConfig, alphabet: Alphabet, utterances: Sequence[Utterance]) -> Crf:
        """Build the model from `train.denominator_text`, or from the transcripts; a function of these alone.

        Raises:
            LanguageModelError: the text or the settings do not allow it; the message says what to change.
        """
        transcripts = [u.text for u in utterances]
        texts = [Path(path) for path in train.denominator_text]
        model = label_model(
            alphabet, train.denominator_order, train.denominator_prune, texts=texts, transcripts=transcripts
        )
        graph = label_graph(model, alphabet)
        log.info(
            "denominator of CTC-CRF: a %d-gram of labels with %d nodes and %d arcs",
            train.denominator_order, len(graph.labels), len(graph.weights),
        )  # fmt: skip
        scorer = LabelScorer(model, alphabet)
        log_probs = torch.tensor([scorer(alphabet.encode(text)) for text in transcripts], dtype=torch.float64)
        return cls(model, Denominator(graph, len(alphabet)), log_probs)

    @property
    def digest(self) -> str:
        """A hash of the graph."""
        graph = self.denominator.graph
        digest = hashlib.sha256()
        for values in (graph.labels, graph.ends, graph.sources, graph.targets, graph.weights, graph.shares):
            digest.update(values.tobytes())
        return digest.hexdigest()[:16]

    def losses(self, ctc: Tensor, logits: Tensor, frames: Tensor, log_probs: Tensor, feasible: Tensor) -> Tensor:
        """The losses of CTC-CRF.

        Args:
            ctc: (B,) the losses of CTC.
            logits: (T, B, V) of any float dtype.
            frames: (B,) int64.
            log_probs: (B,) float64, the entry of `label_log_probs` of each utterance.
            feasible: (B,) bool.

        Returns:
            (B,) fp32 in nats, 0 and without gradient where no alignment exists.
        """
        losses = ctc + self.denominator(logits, frames) - log_probs
        return torch.where(feasible, losses.float(), 0.0)

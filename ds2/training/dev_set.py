"""The utterances that a run is judged by, and how a model does on them."""

from __future__ import annotations

import logging

import torch

from ds2.audio.features import Features
from ds2.config.schema import DataConfig
from ds2.data.loader import SpeechLoader
from ds2.data.splits import scored_utterances
from ds2.decoding.greedy import GreedyDecoder
from ds2.distributed.communicator import Communicator
from ds2.model.acoustic import AcousticModel
from ds2.recognition.evaluate import score, score_words
from ds2.recognition.recogniser import Recogniser
from ds2.text.alphabet import Alphabet
from ds2.training.dev_watch import DevWatch
from ds2.training.metrics import RunLog

log = logging.getLogger(__name__)

_STUCK_STEPS = 2000  # runs that learn leave the first plateau within 1,500 (docs/results/depth.md)
_STUCK_CER = 0.75  # who writes blanks, or the same few letters, has more


class DevSet:
    """The dev set of a run, read on construction.

    Args:
        data: names the manifests.
        features: of the model, by the time of `evaluate` on `device`.
        alphabet: of the model.
        device: that recognises.
        precision: that it recognises in.

    Attributes:
        utterances: in the order of the manifests.

    Raises:
        ManifestError: as `scored_utterances`.
    """

    def __init__(
        self, data: DataConfig, features: Features, alphabet: Alphabet, device: torch.device, precision: str
    ) -> None:
        self.features, self.alphabet, self.device, self.precision = features, alphabet, device, precision
        self.utterances = scored_utterances(data.dev, alphabet)
        self.loader = SpeechLoader(self.utterances, data, device)
        self.watch = DevWatch(self.loader, alphabet, features)

    def evaluate(self, model: AcousticModel, board: RunLog, step: int, comm: Communicator) -> dict[str, float]:
        """Error rates of a model, greedy; they and the loss are logged.

        Args:
            model: left in evaluation mode.
            board: of the run.
            step: of the training.
            comm: the ranks, who share the work and all get the result.

        Returns:
            "wer" and "cer", with case or punctuation in the alphabet "wer_without_case_and_punctuation" too.
        """
        decoder = GreedyDecoder(self.alphabet, self.features.step_s * model.time_stride)
        parts = (model.eval(), self.features, self.alphabet, decoder, self.device, self.precision)
        hypotheses = Recogniser(*parts).recognise(self.loader, comm=comm, watch=self.watch.see)
        report = score(self.utterances, hypotheses, self.alphabet)
        scores = {"wer": report.wer, "cer": report.cer}
        if step >= _STUCK_STEPS and report.cer > _STUCK_CER:
            log.warning(
                "%.0f %% of the dev set's characters are wrong after %d steps: this run has not begun to align, and "
                "few that start so late come back. What has helped: another train.seed, less model.dropout or one that "
                "rises (train.dropout_rise_epochs), a lower optim.learning_rate, model.start=even for 24 layers and "
                "more; `ds2 data check` on the manifests",
                100 * report.cer, step,
            )  # fmt: skip
        if (words_only := score_words(report, self.alphabet)) is not None:
            scores["wer_without_case_and_punctuation"] = words_only.wer
        loss = self.watch.show(board, step, [h.text for h in hypotheses], comm)
        board.scalars("dev", step, {"loss": loss, **scores})
        return scores

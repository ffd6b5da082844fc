"""Evaluation on the dev set: error rates, the loss, and a few utterances that TensorBoard shows each time."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds2.audio.features import Features
from ds2.config.schema import DataConfig
from ds2.data.loader import SpeechLoader, pad_rows
from ds2.data.splits import scored_utterances
from ds2.decoding.greedy import GreedyDecoder
from ds2.distributed.communicator import Communicator
from ds2.model.acoustic import AcousticModel
from ds2.recognition.evaluate import PHONES_ONLY, score, score_words
from ds2.recognition.recogniser import Recogniser
from ds2.system.terminal import ProgressBar
from ds2.text.alphabet import Alphabet
from ds2.training.ctc import ctc_losses, feasible_rows
from ds2.training.metrics import LoggedUtterance, RunLog

log = logging.getLogger(__name__)

_SHOWN = 4
_STUCK_STEPS = 2000  # runs that learn leave the first plateau within 1,500 (docs/results/depth.md)
_STUCK_CER = 0.75  # a model that writes blanks, or the same few letters, has more


@dataclass
class RankResults:
    """What one rank has seen of an evaluation."""

    loss: float = 0.0  # of all its utterances that have an alignment, in nats
    feasible: int = 0  # how many these are
    alignments: dict[int, NDArray[np.float32]] = field(default_factory=dict)  # of the utterances that are shown


class DevEvaluator:
    """Evaluates models on the dev set of a run, whose manifests are read on construction.

    Args:
        data: names the manifests.
        features: of the model, by the time of `evaluate` on `device`.
        alphabet: characters outside it count in error rates, not in the loss.

    Raises:
        ManifestError: as `scored_utterances`.
    """

    def __init__(
        self, data: DataConfig, features: Features, alphabet: Alphabet, device: torch.device, precision: str
    ) -> None:
        self.features, self.alphabet, self.device, self.precision = features, alphabet, device, precision
        self.utterances = scored_utterances(data.dev, alphabet)  # in the order of the manifests
        if self.utterances and alphabet.pronunciations is not None:
            log.info(PHONES_ONLY)
        self.loader = SpeechLoader(self.utterances, data, device)
        lenient = replace(alphabet, unknown="drop")
        self._labels = [lenient.encode(u.text) for u in self.loader.utterances]
        count = len(self._labels)
        self._shown = sorted({place * count // _SHOWN for place in range(_SHOWN)} if count else set())
        self._shown_audio = False  # whether audio and spectrograms, which never change, were logged

    def evaluate(self, model: AcousticModel, run_log: RunLog, step: int, comm: Communicator) -> dict[str, float]:
        """Error rates of a model, greedy; they and the loss are logged.

        Args:
            model: left in evaluation mode.
            comm: the ranks, who share the work and all get the result.

        Returns:
            "wer" and "cer", with case or punctuation in the alphabet "wer_without_case_and_punctuation" too.
        """
        decoder = GreedyDecoder(self.alphabet, self.features.step_s * model.time_stride)
        parts = (model.eval(), self.features, self.alphabet, decoder, self.device, self.precision)
        observed, share = RankResults(), len(self.utterances) / comm.world  # of this rank, about

        def watch(indices: Sequence[int], logits: Tensor, lengths: Tensor) -> None:
            self.observe(observed, comm, indices, logits, lengths)
            progress.update(progress.done + len(indices))

        with ProgressBar("evaluating the dev set", share, "utterances", shown=comm.rank == 0) as progress:
            hypotheses = Recogniser(*parts).recognise(self.loader, comm=comm, watch=watch)
        report = score(self.utterances, hypotheses, self.alphabet, phones=self.alphabet.pronunciations is not None)
        scores = {"wer": report.wer, "cer": report.cer}
        if step >= _STUCK_STEPS and report.cer > _STUCK_CER:
            log.warning(
                "%.0f %% of the dev set's characters are wrong after %d steps: this run has not begun to align, and "
                "few that start so late come back. What has helped: optim.layer_rates={weight_hh:0.3} with AdamW and "
                "model.cell=rnn, a longer optim.warmup_steps, a lower optim.learning_rate, another train.seed, "
                "train.objective=ctc_crf, model.start=even for 24 layers and more; `ds2 data check` on the manifests",
                100 * report.cer, step,
            )  # fmt: skip
        if (words_only := score_words(report, self.alphabet)) is not None:
            scores["wer_without_case_and_punctuation"] = words_only.wer
        loss = self.log(run_log, step, [h.text for h in hypotheses], observed, comm)
        run_log.scalars("dev", step, {"loss": loss, **scores})
        return scores

    def observe(
        self, observed: RankResults, comm: Communicator, indices: Sequence[int], logits: Tensor, lengths: Tensor
    ) -> None:
        """Take the logits (T', B, V) of the utterances at `indices`, with lengths (B,) on the CPU.

        Raises:
            LostRankError: a rank was lost.
        """
        comm.check()
        labels, counts = pad_rows([torch.tensor(self._labels[index], dtype=torch.int64) for index in indices])
        feasible = feasible_rows(lengths, labels, counts)
        targets = (values.to(logits.device) for values in (lengths, labels, counts, feasible))
        observed.loss += float(ctc_losses(logits, *targets).sum())
        observed.feasible += int(feasible.sum())
        for row, index in enumerate(indices):
            if index in self._shown:
                probabilities = logits[: int(lengths[row]), row].float().softmax(1)
                observed.alignments[index] = probabilities[:, self._labels[index]].t().cpu().numpy()

    def log(self, run_log: RunLog, step: int, texts: Sequence[str], observed: RankResults, comm: Communicator) -> float:
        """Log the shown utterances; return the mean loss of an utterance in nats.

        Args:
            texts: what was recognised, in the order of the utterances.
            comm: the ranks that shared the evaluation.
        """
        gathered = comm.allgather((observed.loss, observed.feasible, observed.alignments))
        alignments = {index: torch.from_numpy(image) for _, _, images in gathered for index, image in images.items()}
        for number, index in enumerate(self._shown if comm.rank == 0 else ()):
            reference, _ = self.alphabet.normalise(self.loader.utterances[index].text)
            shown = LoggedUtterance(reference, texts[index], alignments.get(index))
            if not self._shown_audio:
                shown.waveform = torch.from_numpy(self.loader.audio[index])
                length = torch.tensor([len(shown.waveform)])
                shown.features = self.features(shown.waveform[None].to(self.device), length)[0][0]
            run_log.utterance(step, f"utterance_{number + 1}", shown, self.features.sample_rate_hz)
        self._shown_audio = True
        return sum(loss for loss, _, _ in gathered) / max(1, sum(feasible for _, feasible, _ in gathered))

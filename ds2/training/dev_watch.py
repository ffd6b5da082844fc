"""What a run shows of its dev set beside error rates: its loss, and a few utterances that stay the same all along."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ds2.audio.features import Features
from ds2.data.loader import SpeechLoader
from ds2.distributed.communicator import Communicator
from ds2.text.alphabet import Alphabet
from ds2.training.ctc import ctc_losses, feasible_rows
from ds2.training.metrics import RunLog, Shown

_SHOWN = 4


class DevWatch:
    """Looks at the logits of an evaluation as they come; one evaluation after the other.

    Args:
        loader: of the dev utterances.
        alphabet: characters outside it count in error rates, not in the loss.
        features: of the model.
    """

    def __init__(self, loader: SpeechLoader, alphabet: Alphabet, features: Features) -> None:
        self.loader, self.alphabet, self.features = loader, alphabet, features
        forgiving = replace(alphabet, unknown="drop")
        self._labels = [forgiving.encode(u.text) for u in loader.utterances]
        count = len(self._labels)
        self._shown = sorted({place * count // _SHOWN for place in range(_SHOWN)} if count else set())
        self._loss, self._feasible = 0.0, 0
        self._alignments: dict[int, Tensor] = {}
        self._heard = False  # audio and spectrograms, which never change, were shown

    def see(self, indices: Sequence[int], logits: Tensor, lengths: Tensor) -> None:
        """Take what the model says of utterances: their places, logits (T', B, V), lengths (B,) on the CPU."""
        rows = [torch.tensor(self._labels[index], dtype=torch.int64) for index in indices]
        counts = torch.tensor([len(row) for row in rows])
        labels = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        feasible = feasible_rows(lengths, labels, counts)
        given = (values.to(logits.device) for values in (lengths, labels, counts, feasible))
        self._loss += float(ctc_losses(logits, *given).sum())
        self._feasible += int(feasible.sum())
        for row, index in enumerate(indices):
            if index in self._shown:
                probabilities = logits[: int(lengths[row]), row].float().softmax(1)
                self._alignments[index] = probabilities[:, self._labels[index]].t().cpu()

    def show(self, board: RunLog, step: int, texts: Sequence[str], comm: Communicator) -> float:
        """Log the utterances that stay and return the mean loss of an utterance, nats, as in training; then forget.

        Args:
            board: of the run.
            step: of the training.
            texts: what was recognised, in the order of the utterances.
            comm: the ranks that shared the evaluation.
        """
        seen = comm.allgather((self._loss, self._feasible, self._alignments))
        self._loss, self._feasible, self._alignments = 0.0, 0, {}
        alignments = {index: image for _, _, images in seen for index, image in images.items()}
        for number, index in enumerate(self._shown if comm.rank == 0 else ()):
            reference, _ = self.alphabet.normalise(self.loader.utterances[index].text)
            shown = Shown(reference, texts[index], alignments.get(index))
            if not self._heard:
                shown.waveform = torch.from_numpy(self.loader.audio[index])
                length = torch.tensor([len(shown.waveform)])
                shown.features = self.features(shown.waveform[None].to(self.features.mean.device), length)[0][0]
            board.utterance(step, f"utterance_{number + 1}", shown, self.features.sample_rate_hz)
        self._heard = True
        return sum(loss for loss, _, _ in seen) / max(1, sum(feasible for _, feasible, _ in seen))

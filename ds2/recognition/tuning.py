"""Tuning of decoder settings: alpha, beta and the beam on a dev set, from log-probs computed once."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from ds2.config.schema import DataConfig, DecodeConfig
from ds2.data.manifest import Utterance
from ds2.decoding.hypothesis import Hypothesis
from ds2.decoding.keywords import BONUSES
from ds2.decoding.methods import make_decoder
from ds2.decoding.postprocess import IDENTITY, correct_words, fit_calibration, mix_scores
from ds2.lm.ngram import NGram
from ds2.lm.recurrent import RecurrentLM
from ds2.recognition.evaluate import recognition_loader
from ds2.recognition.recogniser import Recogniser
from ds2.scoring.wer import ErrorCounts, word_errors
from ds2.system.files import new_figure, save_picture
from ds2.text.alphabet import Alphabet

_BEAM_TOLERANCE = 0.0005  # a narrower beam is chosen if its WER is higher by no more than this
_REFINEMENTS = 2  # rounds around the best point, each at half the step
_BEAMS = (16, 32, 64, 128, 256)
_KEYWORD_LETTERS, _MAX_KEYWORDS = 5, 100
_SHARES = tuple(tenths / 10 for tenths in range(11))  # of a recurrent model in log p_lm


@dataclass(frozen=True)
class DevLogProbs:
    """Log-probs of a dev set, computed once, the reference texts, and what all decoders of them have in common."""

    batches: list[tuple[Tensor, Tensor]]  # log-probs (T', B, V) float32, lengths (B,) CPU int64
    references: list[str]  # of all utterances, batch by batch, normalised
    frame_s: float  # seconds per frame
    alphabet: Alphabet
    lm: NGram
    device: torch.device  # where decoders run

    @classmethod
    def of(cls, recogniser: Recogniser, utterances: Sequence[Utterance], data: DataConfig, lm: NGram) -> Self:
        """Compute the log-probs of utterances, without those that have no frames; errors as `Recogniser.logits`.

        `data` says how audio is read.
        """
        batches: list[tuple[Tensor, Tensor]] = []
        references: list[str] = []
        loader = recognition_loader(utterances, data, recogniser.device)
        for indices, logits, lengths in recogniser.logits(loader):
            nonempty = lengths.nonzero()[:, 0]
            batches.append((logits.float().log_softmax(2)[:, nonempty.to(logits.device)], lengths[nonempty]))
            texts = (utterances[indices[row]].text for row in nonempty.tolist())
            references += [recogniser.alphabet.normalise(text)[0] for text in texts]
        return cls(batches, references, recogniser.frame_s, recogniser.alphabet, lm, recogniser.device)

    def decode(self, options: DecodeConfig) -> list[tuple[list[Hypothesis], str]]:
        """Return the N best hypotheses of each utterance with these settings, and its reference."""
        decoder = make_decoder(options, self.alphabet, self.frame_s, self.device, self.lm)
        rows = (row for log_probs, lengths in self.batches for row in decoder.decode(log_probs, lengths))
        return list(zip(rows, self.references, strict=True))


@dataclass(frozen=True)
class TuningTrial:
    """One setting and its word errors."""

    alpha: float
    beta: float
    beam: int
    errors: ErrorCounts


def search(
    dev: DevLogProbs,
    options: DecodeConfig,
    alphas: Sequence[float],
    betas: Sequence[float],
    beams: Sequence[int] = _BEAMS,
) -> Iterator[TuningTrial]:
    """Yield trials: the grid of alpha and beta, finer grids around the best, and then beams of other widths there.

    Each trial decodes with `options` except for the values that are tried; `choose` picks the best.
    """
    done: dict[tuple[float, float, int], TuningTrial] = {}

    def run(points: Iterable[tuple[float, float, int]]) -> Iterator[TuningTrial]:
        for alpha, beta, beam in points:
            point = (max(0.0, round(alpha, 4)), round(beta, 4), beam)
            if point not in done:
                settings = replace(options, alpha=point[0], beta=point[1], beam=beam, nbest=1, times=False)
                errors = (word_errors(reference, best.text) for [best], reference in dev.decode(settings))
                done[point] = TuningTrial(*point, sum(errors, ErrorCounts()))
                yield done[point]

    yield from run((alpha, beta, options.beam) for alpha, beta in product(alphas, betas))
    steps = [(values[-1] - values[0]) / max(1, len(values) - 1) for values in (alphas, betas)]
    for _ in range(_REFINEMENTS):
        steps = [step / 2 for step in steps]
        best = min(done.values(), key=lambda trial: trial.errors.errors)
        around = [
            [centre - step, centre, centre + step] for centre, step in zip((best.alpha, best.beta), steps, strict=True)
        ]
        yield from run((alpha, beta, options.beam) for alpha, beta in product(*around))
    best = min(done.values(), key=lambda trial: trial.errors.errors)
    yield from run((best.alpha, best.beta, beam) for beam in beams)


def choose(trials: Sequence[TuningTrial]) -> TuningTrial:
    """Return the trial with the fewest errors, or one with its weights, a narrower beam and at most 0.05 % more WER."""
    best = min(trials, key=lambda trial: (trial.errors.errors, trial.beam))
    like = [t for t in trials if (t.alpha, t.beta) == (best.alpha, best.beta)]
    good = [t for t in like if t.errors.rate <= best.errors.rate + _BEAM_TOLERANCE]
    return min(good, key=lambda trial: trial.beam)


def tune_rescoring(dev: DevLogProbs, options: DecodeConfig, model: RecurrentLM) -> list[tuple[float, ErrorCounts]]:
    """Return the errors for each share of the recurrent model, over the N best of one search with `options`."""
    rows = dev.decode(replace(options, nbest=options.rescore_hypotheses, rescore="", times=False))
    scores = iter(model.score([hypothesis.text for row, _ in rows for hypothesis in row]))
    errors = {share: ErrorCounts() for share in _SHARES}
    for row, reference in rows:
        scored = [(hypothesis, next(scores)) for hypothesis in row]
        for share in _SHARES:
            mixture = replace(options, rescore_weight=share)
            best = max((mix_scores(*pair, mixture) for pair in scored), key=lambda hypothesis: hypothesis.score)
            errors[share] += word_errors(reference, best.text)
    return list(errors.items())


def tune_confidence(dev: DevLogProbs, options: DecodeConfig) -> tuple[float, float]:
    """Return the calibration of words' confidences that fits the dev set, decoded with `options`."""
    confidences: list[float] = []
    right: list[bool] = []
    for [hypothesis], reference in dev.decode(replace(options, nbest=1, times=True, confidence=list(IDENTITY))):
        confidences += [word.confidence for word in hypothesis.words]
        right += correct_words(reference.split(), hypothesis.text.split())
    return fit_calibration(confidences, right)


@dataclass(frozen=True)
class KeywordTrial:
    """The keywords that are found with one bonus."""

    bonus: float
    recall: float  # share of those that were said
    alarms: float  # false ones an hour of one keyword; half an alarm is added to all, so that it is never 0


def tune_keywords(dev: DevLogProbs, options: DecodeConfig) -> list[KeywordTrial]:
    """Search the longer words of the dev set as keywords, with each of `BONUSES`; none if it has no such words.

    Returns:
        A trial for each bonus; an utterance may have a keyword as often as its reference has it.
    """
    occurrences = Counter(word for text in dev.references for word in text.split())
    pronunciations = dev.alphabet.pronunciations
    known = dev.lm.ids.keys() if pronunciations is None else dev.lm.ids.keys() & pronunciations.words
    words = (word for word, _ in occurrences.most_common() if len(word) >= _KEYWORD_LETTERS and word in known)
    keywords = list(islice(words, _MAX_KEYWORDS))
    hours = sum(int(lengths.sum()) for _, lengths in dev.batches) * dev.frame_s / 3600
    total = sum(occurrences[word] for word in keywords)
    trials: list[KeywordTrial] = []
    for bonus in BONUSES if keywords else ():
        settings = replace(options, nbest=1, times=False, hot_words=keywords, hot_word_bonus=bonus)
        right = wrong = 0
        for [hypothesis], reference in dev.decode(settings):
            written = Counter(word for word in hypothesis.text.split() if word in keywords)
            right += (written & Counter(reference.split())).total()
            wrong += (written - Counter(reference.split())).total()
        trials.append(KeywordTrial(bonus, right / total, (wrong + 0.5) / (hours * len(keywords))))
    return trials


def plot(trials: Sequence[TuningTrial], chosen: TuningTrial, path: Path) -> None:
    """Plot the WER over alpha and beta at the beam of most points; raises as `new_figure` and `save_picture`."""
    beam = trials[0].beam
    points = [(t.alpha, t.beta, 100 * t.errors.rate) for t in trials if t.beam == beam]
    alphas, betas, rates = zip(*points, strict=True)
    figure = new_figure(7, 5)
    axes = figure.subplots()
    if len(set(alphas)) > 1 and len(set(betas)) > 1:
        filled = axes.tricontourf(alphas, betas, rates, levels=20, cmap="viridis_r")
        figure.colorbar(filled, label="WER %")
    axes.scatter(alphas, betas, s=8, c="black")
    axes.scatter([chosen.alpha], [chosen.beta], s=80, marker="*", c="red")
    for alpha, beta, rate in points:
        axes.annotate(f"{rate:.1f}", (alpha, beta), fontsize=6, xytext=(2, 2), textcoords="offset points")
    axes.set(xlabel="alpha", ylabel="beta", title=f"WER over {len(points)} settings, beam {beam}")
    save_picture(figure, path)

"""Reliability of word confidences: how often words of each confidence are right, as a picture and one figure.

    python tools/plot_confidence.py RUN/best-evaluation/dev/hypotheses.jsonl --picture confidence.png
    python tools/plot_confidence.py RUN/best-evaluation/tune/hypotheses.jsonl --fit

--fit prints the calibration, `decode.confidence`, that suits these hypotheses, of an evaluation without one: fit it on
other utterances than those it is judged on. `ds2 lm tune` does so for its winner.

The expected calibration error is the mean distance between confidence and accuracy over bins of equal width, weighted
by words (Guo et al. 2017, "On calibration of modern neural networks", equation 3).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ds2.decoding.confidence import calibrate, correct_words, fit_calibration


@dataclass(frozen=True)
class Reliability:
    """Words by confidence, in bins of equal width over 0 to 1."""

    confidence: NDArray[np.float64]  # (bins,) mean of the bin's words, NaN without words
    accuracy: NDArray[np.float64]  # (bins,) share of them that is right, NaN without words
    words: NDArray[np.int64]  # (bins,)

    @property
    def calibration_error(self) -> float:
        """The expected calibration error, 0 to 1."""
        gaps = np.nan_to_num(np.abs(self.confidence - self.accuracy))
        return float((gaps * self.words).sum() / max(1, self.words.sum()))


def read(path: Path) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the confidence of every recognised word of a hypotheses.jsonl, and whether the alignment has it right.

    Raises:
        ValueError: a line whose words and text differ, or no words at all.
    """
    confidences: list[float] = []
    right: list[bool] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        record = json.loads(line)
        said = [word["text"] for word in record["words"]]
        if said != record["pred_text"].split():
            raise ValueError(f"{path}:{number}: the words differ from pred_text: evaluate with decode.times=true")
        right += correct_words(record["text"].split(), said)
        confidences += [word["confidence"] for word in record["words"]]
    if not confidences:
        raise ValueError(f"{path} holds no recognised words")
    return np.array(confidences), np.array(right)


def reliability(confidences: NDArray[np.float64], right: NDArray[np.bool_], bins: int = 10) -> Reliability:
    """Gather words into bins by confidence."""
    places = np.minimum((confidences * bins).astype(np.int64), bins - 1)
    words = np.bincount(places, minlength=bins)
    with np.errstate(invalid="ignore"):
        confidence = np.bincount(places, confidences, bins) / words
        accuracy = np.bincount(places, right, bins) / words
    return Reliability(confidence, accuracy, words)


def draw(found: Reliability, path: Path) -> None:
    """Draw accuracy and word counts over confidence."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 6))
    upper, lower = figure.subplots(2, 1, height_ratios=[3, 1], sharex=True)
    upper.plot([0, 1], [0, 1], "--", color="grey")
    upper.plot(found.confidence, found.accuracy, "o-")
    upper.set(ylabel="words that are right", title=f"calibration error {found.calibration_error:.3f}")
    lower.bar((np.arange(len(found.words)) + 0.5) / len(found.words), found.words, 0.9 / len(found.words))
    lower.set(xlabel="confidence", ylabel="words")
    figure.savefig(path, dpi=150)


def main() -> None:
    """Print a table and the calibration error, and draw the picture where one is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hypotheses", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--bins", type=int, default=10)
    parser.add_argument(
        "--calibration",
        nargs=2,
        type=float,
        metavar=("SLOPE", "OFFSET"),
        help="as decode.confidence=[SLOPE,OFFSET] would",
    )
    parser.add_argument("--fit", action="store_true", help="also print the decode.confidence that suits them")
    arguments = parser.parse_args()
    try:
        words = read(arguments.hypotheses)
        if arguments.calibration:
            words = calibrate(words[0], arguments.calibration), words[1]
        found = reliability(*words, arguments.bins)
        fitted = fit_calibration(*words) if arguments.fit else None
    except ValueError as error:
        parser.exit(2, f"plot_confidence.py: {error}\n")
    print("confidence  right  words")
    for confidence, accuracy, count in zip(found.confidence, found.accuracy, found.words, strict=True):
        print(f"{confidence:10.3f}  {accuracy:5.3f}  {count:5d}")
    print(f"expected calibration error {found.calibration_error:.4f} over {found.words.sum()} words")
    if fitted is not None:
        print(f"decode.confidence=[{fitted[0]:.3f},{fitted[1]:.3f}]")
    if arguments.picture:
        draw(found, arguments.picture)


if __name__ == "__main__":
    main()

"""Tell which text a line comes from: GRNN's other application, a classifier on the last state of an LSTM.

    python tools/classify_text.py books.txt an4/train.jsonl lj.jsonl --epochs 5

Each file is a class: lines of a text (.gz, .xz too) or transcripts of a manifest (.jsonl), read as characters; what
is not a to z, space or ' is dropped. A tenth of the lines, drawn by seed, is held out; prints the accuracy on it with
its interval, and which classes are taken for which.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch
from ds2_ops import lstm
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from ds2.config.device import resolve_device
from ds2.lm.sentences import SentenceReader
from ds2.system.errors import UserError
from ds2.text.alphabet import Alphabet

_ALPHABET = Alphabet(("", *" 'abcdefghijklmnopqrstuvwxyz"))
_LONGEST = 200  # characters of a line that are read
Line = tuple[list[int], int]  # labels of the characters, class


class TextClassifier(nn.Module):
    """Characters to logits of classes: an embedding, one LSTM layer, and a classifier of its state after the last one.

    Args:
        symbols: characters, with 0 for what is none.
        classes: what is told apart.
        hidden: H of the layer.
    """

    def __init__(self, symbols: int, classes: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, hidden)
        self.layer = nn.LSTM(hidden, hidden)  # for its weights; ds2_ops runs it
        self.classifier = nn.Linear(hidden, classes)

    def forward(self, characters: Tensor, lengths: Tensor) -> Tensor:
        """(T, B) characters of which `lengths` (B,) count, to (B, classes) logits; padding is never looked at."""
        weight_ih, weight_hh, bias_ih, bias_hh = self.layer.parameters()
        gates = functional.linear(self.embedding(characters), weight_ih, bias_ih + bias_hh)
        _, last, _ = lstm(gates, weight_hh, lengths=lengths)
        logits: Tensor = self.classifier(last)
        return logits


def batches(lines: Sequence[Line], size: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield characters (T, B), lengths (B,) and classes (B,) of `size` lines at a time."""
    for start in range(0, len(lines), size):
        part = lines[start : start + size]
        characters = pad_sequence([torch.tensor(labels) for labels, _ in part])
        lengths, classes = (torch.tensor(c) for c in ([len(labels) for labels, _ in part], [c for _, c in part]))
        yield characters.to(device), lengths.to(device), classes.to(device)


def read(paths: Sequence[Path], most: int) -> list[Line]:
    """The first `most` lines of each file, with the file's number."""
    lines: list[Line] = []
    for number, path in enumerate(paths):
        reader = SentenceReader([path], "character", _ALPHABET, "drop")
        found = ["".join(tokens).replace("<space>", " ") for tokens in islice(reader, most)]
        lines += [(_ALPHABET.spell(text[:_LONGEST].strip()), number) for text in found]
    return lines


def confusion(model: TextClassifier, lines: Sequence[Line], classes: int, device: torch.device) -> Tensor:
    """(classes, classes) counts: row the truth, column what the model says."""
    counts = torch.zeros(classes, classes, dtype=torch.int64)
    with torch.inference_mode():
        for characters, lengths, truth in batches(lines, 256, device):
            said = model(characters, lengths).argmax(1)
            counts += torch.bincount(truth.cpu() * classes + said.cpu(), minlength=classes**2).view(classes, classes)
    return counts


def main() -> int:
    """Train, judge on the lines held out, print; 2 for input that cannot be used."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, nargs="+", help="two or more: a class each")
    parser.add_argument("--lines", type=int, default=5000, help="of each text, at most (default 5000)")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--batch", type=int, default=64, help="lines a step")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    try:
        device, lines = resolve_device(given.device), read(given.texts, given.lines)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    draw = random.Random(given.seed)
    draw.shuffle(lines)
    held, rest = lines[: len(lines) // 10], lines[len(lines) // 10 :]
    if len(given.texts) < 2 or not held:
        print(f"{len(given.texts)} texts, {len(lines)} lines: two texts and ten lines are needed", file=sys.stderr)
        return 2
    torch.manual_seed(given.seed)
    model = TextClassifier(len(_ALPHABET), len(given.texts), given.hidden).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.learning_rate)
    began = time.monotonic()
    for epoch in range(1, given.epochs + 1):
        draw.shuffle(rest)
        total = 0.0
        for characters, lengths, truth in batches(rest, given.batch, device):
            loss = functional.cross_entropy(model(characters, lengths), truth)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += float(loss.detach()) * len(truth)
        print(f"epoch {epoch}: {total / len(rest):.3f} nats a line, {time.monotonic() - began:.0f} s", flush=True)
    counts = confusion(model, held, len(given.texts), device)
    right = int(counts.trace()) / len(held)
    margin = 1.96 * (right * (1 - right) / len(held)) ** 0.5
    print(f"held out: {100 * right:.2f} % of {len(held)} lines right, +- {100 * margin:.2f} (95 %)")
    for path, row in zip(given.texts, counts.tolist(), strict=True):
        print(f"{path}: {', '.join(map(str, row))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

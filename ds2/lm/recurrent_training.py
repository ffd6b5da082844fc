"""Training of a recurrent language model: a text as one row of labels on the device, of which steps take stretches."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import utils

from ds2.config.allowed import COUNT, SEED, UNLIMITED, number
from ds2.config.check import check_allowed
from ds2.lm.ngram import SPACE, LanguageModelError
from ds2.lm.recurrent import BOUNDARY, RecurrentLM, gather
from ds2.system.plain import FieldError, from_plain
from ds2.system.tensor_file import (
    CheckpointError,
    load,
    optimizer_tensors,
    restore_optimizer,
    save,
    with_prefix,
    without_prefix,
)
from ds2.text.alphabet import Alphabet

_CLIP_NORM = 1.0
_JITTER = 0.1  # of a stretch's length, before like lengths become batches: epochs have other batches


@dataclass(frozen=True)
class Settings:
    """How a model is trained."""

    epochs: int = number(10, 1, COUNT)
    max_minutes: float = number(0.0, 0, UNLIMITED)  # the rate falls to zero by then; 0: no limit
    learning_rate: float = number(2e-3, 0, 1e6, above=True)
    warmup_steps: int = number(200, 0, COUNT)
    weight_decay: float = number(0.01, 0, 1e6)
    batch_tokens: int = number(32_768, 1, COUNT)  # padded, a step
    join: int = number(1, 1, 1000)  # up to so many lines that follow each other become one text, drawn each epoch
    longest: int = number(1000, 1, 1_000_000)  # tokens of a text; what is longer is cut
    seed: int = number(1, 0, SEED)


@dataclass(frozen=True)
class Text:
    """The lines of a text, one after the other: `labels` (N,) uint16, of which line i has starts[i] .. starts[i + 1].

    Where the alphabet has a space, each line ends with one, so that lines that follow each other join as words do.
    """

    labels: NDArray[np.uint16]
    starts: NDArray[np.int64]
    separator: int  # labels between lines

    @classmethod
    def of(cls, sentences: Iterable[list[str]], alphabet: Alphabet) -> Text:
        """Take what a `SentenceReader` of this alphabet yields.

        Raises:
            LanguageModelError: there is nothing.
        """
        labels = {symbol: label for label, symbol in enumerate(alphabet.symbols)}
        labels[SPACE] = labels.get(" ", BOUNDARY)
        between = [labels[" "]] if " " in labels else []
        rows = [np.array([*map(labels.__getitem__, tokens), *between], np.uint16) for tokens in sentences]
        if not rows:
            raise LanguageModelError("the text is empty: no line holds a token")
        return cls(np.concatenate(rows), np.cumsum([0, *map(len, rows)]), len(between))

    @property
    def digest(self) -> str:
        """Of all lines."""
        return hashlib.sha256(self.labels.tobytes() + self.starts.tobytes()).hexdigest()[:16]

    def stretches(self, join: int, longest: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Cut all lines into texts of 1 to `join` lines, drawn evenly: (S, 2) first label and number of labels."""
        lines = len(self.starts) - 1
        ends = np.minimum(np.cumsum(rng.integers(1, join + 1, lines)), lines)
        edges = self.starts[np.unique(np.append(0, ends))]
        first, sizes = edges[:-1], np.diff(edges) - self.separator
        parts = np.maximum(1, -(-sizes // longest))
        begins = longest * (np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts))
        return np.stack(
            [np.repeat(first, parts) + begins, np.minimum(longest, np.repeat(sizes, parts) - begins)], axis=1
        )


def plan(stretches: NDArray[np.int64], batch_tokens: int, rng: np.random.Generator) -> list[NDArray[np.int64]]:
    """Put stretches (S, 2) of like length together in batches (B, 2) of at most `batch_tokens` padded tokens each.

    Both hold first labels and numbers of labels; batches come in random order.
    """
    sizes = stretches[:, 1]
    order = np.argsort(sizes * (1 + _JITTER * rng.random(len(sizes))), kind="stable")[::-1]
    batches, at = [], 0
    while at < len(order):
        longest = int(sizes[order[at : at + 1]].max() * (1 + _JITTER)) + 2  # with the boundary
        batches.append(order[at : at + max(1, batch_tokens // longest)])
        at += len(batches[-1])
    return [stretches[batches[index]] for index in rng.permutation(len(batches))]


@dataclass(frozen=True)
class Passed:
    """What came of the steps so far."""

    epoch: int
    step: int
    part: float  # of the planned training
    loss: float  # nats a token, mean of the steps since the last report
    tokens_per_s: float
    elapsed_s: float = 0.0  # of training, that before a restart too


def train(
    model: RecurrentLM,
    text: Text,
    settings: Settings,
    report: Callable[[Passed], None],
    report_every_s: float = 10.0,
    stop: Callable[[], bool] = lambda: False,
    state: StateFile | None = None,
) -> Passed:
    """Fit a model to a text: AdamW, a rate that rises in the first steps and falls by half a cosine to zero.

    Each step draws dropout by its own seed, so that a training that goes on from a state takes the steps of an
    unbroken one; with `max_minutes` but for what the clock says of the rate.

    Args:
        model: changed in place, on the device where it is to be trained; left ready to score.
        text: in the model's alphabet.
        settings: of the training.
        report: is told now and then how far it is.
        report_every_s: seconds between two reports.
        stop: asked before each step whether to end there.
        state: from which it goes on where there is one, and in which it is kept where it is stopped or time for it;
            who has written the model removes it.

    Raises:
        LanguageModelError: settings out of range, or a loss that is not finite.
        CheckpointError: the state is damaged, of another training, or cannot be written.
    """
    check_allowed(settings, "lm train")
    device = model.classifier.weight.device
    on_gpu = device.type == "cuda"
    labels = torch.from_numpy(text.labels.astype(np.int32)).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=torch.tensor(settings.learning_rate, device=device),
        betas=(0.9, 0.98),
        weight_decay=settings.weight_decay,
        fused=True,
    )
    position = Position() if state is None else state.restore(model, optimizer)
    rate: Tensor = optimizer.param_groups[0]["lr"]
    began = time.monotonic() - position.elapsed_s
    window = _Window(device)
    passed = Passed(position.epoch, position.step, 0.0, math.nan, 0.0, position.elapsed_s)
    model.train()
    for epoch, behind, batches, batch in _batches(text, settings, position):
        part = (epoch - 1 + behind / batches) / settings.epochs
        if settings.max_minutes:
            part = max(part, (time.monotonic() - began) / (60 * settings.max_minutes))
        stopped = stop()
        if state is not None and (stopped or state.due) and window.steps:
            passed = window.close(passed)  # which says if there is nothing worth keeping
            report(passed)
            state.save(model, optimizer, Position(epoch, behind, passed.step, passed.elapsed_s))
        if part >= 1 or stopped:
            break
        torch.manual_seed(_step_seed(settings.seed, passed.step))
        warm = min(1.0, (passed.step + 1) / max(1, settings.warmup_steps))
        rate.fill_(settings.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * part)))
        targets, lengths = gather(labels, torch.from_numpy(batch).to(device), int(batch[:, 1].max()))
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            loss = -model.log_probs(targets, lengths).sum() / lengths.sum()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        utils.clip_grad_norm_(model.parameters(), _CLIP_NORM, foreach=True)
        optimizer.step()
        window.add(loss.detach(), int(batch[:, 1].sum()) + len(batch))
        elapsed_s = time.monotonic() - began
        passed = replace(passed, epoch=epoch, step=passed.step + 1, part=part, elapsed_s=elapsed_s)
        if window.age_s >= report_every_s:
            passed = window.close(passed)
            report(passed)
    if window.steps:
        passed = window.close(passed)
        report(passed)
    model.eval()
    return passed


class _Window:
    """The steps since the last report."""

    def __init__(self, device: torch.device) -> None:
        self._loss, self.steps, self._tokens, self._began = torch.zeros((), device=device), 0, 0, time.monotonic()

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._began

    def add(self, loss: Tensor, tokens: int) -> None:
        self._loss += loss
        self.steps, self._tokens = self.steps + 1, self._tokens + tokens

    def close(self, passed: Passed) -> Passed:
        """Fill in what the window saw, and begin another; waits for the device."""
        mean = float(self._loss) / self.steps
        if not math.isfinite(mean):
            raise LanguageModelError(f"the loss is {mean} at step {passed.step}: lower --learning-rate")
        found = replace(passed, loss=mean, tokens_per_s=self._tokens / self.age_s)
        self._loss.zero_()
        self.steps, self._tokens, self._began = 0, 0, time.monotonic()
        return found


def _step_seed(seed: int, step: int) -> int:
    return int(np.random.SeedSequence([seed, step]).generate_state(1, np.uint64)[0]) >> 1  # torch takes signed ones


def _batches(text: Text, settings: Settings, start: Position) -> Iterator[tuple[int, int, int, NDArray[np.int64]]]:
    """Yield (epoch, batches of it that are behind, batches of the epoch, the batch's stretches) from a position on."""
    for epoch in range(start.epoch, settings.epochs + 1):
        rng = np.random.default_rng([settings.seed, epoch])
        batches = plan(text.stretches(settings.join, settings.longest, rng), settings.batch_tokens, rng)
        for behind in range(start.batch if epoch == start.epoch else 0, len(batches)):
            yield epoch, behind, len(batches), batches[behind]


_KIND = "recurrent-lm-training"


@dataclass(frozen=True)
class Position:
    """How far a training is."""

    epoch: int = 1  # that is running
    batch: int = 0  # batches of it that are behind
    step: int = 0
    elapsed_s: float = 0.0


@dataclass(frozen=True)
class _Stored:
    """The metadata of a file."""

    format: int
    kind: str
    position: Position
    made_of: dict[str, Any]


class StateFile:
    """Weights, optimizer and position beside the model that is to be, until that is whole.

    Args:
        path: of the file.
        made_of: what must be the same for a training to go on, by the name that messages call it; JSON-serialisable.
        every_s: seconds between two saves; 0: only where the training is stopped.
    """

    def __init__(self, path: Path, made_of: Mapping[str, Any], every_s: float) -> None:
        self.path, self._made_of, self._every_s = path, dict(made_of), every_s
        self._saved = time.monotonic()

    @property
    def due(self) -> bool:
        """Whether the time between two saves has passed."""
        return 0 < self._every_s < time.monotonic() - self._saved

    def save(self, model: RecurrentLM, optimizer: torch.optim.Optimizer, position: Position) -> None:
        """Write the file, the old one or the whole new one.

        Raises:
            CheckpointError: it cannot be written.
        """
        tensors = {
            **with_prefix("model", model.state_dict()), **with_prefix("optimizer", optimizer_tensors(optimizer)),
        }  # fmt: skip
        save(self.path, tensors, {"kind": _KIND, "position": asdict(position), "made_of": self._made_of})
        self._saved = time.monotonic()

    def restore(self, model: RecurrentLM, optimizer: torch.optim.Optimizer) -> Position:
        """Make model and optimizer those of the file, and return its position; without a file it is the start.

        Raises:
            CheckpointError: the file is damaged, or of a training of other things; the message says which.
        """
        if not self.path.is_file():
            return Position()
        try:
            return self._restore(model, optimizer)
        except (CheckpointError, FieldError, RuntimeError, KeyError, ValueError) as error:
            reason = " ".join(str(error).split()).removeprefix(f"{self.path}: ")
            raise CheckpointError(f"{self.path}: {reason}; remove this file to begin anew") from error

    def _restore(self, model: RecurrentLM, optimizer: torch.optim.Optimizer) -> Position:
        tensors, metadata = load(self.path)
        if metadata.get("kind") != _KIND:
            raise CheckpointError(f"is a {metadata.get('kind')}, not the state of `ds2 lm train`")
        stored = from_plain(_Stored, metadata, "metadata")
        here = self._made_of
        other = [name for name in sorted({*here, *stored.made_of}) if here.get(name) != stored.made_of.get(name)]
        if other:
            raise CheckpointError(f"a training with other {', '.join(other)} was stopped there: go on with the same")
        if min(stored.position.epoch - 1, stored.position.batch, stored.position.step) < 0:
            raise CheckpointError(f"metadata.position: counts from before the start, {stored.position}")
        model.load_state_dict(without_prefix("model", tensors))
        momenta, weights = without_prefix("optimizer", tensors), list(model.parameters())
        wanted = {f"{n}.{name}": w.shape for n, w in enumerate(weights) for name in ("exp_avg", "exp_avg_sq")}
        wanted |= {f"{n}.step": torch.Size() for n in range(len(weights))}
        if {name: value.shape for name, value in momenta.items()} != wanted:
            raise CheckpointError("optimizer: its momenta are those of other weights")
        restore_optimizer(optimizer, momenta)
        return stored.position

    def remove(self) -> None:
        """Remove the file: the model is whole."""
        self.path.unlink(missing_ok=True)

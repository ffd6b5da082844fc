"""Training of a recurrent language model, and the state from which an interrupted training continues."""

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import utils

from ds2.config.allowed import COUNT, SEED, UNLIMITED, number
from ds2.config.check import check_allowed
from ds2.lm.ngram import SPACE, LanguageModelError
from ds2.lm.recurrent import BOUNDARY, RecurrentLM, batches, pad_texts
from ds2.system import tensor_file
from ds2.system.plain import FieldError, from_plain
from ds2.system.tensor_file import CheckpointError, optimizer_tensors, restore_optimizer, with_prefix, without_prefix
from ds2.text.alphabet import Alphabet

_CLIP_NORM = 1.0
_JITTER = 0.1  # of lengths, before texts of similar length become batches: every epoch has other batches
_KIND = "recurrent-lm-training"


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of a training; `ds2 lm train --help` shows the comments."""

    epochs: int = number(10, 1, COUNT)  # passes over the text
    max_minutes: float = number(0.0, 0, UNLIMITED)  # the learning rate reaches zero after this time; 0: no limit
    learning_rate: float = number(2e-3, 0, 1e6, above=True)  # the highest
    warmup_steps: int = number(200, 0, COUNT)  # steps in which the learning rate rises
    weight_decay: float = number(0.01, 0, 1e6)  # of AdamW
    batch_tokens: int = number(32_768, 1, COUNT)  # tokens of a step, padding included
    join: int = number(1, 1, 1000)  # 1 to this many consecutive lines become one text, drawn in each epoch
    longest: int = number(1000, 1, 1_000_000)  # tokens of a text; longer texts are split
    seed: int = number(1, 0, SEED)  # of weights, dropout and order


@dataclass(frozen=True)
class TrainingText:
    """The lines of a text in one array: line i has the labels (N,) from starts[i] to starts[i + 1], uint16 if they fit.

    If the alphabet has a space, each line ends with one, which separates lines that are joined.
    """

    labels: NDArray[np.uint16 | np.int32]
    starts: NDArray[np.int64]
    separator: int  # labels between two lines: 1 or 0

    @classmethod
    def of(cls, sentences: Iterable[list[str]], alphabet: Alphabet) -> Self:
        """Convert the sentences, one or more, of a `SentenceReader` with the same alphabet."""
        labels = {symbol: label for label, symbol in enumerate(alphabet.symbols)}
        labels[SPACE] = labels.get(" ", BOUNDARY)
        separator = [labels[" "]] if " " in labels else []
        kind = np.uint16 if len(alphabet) <= 1 << 16 else np.int32
        rows = [np.array([*map(labels.__getitem__, tokens), *separator], kind) for tokens in sentences]
        return cls(np.concatenate(rows), np.cumsum([0, *map(len, rows)]), len(separator))

    @property
    def digest(self) -> str:
        """A hash of all lines."""
        return hashlib.sha256(self.labels.tobytes() + self.starts.tobytes()).hexdigest()[:16]

    def draw_spans(self, join: int, longest: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Return texts of 1 to `join` lines as spans (S, 2): position of the first label and number of labels."""
        lines = len(self.starts) - 1
        ends = np.minimum(np.cumsum(rng.integers(1, join + 1, lines)), lines)
        edges = self.starts[np.unique(np.append(0, ends))]
        first, sizes = edges[:-1], np.diff(edges) - self.separator
        parts = np.maximum(1, -(-sizes // longest))
        begins = longest * (np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts))
        return np.stack(
            [np.repeat(first, parts) + begins, np.minimum(longest, np.repeat(sizes, parts) - begins)], axis=1
        )


def plan_batches(spans: NDArray[np.int64], batch_tokens: int, rng: np.random.Generator) -> list[NDArray[np.int64]]:
    """Group spans (S, 2) of similar length into batches (B, 2) of at most `batch_tokens` padded tokens, shuffled."""
    sizes = spans[:, 1]
    order = np.argsort(sizes * (1 + _JITTER * rng.random(len(sizes))), kind="stable")[::-1]
    longest = (sizes[order] * (1 + _JITTER)).astype(np.int64) + 2  # that follow in a batch, with the boundary
    planned = [spans[order[rows]] for rows in batches(longest, batch_tokens)]
    return [planned[index] for index in rng.permutation(len(planned))]


@dataclass(frozen=True)
class TrainingProgress:
    """The progress of a training."""

    epoch: int
    step: int
    part: float  # share of the planned training, 0 to 1
    loss: float  # nats for each token, mean of the steps since the last report
    tokens_per_s: float
    elapsed_s: float = 0.0  # time of training, including that before a restart


def train(
    model: RecurrentLM,
    text: TrainingText,
    settings: TrainingSettings,
    report: Callable[[TrainingProgress], None],
    report_every_s: float = 10.0,
    stop: Callable[[], bool] = lambda: False,
    state: "StateFile | None" = None,
) -> TrainingProgress:
    """Train a model with AdamW, a linear warm-up and a half cosine of the learning rate to zero.

    The random numbers of a step depend on its number only: a training that continues from a state takes the same steps
    as one without interruption, unless `max_minutes` makes the learning rate depend on the clock.

    Args:
        model: trained in place on its device; in evaluation mode afterwards.
        text: in the model's alphabet.
        report: called with the progress at intervals.
        stop: called before each step; the training ends if it returns True.
        state: file to continue from, if it exists, and to save to when the training is stopped and at intervals. The
            caller removes it after the model was saved.

    Raises:
        ConfigError: a setting is out of range.
        LanguageModelError: the loss is not finite.
        CheckpointError: the state is damaged, belongs to another training, or cannot be written.
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
    position = TrainingPosition() if state is None else state.restore(model, optimizer)
    rate: Tensor = optimizer.param_groups[0]["lr"]
    start_s = time.monotonic() - position.elapsed_s
    window = _ReportWindow(device)
    progress = TrainingProgress(position.epoch, position.step, 0.0, math.nan, 0.0, position.elapsed_s)
    model.train()
    for epoch, done, count, batch in _remaining_batches(text, settings, position):
        part = (epoch - 1 + done / count) / settings.epochs
        if settings.max_minutes:
            part = max(part, (time.monotonic() - start_s) / (60 * settings.max_minutes))
        stopped = stop()
        if state is not None and (stopped or state.is_due) and window.steps:
            progress = window.close(progress)  # raises an error instead of saving weights of a non-finite loss
            report(progress)
            state.save(model, optimizer, TrainingPosition(epoch, done, progress.step, progress.elapsed_s))
        if part >= 1 or stopped:
            break
        seed = np.random.SeedSequence([settings.seed, progress.step]).generate_state(1, np.uint64)
        torch.manual_seed(int(seed[0]) >> 1)  # torch takes signed seeds
        warm = min(1.0, (progress.step + 1) / max(1, settings.warmup_steps))
        rate.fill_(settings.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * part)))
        targets, lengths = pad_texts(labels, torch.from_numpy(batch).to(device), int(batch[:, 1].max()))
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            loss = -model.log_probs(targets, lengths).sum() / lengths.sum()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        utils.clip_grad_norm_(model.parameters(), _CLIP_NORM, foreach=True)
        optimizer.step()
        window.add(loss.detach(), int(batch[:, 1].sum()) + len(batch))
        elapsed_s = time.monotonic() - start_s
        progress = replace(progress, epoch=epoch, step=progress.step + 1, part=part, elapsed_s=elapsed_s)
        if window.age_s >= report_every_s:
            progress = window.close(progress)
            report(progress)
    if window.steps:
        progress = window.close(progress)
        report(progress)
    model.eval()
    return progress


class _ReportWindow:
    """Loss and tokens of the steps since the last report."""

    def __init__(self, device: torch.device) -> None:
        self._loss, self.steps, self._tokens, self._start_s = torch.zeros((), device=device), 0, 0, time.monotonic()

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._start_s

    def add(self, loss: Tensor, tokens: int) -> None:
        self._loss += loss
        self.steps, self._tokens = self.steps + 1, self._tokens + tokens

    def close(self, progress: TrainingProgress) -> TrainingProgress:
        """Return the progress with loss and speed of this window, and start the next one; synchronises the device."""
        mean = float(self._loss) / self.steps
        if not math.isfinite(mean):
            raise LanguageModelError(f"the loss is {mean} at step {progress.step}: lower --learning-rate")
        closed = replace(progress, loss=mean, tokens_per_s=self._tokens / self.age_s)
        self._loss.zero_()
        self.steps, self._tokens, self._start_s = 0, 0, time.monotonic()
        return closed


def _remaining_batches(
    text: TrainingText, settings: TrainingSettings, start: "TrainingPosition"
) -> Iterator[tuple[int, int, int, NDArray[np.int64]]]:
    """Yield (epoch, completed batches of the epoch, batches of the epoch, spans of the batch) from a position on."""
    for epoch in range(start.epoch, settings.epochs + 1):
        rng = np.random.default_rng([settings.seed, epoch])
        planned = plan_batches(text.draw_spans(settings.join, settings.longest, rng), settings.batch_tokens, rng)
        for done in range(start.batch if epoch == start.epoch else 0, len(planned)):
            yield epoch, done, len(planned), planned[done]


@dataclass(frozen=True)
class TrainingPosition:
    """The position from which a training continues."""

    epoch: int = 1
    batch: int = 0  # completed batches of this epoch
    step: int = 0
    elapsed_s: float = 0.0


@dataclass(frozen=True)
class _StateHeader:
    """The metadata of a state file."""

    format: int
    kind: str
    position: TrainingPosition
    made_of: dict[str, Any]


class StateFile:
    """A file of weights, optimizer and position, next to the model file, while the training is not finished.

    Args:
        made_of: everything that must be equal for a training to continue, by name for messages; JSON-serialisable.
        every_s: seconds from one save to the next; 0: save only when the training is stopped.
    """

    def __init__(self, path: Path, made_of: Mapping[str, Any], every_s: float) -> None:
        self.path, self._made_of, self._every_s = path, dict(made_of), every_s
        self._saved_s = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether it is time for the next save."""
        return 0 < self._every_s < time.monotonic() - self._saved_s

    def save(self, model: RecurrentLM, optimizer: torch.optim.Optimizer, position: TrainingPosition) -> None:
        """Write the file atomically; raises CheckpointError where that fails."""
        tensors = with_prefix("model", model.state_dict()) | with_prefix("optimizer", optimizer_tensors(optimizer))
        tensor_file.save(self.path, tensors, {"kind": _KIND, "position": asdict(position), "made_of": self._made_of})
        self._saved_s = time.monotonic()

    def restore(self, model: RecurrentLM, optimizer: torch.optim.Optimizer) -> TrainingPosition:
        """Load model and optimizer from the file and return its position; without a file return the start.

        Raises:
            CheckpointError: the file is damaged, or belongs to a training of other things, which the message names.
        """
        if not self.path.is_file():
            return TrainingPosition()
        try:
            return self._restore(model, optimizer)
        except (CheckpointError, FieldError, RuntimeError, KeyError, ValueError) as error:
            reason = " ".join(str(error).split()).removeprefix(f"{self.path}: ")
            raise CheckpointError(f"{self.path}: {reason}; delete this file to start from the beginning") from error

    def _restore(self, model: RecurrentLM, optimizer: torch.optim.Optimizer) -> TrainingPosition:
        tensors, metadata = tensor_file.load(self.path)
        if metadata.get("kind") != _KIND:
            raise CheckpointError(f"is a {metadata.get('kind')}, not the state of `ds2 lm train`")
        header = from_plain(_StateHeader, metadata, "metadata")
        names = sorted({*self._made_of, *header.made_of})
        different = [name for name in names if self._made_of.get(name) != header.made_of.get(name)]
        if different:
            raise CheckpointError(f"was saved by a training with another {', '.join(different)}: use the same")
        if min(header.position.epoch - 1, header.position.batch, header.position.step) < 0:
            raise CheckpointError(f"metadata.position: has a negative count, {header.position}")
        model.load_state_dict(without_prefix("model", tensors))
        momenta, weights = without_prefix("optimizer", tensors), list(model.parameters())
        shapes = {f"{n}.{name}": w.shape for n, w in enumerate(weights) for name in ("exp_avg", "exp_avg_sq")}
        shapes |= {f"{n}.step": torch.Size() for n in range(len(weights))}
        if {name: value.shape for name, value in momenta.items()} != shapes:
            raise CheckpointError("optimizer: the momenta belong to other weights")
        restore_optimizer(optimizer, momenta)
        return header.position

    def remove(self) -> None:
        """Delete the file after the model was saved."""
        self.path.unlink(missing_ok=True)

"""Logs of a run: JSON lines, TensorBoard, a progress bar, the time of each phase of a step, gradient noise."""

import errno
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ds2.distributed.communicator import Moment
from ds2.system.files import atomic_file, name_errors
from ds2.system.terminal import stderr_is_terminal
from ds2.training.state import Progress

_ALIGNMENT_ROW_PIXELS = 6
LoggedScalars = tuple[str, int, Mapping[str, float]]  # a group of numbers, their step, and the numbers by name
_DECAY = 0.9  # of the weight of a window in the running averages, from window to window


class StepTimer:
    """Seconds a step spends in each phase, measured by device events on a GPU and by the clock on a CPU.

    The events are read only in `means`, so that timing costs a step no synchronisation. `data` is always host time: how
    long the loop waited for the loader.
    """

    def __init__(self, device: torch.device, on_phase: Callable[[str], None]) -> None:
        """Start with no step recorded; `on_phase` is called with the name of each phase as it begins."""
        self._on_gpu, self._on_phase = device.type == "cuda", on_phase
        self._spans: dict[str, list[tuple[Moment, Moment]]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as one occurrence of the phase `name`."""
        self._on_phase(name)
        began = self._now(name)
        yield
        self.add(name, began, self._now(name))

    def _now(self, phase: str) -> Moment:
        if not self._on_gpu or phase == "data":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def add(self, name: str, began: Moment, ended: Moment) -> None:
        """Add the time between two moments of one kind."""
        self._spans.setdefault(name, []).append((began, ended))

    def means(self, steps: int) -> dict[str, float]:
        """Mean seconds a step by phase over the last `steps` steps; forgets them."""
        if self._on_gpu:
            torch.cuda.synchronize()
        spans, self._spans = self._spans, {}
        return {name: sum(starmap(_seconds, pairs)) / max(steps, 1) for name, pairs in spans.items()}


def _seconds(began: Any, ended: Any) -> float:
    return float(ended - began if isinstance(began, float) else began.elapsed_time(ended) / 1000)


@dataclass
class LoggedUtterance:
    """A dev utterance for TensorBoard; None is not shown."""

    reference: str
    hypothesis: str
    alignment: Tensor | None = None  # (L, T') probabilities of the reference's labels, in order, at each output frame
    waveform: Tensor | None = None  # (N,)
    features: Tensor | None = None  # (F, T)


def _tag(group: str, name: str) -> str:
    """Return the tag of a number in TensorBoard: losses first, then scores, times in a group of their own."""
    if name == "loss":
        return f"loss/{group}"
    if name.endswith("_s"):
        return f"timing/{name}"
    return f"score/{group}_{name}" if group == "dev" else f"{group}/{name}"


def load_tensorboard() -> None:
    """Import what a `RunLog` that writes needs, which takes a moment: the others would wait for a new rank 0."""
    import torch.utils.tensorboard  # noqa: F401


class RunLog:
    """Writes a run's scalars, texts and spectrograms under its folder; only rank 0 makes one that writes.

    `log.jsonl` gets one object an event and is only ever appended to: a resumed run repeats the steps after its
    checkpoint, and its `resume` event says from where. Of two lines of one step the later one holds.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        resume_step: int = 0,
        writes: bool = True,
        superseded: Callable[[], bool] = lambda: False,
        takes_over: bool = False,
    ) -> None:
        """Open `run_dir/log.jsonl` and `run_dir/tensorboard`; events after `resume_step` are hidden in TensorBoard.

        With `writes` False, as on ranks above 0, nothing is opened or written. Nothing more is written once
        `superseded` returns that another process writes. `takes_over` replaces the file by a copy: a previous writer
        that was stopped just before it wrote a line then goes on in the old file.
        """
        self._path, self._superseded = run_dir / "log.jsonl", superseded
        self.writes = writes and not (takes_over and self._path.is_file() and not self._replace_by_copy())
        if not self.writes:
            return
        from torch.utils.tensorboard import SummaryWriter

        torn = self._path.is_file() and self._path.read_bytes()[-1:] not in (b"", b"\n")
        self._jsonl = self._path.open("a", encoding="utf-8")
        if torn:  # a killed process left part of a line: the next event starts a new one
            self._jsonl.write("\n")
        purge = resume_step + 1 if resume_step else None
        self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge)
        self._board.add_custom_scalars({"loss": {"train and dev": ["Multiline", ["loss/train", "loss/dev"]]}})

    def _replace_by_copy(self) -> bool:
        """Replace the file by a copy of it, unless another process writes by now; returns whether it did.

        A process that was stopped after it copied cannot replace the others' lines: their next writer has removed the
        copy.
        """
        try:
            with atomic_file(self._path) as copy:
                shutil.copyfile(self._path, copy)
                if self._superseded():
                    raise InterruptedError(errno.EINTR, "another process writes", str(copy))
        except OSError:
            if not self._superseded():
                raise
            return False
        return True

    def event(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Append one JSON line `{"event": kind, "step": step, "time": ..., **values}`."""
        if not self.writes or self._superseded():
            return
        finite = {k: (None if isinstance(v, float) and not math.isfinite(v) else v) for k, v in values.items()}
        line = {"event": kind, "step": step, "time": round(time.time(), 3), **finite}
        with name_errors(self._path):
            self._jsonl.write(json.dumps(line, ensure_ascii=False) + "\n")
            self._jsonl.flush()

    def scalars(self, group: str, step: int, values: Mapping[str, float]) -> LoggedScalars:
        """Log numbers to both places; returns them."""
        self.event(group, step, values)
        if self.writes:
            with name_errors(self._path.with_name("tensorboard")):
                for name, value in values.items():
                    self._board.add_scalar(_tag(group, name), value, step)
        return group, step, values

    def utterance(self, step: int, tag: str, shown: LoggedUtterance, sample_rate_hz: int) -> None:
        """Show an utterance: audio, spectrogram with low frequencies at the bottom, alignment, and both texts.

        In the alignment labels of the reference go down and time goes right; a network that is sure gives a diagonal.
        """
        if not self.writes:
            return
        if shown.waveform is not None:
            self._board.add_audio(f"{tag}/audio", shown.waveform[None], step, sample_rate_hz)
        if shown.features is not None:
            image = shown.features.detach().float().cpu().flip(0)
            low, high = image.min(), image.max()
            self._board.add_image(f"{tag}/spectrogram", ((image - low) / (high - low + 1e-9))[None], step)
        if shown.alignment is not None and shown.alignment.numel():
            rows = shown.alignment.repeat_interleave(_ALIGNMENT_ROW_PIXELS, 0).repeat_interleave(2, 1)
            self._board.add_image(f"{tag}/alignment", rows[None], step)
        text = f"    ref: {shown.reference}\n    hyp: {shown.hypothesis}"
        self._board.add_text(f"{tag}/text", text, step)

    def settings(self, values: Mapping[str, Any], scores: Mapping[str, float]) -> None:
        """Add a run's settings and best scores as a row of TensorBoard's HParams table.

        Empty texts, lists and mappings are left out: they would be the first columns of the table.

        Args:
            values: settings by dotted key, best those that are not the default: each is a column.
            scores: of the best epoch, by name.
        """
        if not self.writes:
            return
        from torch.utils.tensorboard.summary import hparams

        non_empty = {k: v for k, v in values.items() if v not in ("", [], {})}
        plain = {k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in non_empty.items()}
        finite = {f"score/best_{name}": value for name, value in scores.items() if math.isfinite(value)}
        writer = self._board._get_file_writer()  # type: ignore[no-untyped-call]  # add_hparams makes a run of its own
        for summary in hparams(plain, finite):  # type: ignore[no-untyped-call]
            writer.add_summary(summary)
        for name, value in finite.items():
            self._board.add_scalar(name, value)

    def close(self) -> None:
        """Flush and close both files."""
        if not self.writes:
            return
        self._jsonl.close()
        self._board.close()


def progress_bar(total: int, epoch: int, epochs: int, initial: int, *, shown: bool = True) -> tqdm:
    """A bar over the steps of an epoch; silent where `shown` is False or the error stream is no terminal."""
    return tqdm(
        total=total, initial=initial, desc=f"epoch {epoch}/{epochs}", unit="step", dynamic_ncols=True, leave=False,
        disable=not (shown and stderr_is_terminal()),
    )  # fmt: skip


class LogWindow:
    """Means over the steps of this process since it was made: those of a log line, or of an epoch."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.losses, self.steps = progress, list[float](), 0
        self._began, self._audio_s = time.monotonic(), progress.audio_s

    def add(self, loss: float | None) -> None:
        """Count one step; None is a skipped one."""
        self.steps += 1
        if loss is not None:
            self.losses.append(loss)

    @property
    def loss(self) -> float:
        """Mean over the steps that were not skipped."""
        return sum(self.losses) / len(self.losses) if self.losses else float("nan")

    @property
    def audio_s_per_s(self) -> float:
        """Seconds of training audio a second of wall time."""
        return (self.progress.audio_s - self._audio_s) / max(time.monotonic() - self._began, 1e-9)

    def values(self, split: Mapping[str, float], rate: float, gradient_norm: float, ranks: int) -> dict[str, float]:
        """The scalars of one log line; `split` has the seconds a step of each phase, `ranks` took the steps."""
        return {
            "loss": self.loss,
            "learning_rate": rate,
            "gradient_norm": gradient_norm,
            "epoch": self.progress.epoch,
            "ranks": ranks,
            "skipped_steps": self.progress.skipped,
            "infeasible_utterances": self.progress.infeasible,
            "audio_s_per_s": self.audio_s_per_s,
            "step_s": (time.monotonic() - self._began) / self.steps,
            **{f"{name}_s": seconds for name, seconds in split.items()},
        }


class NoiseScale:
    """Estimates tr(S) / |G|^2 in utterances, G the gradient and S its covariance from utterance to utterance.

    A batch far below it halves the steps when it is doubled, one far above it hardly saves any (McCandlish et al. 2018,
    section 2.2). Over a window of k steps, of batches of b utterances with gradients g,

        E[mean of |g|^2] = |G|^2 + tr(S) / b   and   E[|mean of g|^2] = |G|^2 + tr(S) / (k b)

    (appendix A.1), solved for both, each averaged over windows before they are divided. The weights move within a
    window, which counts as noise: at high learning rates the estimate is somewhat too large.

    Args:
        gradients: the tensors that hold a step's gradients of the mean loss, before clipping.
    """

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        self._gradients = list(gradients)
        self._sum = [torch.zeros_like(gradient) for gradient in gradients]
        self._squares: list[float] = []
        self._utterances = 0

    def add(self, norm: float, utterances: int) -> None:
        """Count a step whose gradient has this norm, of a batch of so many utterances."""
        torch._foreach_add_(self._sum, self._gradients)
        self._squares.append(norm**2)
        self._utterances += utterances

    def end_window(self, progress: Progress) -> float:
        """Return the estimate by averages in `progress`, NaN where noise hides the gradient; waits for the device."""
        k = len(self._squares)
        if k > 1:
            batch, square = self._utterances / k, sum(self._squares) / k
            of_mean = float(torch.stack(torch._foreach_norm(self._sum)).square().sum()) / k**2
            progress.noise = _DECAY * progress.noise + batch * (square - of_mean) * k / (k - 1)
            progress.signal = _DECAY * progress.signal + (k * of_mean - square) / (k - 1)
            torch._foreach_zero_(self._sum)
            self._squares, self._utterances = [], 0
        return progress.noise / progress.signal if progress.signal > 0 else float("nan")

"""The CTC loss and its gradient on arrays of any framework (Graves et al. 2006, equations 8 and 16).

    op = Ctc(frames=400, batch=8, labels=29, longest=120)
    workspace = cupy.empty(op.workspace_bytes, cupy.uint8)
    op.forward(log_probs, frames, labels, sizes, losses, workspace, stream=stream)
    op.gradient(log_probs, frames, labels, sizes, losses, grad_losses, grad_logits, workspace, stream=stream)

Lengths are not read back. Arrays on the CPU are computed in float64 by NumPy.
Shape letters: T frames, B utterances, V labels (0 is the blank), L labels of the longest target.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ds2_ops.ctc.paths import plan, slopes
from ds2_ops.jit import runtime
from ds2_ops.jit.launch import Launch
from ds2_ops.primitives.arrays import Arrays, ContiguousOp


class Ctc(ContiguousOp):
    """The loss of one shape.

    Args:
        frames, batch, labels, longest: T, B, V, L.
        device: number of the GPU.

    Attributes:
        shapes: of the arrays by their names.
        workspace_bytes: what a GPU needs from `forward` to the end of `gradient`.

    Raises:
        ValueError: a size below 1.
    """

    def __init__(self, *, frames: int, batch: int, labels: int, longest: int, device: int = 0) -> None:
        if min(frames, batch, labels, longest) < 1:
            raise ValueError(f"(T, B, V, L) is {(frames, batch, labels, longest)}, allowed are sizes of 1 or more")
        self.frames, self.batch, self.labels, self.longest, self.device = frames, batch, labels, longest, device
        of_utterance, of_label = (batch,), (frames, batch, labels)
        self.shapes = {
            "log_probs": of_label, "grad_logits": of_label, "labels": (batch, longest),
            **dict.fromkeys(("frames", "sizes", "losses", "grad_losses"), of_utterance),
        }  # fmt: skip
        self.dtypes = dict.fromkeys(self.shapes, "float32") | dict.fromkeys(("frames", "labels", "sizes"), "int64")
        self.workspace_bytes = 2 * 4 * batch * frames * (2 * longest + 1)

    def forward(
        self,
        log_probs: Any,
        frames: Any,
        labels: Any,
        sizes: Any,
        losses: Any,
        workspace: Any = None,
        *,
        stream: Any = None,
    ) -> None:
        """Write the negative log-likelihood of each target, queued on a stream.

        Args:
            log_probs: (T, B, V) float32, log-softmax of the logits.
            frames: (B,) int64, 0 to T.
            labels: (B, L) int64, 1 to V - 1 in the first ``sizes`` columns.
            sizes: (B,) int64, labels of each target, 0 to L.
            losses: (B,) float32, written, in nats; infinite where no alignment exists.
            workspace: `workspace_bytes` of a GPU; holds what `gradient` needs.
            stream: as of the recurrence's primitives.

        Raises:
            ValueError, TypeError: an array is not what is expected, or the scores of a frame do not fit into a block.
            RuntimeError: the compiler's or driver's error.
        """
        arrays = {"log_probs": log_probs, "frames": frames, "labels": labels, "sizes": sizes}
        self._run(self._losses, ["paths"], arrays, {"losses": losses}, workspace, stream)

    def gradient(
        self,
        log_probs: Any,
        frames: Any,
        labels: Any,
        sizes: Any,
        losses: Any,
        grad_losses: Any,
        grad_logits: Any,
        workspace: Any = None,
        *,
        stream: Any = None,
    ) -> None:
        """Write the gradient of the logits, after `forward` on the same arrays and workspace.

        Args:
            log_probs, frames, labels, sizes, losses, workspace, stream: of `forward`.
            grad_losses: (B,) float32.
            grad_logits: (T, B, V) float32, written; 0 past an utterance's frames, not defined where a loss is infinite.

        Raises:
            ValueError, TypeError, RuntimeError: as `forward`.
        """
        arrays = {"log_probs": log_probs, "frames": frames, "labels": labels, "sizes": sizes}
        arrays |= {"losses": losses, "grad_losses": grad_losses}
        self._run(self._gradient, ["slopes"], arrays, {"grad_logits": grad_logits}, workspace, stream)

    def _launch(self, kernel: str) -> Launch:
        if kernel == "slopes":
            return slopes(self.frames, self.batch, self.longest)
        return plan(self.longest, self.labels, runtime.smem_bytes_per_block(self.device), self.batch)

    def _numbers(self, workspace: int) -> dict[str, float]:
        sizes: dict[str, float] = {
            "length": self.frames,
            "batch": self.batch,
            "vocabulary": self.labels,
            "longest": self.longest,
            "delay_penalty": 0.0,
        }
        return sizes | {"alpha": workspace, "beta": workspace + self.workspace_bytes // 2}

    def __str__(self) -> str:
        return f"CTC of (T, B, V) = {self.shapes['log_probs']}"

    def _losses(self, arrays: Arrays) -> Arrays:
        return {"losses": self._alpha_beta(arrays)[2]}

    def _alpha_beta(self, arrays: Arrays) -> tuple[Any, Any, Any]:
        """Log-sums of paths to and from each state, emissions in both, (B, T, S), and the losses (B,)."""
        shape = (self.batch, self.frames, 2 * self.longest + 1)
        alpha, beta, losses = np.full(shape, -np.inf), np.full(shape, -np.inf), np.full(self.batch, np.inf)
        for b in range(self.batch):
            frames, target = int(arrays["frames"][b]), self._target(arrays, b)
            scores = arrays["log_probs"][:frames, b][:, target]
            alpha[b, :frames, : len(target)] = _paths(scores, target)
            beta[b, :frames, : len(target)] = _paths(scores[::-1, ::-1], target[::-1])[::-1, ::-1]
            if frames:
                losses[b] = -np.logaddexp.reduce(alpha[b, frames - 1, max(0, len(target) - 2) : len(target)])
            elif len(target) == 1:
                losses[b] = 0.0
        return alpha, beta, losses

    @staticmethod
    def _target(arrays: Arrays, b: int) -> Any:
        """The label of each state: blanks around and between the labels."""
        labels = arrays["labels"][b, : int(arrays["sizes"][b])]
        states = np.zeros(2 * len(labels) + 1, dtype=np.int64)
        states[1::2] = labels
        return states

    def _gradient(self, arrays: Arrays) -> Arrays:
        alpha, beta, losses = self._alpha_beta(arrays)
        grad = np.zeros(self.shapes["grad_logits"])
        for b in range(self.batch):
            frames, target = int(arrays["frames"][b]), self._target(arrays, b)
            emitted = arrays["log_probs"][:frames, b][:, target]
            with np.errstate(invalid="ignore"):  # -inf of states that no path reaches
                through = np.exp(
                    alpha[b, :frames, : len(target)] + beta[b, :frames, : len(target)] - emitted + losses[b]
                )
            shares = np.zeros((frames, self.labels))
            for state, label in enumerate(target):
                shares[:, label] += through[:, state]
            grad[:frames, b] = (np.exp(arrays["log_probs"][:frames, b]) - shares) * arrays["grad_losses"][b]
        return {"grad_logits": grad}


def _paths(scores: Any, target: Any) -> Any:
    """Log-sum over all ways to each state of a frame, with its emission: (T, S)."""
    sums = np.full(scores.shape, -np.inf)
    if len(sums) == 0:
        return sums
    sums[0, :2] = scores[0, :2]
    leap = np.zeros(len(target), dtype=bool)
    leap[2:] = (target[2:] != 0) & (target[2:] != target[:-2])
    for t in range(1, len(scores)):
        before = sums[t - 1]
        step = np.concatenate([[-np.inf], before[:-1]])
        jump = np.where(leap, np.concatenate([[-np.inf, -np.inf], before[:-2]])[: len(target)], -np.inf)
        sums[t] = scores[t] + np.logaddexp(np.logaddexp(before, step), jump)
    return sums

"""What tools/bench_rnn.py runs: random tensors of one size, our op and torch's on them. Shape letters: T, B, H."""

from collections.abc import Callable, Iterable, Sequence

import torch
from ds2_ops import recurrence
from ds2_ops.recurrent.backends.reference import recurrence_reference
from ds2_ops.recurrent.cells import CELLS, GATED
from torch import Tensor, nn

PEERS = {"lstm": "nn.LSTM", "gru_after": "nn.GRU", "gru_before": "nn.GRU"}  # of the last, only its time compares


def peer_of(cell: str) -> str:
    """Name torch's module for a cell."""
    return PEERS.get(cell, "nn.RNN")


class Work:
    """Random tensors of one size, whose states neither die out nor explode, and what is run on them."""

    def __init__(self, size: tuple[int, int, int], dtype: torch.dtype, device: torch.device, cell: str) -> None:
        self.hidden, self.batch, self.frames = hidden, batch, frames = size
        self.dtype, self.device, self.cell, self.gates = dtype, device, cell, CELLS[cell].gates
        torch.manual_seed(hidden + batch)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, dtype=dtype, device=device) * scale).requires_grad_()

        rows = self.gates * hidden
        self.inputs = draw(frames, batch, hidden)  # of a layer
        self.x = draw(frames, batch, rows) if cell in GATED else self.inputs
        self.grad_y = draw(frames, batch, hidden).detach()
        self.weight_hh = draw(rows, hidden, scale=(1.0 if cell in GATED else 0.9) * hidden**-0.5)
        self.weight_ih, self.bias = draw(rows, hidden, scale=hidden**-0.5), draw(rows, scale=0.1)
        self.bias_hn = draw(hidden, scale=0.1) if cell in GATED and cell != "lstm" else None
        options = {} if cell in GATED else {"nonlinearity": "tanh" if cell == "tanh" else "relu"}
        make = getattr(nn, peer_of(cell).removeprefix("nn."))
        self.peer = make(hidden, hidden, dtype=dtype, device=device, **options)
        with torch.no_grad():
            for mine, theirs in ((self.weight_ih, "weight_ih_l0"), (self.weight_hh, "weight_hh_l0")):
                self.peer.get_parameter(theirs).copy_(mine)
        self.peer.flatten_parameters()

    def in_dtype(self, dtype: torch.dtype) -> "Work":
        """The same size in another dtype."""
        return Work((self.hidden, self.batch, self.frames), dtype, self.device, self.cell)

    def op(self, backend: str, projection: bool, backward: bool) -> Callable[[], object]:
        """Our op as a callable: forward alone, or with all gradients."""
        own = [self.inputs if projection else self.x, self.weight_hh, *([] if self.bias_hn is None else [self.bias_hn])]
        leaves = [*own, *([self.weight_ih, self.bias] if projection else [])]

        def call() -> object:
            with torch.set_grad_enabled(backward):
                x = nn.functional.linear(self.inputs, self.weight_ih, self.bias) if projection else self.x
                y = self._run([x, *own[1:]], None, None, None, backend)[0]
            return torch.autograd.grad(y, leaves, self.grad_y) if backward else y

        return call

    def _run(
        self, given: Sequence[Tensor], h0: Tensor | None, c0: Tensor | None, lengths: Tensor | None, backend: str
    ) -> Sequence[Tensor]:
        x, weight_hh, *bias = given
        own = {"bias_hn": bias[0] if bias else None, "c0": c0}
        return recurrence(x, weight_hh, h0, lengths, cell=self.cell, backend=backend, **own)

    def torch_rnn(self, backward: bool) -> Callable[[], object]:
        """torch's module as a callable; it knows no clipping, which is not where its time goes."""

        def call() -> object:
            with torch.set_grad_enabled(backward):
                y, _ = self.peer(self.inputs)
            return torch.autograd.grad(y, [self.inputs, *self.peer.parameters()], self.grad_y) if backward else y

        return call

    def flashrnn(self, backward: bool, backend: str = "cuda_fused") -> Callable[[], object]:
        """FlashRNN (Poeppel, Beck, Hochreiter 2024) as a callable, of the package that is installed: y (T, B, H).

        Raises:
            RuntimeError: it is not installed, or has no such cell. What it compiles at its first call may fail too.
        """
        try:
            from flashrnn import FlashRNNConfig, flashrnn
        except ImportError as error:
            raise RuntimeError(f"FlashRNN is not installed ({error}): pip install flashrnn") from error
        if self.cell != "lstm":
            raise RuntimeError(f"FlashRNN's equations of {self.cell} are not ours: --cell lstm is compared")
        config = FlashRNNConfig(
            backend=backend, function="lstm", hidden_dim=self.hidden, num_heads=1, batch_size=self.batch,
            dtype=str(self.dtype).removeprefix("torch."), input_shape="TBGHD", output_shape="STBHD",
        )  # fmt: skip
        x = self.x.view(self.frames, self.batch, self.gates, 1, self.hidden)
        weight = self.weight_hh.view(self.gates, 1, self.hidden, self.hidden)
        bias = torch.zeros(self.gates, 1, self.hidden, dtype=self.dtype, device=self.device)

        def call() -> object:
            with torch.set_grad_enabled(backward):
                y = flashrnn(x, weight, bias, function="lstm", config=config, dtype=config.dtype)[0][0].flatten(2)
            return torch.autograd.grad(y, [self.x, self.weight_hh], self.grad_y) if backward else y

        return call

    def error_of(self, y: Tensor) -> tuple[float, float]:
        """Relative RMS error against float64 of y without h0, and of the stock loop in the same precision."""
        given = (self.x.detach(), self.weight_hh.detach())
        truth = recurrence_reference(*(t.double() for t in given), cell=self.cell)[0]
        stock = recurrence_reference(*given, cell=self.cell)[0]
        first, second = (float((t.double() - truth).norm() / truth.norm()) for t in (y.detach(), stock))
        return first, second

    def errors(self, backend: str) -> dict[str, tuple[float, float]]:
        """Relative RMS error against float64 of (ours, the stock loop in the same precision), ragged and with h0."""
        lengths = torch.linspace(self.frames, self.frames // 2, self.batch, device=self.device).int()
        h0 = torch.randn(self.batch, self.hidden, dtype=self.dtype, device=self.device)
        own = [self.x, self.weight_hh, *([] if self.bias_hn is None else [self.bias_hn]), h0]

        def ours(x: Tensor, weight_hh: Tensor, *rest: Tensor) -> Sequence[Tensor]:
            return self._run([x, weight_hh, *rest[:-1]], rest[-1], None, lengths, backend)[:2]

        def reference(x: Tensor, weight_hh: Tensor, *rest: Tensor) -> Sequence[Tensor]:
            bias = rest[0] if len(rest) > 1 else None
            return recurrence_reference(x, weight_hh, rest[-1], lengths, cell=self.cell, bias_hn=bias)[:2]

        def run(op: Callable[..., Sequence[Tensor]], dtype: torch.dtype) -> Iterable[Tensor]:
            leaves = [t.detach().to(dtype).requires_grad_() for t in own]
            y, h_n = op(*leaves)
            gradients = torch.autograd.grad((y, h_n), leaves, (self.grad_y.to(dtype), h0.to(dtype)))
            return y.detach(), h_n.detach(), *gradients

        def relative(value: Tensor, truth: Tensor) -> float:
            return float((value.double() - truth).norm() / truth.norm())

        truth = run(reference, torch.float64)
        torch.backends.cuda.matmul.allow_tf32 = backend == "persistent"  # as its kernels multiply float32
        stock = run(reference, self.dtype)
        torch.backends.cuda.matmul.allow_tf32 = False
        names = ("y", "h_n", "grad_x", "grad_weight_hh", *(["grad_bias"] if len(own) > 3 else []), "grad_h0")
        triples = zip(names, run(ours, self.dtype), stock, truth, strict=True)
        return {n: (relative(o, t), relative(s, t)) for n, o, s, t in triples}

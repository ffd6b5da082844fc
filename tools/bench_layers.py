"""Time bidirectional layers alone, forward and backward: both directions in one launch, in two, and cuDNN's.

    python tools/bench_layers.py                                  six LSTM layers of 512, T 400
    python tools/bench_layers.py --cell gru --hidden 320 --depth 4 --batch 8 16

Projections, sums of both directions and all gradients are included; utterances are of one length. Each contender's
relative errors against torch's in float32 are printed. Prints a table and one JSON line. Shape letters: T frames, B
batch, H hidden.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace

import torch
from ds2_ops.lengths import turned
from timing import graphed, machine, measure
from torch import Tensor, nn

from ds2.config.schema import ModelConfig
from ds2.model.ragged import Ragged
from ds2.model.recurrent import GatedRecurrentLayer

Run = Callable[[Tensor], Tensor]


def one_way(cell: nn.Module, config: ModelConfig) -> GatedRecurrentLayer:
    """A layer of one direction with the weights of a cell."""
    layer = GatedRecurrentLayer(config.hidden, replace(config, bidirectional=False))
    layer.cell = cell
    return layer


class Stack:
    """Layers of one size with the same weights everywhere, and what is run on them."""

    def __init__(self, options: argparse.Namespace, batch: int) -> None:
        torch.manual_seed(0)
        self.hidden, self.device = options.hidden, torch.device("cuda")
        config = ModelConfig(cell=options.cell, hidden=options.hidden, batch_norm=False, bidirectional=True)
        layers = [GatedRecurrentLayer(options.hidden, config) for _ in range(options.depth)]
        self.layers = nn.ModuleList(layers).to(self.device, torch.bfloat16)
        self.directions = [(one_way(layer.cell, config), one_way(layer.cell_reverse, config)) for layer in layers]
        self.ragged = Ragged.of(torch.full((batch,), options.frames), options.frames, self.device)
        shape = (options.frames, batch, options.hidden)
        self.x = torch.randn(shape, device=self.device, dtype=torch.bfloat16).requires_grad_()
        self.grad_y = torch.randn(shape, device=self.device, dtype=torch.bfloat16)
        self.peers = [self._peer(layer, options.cell) for layer in layers]

    def _peer(self, layer: GatedRecurrentLayer, cell: str) -> nn.Module:
        make = {"lstm": nn.LSTM, "gru": nn.GRU}[cell]
        peer = make(self.hidden, self.hidden, bidirectional=True, device=self.device)
        with torch.no_grad():
            for own, way in ((layer.cell, ""), (layer.cell_reverse, "_reverse")):
                for name, weight in own.named_parameters():
                    peer.get_parameter(name + way).copy_(weight)
        return peer

    def together(self, x: Tensor) -> Tensor:
        """Our layers as the model runs them."""
        for layer in self.layers:
            x = layer(x, self.ragged)
        return x

    def apart(self, x: Tensor) -> Tensor:
        """Our kernels, one direction after the other."""
        for forward, backward in self.directions:
            y = forward(x, self.ragged)
            x = y + turned(backward(turned(x, self.ragged.lengths), self.ragged), self.ragged.lengths)
        return x

    def of_torch(self, dtype: torch.dtype) -> tuple[Run, list[Tensor]]:
        """torch's modules in a dtype, and their weights."""
        peers = [peer.to(dtype) for peer in self.peers]
        for peer in peers:
            peer.flatten_parameters()

        def run(x: Tensor) -> Tensor:
            for peer in peers:
                x = peer(x)[0].unflatten(2, (2, self.hidden)).sum(2)
            return x

        return run, [p for peer in peers for p in peer.parameters()]

    def step(self, run: Run, weights: list[Tensor], dtype: torch.dtype = torch.bfloat16) -> Callable[[], list[Tensor]]:
        """Forward and backward as a call: y, and the gradients of x and of the weights."""
        x, grad_y = self.x.detach().to(dtype).requires_grad_(), self.grad_y.to(dtype)

        def call() -> list[Tensor]:
            y = run(x)
            return [y, *torch.autograd.grad(y, [x, *weights], grad_y)]

        return call


def main() -> None:
    """Check, time, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", choices=("lstm", "gru"), default="lstm")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--frames", type=int, default=400)
    parser.add_argument("--batch", type=int, nargs="+", default=[32, 64, 256])
    parser.add_argument("--contenders", nargs="+", default=["together", "apart", "float16", "bfloat16"])
    options = parser.parse_args()
    size = f"{options.depth} bidirectional {options.cell} layers of {options.hidden}, T {options.frames}"
    print(f"{size}, ms forward+backward on {machine(torch.device('cuda'))}; errors of y and grad_x")
    torch.backends.cudnn.allow_tf32 = False
    rows = []
    for batch in options.batch:
        stack = Stack(options, batch)
        run, weights = stack.of_torch(torch.float32)
        truth = [t.detach() for t in stack.step(run, weights, torch.float32)()[:2]]
        for name in options.contenders:
            row = {"batch": batch, "contender": name}
            rows.append(row)
            if name in ("together", "apart"):
                call = stack.step(getattr(stack, name), list(stack.layers.parameters()))
            else:
                dtype = getattr(torch, name)
                call = stack.step(*stack.of_torch(dtype), dtype)
            pairs = zip((t.detach() for t in call()[:2]), truth, strict=True)
            row["errors"] = [round(float((own.float() - true).norm() / true.norm()), 5) for own, true in pairs]
            timed = graphed(call) if name in ("together", "apart") else call
            row["ms"] = [round(t * 1e3, 3) for t in measure(timed, stack.device)]
            median, low, high = row["ms"]
            print(
                f"  B {batch:<4} {name:10} {median:8.2f} ({low:.2f} - {high:.2f}) ms, errors {row['errors']}",
                flush=True,
            )
            del call, timed
            torch.cuda.empty_cache()
    print(json.dumps({"benchmark": "layers", **vars(options), "rows": rows}))


if __name__ == "__main__":
    main()

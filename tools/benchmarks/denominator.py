"""The loss of CTC-CRF beside that of CTC, forward and backward: random logits, and graphs of several sizes.

    python tools/bench.py denominator corpora/librispeech_5h/train.jsonl --order 4 --prune 0 1 2

The labels follow an n-gram model of the transcripts of a manifest. Prints a table and one JSON line.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from benchmarks.common import Table, facts, graphed, measure, write_json
from dispatch import new_parser, parse
from torch import Tensor

from ds2.config.schema import AlphabetConfig, TrainConfig
from ds2.data.manifest import Utterance, read_manifests
from ds2.text.alphabet import Alphabet
from ds2.training.crf import Crf
from ds2.training.ctc import ctc_losses

LABELS_PER_FRAME = 0.3
COLUMNS = {
    "order": "{order}",
    "prune": "{prune}",
    "nodes": "{nodes:,}",
    "arcs": "{arcs:,}",
    "CTC, ms": "{ctc_ms:.2f}",
    "denominator forward, ms": "{forward_ms:.2f}",
    "forward and backward, ms": "{both_ms:.2f}",
}


def main(arguments: list[str] | None = None) -> None:
    """Measure."""
    parser = new_parser(__doc__)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--order", type=int, nargs="+", default=[4])
    parser.add_argument("--prune", type=int, nargs="+", default=[0])
    parser.add_argument("--batch", type=int, default=64, help="utterances, of all views")
    parser.add_argument("--frames", type=int, default=750, help="of the network's output")
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parse(parser, arguments)
    device, alphabet = torch.device(options.device), Alphabet.from_config(AlphabetConfig())
    utterances = read_manifests([options.manifest])
    head = facts(options, device, f"{options.batch} utterances of {options.frames} frames")
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(options.frames, options.batch, len(alphabet), generator=generator).to(device)
    logits.requires_grad_()
    frames = torch.full((options.batch,), options.frames, device=device)
    size = int(LABELS_PER_FRAME * options.frames)
    labels = torch.randint(1, len(alphabet), (options.batch, size), generator=generator).to(device)
    sizes, feasible = torch.full_like(frames, size), torch.ones_like(frames, dtype=torch.bool)
    once = graphed if device.type == "cuda" else _plain

    def ms(loss: Callable[[], Tensor], backward: bool) -> float:
        def call() -> object:
            return torch.autograd.grad(loss().sum(), logits) if backward else loss()

        return 1e3 * measure(once(call), device).median_s

    ctc_ms = ms(lambda: ctc_losses(logits, frames, labels, sizes, feasible), True)
    table, rows = Table(COLUMNS), []
    for order in options.order:
        for prune in options.prune:
            row = {"order": order, "prune": prune, "ctc_ms": ctc_ms}
            rows.append(row | _measured(order, prune, alphabet, utterances, ms, logits, frames))
            table.print_row(rows[-1])
    write_json(options.out, {**head, "rows": rows})


def _measured(
    order: int,
    prune: int,
    alphabet: Alphabet,
    utterances: list[Utterance],
    ms: Callable[[Callable[[], Tensor], bool], float],
    logits: Tensor,
    frames: Tensor,
) -> dict[str, float]:
    train = TrainConfig(objective="ctc_crf", denominator_order=order, denominator_prune=prune)
    denominator = Crf.of(train, alphabet, utterances).denominator
    if logits.is_cuda and (reason := denominator.why_not(logits.device)):
        raise RuntimeError(reason)
    return {
        "nodes": len(denominator.graph.labels),
        "arcs": len(denominator.graph.weights),
        "forward_ms": ms(lambda: denominator(logits, frames), False),
        "both_ms": ms(lambda: denominator(logits, frames), True),
    }


def _plain(call: Callable[[], object]) -> Callable[[], object]:
    return call

"""The tables of Persistent RNNs (2016) as rows of settings of `ds2 train`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

PAPER_EPOCHS, PAPER_ANNEAL = 20, 1.2  # section 5.3


@dataclass(frozen=True)
class Row:
    """One model of a table."""

    name: str
    settings: tuple[str, ...]
    paper: float | None = None  # WER in % that the paper prints


@dataclass(frozen=True)
class PaperTable:
    """Rows that are compared, and their common settings.

    Attributes:
        title: heading of the report.
        rows: in the order of the report.
        settings: overrides of `ds2 train` for all rows.
        rates: learning rates, which each row tries for the first epochs to continue with the best; empty: none.
    """

    title: str
    rows: tuple[Row, ...]
    settings: tuple[str, ...]
    rates: tuple[float, ...] = ()


@dataclass(frozen=True)
class Shape:
    """How the tables of the paper are run: widths divided by `narrow`, number of epochs, optimizer."""

    narrow: float = 1.0
    epochs: int = PAPER_EPOCHS
    optimizer: str = "sgd"


# Section 5.3: Nesterov 0.99, clip 400, SortaGrad, noise on 40 %, the best model on dev. Not the paper's: characters at
# 25 frames a second for speed; speed and masks, as the model would memorise 5 hours of speech otherwise.
_PAPER = (
    "recipe=librispeech_5h_relu",
    "optim.schedule=anneal",
    "augment.noise_probability=0.4",
    "model.row_convs=10",
    "model.row_conv_context=1",
    "model.dropout=0",
    "model.convs=[{kernel:[41,11],stride:[2,2],channels:32},{kernel:[21,11],stride:[2,2],channels:32}]",
    "batching.utterances=32",
    "train.average_decay=0",
    "train.evaluate_every_epochs=2",
)
_OPTIMIZERS = {
    # The paper's, rates from its range; with recurrent weights at the full rate it learns no words here.
    "sgd": (("optim=sgd", "optim.warmup_steps=0", "optim.layer_rates={weight_hh:0.1}"), (1e-4, 3e-4, 6e-4)),
    "adamw": (("optim=adamw", "optim.warmup_steps=200"), (3e-4, 1e-3)),
}
_SKIPS = (100.0, 38.77, 33.28, 30.32, 29.40, 29.82, 30.04, 29.87, 27.44)
_EQUAL_PARAMETERS = {8: (1632, 33.61), 24: (928, 31.99), 40: (704, 31.64)}
_EQUAL_PARAMETERS |= {56: (608, 30.67), 72: (544, 33.35), 88: (480, 42.67)}
_EQUAL_WIDTH = {8: (1152, 35.69), 24: (1152, 31.32), 40: (1152, 28.90)}
_EQUAL_WIDTH |= {56: (1152, 28.12), 72: (1152, 27.84), 88: (1152, 27.23)}
_START = "model.start=even"  # with it 48 layers learn that have a skip over every 4; with ours they do not
_OTHER_STARTS = {"plain": (4, 0, 1), "even": (4, 1, 8)}  # by skip: the rows that are hard for one of the starts
_BATCHES = (8, 32, 128, 512)


def _layers(depth: int, skip: int, printed: int, narrow: float) -> tuple[str, ...]:
    return f"model.depth={depth}", f"model.skip={skip}", f"model.hidden={8 * round(printed / narrow / 8)}"


def _paper(title: str, rows: list[Row], shape: Shape, *more: str) -> PaperTable:
    anneal = PAPER_ANNEAL ** (PAPER_EPOCHS / max(1, shape.epochs))  # the rate falls as far as in the paper's 20 epochs
    settings, rates = _OPTIMIZERS[shape.optimizer]
    return PaperTable(title, tuple(rows), (*_PAPER, *settings, f"optim.anneal={anneal:.5f}", *more), rates)


def _table_1(shape: Shape) -> PaperTable:
    names = ["no skip", *(f"skip {skip}" for skip in range(1, len(_SKIPS)))]
    rows = [Row(name, _layers(48, skip, 1152, shape.narrow), _SKIPS[skip]) for skip, name in enumerate(names)]
    rows += [
        Row(f"{names[skip]}, {start} start", (*_layers(48, skip, 1152, shape.narrow), f"model.start={start}"))
        for start, skips in _OTHER_STARTS.items()
        for skip in skips
    ]
    return _paper("Table 1: 48 recurrent layers, a skip over every N", rows, shape)


def _by_depth(title: str, printed: dict[int, tuple[int, float]]) -> Callable[[Shape], PaperTable]:
    def table(shape: Shape) -> PaperTable:
        rows = [
            Row(f"{depth} layers", _layers(depth, 4, width, shape.narrow), paper)
            for depth, (width, paper) in printed.items()
        ]
        return _paper(title, rows, shape, _START)

    return table


def _figure_8(shape: Shape) -> PaperTable:
    rows = [
        Row(
            f"batch {size}",
            (*_layers(48, 4, 1152, shape.narrow), f"batching.utterances={size}", "train.noise_scale=true"),
        )
        for size in _BATCHES
    ]
    return _paper("Figure 8: utterances a batch, equal epochs, 48 layers, skip 4", rows, shape, _START)


TABLES: dict[str, Callable[[Shape], PaperTable]] = {
    "table1": _table_1,
    "table2": _by_depth("Table 2: depth, about equal parameters", _EQUAL_PARAMETERS),
    "table3": _by_depth("Table 3: depth, equal width", _EQUAL_WIDTH),
    "fig8": _figure_8,
}
"""Tables by name."""
OPTIMIZERS = tuple(_OPTIMIZERS)

"""A recurrent language model over the labels of an alphabet, on our own LSTM; and its file.

Shape letters: T tokens, B texts, H hidden, V labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from ds2_ops import lstm
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from ds2.config.allowed import number
from ds2.config.check import check_allowed
from ds2.config.schema import ConfigError
from ds2.lm.ngram import LanguageModelError
from ds2.system.plain import FieldError, from_plain
from ds2.system.tensor_file import WAY_OUT, CheckpointError, load, read_metadata, save
from ds2.text.alphabet import BLANK, Alphabet, AlphabetError, describe

BOUNDARY = BLANK  # the label that writes nothing stands before and behind every text
_KIND = "recurrent-lm"
_BATCH_TOKENS = {"cpu": 2**13, "cuda": 2**18}  # padded, scored at once


@dataclass(frozen=True)
class Shape:
    """The size of a recurrent language model."""

    hidden: int = number(512, 1, 65_536)
    layers: int = number(2, 1, 100)
    dropout: float = number(0.1, 0, 1, below=True)  # of inputs of layers and classifier, and of recurrent weights


class RecurrentLM(nn.Module):
    """Labels to the log-probs of the next ones: an embedding, LSTM layers with residual skips, a classifier.

    The character-level network of Karpathy et al. 2015 that GRNN (Holmes et al. 2019) times, with skips as
    Persistent RNNs' (Diamos et al. 2016, Figure 7), so that layers may be added without another learning rate.

    In training `dropout` leaves out inputs of layers and of the classifier and, once a batch, recurrent weights (Merity
    et al. 2018).

    Args:
        alphabet: of the text; its labels are the tokens, label 0 is `BOUNDARY`.
        shape: of the network.
    """

    def __init__(self, alphabet: Alphabet, shape: Shape) -> None:
        super().__init__()
        check_allowed(shape, "recurrent language model")
        self.alphabet, self.shape = alphabet, shape
        self.embedding = nn.Embedding(len(alphabet), shape.hidden)
        self.layers = nn.ModuleList(nn.LSTM(shape.hidden, shape.hidden) for _ in range(shape.layers))
        self.classifier = nn.Linear(shape.hidden, len(alphabet))
        self.drop = nn.Dropout(shape.dropout)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Map (T, B) int64 tokens, of which `lengths` (B,) count, to logits (T, B, V) float32 of what follows each."""
        x = self.embedding(tokens)
        for layer in cast(Iterable[nn.LSTM], self.layers):
            weight_ih, weight_hh, bias_ih, bias_hh = layer.parameters()
            z = functional.linear(self.drop(x), weight_ih, bias_ih + bias_hh)
            x = x + lstm(z, self.drop(weight_hh), lengths=lengths)[0]
        logits: Tensor
        if self.training:
            logits = self.classifier(self.drop(x)).float()
        else:
            with torch.autocast(x.device.type, enabled=False):
                logits = self.classifier(x.float())
        return logits

    def log_probs(self, targets: Tensor, lengths: Tensor) -> Tensor:
        """Natural-log probabilities (T, B) of texts, token by token, each after those before it; 0 past a length.

        Args:
            targets: (T, B) int64, texts with `BOUNDARY` behind them.
            lengths: (B,) int64 with it, on the CPU or the device.
        """
        tokens = functional.pad(targets, (0, 0, 1, 0), value=BOUNDARY)[:-1]
        logits = self(tokens, lengths)
        scores = -functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        valid = torch.arange(len(targets), device=targets.device)[:, None] < lengths.to(targets.device)
        return torch.where(valid, scores.view_as(targets), 0.0)

    @torch.inference_mode()
    def score(self, texts: Sequence[str], *, normalised: bool = False) -> list[float]:
        """The natural-log probability of each text, its end included; in bfloat16 on a GPU, but for the classifier.

        Args:
            texts: of any kind, and as many as there are.
            normalised: they are as the alphabet's `normalise` would have them, which is not done again.

        Raises:
            LanguageModelError: a text with characters that the model does not know.
        """
        if not texts:
            return []
        spelled = [self.spell(text, normalised=normalised) for text in texts]
        sizes = np.array([len(labels) for labels in spelled])
        starts = np.cumsum(sizes) - sizes
        device = self.classifier.weight.device
        labels = torch.from_numpy(np.fromiter(chain.from_iterable(spelled), np.int32, int(sizes.sum()))).to(device)
        stretches = torch.from_numpy(np.stack([starts, sizes], 1)).to(device)
        order, parts = np.argsort(-sizes, kind="stable"), []
        for rows in _batches(sizes[order] + 1, _BATCH_TOKENS[device.type]):
            targets, lengths = gather(
                labels, stretches[torch.from_numpy(order[rows]).to(device)], sizes[order[rows][0]]
            )
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                parts.append(self.log_probs(targets, lengths).double().sum(0))
        found = np.empty(len(texts))
        found[order] = torch.cat(parts).cpu().numpy()
        scores: list[float] = found.tolist()
        return scores

    def spell(self, text: str, *, normalised: bool = False) -> list[int]:
        """The labels of a text without its end; arguments and errors as `score`."""
        try:
            return self.alphabet.spell(text if normalised else self.alphabet.normalise(text)[0])
        except KeyError:
            unknown = self.alphabet.normalise(text)[1]
        raise LanguageModelError(
            f"the recurrent language model does not know {describe(unknown)}: train one with "
            "`ds2 lm train --model` of the network that writes them"
        )


def gather(labels: Tensor, stretches: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Texts (T, B) int64 with a boundary behind each, and their lengths (B,) with it.

    Args:
        labels: (N,) int32, all texts one after the other.
        stretches: (B, 2) int64, the first label of each text and the number of its labels.
        longest: the largest of these numbers: T - 1.
    """
    first, sizes = stretches.unbind(1)
    at = torch.arange(int(longest) + 1, device=labels.device)[:, None]
    if not len(labels):
        return at.expand(-1, len(sizes)) * 0, sizes + 1
    found = labels[(first + at).clamp(max=len(labels) - 1)].long()
    return torch.where(at < sizes, found, BOUNDARY), sizes + 1


def _batches(sizes: NDArray[np.int64], budget: int) -> Iterator[slice]:
    """Cut texts, longest first, into batches of at most `budget` padded tokens, or of one text."""
    start = 0
    while start < len(sizes):
        count = max(1, budget // int(sizes[start]))
        yield slice(start, start + count)
        start += count


@dataclass(frozen=True)
class _Stored:
    """The metadata of a file."""

    format: int
    kind: str
    shape: Shape
    alphabet: dict[str, Any]
    facts: dict[str, Any]


def save_recurrent(path: Path, model: RecurrentLM, facts: dict[str, Any]) -> None:
    """Write a model as one file, the old one or the whole new one; `facts` say how it came about.

    Raises:
        CheckpointError: the file cannot be written.
    """
    metadata = {"kind": _KIND, "shape": asdict(model.shape), "alphabet": model.alphabet.to_dict(), "facts": facts}
    save(path, model.state_dict(), metadata)


def load_recurrent(path: Path, device: torch.device | str = "cpu") -> RecurrentLM:
    """Open what `save_recurrent` wrote, ready to score.

    Raises:
        CheckpointError: no such file, or a damaged one.
        LanguageModelError: a file of another kind.
    """
    kind = read_metadata(path).get("kind")  # before tensors: an n-gram model's digest is not of their content
    if kind != _KIND:
        raise LanguageModelError(
            f"{path} is a {kind}, not a recurrent language model: `ds2 lm train` writes them, and n-gram models "
            "are given as decode.lm"
        )
    tensors, metadata = load(path, device)
    try:
        stored = from_plain(_Stored, metadata, "metadata")
        with torch.device("meta"):  # memory is taken for what the file holds, not for what it says that it holds
            model = RecurrentLM(Alphabet.from_dict(stored.alphabet), stored.shape)
        model.load_state_dict({name: tensor.float().clone() for name, tensor in tensors.items()}, assign=True)
    except (FieldError, AlphabetError, ConfigError, RuntimeError) as error:
        raise CheckpointError(f"{path}: {' '.join(str(error).split())}; {WAY_OUT}") from error
    return model.eval()

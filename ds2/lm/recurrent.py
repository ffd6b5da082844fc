"""A recurrent language model over the labels of an alphabet, on the LSTM of ds2_ops, and its file format.

Shape letters: T tokens, B texts, H hidden, V labels.
"""

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

BOUNDARY = BLANK  # stands before and after each text: the blank label writes nothing
_KIND = "recurrent-lm"
_BATCH_TOKENS = {"cpu": 2**13, "cuda": 2**18}  # padded tokens of a batch to score


@dataclass(frozen=True)
class RecurrentShape:
    """The size of a recurrent language model; `ds2 lm train --help` shows the comments."""

    hidden: int = number(512, 1, 65_536)  # units per layer
    layers: int = number(2, 1, 100)  # LSTM layers
    dropout: float = number(0.1, 0, 1, below=True)  # of the inputs of layers and classifier, and of recurrent weights


class RecurrentLM(nn.Module):
    """Predict the next label: an embedding, LSTM layers with residual skips, a classifier.

    The character-level network of Karpathy et al. 2015, which GRNN (Holmes et al. 2019) measures, with the residual
    skips of Persistent RNNs (Diamos et al. 2016, Figure 7), so that deeper models need no other learning rate.

    Dropout applies to the inputs of layers and classifier and, with one mask for a batch, to recurrent weights (Merity
    et al. 2018). The tokens are the labels of the alphabet; label 0 is `BOUNDARY`.
    """

    def __init__(self, alphabet: Alphabet, shape: RecurrentShape) -> None:
        super().__init__()
        check_allowed(shape, "recurrent language model")
        self.alphabet, self.shape = alphabet, shape
        self.embedding = nn.Embedding(len(alphabet), shape.hidden)
        self.layers = nn.ModuleList(nn.LSTM(shape.hidden, shape.hidden) for _ in range(shape.layers))
        self.classifier = nn.Linear(shape.hidden, len(alphabet))
        self.drop = nn.Dropout(shape.dropout)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Return the logits (T, B, V) float32 of the label after each of the tokens (T, B) int64 of `lengths` (B,)."""
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
        """Return the natural-log probability (T, B) of each token after those before it; 0 beyond a text's length.

        Args:
            targets: (T, B) int64, texts that end with `BOUNDARY`.
            lengths: (B,) int64 including `BOUNDARY`, on the CPU or the device.
        """
        tokens = functional.pad(targets, (0, 0, 1, 0), value=BOUNDARY)[:-1]
        logits = self(tokens, lengths)
        scores = -functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        valid = torch.arange(len(targets), device=targets.device)[:, None] < lengths.to(targets.device)
        return torch.where(valid, scores.view_as(targets), 0.0)

    @torch.inference_mode()
    def score(self, texts: Sequence[str], *, normalised: bool = False) -> list[float]:
        """Return the natural-log probability of each text and its end; on a GPU in bfloat16 except the classifier.

        Texts are normalised by the alphabet, unless they are so already (`normalised`).

        Raises:
            LanguageModelError: a text has characters outside the alphabet.
        """
        if not texts:
            return []
        spelled = [self.spell(text, normalised=normalised) for text in texts]
        sizes = np.array([len(labels) for labels in spelled])
        starts = np.cumsum(sizes) - sizes
        device = self.classifier.weight.device
        labels = torch.from_numpy(np.fromiter(chain.from_iterable(spelled), np.int32, int(sizes.sum()))).to(device)
        spans = torch.from_numpy(np.stack([starts, sizes], 1)).to(device)
        order, parts = np.argsort(-sizes, kind="stable"), []
        for rows in batches(sizes[order] + 1, _BATCH_TOKENS[device.type]):
            targets, lengths = pad_texts(labels, spans[torch.from_numpy(order[rows]).to(device)], sizes[order[rows][0]])
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                parts.append(self.log_probs(targets, lengths).double().sum(0))
        scores = np.empty(len(texts))
        scores[order] = torch.cat(parts).cpu().numpy()
        listed: list[float] = scores.tolist()
        return listed

    def spell(self, text: str, *, normalised: bool = False) -> list[int]:
        """Return the labels of a text without its end; arguments and errors as in `score`."""
        try:
            return self.alphabet.spell(text if normalised else self.alphabet.normalise(text)[0])
        except KeyError:
            unknown = self.alphabet.normalise(text)[1]
        raise LanguageModelError(
            f"the recurrent language model does not know {describe(unknown)}: train a model for the "
            "alphabet of your network with `ds2 lm train --model MODEL`"
        )


def pad_texts(labels: Tensor, spans: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Return padded texts (T, B) int64 that end with a boundary, and their lengths (B,) including it.

    Args:
        labels: (N,) int32, all texts one after the other.
        spans: (B, 2) int64, position of the first label and number of labels of each text.
        longest: the largest number of labels, T - 1.
    """
    first, sizes = spans.unbind(1)
    at = torch.arange(int(longest) + 1, device=labels.device)[:, None]
    if not len(labels):
        return at.expand(-1, len(sizes)) * 0, sizes + 1
    texts = labels[(first + at).clamp(max=len(labels) - 1)].long()
    return torch.where(at < sizes, texts, BOUNDARY), sizes + 1


def batches(sizes: NDArray[np.int64], budget: int) -> Iterator[slice]:
    """Split texts, longest first, into batches of at most `budget` padded tokens, at least one text each."""
    start = 0
    while start < len(sizes):
        count = max(1, budget // int(sizes[start]))
        yield slice(start, start + count)
        start += count


@dataclass(frozen=True)
class _RecurrentHeader:
    """The metadata of a model file."""

    format: int
    kind: str
    shape: RecurrentShape
    alphabet: dict[str, Any]
    facts: dict[str, Any]


def save_recurrent(path: Path, model: RecurrentLM, facts: dict[str, Any]) -> None:
    """Write a model file atomically; `facts` describe its training. Raises CheckpointError where that fails."""
    metadata = {"kind": _KIND, "shape": asdict(model.shape), "alphabet": model.alphabet.to_dict(), "facts": facts}
    save(path, model.state_dict(), metadata)


def load_recurrent(path: Path, device: torch.device | str = "cpu") -> RecurrentLM:
    """Load a model file in evaluation mode.

    Raises:
        CheckpointError: the file is damaged.
        LanguageModelError: the file is missing or of another kind.
    """
    if not path.is_file():
        raise LanguageModelError(
            f"there is no recurrent language model {path}: `ds2 lm train TEXT... --output {path}` makes one"
        )
    kind = read_metadata(path).get("kind")  # read before the tensors: the digest of an n-gram model does not cover them
    if kind != _KIND:
        raise LanguageModelError(
            f"{path} is of kind {kind}, not a recurrent language model: `ds2 lm train` writes recurrent models; an "
            "n-gram model belongs in decode.lm"
        )
    tensors, metadata = load(path, device)
    try:
        stored = from_plain(_RecurrentHeader, metadata, "metadata")
        with torch.device("meta"):  # allocates nothing: a damaged file may name any size
            model = RecurrentLM(Alphabet.from_dict(stored.alphabet), stored.shape)
        model.load_state_dict({name: tensor.float().clone() for name, tensor in tensors.items()}, assign=True)
    except (FieldError, AlphabetError, ConfigError, RuntimeError) as error:
        raise CheckpointError(f"{path}: {' '.join(str(error).split())}; {WAY_OUT}") from error
    return model.eval()

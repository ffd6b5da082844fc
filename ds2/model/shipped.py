"""Models that come with ds2: `ds2/models/NAME` is a run folder with a card, `card.json`.

Wherever a model is asked for, its name will do; a file or folder of the user of that name goes first.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from ds2.system.plain import from_plain

FOLDER = Path(__file__).parents[1] / "models"
DEFAULT = "english"  # where no model is given
WEIGHTS = ("best.safetensors", "last.safetensors")  # of a run folder, the better one first
_MODEL_SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt", ".onnx", ".bin")
_HEADER_BYTES = 9  # of a safetensors file: the length of its JSON header, and the brace that this begins with


@dataclass(frozen=True)
class Score:
    """Error rates on one test set, percent."""

    speech: str
    utterances: int
    phones: float  # wrong phones, greedy
    words: float  # wrong words of the search with the language model


@dataclass(frozen=True)
class Source:
    """Speech or text that a model was made from."""

    name: str
    amount: str
    licence: str
    address: str


@dataclass(frozen=True)
class Card:
    """The description of a shipped model: what it is, how good it is, and what it was made from."""

    language: str
    parameters: int
    scores: tuple[Score, ...]
    sources: tuple[Source, ...]
    licence: str
    commit: str
    made_by: tuple[str, ...]  # commands
    notes: tuple[str, ...]

    def quality(self) -> str:
        """The error rates in one line."""
        return "; ".join(f"{score.words:.1f} % ({score.speech})" for score in self.scores)


def names() -> list[str]:
    """The names of the shipped models."""
    return sorted(folder.parent.name for folder in FOLDER.glob("*/card.json"))


def folder_of(path: Path) -> Path:
    """Return the folder of the shipped model that a path names; a path that exists, or is no such name, as it is."""
    return FOLDER / path if not path.exists() and str(path) in names() else path


def is_shipped(file: Path) -> bool:
    """Whether a file belongs to a shipped model."""
    return FOLDER.resolve() in file.resolve().parents


def read_card(name: str) -> Card:
    """Return the card of a shipped model."""
    return from_plain(Card, json.loads((FOLDER / name / "card.json").read_text(encoding="utf-8")), f"{name}/card.json")


def size_bytes(name: str) -> int:
    """Bytes of a shipped model, its language model included."""
    return sum(file.stat().st_size for file in (FOLDER / name).iterdir())


def default_model() -> Path:
    """Return the folder of the model that is used where none is given; say on stderr which it is, and how good."""
    print(
        f"model: {DEFAULT}, which comes with ds2; words wrong: {read_card(DEFAULT).quality()}",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    return FOLDER / DEFAULT


def looks_like_model(argument: str) -> bool:
    """Whether an argument names a model rather than audio.

    A folder is a model if weights are in it. A file is one if it has a suffix of model files or starts as a safetensors
    file does. What does not exist is one if it has such a suffix or is the name of a shipped model.
    """
    path = Path(argument)
    if path.is_dir():
        return any((path / name).is_file() for name in WEIGHTS)
    if path.suffix.lower() in _MODEL_SUFFIXES or not path.is_file():
        return path.suffix.lower() in _MODEL_SUFFIXES or folder_of(path) != path
    try:
        with path.open("rb") as file:
            start = file.read(_HEADER_BYTES)
    except OSError:  # whoever reads it as audio says why not
        return False
    return len(start) == _HEADER_BYTES and start[8:] == b"{" and int.from_bytes(start[:8], "little") < 1 << 32

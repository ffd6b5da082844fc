"""ds2: deep unidirectional residual speech recognition on persistent recurrent kernels.

    import ds2
    print(ds2.load("runs/an4").transcribe("talk.mp3").text)

Nothing of torch is imported before the first call.
"""

from collections.abc import Iterable
from importlib import import_module  # by name: commands import this package
from pathlib import Path
from typing import Any

from ds2.system.machine import VERSION

__version__ = VERSION
__all__ = ["__version__", "load", "save_dataset", "train"]


def load(path: Path | str | None = None, **settings: Any) -> Any:
    """Open a model file, or the best one of a run folder: a `ds2.recognition.recogniser.Recogniser`.

    Args:
        path: the file or folder, or a name of `ds2 models`; None: the model that comes with ds2, named on stderr.
        settings: device, precision, decode: as `Recogniser.load`.

    Raises:
        UserError: as `Recogniser.load`.
    """
    return import_module("ds2.recognition.recogniser").Recogniser.load(path, **settings)


def save_dataset(
    folder: Path | str, utterances: Iterable[tuple[Any, ...]], *, sample_rate_hz: int | None = None
) -> Path:
    """Write a manifest, `folder/manifest.jsonl`, that `data.train` and `data.dev` can name; return its path.

    Args:
        folder: is made; arrays are written into it as FLAC files.
        utterances: (audio, text) or (audio, text, speaker). Audio is a file, or samples (N,) in [-1, 1].
        sample_rate_hz: of samples.

    Raises:
        UserError: a folder that has a manifest already, audio that cannot be read, or samples without a rate.
    """
    manifest: Path = import_module("ds2.data.corpora.layouts").save_dataset(
        folder, utterances, sample_rate_hz=sample_rate_hz
    )
    return manifest


def train(*overrides: str) -> Path:
    """Train, or go on where the run folder stopped, as `ds2 train OVERRIDE...` does; return the run folder.

    It handles SIGINT and SIGTERM, so it runs in the main thread. Progress goes to Python's logging, level INFO.

    Args:
        overrides: "recipe=an4", "data.train=[mine/manifest.jsonl]", "run_dir=runs/mine": those of the command line.

    Raises:
        UserError: as the command reports it.
        KeyboardInterrupt: a signal ended training, after a save; the same call goes on from there.
    """
    run_dir: Path = import_module("ds2.commands.train").fit(overrides)
    return run_dir

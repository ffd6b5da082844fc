"""Corpora as they are published, to utterances: one function a layout, and the prepare step of each recipe."""

from ds2.importers.an4 import import_an4
from ds2.importers.common import ImporterError
from ds2.importers.kaldi import export_kaldi, import_kaldi
from ds2.importers.librispeech import import_librispeech
from ds2.importers.prepare import FORMATS, RECIPES, import_corpus, prepare
from ds2.importers.tables import import_csv, import_deepspeech_pytorch

__all__ = [
    "FORMATS",
    "RECIPES",
    "ImporterError",
    "export_kaldi",
    "import_an4",
    "import_corpus",
    "import_csv",
    "import_deepspeech_pytorch",
    "import_kaldi",
    "import_librispeech",
    "prepare",
]

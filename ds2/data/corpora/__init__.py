"""Importers of corpora, one function per layout, and the prepare step of each recipe."""

from ds2.data.corpora.common import ImporterError
from ds2.data.corpora.kaldi import export_kaldi, import_kaldi
from ds2.data.corpora.layouts import (
    import_an4,
    import_csv,
    import_deepspeech_pytorch,
    import_folder,
    import_librispeech,
)
from ds2.data.corpora.prepare import FORMATS, RECIPES, import_corpus, prepare
from ds2.data.corpora.shards import import_shar, import_webdataset

__all__ = [
    "FORMATS",
    "RECIPES",
    "ImporterError",
    "export_kaldi",
    "import_an4",
    "import_corpus",
    "import_csv",
    "import_deepspeech_pytorch",
    "import_folder",
    "import_kaldi",
    "import_librispeech",
    "import_shar",
    "import_webdataset",
    "prepare",
]

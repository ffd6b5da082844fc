"""Importers on small corpora in each layout, also with the audio transcoded; and on real ones where they lie beside."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds2.data.corpora import (
    FORMATS,
    ImporterError,
    import_corpus,
    prepare,
)
from ds2.system import UserError


@pytest.mark.parametrize("format", FORMATS)
def test_a_missing_corpus_is_named(tmp_path: Path, format: str) -> None:
    with pytest.raises((ImporterError, UserError), match="nowhere"):
        import_corpus(format, tmp_path / "nowhere")


def test_a_path_that_no_file_can_have_is_named(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("path,sentence\nwav\0/a.wav,a\n")
    with pytest.raises(UserError, match=r"table\.csv:2: contains NUL"):
        import_corpus("csv", table)


def test_wrong_names_list_the_right_ones(tmp_path: Path) -> None:
    with pytest.raises(ImporterError, match="has no parts"):
        import_corpus("kaldi", tmp_path, "train")
    with pytest.raises(ImporterError, match="not one of an4, english, librispeech, librispeech_5h, synthetic"):
        prepare("timit", tmp_path, tmp_path)

"""Byte-pair pieces: training on transcripts with sentencepiece, and files of pieces."""

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ds2.text.alphabet import WORD_MARK, Alphabet, AlphabetError


def learn_pieces(texts: Iterable[str], alphabet: Alphabet, count: int) -> list[str]:
    """Train a byte-pair encoding; return pieces in merge order, single characters last.

    Args:
        texts: transcripts, which are normalised; characters outside the alphabet are dropped.
        alphabet: of characters, each of which but the space becomes a piece, even if it does not occur.
        count: number of pieces; fewer are returned if the texts do not have as many.

    Raises:
        AlphabetError: there is no text, the count is too small for the characters, or sentencepiece is not installed.
    """
    characters = sorted({WORD_MARK, *alphabet.symbols[1:]} - {" "})
    if count <= len(characters):
        raise AlphabetError(f"{count} pieces are not enough for {len(characters)} single characters: use more")
    normalised = (alphabet.normalise(text) for text in texts)
    sentences = ["".join(c for c in text if c not in unknown).strip() for text, unknown in normalised]
    sentences = [sentence for sentence in sentences if sentence]
    if not sentences:
        raise AlphabetError("there is no text to train pieces on")
    package, model = _sentencepiece(), io.BytesIO()
    package.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=model,
        model_type="bpe",
        vocab_size=count + 1,  # including the unknown piece
        hard_vocab_limit=False,
        character_coverage=1.0,
        normalization_rule_name="identity",
        required_chars="".join(characters).replace(WORD_MARK, ""),  # with it sentencepiece requires none
        unk_id=0,
        bos_id=-1,
        eos_id=-1,
        pad_id=-1,
        num_threads=1,
        minloglevel=2,
        max_sentence_length=max(4192, *(len(text.encode()) + 1 for text in sentences)),  # it leaves out longer ones
    )
    return _listed(package.SentencePieceProcessor(model_proto=model.getvalue()))


def read_pieces(path: Path) -> list[str]:
    """Read a file of pieces: a text with one piece a line, or a byte-pair model of sentencepiece (.model).

    Raises:
        AlphabetError: the file does not exist or contains no pieces.
    """
    if not path.is_file():
        raise AlphabetError(f"there is no file of pieces {path}: `ds2 data pieces` writes one")
    try:
        if path.suffix == ".model":
            pieces = _listed(_sentencepiece().SentencePieceProcessor(model_file=str(path)))
        else:
            pieces = path.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
    except (OSError, RuntimeError, UnicodeDecodeError) as error:
        raise AlphabetError(f"{path} is no file of pieces: {error}") from error
    bad = [piece for piece in pieces if not piece or any(c.isspace() for c in piece)]
    if bad or not any(piece.startswith(WORD_MARK) for piece in pieces):
        raise AlphabetError(
            f"{path} is no file of pieces: it needs one piece a line, some of which start with {WORD_MARK!r}"
        )
    return pieces


def _listed(processor: Any) -> list[str]:
    labels = [i for i in range(processor.get_piece_size()) if not (processor.is_unknown(i) or processor.is_control(i))]
    merged = sorted(labels, key=lambda label: -processor.get_score(label))
    if [processor.get_score(label) for label in merged] != [-rank for rank in range(len(merged))]:
        raise AlphabetError("the sentencepiece model is no byte-pair model (model_type=bpe)")
    return [processor.id_to_piece(label) for label in merged]


def _sentencepiece() -> Any:
    try:
        import sentencepiece
    except ImportError as error:
        raise AlphabetError("pieces need sentencepiece: pip install sentencepiece") from error
    return sentencepiece

"""`ds2 data lexicon`: pronunciations of words of texts and language models, from a dictionary or by their letters."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

from ds2.system.errors import UserError
from ds2.system.files import check_writable, write_text
from ds2.text.alphabet import Alphabet
from ds2.text.pronunciations import Phones, Pronunciations, read_pronunciations

_SHOWN = 10


def add_lexicon(commands: Any) -> None:
    """Declare `ds2 data lexicon`."""
    parser = commands.add_parser(
        "lexicon", help="pronunciations of the words of texts and language models, for alphabet.lexicon"
    )
    parser.add_argument("output", type=Path, help="file to write in the format of CMUdict")
    parser.add_argument("--dictionary", type=Path, required=True, help="pronunciations in that format, such as CMUdict")
    parser.add_argument(
        "--words", type=Path, nargs="+", default=[], metavar="FILE",
        help="texts and manifests whose words are needed, and word models (.lm, .arpa); none: the whole dictionary",
    )  # fmt: skip
    parser.add_argument("--keep-stress", action="store_true", help="keep the 0, 1 or 2 at the end of phones")
    parser.add_argument(
        "--no-guess", action="store_true", help="leave out words that the dictionary lacks, instead of a guess"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from ds2.lm.letters_to_phones import LettersToPhones  # imported late: the other data commands need no torch

    check_writable(options.output)
    missing = [str(path) for path in options.words if not path.is_file()]
    if missing:
        raise UserError(f"there is no file {', '.join(missing)}")
    dictionary = read_pronunciations(options.dictionary, keep_stress=options.keep_stress)
    alphabet = Alphabet(("", *sorted({" ", *"".join(dictionary.words).lower()})), punctuation="drop")
    normalised: dict[str, list[Phones]] = {}
    for word, variants in dictionary.words.items():
        normalised.setdefault(alphabet.normalise(word)[0], []).extend(variants)
    dictionary = Pronunciations.of(normalised)
    wanted = _words(options.words, alphabet) if options.words else Counter(dictionary.words)
    unknown = [word for word in wanted if word not in dictionary.words]
    guessed = LettersToPhones(dictionary).pronounce(unknown) if unknown and not options.no_guess else {}
    listed = {word: dictionary.words.get(word) or (guessed[word],) for word in sorted(wanted)
              if word in dictionary.words or word in guessed}  # fmt: skip
    if not listed:
        raise UserError(f"no word of {', '.join(map(str, options.words))} has a pronunciation")
    written = Pronunciations.of(listed)
    write_text(options.output, "".join(line + "\n" for line in written.lines()))
    print(
        f"wrote {options.output}: {len(listed)} words, {len(written.phones)} phones; {len(guessed)} words are not in "
        f"{options.dictionary} and were guessed from their letters"
    )
    if guessed:
        common = sorted(guessed, key=lambda word: -wanted[word])[:_SHOWN]
        print("guessed: " + ", ".join(f"{word} {' '.join(guessed[word])}" for word in common))
    left = sorted((word for word in unknown if word not in guessed), key=lambda word: -wanted[word])
    if left:
        lacking = sorted(set("".join(left)).difference(*dictionary.words))
        why = f"; the dictionary has no word with {' '.join(lacking)}" if lacking else ""
        print(f"without a pronunciation: {len(left)} words, such as {', '.join(left[:_SHOWN])}{why}")
    return 0


def _words(paths: list[Path], alphabet: Alphabet) -> Counter[str]:
    """The words of texts, manifests and language models, with their frequency in texts; no letter is left out."""
    from ds2.lm.files import load_ngram  # imported late, as above
    from ds2.lm.ngram import END, START, UNKNOWN
    from ds2.lm.sentences import SentenceReader

    counts: Counter[str] = Counter()
    texts = [path for path in paths if path.suffix not in (".lm", ".arpa")]
    for tokens in SentenceReader(texts, "word", alphabet=None):
        counts.update(alphabet.normalise(" ".join(tokens))[0].split())
    for path in paths:
        if path not in texts:
            model = load_ngram(path)
            if model.unit != "word":
                raise UserError(f"{path} is a model of {model.unit}s: give one of words")
            counts.update(dict.fromkeys(set(model.vocabulary) - {UNKNOWN, START, END} - counts.keys(), 0))
    return counts

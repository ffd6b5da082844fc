"""Texts of language models: files to sentences of tokens, and the perplexity of a model on them."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch

from ds2.lm.ngram import END, RESERVED, SPACE, UNKNOWN, LanguageModelError, NGram
from ds2.system.files import read_lines
from ds2.system.plain import counted, parse_object
from ds2.text.alphabet import Alphabet, describe

_BATCH_SENTENCES = 4096
_MAX_NATS = 700.0  # for each token; beyond that the perplexity overflows


def tokenise(line: str, unit: str, alphabet: Alphabet | None) -> list[str]:
    """Return the tokens of a normalised line."""
    if unit == "character":
        return [SPACE if character == " " else character for character in line.strip()]
    if unit == "piece" and alphabet is not None:
        return [alphabet.symbols[label] for label in alphabet.spell(line)]
    return line.split()


def _transcript(line: str, where: str) -> str:
    try:
        text = parse_object(line).get("text") if line.strip() else ""
    except ValueError as error:
        raise LanguageModelError(f"{where} is {error}: a plain text must not be called .jsonl") from error
    if not isinstance(text, str):
        raise LanguageModelError(f'{where} has no "text": a .jsonl file must be a manifest')
    return text


@dataclass
class SentenceReader:
    """Iterate over the sentences of text files, one a line, as normalised tokens; counts what was skipped.

    Of manifests (.jsonl) the transcripts are read. Files may be compressed (.gz, .xz).

    Args:
        unit: "word" splits at white space; "character" writes a space as <space>; "piece" splits words into the pieces
            of the alphabet, without an alphabet at white space.
        alphabet: normalises the lines; None: unchanged lines.
        unknown: what to do with a character outside the alphabet: "skip" the line, "drop" the character or "stop".
    """

    paths: Sequence[Path]
    unit: str = "word"
    alphabet: Alphabet | None = None
    unknown: str = "skip"
    lines: int = 0
    empty_lines: int = 0
    skipped_lines: int = 0
    tokens: int = 0
    characters: Counter[str] = field(default_factory=Counter)  # outside the alphabet

    def __iter__(self) -> Iterator[list[str]]:
        """Yield sentences.

        Raises:
            LanguageModelError: reserved tokens; with "stop" an unknown character; no line has a token, or with "skip"
                each has an unknown character.
        """
        for path in self.paths:
            for number, line in read_lines(path):
                self.lines += 1
                where = f"{path}:{number}"
                tokens = self._tokens(_transcript(line, where) if ".jsonl" in path.suffixes else line, where)
                if tokens:
                    self.tokens += len(tokens)
                    yield tokens
        if self.paths and not self.tokens:
            reason = "the text is empty: no line has a word"
            if self.skipped_lines:
                reason = f"no line is left: {self.report()}; choose --unknown drop, or an alphabet that has them"
            raise LanguageModelError(f"{', '.join(map(str, self.paths))}: {reason}")

    def _tokens(self, line: str, where: str) -> list[str]:
        if self.alphabet is not None:
            line, unknown = self.alphabet.normalise(line)
            if unknown:
                self.characters.update(unknown)
                if self.unknown == "stop":
                    raise LanguageModelError(
                        f"{where} has characters outside the alphabet: {describe(unknown)}; "
                        "replace them with --replace, or choose --unknown skip or drop"
                    )
                if self.unknown == "skip":
                    self.skipped_lines += 1
                    return []
                line = " ".join("".join(c for c in line if c not in unknown).split())
        tokens = tokenise(line, self.unit, self.alphabet)
        if not tokens:
            self.empty_lines += 1
        elif reserved := set(RESERVED).intersection(tokens):
            raise LanguageModelError(f"{where} has the reserved token {', '.join(sorted(reserved))}: remove it")
        return tokens

    def report(self) -> str:
        """Return the numbers of lines, tokens and skipped lines as a sentence."""
        text = ", ".join(
            (counted(self.lines, "line"), counted(self.tokens, self.unit), counted(self.empty_lines, "empty line"))
        )
        if self.characters:
            action = f"{counted(self.skipped_lines, 'line')} skipped for" if self.unknown == "skip" else "dropped"
            common = dict(self.characters.most_common(20))
            more = f" and {len(self.characters) - len(common)} others" if len(self.characters) > len(common) else ""
            text += f", {action} characters outside the alphabet: {describe(common)}{more}"
        return text


@dataclass
class Perplexity:
    """Sums of natural-log probabilities of a text, with </s> and without <s>."""

    tokens: int = 0
    sentences: int = 0
    unknown: int = 0  # tokens outside the vocabulary
    log_prob: float = 0.0
    unknown_log_prob: float = 0.0

    def format(self) -> str:
        """Return the perplexity with and without tokens outside the vocabulary (OOV), and their rate, as text."""
        mean = -self.log_prob / (self.tokens + self.sentences)
        if not 0 <= mean < _MAX_NATS:
            raise LanguageModelError(
                f"the language model is damaged: the mean log-prob of a token is {-mean:g}: copy the file again or "
                "build the model again"
            )
        known = self.tokens - self.unknown + self.sentences
        return (
            f"perplexity {math.exp(mean):.2f} with OOVs, "
            f"{math.exp(-(self.log_prob - self.unknown_log_prob) / known):.2f} without\n"
            f"OOV rate {100 * self.unknown / max(1, self.tokens):.2f} % ({self.unknown} of {self.tokens} tokens, "
            f"{self.sentences} sentences)"
        )


def perplexity(model: NGram, sentences: Iterable[list[str]]) -> Perplexity:
    """Score sentences in batches."""
    total = Perplexity()
    remaining = iter(sentences)
    end, unknown = model.ids[END], model.ids[UNKNOWN]
    while batch := sorted((model.token_ids(s) for s in islice(remaining, _BATCH_SENTENCES)), key=len, reverse=True):
        lengths = torch.tensor([len(sentence) + 1 for sentence in batch])
        words = torch.full((len(batch), int(lengths[0])), end)
        for row, sentence in zip(words, batch, strict=True):
            row[: len(sentence)] = torch.tensor(sentence)
        words = words.to(model.keys.device)
        states = torch.full((len(batch),), model.start(), device=model.keys.device)
        for t in range(words.shape[1]):
            live = int((lengths > t).sum())
            scores, states = model.score_batch(states[:live], words[:live, t])
            scores = scores.double()
            total.log_prob += float(scores.sum())
            total.unknown_log_prob += float(scores[words[:live, t] == unknown].sum())
        total.sentences += len(batch)
        total.tokens += int(lengths.sum()) - len(batch)
        total.unknown += sum(sentence.count(unknown) for sentence in batch)
    return total

"""Back-off n-gram language models of any order, as one automaton in tensors.

Shapes: N queries, V vocabulary size, S states, E n-grams of all orders. A state is the longest stretch of history that
any n-gram of the model goes on from, as one integer; state 0 is the empty history. Histories that no n-gram tells apart
share a state, so hypotheses that end in it may be recombined. Log-probs are natural logarithms.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds2.system.errors import UserError
from ds2.text.alphabet import Alphabet, describe

UNKNOWN, START, END = "<unk>", "<s>", "</s>"
SPACE = "<space>"  # how a character-level model writes a space, as tokens of ARPA files hold none
UNITS = ("word", "character", "piece")
DENSE_LIMIT_BYTES = 2**30
_CACHED_QUERIES = 2**18
_CHECKED = 2**22  # entries at a time
_ROUNDING = 1e-3  # what a log-prob may be above 0
_NO_NUMBERS = "it holds numbers that are no log-probs or no states: copy the file again or build it anew"
TENSORS = ("keys", "log_prob", "next_state", "backoff", "suffix")
log = logging.getLogger(__name__)


class LanguageModelError(UserError):
    """A text, a model file or settings that give no language model; the message names the file and the way out."""


@dataclass(frozen=True, eq=False)
class NGram:
    """A back-off n-gram model of any order over words, characters or pieces, in flat tensors on one device.

    An n-gram is a transition: n-gram e leads from the state `keys[e] // V` by the word `keys[e] % V`. Entries are
    sorted by key, hence by order, and the first V are the unigrams; the states of one length are consecutive too.
    Vocabulary ids are positions in `vocabulary`.

    Reading a word: look for it in the state; while it is not there, add the state's back-off and go to its suffix.
    """

    vocabulary: tuple[str, ...]
    keys: Tensor  # (E,) int64: state x V + word
    log_prob: Tensor  # (E,) float32
    next_state: Tensor  # (E,) int32: the state after the n-gram
    backoff: Tensor  # (S,) float32
    suffix: Tensor  # (S,) int32: the longest shorter history that is a state; 0 for state 0
    entry_starts: tuple[int, ...]  # the first entry of each order, then E
    state_starts: tuple[int, ...]  # the first state of each length 0 .. order - 1, then S
    unit: str = "word"  # word | character | piece: what a vocabulary entry writes
    alphabet: Mapping[str, Any] | None = None  # Alphabet.to_dict() of the normalisation of its text, where known
    ids: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ids = {token: index for index, token in enumerate(self.vocabulary)}
        if len(ids) < len(self.vocabulary):
            raise LanguageModelError("a language model's vocabulary lists a token twice")
        missing = [token for token in (UNKNOWN, START, END) if token not in ids]
        if missing:
            raise LanguageModelError(f"a language model's vocabulary lacks {', '.join(missing)}")
        object.__setattr__(self, "ids", ids)

    @property
    def order(self) -> int:
        """The longest n-gram, in tokens."""
        return len(self.entry_starts) - 1

    def check(self) -> NGram:
        """Read all of it and return the model, for searches that follow its transitions and add its numbers unchecked.

        Raises:
            LanguageModelError: transitions that leave the model, suffixes that go round in circles, or numbers that are
                no log-probs.
        """
        states = self.suffix.numel()
        for part in (slice(at, at + _CHECKED) for at in range(0, max(states, self.keys.numel()), _CHECKED)):
            keys, following, suffix = self.keys[part], self.next_state[part], self.suffix[part]
            numbers = torch.arange(part.start, part.start + suffix.numel(), device=suffix.device)
            shorter = (suffix >= 0) & (suffix < numbers.clamp(min=1))  # a shorter history has a smaller number
            sound = (following >= 0) & (following < states) & (keys >= 0) & (keys < states * len(self.vocabulary))
            ordered = (keys[1:] > keys[:-1]).all()
            if not (bool(shorter.all()) and bool(sound.all()) and bool(ordered)):
                raise LanguageModelError(
                    f"the language model's automaton is damaged, at {part.start} to {part.stop}: its transitions leave "
                    "it or its histories go round in circles: copy the file again or build it anew"
                )
            if not (_log_probs(self.log_prob[part]) and bool(torch.isfinite(self.backoff[part]).all())):
                raise LanguageModelError(f"the language model is damaged at {part.start} to {part.stop}: {_NO_NUMBERS}")
        return self

    def to(self, device: torch.device | str) -> NGram:
        """Return the model with its tensors on `device`."""
        return replace(self, **{name: getattr(self, name).to(device) for name in TENSORS})

    def token_ids(self, tokens: Iterable[str]) -> list[int]:
        """Return vocabulary ids; the id of <unk> for tokens outside. A character-level model takes " " for a space."""
        unknown = self.ids[UNKNOWN]
        return [
            self.ids.get(SPACE if token == " " and self.unit == "character" else token, unknown) for token in tokens
        ]

    def start_states(self, count: int) -> Tensor:
        """Return (count,) int64 states of sentence starts, on the model's device."""
        return torch.full((count,), self.start(), device=self.keys.device)

    def score_batch(self, states: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        """Score one word for each of N states, without waiting for the device.

        Args:
            states: (N,) int64 or int32 on the model's device.
            words: (N,) int64 vocabulary ids, all within 0 .. V - 1.

        Returns:
            (N,) float32 log-probs and (N,) int64 next states.
        """
        contexts, found, shortened = longest_match(
            self.keys, self.suffix, len(self.vocabulary), self.order, states, words
        )
        backoffs = self.backoff.take(contexts).cumsum(1)  # of the chain up to each state; state 0 has none
        penalty = torch.cat((torch.zeros_like(backoffs[:, :1]), backoffs[:, :-1]), 1)
        entries = found.gather(1, shortened)[:, 0]
        log_probs = self.log_prob.take(entries) + penalty.gather(1, shortened)[:, 0]
        return log_probs, self.next_state.take(entries).long()

    def score_all(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Score every word for each of N states: (N, V) float32 log-probs and (N, V) int64 next states.

        For small vocabularies (characters, pieces): where all states x V fit a gigabyte, rows are read off a table that
        the first call makes, else each pair is searched for.
        """
        size = len(self.vocabulary)
        if self.backoff.numel() * size * 8 <= DENSE_LIMIT_BYTES:
            log_probs, next_states = self._dense
            return log_probs.index_select(0, states), next_states.index_select(0, states).long()
        words = torch.arange(size, device=states.device).repeat(states.numel())
        scores, following = self.score_batch(states.repeat_interleave(size), words)
        return scores.view(-1, size), following.view(-1, size)

    @cached_property
    def _dense(self) -> tuple[Tensor, Tensor]:
        size, states = len(self.vocabulary), self.backoff.numel()
        log_probs = torch.empty(states, size, device=self.keys.device)
        following = torch.empty(states, size, dtype=torch.int32, device=self.keys.device)
        for length in range(self.order):
            first, end = self.state_starts[length], self.state_starts[length + 1]
            if length:
                parents = self.suffix[first:end]
                log_probs[first:end] = log_probs.index_select(0, parents) + self.backoff[first:end, None]
                following[first:end] = following.index_select(0, parents)
            entries = slice(self.entry_starts[length], self.entry_starts[length + 1])
            log_probs.view(-1)[self.keys[entries]] = self.log_prob[entries]
            following.view(-1)[self.keys[entries]] = self.next_state[entries]
        return log_probs, following

    def start(self) -> int:
        """Return the state at the start of a sentence."""
        return self._start

    def score(self, state: int, token: str) -> tuple[float, int]:
        """Return log p(token | state), that of <unk> for a token outside the vocabulary, and the next state."""
        return self._query(state, self.token_ids((token,))[0])

    def finish(self, state: int) -> float:
        """Return log p(</s> | state)."""
        return self._query(state, self.ids[END])[0]

    def sentence(self, tokens: Sequence[str]) -> list[float]:
        """Return the log-prob of each token of a sentence, and last that of its end.

        Raises:
            LanguageModelError: some are NaN or infinite.
        """
        state, scores = self.start(), []
        for token in tokens:
            score, state = self.score(state, token)
            scores.append(score)
        scores.append(self.finish(state))
        if not all(map(math.isfinite, scores)):
            raise LanguageModelError(f"the language model is damaged: {_NO_NUMBERS}")
        return scores

    @cached_property
    def _start(self) -> int:
        return int(self.next_state[self.ids[START]])

    def _view(self, name: str) -> memoryview:
        return memoryview(np.require(getattr(self, name).cpu().numpy(), requirements="A"))  # a file may hold it askew

    @cached_property
    def _query(self) -> Callable[[int, int], tuple[float, int]]:
        keys, log_prob, following, backoff, suffix = map(self._view, TENSORS)
        size, depth = len(self.vocabulary), self.order - 1

        @lru_cache(maxsize=_CACHED_QUERIES)
        def query(state: int, word: int) -> tuple[float, int]:
            try:
                return walk(state, word)
            except IndexError as error:  # of an automaton that nobody checked
                raise LanguageModelError(f"the language model is damaged: {_NO_NUMBERS}") from error

        def walk(state: int, word: int) -> tuple[float, int]:
            penalty = 0.0
            for _ in range(depth):  # as long as a chain of suffixes can be: a damaged one ends too
                if not state:
                    break
                key = state * size + word
                entry = bisect_left(keys, key)
                if entry < len(keys) and keys[entry] == key:
                    return penalty + log_prob[entry], following[entry]
                penalty += backoff[state]
                state = suffix[state]
            return penalty + log_prob[word], following[word]

        return query

    def check_alphabet(self, alphabet: Alphabet) -> None:
        """Warn of the entries that a network with this alphabet cannot write.

        Raises:
            LanguageModelError: it can write less than half of the vocabulary (pieces are not checked).
        """
        if self.unit == "piece":
            return
        entries = [" " if token == SPACE and self.unit == "character" else token for token in self.vocabulary]
        entries = [token for token in entries if token not in (UNKNOWN, START, END)]
        symbols = set("".join(alphabet.symbols))
        bad = [token for token in entries if not symbols.issuperset(token)]
        if not bad:
            return
        characters = {c: sum(c in token for token in bad) for c in sorted(set("".join(bad)) - symbols)}
        worst = dict(sorted(characters.items(), key=lambda item: -item[1])[:20])
        message = (
            f"{len(bad)} of the language model's {len(entries)} {self.unit}s hold characters outside the network's "
            f"alphabet, such as {bad[0]!r}; by number of entries: {describe(worst)}"
        )
        if 2 * len(bad) > len(entries):
            raise LanguageModelError(
                f"{message}. Build it with the network's normalisation: ds2 lm build --model MODEL"
            )
        log.warning("%s; the network never writes those", message)


def _log_probs(values: Tensor) -> bool:
    """Whether all are finite and, but for rounding, at most 0."""
    return bool((torch.isfinite(values) & (values <= _ROUNDING)).all())


def longest_match(
    keys: Tensor, suffix: Tensor, vocabulary_size: int, depth: int, states: Tensor, words: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Find, for each of N (state, word), the first state of its suffix chain that has an n-gram with the word.

    All `depth` states of a chain are searched at once, so that a batch costs a fixed number of device operations.

    Returns:
        (N, depth) int64 chains, (N, depth) entries, and (N, 1) how many states were left behind.
    """
    chain = [states.long()]
    for _ in range(depth - 1):
        chain.append(suffix.take(chain[-1]).long())
    contexts = torch.stack(chain, 1)
    wanted = contexts * vocabulary_size + words[:, None]
    found = torch.searchsorted(keys, wanted).clamp_(max=keys.numel() - 1)
    hit = keys.take(found) == wanted
    return contexts, found, hit.to(torch.uint8).argmax(1, keepdim=True)


_BLOCK = 1 << 19  # n-grams handled at once: what bounds temporary arrays


@dataclass(frozen=True)
class Level:
    """All n-grams of one order, sorted by (prefix, word)."""

    prefix: NDArray[np.int64]  # (n,) position, one level below, of the n-gram without its last word; 0 for unigrams
    word: NDArray[np.int32]  # (n,) last word
    log_prob: NDArray[np.float32]  # (n,) natural log
    backoff: NDArray[np.float32]  # (n,) natural log; zeros at the highest order

    def __len__(self) -> int:
        return len(self.word)


def blocks(length: int, block: int = _BLOCK) -> Iterator[slice]:
    """Cut range(length) into slices of at most `block`."""
    return (slice(start, min(start + block, length)) for start in range(0, length, block))


def link(
    levels: Sequence[Level], vocabulary: Sequence[str], unit: str, alphabet: Mapping[str, Any] | None = None
) -> NGram:
    """Join levels to an automaton; level 1 holds every vocabulary entry in order of id.

    A state is kept for each n-gram that others extend or that has a back-off. A missing suffix (some tools prune it)
    acts as one without back-off.

    Raises:
        LanguageModelError: more states than the file format numbers.
    """
    size, order = len(vocabulary), len(levels)
    kept = []
    for level, above in pairwise(levels):
        flags = level.backoff != 0
        flags[above.prefix] = True
        kept.append(flags)
    entry_starts = np.cumsum([0, *map(len, levels)]).tolist()
    state_starts = np.cumsum([0, 1, *(np.count_nonzero(flags) for flags in kept)]).tolist()
    if state_starts[-1] > np.iinfo(np.int32).max:
        raise LanguageModelError(f"{state_starts[-1]} histories are more than 2^31: prune more, or lower the order")
    keys = np.empty(entry_starts[-1], np.int64)
    log_prob = np.empty(entry_starts[-1], np.float32)
    next_state = np.empty(entry_starts[-1], np.int32)
    backoff = np.zeros(state_starts[-1], np.float32)
    suffix = np.zeros(state_starts[-1], np.int32)
    prefix_state = np.zeros(1, np.int32)  # of the n-grams one level below; the empty history first
    for n, level in enumerate(levels, start=1):
        first, end = entry_starts[n - 1], entry_starts[n]
        log_prob[first:end] = level.log_prob
        for part in blocks(len(level)):
            at = slice(first + part.start, first + part.stop)
            parents, words = prefix_state[level.prefix[part]], level.word[part]
            keys[at] = parents.astype(np.int64) * size + words
            shorter = (torch.from_numpy(suffix[parents]), torch.from_numpy(words))
            next_state[at] = 0 if n == 1 else next_state[_entries(keys[:first], suffix, size, n - 1, *shorter)]
        if n < order:
            flags = kept[n - 1]
            states = slice(state_starts[n], state_starts[n + 1])
            suffix[states] = next_state[first:end][flags]
            backoff[states] = level.backoff[flags]
            next_state[first:end][flags] = np.arange(states.start, states.stop, dtype=np.int32)
            prefix_state = next_state[first:end]
    return NGram(
        tuple(vocabulary),
        keys=torch.from_numpy(keys),
        log_prob=torch.from_numpy(log_prob),
        next_state=torch.from_numpy(next_state),
        backoff=torch.from_numpy(backoff),
        suffix=torch.from_numpy(suffix),
        entry_starts=tuple(entry_starts),
        state_starts=tuple(state_starts),
        unit=unit,
        alphabet=alphabet,
    )


def _entries(
    keys: NDArray[np.int64], suffix: NDArray[np.int32], size: int, order: int, states: Tensor, words: Tensor
) -> NDArray[np.int64]:
    """The entries of the longest n-grams, of at most `order` words, that end with these words after these states."""
    _, found, shortened = longest_match(torch.from_numpy(keys), torch.from_numpy(suffix), size, order, states, words)
    entries: NDArray[np.int64] = found.gather(1, shortened)[:, 0].numpy()
    return entries


def unlink(model: NGram) -> list[Level]:
    """The inverse of `link`."""
    size = len(model.vocabulary)
    keys, log_prob, following, state_backoff = (
        tensor.cpu().numpy() for tensor in (model.keys, model.log_prob, model.next_state, model.backoff)
    )
    levels, positions = [], np.zeros(1, np.int64)  # of the states one level below, in their level
    for n in range(1, model.order + 1):
        at = slice(model.entry_starts[n - 1], model.entry_starts[n])
        parents, words = np.divmod(keys[at], size)
        backoff = np.zeros(len(words), np.float32)
        prefix = positions[parents - model.state_starts[n - 1]]
        if n < model.order:
            positions = np.flatnonzero(following[at] >= model.state_starts[n])  # an n-gram that is itself a state
            backoff[positions] = state_backoff[model.state_starts[n] : model.state_starts[n + 1]]
        levels.append(Level(prefix, words.astype(np.int32), log_prob[at], backoff))
    return levels

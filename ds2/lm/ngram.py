"""Back-off n-gram language models of any order, as a finite automaton in tensors.

Shapes: N queries, V vocabulary size, S states, E n-grams of all orders. A state is a number for the longest part of the
history that is the prefix of an n-gram; state 0 is the empty history. Histories with the same state have the same
continuations, so a decoder may recombine hypotheses by state. Log-probs are natural logarithms.
"""

import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds2.system import UserError
from ds2.system.terminal import warn_once
from ds2.text.alphabet import Alphabet, describe

RESERVED = UNKNOWN, START, END = "<unk>", "<s>", "</s>"
SPACE = "<space>"  # the space in character-level models: tokens of ARPA files contain no spaces
UNITS = ("word", "character", "piece")
DENSE_LIMIT_BYTES = 2**30
_CACHED_QUERIES = 2**18
_CHECKED_ENTRIES = 2**22  # at a time
_ROUNDING = 1e-3  # log-probs may exceed 0 by this
_BAD_NUMBERS = "it contains invalid log-probs or states: copy the file again or build the model again"
TENSORS = ("keys", "log_prob", "next_state", "backoff", "suffix")
log = logging.getLogger(__name__)
_BLOCK = 1 << 19  # n-grams processed at once, which bounds the size of temporary arrays


class LanguageModelError(UserError):
    """A text, a model file or settings of a language model are invalid; the message names the file and what to do."""


@dataclass(frozen=True, eq=False)
class NGram:
    """A back-off n-gram model over words, characters or pieces, in flat tensors on one device.

    An n-gram is a transition: n-gram e leads from state `keys[e] // V` with word `keys[e] % V` to `next_state[e]`.
    N-grams are sorted by key and therefore by order; the first V are the unigrams. States of one length are
    consecutive too. A word's id is its position in `vocabulary`.

    To score a word, search its transition from the state; if there is none, add the state's back-off and continue with
    the state's suffix.
    """

    vocabulary: tuple[str, ...]
    keys: Tensor  # (E,) int64: state x V + word
    log_prob: Tensor  # (E,) float32
    next_state: Tensor  # (E,) int32: the state after the n-gram
    backoff: Tensor  # (S,) float32
    suffix: Tensor  # (S,) int32: the longest shorter history that is a state; 0 for state 0
    entry_starts: tuple[int, ...]  # the first entry of each order, then E
    state_starts: tuple[int, ...]  # the first state of each length 0 .. order - 1, then S
    unit: str = "word"  # word | character | piece: what a vocabulary entry is
    alphabet: Mapping[str, Any] | None = None  # Alphabet.to_dict() that normalised its text, if known
    ids: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ids = {token: index for index, token in enumerate(self.vocabulary)}
        if len(ids) < len(self.vocabulary):
            raise LanguageModelError("the language model's vocabulary lists a token twice")
        missing = [token for token in RESERVED if token not in ids]
        if missing:
            raise LanguageModelError(f"the language model's vocabulary lacks {', '.join(missing)}")
        object.__setattr__(self, "ids", ids)

    @property
    def order(self) -> int:
        """Tokens of the longest n-gram."""
        return len(self.entry_starts) - 1

    @property
    def tokens(self) -> list[str]:
        """The vocabulary without reserved tokens."""
        return [token for token in self.vocabulary if token not in RESERVED]

    def check(self) -> Self:
        """Check all tensors and return the model. Searches that use it afterwards check nothing.

        Raises:
            LanguageModelError: a transition or suffix leads to no state, suffixes form a cycle, or a number is no
                log-prob.
        """
        states = self.suffix.numel()
        for part in slices(max(states, self.keys.numel()), _CHECKED_ENTRIES):
            keys, following, suffix = self.keys[part], self.next_state[part], self.suffix[part]
            numbers = torch.arange(part.start, part.start + suffix.numel(), device=suffix.device)
            shorter = (suffix >= 0) & (suffix < numbers.clamp(min=1))  # a shorter history has a smaller number
            in_range = (following >= 0) & (following < states) & (keys >= 0) & (keys < states * len(self.vocabulary))
            ordered = (keys[1:] > keys[:-1]).all()
            if not (bool(shorter.all()) and bool(in_range.all()) and bool(ordered)):
                raise LanguageModelError(
                    f"the language model is damaged at {part.start} to {part.stop}: transitions lead to no state or "
                    "suffixes form a cycle: copy the file again or build the model again"
                )
            log_prob, backoff = self.log_prob[part], self.backoff[part]
            if not bool((log_prob.isfinite() & (log_prob <= _ROUNDING)).all() and backoff.isfinite().all()):
                raise LanguageModelError(f"the language model is damaged: {_BAD_NUMBERS}")
        return self

    def to(self, device: torch.device | str) -> Self:
        """Return the model with its tensors on `device`."""
        return replace(self, **{name: getattr(self, name).to(device) for name in TENSORS})

    def token_ids(self, tokens: Iterable[str]) -> list[int]:
        """Return vocabulary ids, that of <unk> for unknown tokens. In character-level models " " means <space>."""
        unknown = self.ids[UNKNOWN]
        return [
            self.ids.get(SPACE if token == " " and self.unit == "character" else token, unknown) for token in tokens
        ]

    def score_batch(self, states: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        """Score one word for each of N states: (N,) float32 log-probs, (N,) int64 next states; the host does not wait.

        Args:
            states: (N,) int64 or int32 on the model's device.
            words: (N,) int64 vocabulary ids in 0 .. V - 1.
        """
        contexts, matches, depth = longest_match(
            self.keys, self.suffix, len(self.vocabulary), self.order, states, words
        )
        backoffs = self.backoff.take(contexts).cumsum(1)  # of the chain up to each state; state 0 has back-off 0
        penalty = torch.cat((torch.zeros_like(backoffs[:, :1]), backoffs[:, :-1]), 1)
        entries = matches.gather(1, depth)[:, 0]
        log_probs = self.log_prob.take(entries) + penalty.gather(1, depth)[:, 0]
        return log_probs, self.next_state.take(entries).long()

    def score_all(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Score every word for each of N states: (N, V) float32 log-probs and (N, V) int64 next states.

        For small vocabularies (characters, pieces). If the table of all states and words fits a gigabyte, the first
        call computes it; otherwise every pair is searched.
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
        """What `score_all` returns for all states, from the shortest histories to the longest."""
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
        """Return log p(token | state) and the next state; tokens outside the vocabulary are <unk>."""
        return self.query(state, self.token_ids((token,))[0])

    def finish(self, state: int) -> float:
        """Return log p(</s> | state)."""
        return self.query(state, self.ids[END])[0]

    def sentence(self, tokens: Sequence[str]) -> list[float]:
        """Return the log-probs of a sentence's tokens and its end; raises LanguageModelError for NaN and infinity."""
        state, scores = self.start(), []
        for word in (*self.token_ids(tokens), self.ids[END]):
            score, state = self.query(state, word)
            scores.append(score)
        if not all(map(math.isfinite, scores)):
            raise LanguageModelError(f"the language model is damaged: {_BAD_NUMBERS}")
        return scores

    @cached_property
    def _start(self) -> int:
        return int(self.next_state[self.ids[START]])

    @cached_property
    def query(self) -> Callable[[int, int], tuple[float, int]]:
        """A function of a state and a word's id that returns the log-prob of the word and the next state."""
        arrays = (getattr(self, name).cpu().numpy() for name in TENSORS)
        keys, log_prob, following, backoff, suffix = (  # those of a file may be unaligned
            memoryview(np.require(array, requirements="A")) for array in arrays
        )
        size, depth = len(self.vocabulary), self.order - 1

        @lru_cache(maxsize=_CACHED_QUERIES)
        def query(state: int, word: int) -> tuple[float, int]:
            penalty = 0.0
            try:
                for _ in range(depth):  # the greatest length of a suffix chain; ends in a damaged model too
                    if not state:
                        break
                    key = state * size + word
                    entry = bisect_left(keys, key)
                    if entry < len(keys) and keys[entry] == key:
                        return penalty + log_prob[entry], following[entry]
                    penalty += backoff[state]
                    state = suffix[state]
                return penalty + log_prob[word], following[word]
            except IndexError as error:  # a damaged model that was not checked
                raise LanguageModelError(f"the language model is damaged: {_BAD_NUMBERS}") from error

        return query

    def check_alphabet(self, alphabet: Alphabet) -> None:
        """Log a warning if a network with this alphabet cannot write some vocabulary entries.

        Raises:
            LanguageModelError: it cannot write most of the vocabulary, or its labels are pieces and the model's tokens
                characters, or the reverse.
        """
        if self.unit not in ("word", alphabet.unit):
            raise LanguageModelError(
                f"the language model is one of {self.unit}s, the labels of the network are {alphabet.unit}s: build one "
                f"of them (ds2 lm build --unit {alphabet.unit} --model MODEL) or of words"
            )
        entries = [" " if token == SPACE and self.unit == "character" else token for token in self.tokens]
        whole = self.unit == "piece"  # a label each; words and characters are spelled with characters
        symbols = set(alphabet.symbols if whole else "".join(alphabet.symbols))
        unwritable = [token for token in entries if not symbols.issuperset([token] if whole else token)]
        if not unwritable:
            return
        message = f"{len(unwritable)} of the language model's {len(entries)} {self.unit}s "
        if whole:
            message += f"are no labels of the network, such as {unwritable[0]!r}"
            way_out = (
                ": it has other pieces. Build it with those of the network: ds2 lm build --unit piece --model MODEL"
            )
        else:
            characters = {c: sum(c in t for t in unwritable) for c in sorted(set("".join(unwritable)) - symbols)}
            worst = dict(sorted(characters.items(), key=lambda item: -item[1])[:20])
            message += (
                f"contain characters outside the network's alphabet, such as {unwritable[0]!r}; by number of entries: "
                f"{describe(worst)}"
            )
            way_out = ". Build it with the network's normalisation: ds2 lm build --model MODEL"
        if 2 * len(unwritable) > len(entries):
            raise LanguageModelError(message + way_out)
        warn_once(log, f"{message}; the network never writes them")


def longest_match(
    keys: Tensor, suffix: Tensor, vocabulary_size: int, depth: int, states: Tensor, words: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Find, for each of N (state, word), the first state of its suffix chain that has an n-gram with the word.

    All `depth` states of a chain are searched at once: a batch costs a fixed number of device operations.

    Returns:
        (N, depth) int64 chains of states, (N, depth) n-gram entries, and (N, 1) the position in the chain.
    """
    chain = [states.long()]
    for _ in range(depth - 1):
        chain.append(suffix.take(chain[-1]).long())
    contexts = torch.stack(chain, 1)
    queries = contexts * vocabulary_size + words[:, None]
    entries = torch.searchsorted(keys, queries).clamp_(max=keys.numel() - 1)
    matches = keys.take(entries) == queries
    return contexts, entries, matches.to(torch.uint8).argmax(1, keepdim=True)


@dataclass(frozen=True)
class Level:
    """All n-grams of one order, sorted by (prefix, word)."""

    prefix: NDArray[np.int64]  # (n,) position, one level below, of the n-gram without its last word; 0 for unigrams
    word: NDArray[np.int32]  # (n,) last word
    log_prob: NDArray[np.float32]  # (n,) natural log
    backoff: NDArray[np.float32]  # (n,) natural log; zeros at the highest order

    def __len__(self) -> int:
        return len(self.word)


def slices(length: int, block: int = _BLOCK) -> Iterator[slice]:
    """Return the slices of at most `block` elements that cover range(length)."""
    return (slice(start, min(start + block, length)) for start in range(0, length, block))


def from_levels(
    levels: Sequence[Level], vocabulary: Sequence[str], unit: str, alphabet: Mapping[str, Any] | None = None
) -> NGram:
    """Build the automaton of n-grams listed order by order; level 1 has every vocabulary entry in order of id.

    An n-gram becomes a state if it is the prefix of another one or has a back-off. A missing suffix, which some tools
    prune, acts like one without back-off.

    Raises:
        LanguageModelError: more than 2^31 states.
    """
    size, order = len(vocabulary), len(levels)
    is_state = []
    for level, above in pairwise(levels):
        flags = level.backoff != 0
        flags[above.prefix] = True
        is_state.append(flags)
    entry_starts = np.cumsum([0, *map(len, levels)]).tolist()
    state_starts = np.cumsum([0, 1, *(np.count_nonzero(flags) for flags in is_state)]).tolist()
    if state_starts[-1] > np.iinfo(np.int32).max:
        raise LanguageModelError(f"{state_starts[-1]} histories are more than 2^31: prune more or lower the order")
    keys = np.empty(entry_starts[-1], np.int64)
    log_prob = np.empty(entry_starts[-1], np.float32)
    next_state = np.zeros(entry_starts[-1], np.int32)
    backoff = np.zeros(state_starts[-1], np.float32)
    suffix = np.zeros(state_starts[-1], np.int32)
    prefix_state = np.zeros(1, np.int32)  # state of each n-gram one level below; first the empty history
    for n, level in enumerate(levels, start=1):
        first, end = entry_starts[n - 1], entry_starts[n]
        log_prob[first:end] = level.log_prob
        for part in slices(len(level)):
            at = slice(first + part.start, first + part.stop)
            parents, words = prefix_state[level.prefix[part]], level.word[part]
            keys[at] = parents.astype(np.int64) * size + words
            if n > 1:
                below = torch.from_numpy(keys[:first]), torch.from_numpy(suffix)
                shorter = torch.from_numpy(suffix[parents]), torch.from_numpy(words)
                _, entries, depth = longest_match(*below, size, n - 1, *shorter)
                next_state[at] = next_state[entries.gather(1, depth)[:, 0].numpy()]
        if n < order:
            flags = is_state[n - 1]
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


def to_levels(model: NGram) -> list[Level]:
    """Return the n-grams of a model order by order: the inverse of `from_levels`."""
    size = len(model.vocabulary)
    keys, log_prob, following, state_backoff = (
        tensor.cpu().numpy() for tensor in (model.keys, model.log_prob, model.next_state, model.backoff)
    )
    levels, positions = [], np.zeros(1, np.int64)  # position of each state in the level below
    for n in range(1, model.order + 1):
        at = slice(model.entry_starts[n - 1], model.entry_starts[n])
        parents, words = np.divmod(keys[at], size)
        backoff = np.zeros(len(words), np.float32)
        prefix = positions[parents - model.state_starts[n - 1]]
        if n < model.order:
            positions = np.flatnonzero(following[at] >= model.state_starts[n])  # n-grams that are states
            backoff[positions] = state_backoff[model.state_starts[n] : model.state_starts[n + 1]]
        levels.append(Level(prefix, words.astype(np.int32), log_prob[at], backoff))
    return levels

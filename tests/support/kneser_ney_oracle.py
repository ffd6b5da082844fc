"""Modified Kneser-Ney from the published equations, in plain dictionaries and float64: the oracle of the LM tests.

Chen and Goodman 1998, section 3 and equation (26); Heafield et al. 2013, section 3 (adjusted counts, <s>, <unk>).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

Gram = tuple[str, ...]
START, END, UNKNOWN = "<s>", "</s>", "<unk>"


class Oracle:
    """Interpolated probabilities of kept n-grams and back-off weights of histories, by n-gram."""

    def __init__(self, sentences: Sequence[Sequence[str]], order: int, prune: Sequence[int]) -> None:
        self.order = order
        counts: Counter[Gram] = Counter()
        before: defaultdict[Gram, set[str]] = defaultdict(set)
        for sentence in sentences:
            tokens = (START, *sentence, END)
            for end in range(1, len(tokens) + 1):
                for begin in range(max(0, end - order), end):
                    counts[tokens[begin:end]] += 1
                    if begin:
                        before[tokens[begin:end]].add(tokens[begin - 1])
        adjusted = {g: c if len(g) == order or g[0] == START else len(before[g]) for g, c in counts.items()}
        adjusted[START,] = adjusted[UNKNOWN,] = 0
        self.ngrams = {g for g in adjusted if len(g) == 1 or counts[g] > prune[len(g) - 1]}
        self.discounts = [self._discounts([a for g, a in adjusted.items() if len(g) == n]) for n in range(1, order + 1)]
        followers: defaultdict[Gram, list[Gram]] = defaultdict(list)
        for g in adjusted:
            followers[g[:-1]].append(g)
        self.total = {h: sum(adjusted[g] for g in grams) for h, grams in followers.items()}
        self.gamma = {
            h: sum(self._discount(len(g), adjusted[g]) if g in self.ngrams else adjusted[g] for g in grams)
            / self.total[h]
            for h, grams in followers.items()
        }
        self.adjusted = adjusted
        self.vocabulary = [g[0] for g in adjusted if len(g) == 1]

    @staticmethod
    def _discounts(values: Sequence[int]) -> tuple[float, ...]:
        t = [sum(1 for value in values if value == j) for j in range(5)]
        if all(t[1:4]):
            y = t[1] / (t[1] + 2 * t[2])
            d = [j - (j + 1) * y * t[j + 1] / t[j] for j in (1, 2, 3)]
            if all(0 <= value <= j for j, value in enumerate(d, start=1)):
                return (0.0, *d)
        return (0.0, 0.5, 1.0, 1.5)

    def _discount(self, n: int, count: int) -> float:
        return self.discounts[n - 1][min(count, 3)]

    def _interpolated(self, gram: Gram) -> float:
        if not gram:
            return 1 / (len(self.vocabulary) - 1)
        if gram == (START,):
            return 1.0
        own = (self.adjusted[gram] - self._discount(len(gram), self.adjusted[gram])) / self.total[gram[:-1]]
        return own + self.gamma[gram[:-1]] * self._interpolated(gram[1:])

    def probability(self, history: Sequence[str], word: str) -> float:
        """p(word | history), of the longest kept n-gram with the weights of what was backed off from."""
        h = tuple(history)[max(0, len(history) - self.order + 1) :]
        if (*h, word) in self.ngrams:
            return self._interpolated((*h, word))
        return (self.gamma.get(h, 1.0) if h in self.ngrams else 1.0) * self.probability(h[1:], word)

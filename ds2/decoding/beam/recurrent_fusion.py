"""A recurrent language model within the search: it reads a word when the n-gram model does, prefix by prefix.

Shapes: B utterances, K prefixes an utterance, N words that are read at once, L layers, H hidden. A prefix remembers
what the recurrent model is after its words as one row of (2 L + 1) H numbers: h and c of each layer, then the output of
the last, from which the next label is told.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ds2.config.schema import DecodeConfig
from ds2.decoding.beam.fusion import LENGTH, LM, NODE, STATE, WORDS, Extensions, Fusion
from ds2.decoding.hypothesis import DecodeError
from ds2.lm.ngram import NGram
from ds2.lm.recurrent import BOUNDARY, RecurrentLM
from ds2.text.alphabet import Alphabet

_AT_ONCE = 8192  # words that are read at once, which bounds memory


class RecurrentFusion(Fusion):
    """Scores each word with a mixture of both models as soon as it is complete, so that the search follows by it.

        log p(word | words before) = (1 - w) log p_ngram + w log p_recurrent,   w = decode.rescore_weight

    the mixture of `ds2.decoding.rescore.Rescorer`, word by word. A word that the n-gram model does not know keeps that
    model's score, and the recurrent model goes on as if it had not been said.

    Args:
        alphabet, options, lm, device: of `Fusion`; a model of words.
        model: the recurrent one, on the device.

    Raises:
        DecodeError: there is no n-gram model of words.
    """

    waits = True

    def __init__(
        self, alphabet: Alphabet, options: DecodeConfig, lm: NGram | None, device: torch.device, model: RecurrentLM
    ) -> None:
        super().__init__(alphabet, options, lm, device)
        if lm is None or not self.by_word:
            raise DecodeError("decode.rescore_in_search=true needs a language model of words: set decode.lm")
        self.share, self._classifier = options.rescore_weight, model.classifier.requires_grad_(False)
        half = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._embedding = model.embedding.weight.detach()
        self._weights = [
            (torch.cat([weight_ih, weight_hh], 1).detach().to(half), (bias_ih + bias_hh).detach())
            for weight_ih, weight_hh, bias_ih, bias_hh in (
                layer.parameters() for layer in cast(Iterable[nn.LSTM], model.layers)
            )
        ]
        self._hidden = model.shape.hidden
        between = [] if model.alphabet.has_pieces else model.alphabet.spell(" ")
        self._separated = bool(between)
        self._spelled, self._counts = _spelled(lm, model, between, device)

    @torch.no_grad()
    def memory(self, batch: int, beam: int) -> Tensor:
        """What is remembered of empty prefixes (B, K, M)."""
        width = (2 * len(self._weights) + 1) * self._hidden
        begun = self._advance(torch.zeros(1, width, device=self.device), torch.full((1,), BOUNDARY, device=self.device))
        return begun.expand(batch, beam, -1)

    @torch.no_grad()
    def read(
        self,
        memory: Tensor,
        before: Tensor,
        floats: Tensor,
        found: Extensions,
        source: Tensor,
        label: Tensor,
        alive: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Let the recurrent model read the words that were completed; see `Fusion.read`."""
        assert found.word_score is not None
        at = source[..., None]
        memory = memory.gather(1, at.expand(-1, -1, memory.shape[2]))
        length, node = before[..., LENGTH].gather(1, source), before[..., NODE].gather(1, source)
        word = self.forest.nodes.word[node]
        complete = alive & self.spelling.starts_word[label] & (length > 0) & (word >= 0)
        rows, slots = complete.nonzero(as_tuple=True)
        for part in range(0, len(rows), _AT_ONCE):
            where = rows[part : part + _AT_ONCE], slots[part : part + _AT_ONCE]
            first = before[..., WORDS].gather(1, source)[where] == 0
            score, state = self._words(memory[where], word[where], first)
            memory[where] = state
            said = found.word_score.gather(1, source)[where]
            floats[..., LM][where] += self._change(score, said)
        return memory, floats

    @torch.no_grad()
    def finish(
        self, integers: Tensor, floats: Tensor, alive: Tensor, memory: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """End every prefix as `Fusion.finish`, both models reading its last word and the end."""
        assert memory is not None and self.lm is not None
        log_prob, bonus, total = super().finish(integers, floats, alive)
        _, word_score, word_state = self._complete(integers[..., STATE], integers[..., NODE])
        assert word_score is not None and word_state is not None
        word, opened = self.forest.nodes.word[integers[..., NODE]], integers[..., LENGTH] > 0
        state = torch.where(opened, word_state, integers[..., STATE])
        ends = torch.full_like(state, self._end_id)
        end_score = self.lm.score_batch(state.flatten(), ends.flatten())[0].view_as(state).double()
        change = torch.zeros_like(log_prob)
        rows, slots = alive.nonzero(as_tuple=True)
        for part in range(0, len(rows), _AT_ONCE):
            where = rows[part : part + _AT_ONCE], slots[part : part + _AT_ONCE]
            states, more = memory[where], torch.zeros(len(where[0]), dtype=torch.float64, device=self.device)
            reads = (opened & (word >= 0))[where].nonzero()[:, 0]
            of_word = where[0][reads], where[1][reads]
            first = integers[..., WORDS][of_word] == 0
            score, after = self._words(states[reads], word[of_word], first)
            states[reads] = after
            more[reads] = self._change(score, word_score[of_word])
            ends_here = torch.full((len(states),), BOUNDARY, device=self.device)
            change[where] = more + self._change(self._told(states, ends_here), end_score[where])
        return log_prob + change, bonus, total + self.alpha * change

    @torch.no_grad()
    def _words(self, states: Tensor, words: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """Natural log-probs (N,) of words (N,) after states (N, M), and the states behind them.

        The first word of an utterance is spelled without the label that parts words.
        """
        spelled, counts = self._spelled[words], self._counts[words]
        if self._separated:
            spelled = torch.where(first[:, None], spelled.roll(-1, 1), spelled)
            counts = counts - first.long()
        order = counts.argsort(descending=True)
        spelled, states = spelled[order], states[order]
        scores = torch.zeros(len(words), device=self.device)
        live_at = (counts[:, None] > torch.arange(spelled.shape[1], device=self.device)).sum(0).tolist()
        for place, live in enumerate(live_at):
            labels = spelled[:live, place]
            scores[:live] += self._told(states[:live], labels)
            states[:live] = self._advance(states[:live], labels)
        back = order.argsort()
        return scores[back], states[back]

    def _change(self, score: Tensor, said: Tensor) -> Tensor:
        """What the recurrent model's score (N,) changes in the n-gram model's."""
        return self.share * (score.double() - said)

    def _told(self, states: Tensor, labels: Tensor) -> Tensor:
        """The log-prob (N,) of each label after its state."""
        logits = functional.linear(states[:, -self._hidden :], self._classifier.weight, self._classifier.bias)
        return -functional.cross_entropy(logits, labels, reduction="none")

    def _advance(self, states: Tensor, labels: Tensor) -> Tensor:
        """The states (N, M) after labels (N,): a step of every layer as `RecurrentLM.forward` takes it."""
        x, kept = self._embedding[labels], []
        parts = states.view(len(states), 2 * len(self._weights) + 1, self._hidden).unbind(1)
        for layer, (weight, bias) in enumerate(self._weights):
            h, c = parts[2 * layer], parts[2 * layer + 1]
            gates = functional.linear(torch.cat([x, h], 1).to(weight.dtype), weight).float() + bias
            i, f, g, o = gates.chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            x = x + h
            kept += [h, c]
        return torch.cat([*kept, x], 1)


def _spelled(lm: NGram, model: RecurrentLM, between: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """The recurrent model's labels (words, longest) of each word of the n-gram model, and how many.

    Those of characters come behind the label that parts words. What it cannot spell has no label.
    """
    rows = []
    for word in lm.vocabulary:
        text, unknown = model.alphabet.normalise(word)
        rows.append([] if unknown or not text else [*between, *model.alphabet.spell(text)])
    counts = torch.tensor([len(row) for row in rows])
    spelled = torch.zeros(len(rows), max(1, int(counts.max())), dtype=torch.int64)
    for at, row in enumerate(rows):
        spelled[at, : len(row)] = torch.tensor(row, dtype=torch.int64)
    return spelled.to(device), counts.to(device)

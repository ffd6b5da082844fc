"""ctcdecode behind our interface."""

from __future__ import annotations

from torch import Tensor

from ds2.config.schema import DecodeConfig
from ds2.decoding.external.adapter import Rescorer, find_package, thread_count
from ds2.decoding.hypothesis import DecodeError, Hypothesis
from ds2.lm.arpa import arpa_file
from ds2.lm.ngram import NGram
from ds2.text.alphabet import WORD_MARK, Alphabet

_UNKNOWN_SCORE = -1000.0  # of an n-gram with an unknown word, the package's OOV_SCORE


class CtcdecodeSearch:
    """The package ctcdecode where a user has built it: its settings from ours, and its results in our form."""

    def __init__(self, alphabet: Alphabet, options: DecodeConfig, lm: NGram | None) -> None:
        package = find_package("ctcdecode", "ctcdecode", "ctcdecode")
        if lm is not None and lm.unit != "word":
            raise DecodeError(
                f"decode.method=ctcdecode reads models of words, not of {lm.unit}s: take decode.method=beam"
            )
        if options.hot_words or options.lexicon:
            raise DecodeError(
                "decode.method=ctcdecode has no hot words and no lexicon apart from its model: take decode.method=beam"
            )
        self.rescorer = Rescorer(alphabet, options, lm)
        self.options = options
        settings = {
            "beam_width": options.beam,
            "cutoff_top_n": len(alphabet),
            "cutoff_prob": 1.0,
            "num_processes": thread_count(options),
            "blank_id": 0,
            "log_probs_input": True,
        }
        labels = ["_", *alphabet.symbols[1:]]
        if lm is None:
            self.decoder = package.CTCBeamDecoder(labels, **settings)
            return
        with arpa_file(lm, options.lm) as arpa:  # its KenLM does not read our binary
            self.decoder = package.CTCBeamDecoder(
                labels, model_path=str(arpa), alpha=options.alpha, beta=options.beta, **settings
            )

    def search(self, log_probs: Tensor, lengths: Tensor) -> list[list[Hypothesis]]:
        """Return the N best of each utterance, without word times; arguments as `BatchedBeamSearch.search`."""
        batch = log_probs.transpose(0, 1).contiguous().cpu()
        labels, scores, _, sizes = self.decoder.decode(batch, lengths)
        rows = []
        for row in range(len(batch)):
            found = []
            for rank in range(min(self.options.nbest, labels.shape[1])):
                heard = labels[row, rank, : int(sizes[row, rank])].tolist()
                text = self.rescorer.alphabet.decode(heard).replace(WORD_MARK, " ")
                found.append(
                    self.rescorer.hypothesis(text, self._acoustic(text, len(heard), -float(scores[row, rank])))
                )
            rows.append(sorted(found, key=lambda h: -h.score))
        return rows

    def _acoustic(self, text: str, labels: int, returned: float) -> float:
        """The log-probability of the labels alone, from what the package returns for a text.

        With a model it takes back from its score alpha log p_lm with the end of the sentence, which it had not added,
        and beta for each label, where it had added beta for each word (`ctc_beam_search_decoder.cpp`, approx_ctc).
        """
        lm, words = self.rescorer.lm, text.split()
        if lm is None:
            return returned
        state = lm.start()
        for word in words:
            _, state = lm.score(state, word)
        near = words[len(words) - min(len(words), lm.order - 1) :]  # one unknown word there is the score of the n-gram
        end = lm.finish(state) if all(word in lm.ids for word in near) else _UNKNOWN_SCORE
        return returned + self.options.alpha * end + self.options.beta * (labels - len(words))

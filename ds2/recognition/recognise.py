"""Utterances to hypotheses, in batches over all ranks; and hypotheses to a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from ds2.audio.features import Features
from ds2.data.loader import SpeechLoader
from ds2.data.manifest import Utterance, corpus
from ds2.decoding.decoder import Decoder
from ds2.decoding.greedy import GreedyDecoder
from ds2.decoding.hypothesis import DecodeError, Hypothesis
from ds2.distributed.agreement import weights
from ds2.distributed.communicator import Communicator
from ds2.model.acoustic import AcousticModel
from ds2.recognition.logits import logit_batches
from ds2.scoring.wer import Report, corpus_report
from ds2.text.alphabet import Alphabet


@torch.inference_mode()
def transcribe_utterances(
    model: AcousticModel,
    features: Features,
    alphabet: Alphabet,
    loader: SpeechLoader,
    *,
    device: torch.device,
    precision: str = "fp32",
    batch_audio_s: float | None = None,
    comm: Communicator | None = None,
    decoder: Decoder | None = None,
) -> list[Hypothesis]:
    """Recognise utterances, in batches of like duration, longest first; their texts are not looked at.

    Args:
        model: in evaluation mode, on `device`.
        features: on `device`.
        alphabet: of the model.
        loader: of any number of utterances, without augmentation.
        device: where the model runs.
        precision: fp32 or bf16.
        batch_audio_s: budget of padded audio a batch, seconds; None chooses by device.
        comm: ranks that share the batches out and all get all hypotheses; None is this process alone.
        decoder: what turns log-probs to words; None is greedy.

    Returns:
        Hypotheses in the order of the utterances.

    Raises:
        DecodeError: the model gives NaN or infinity; names the utterances.
        AudioError: audio cannot be read.
        DisagreementError: a rank has other utterances or weights.
        RuntimeError: the model is in training mode.
    """
    comm, utterances = comm or Communicator(device), loader.utterances
    if comm.world > 1:
        comm.agree(corpus("to recognise", utterances), "give all hosts the same manifests")
        comm.agree(weights(model), "give all hosts the same model; in training, run on GPUs of one kind")
    decoder = decoder or GreedyDecoder(alphabet, features.step_s * model.time_stride)
    found: dict[int, Hypothesis] = {}
    batches = logit_batches(
        model, features, loader, device=device, precision=precision, batch_audio_s=batch_audio_s, comm=comm
    )
    for indices, logits, lengths in batches:
        try:
            rows = decode_batch(decoder, logits, lengths)
        except DecodeError as error:
            named = ", ".join(utterances[indices[row]].name for row in error.rows)
            raise DecodeError(f"{named}: {error}" if named else str(error)) from error
        found.update(zip(indices, rows, strict=True))
    found = {index: hypothesis for part in comm.allgather(found) for index, hypothesis in part.items()}
    return [found[index] for index in range(len(utterances))]


def decode_batch(decoder: Decoder, logits: Tensor, lengths: Tensor) -> list[Hypothesis]:
    """Return the best hypothesis of each utterance of logits (T', B, V); too short for a frame, it is empty."""
    heard = lengths.nonzero()[:, 0]
    best = [Hypothesis("", 0.0, (), ()) for _ in lengths]
    if not len(heard):
        return best
    if len(heard) < len(best):
        logits, lengths = logits[:, heard.to(logits.device)], lengths[heard]
    try:
        rows = decoder.decode(logits.float().log_softmax(2), lengths)
    except DecodeError as error:
        raise DecodeError(str(error), heard[error.rows].tolist()) from error
    for row, found in zip(heard.tolist(), rows, strict=True):
        best[row] = found[0]
    return best


def score(utterances: Sequence[Utterance], hypotheses: Sequence[Hypothesis], alphabet: Alphabet) -> Report:
    """Report on hypotheses against normalised transcripts; characters outside the alphabet stay in, as errors."""
    return corpus_report(
        [alphabet.normalise(u.text)[0] for u in utterances],
        [h.text for h in hypotheses],
        names=[u.name for u in utterances],
        speakers=[u.speaker for u in utterances],
    )


def hypothesis_record(utterance: Utterance, hypothesis: Hypothesis, reference: str) -> dict[str, Any]:
    """Return one line of hypotheses.jsonl: NeMo's keys (`pred_text` is the hypothesis), score and words with times."""
    return {
        "audio_filepath": str(utterance.audio_filepath),
        "offset": utterance.offset_s,
        "duration": utterance.duration_s,
        "speaker": utterance.speaker,
        "text": reference,
        "pred_text": hypothesis.text,
        "score": hypothesis.score,
        "acoustic_score": hypothesis.acoustic,
        "lm_score": hypothesis.lm,
        "words": [asdict(word) for word in hypothesis.words],
    }

"""What the stored position in an epoch means, once data or batching may have changed."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence

from ds2.data.manifest import Utterance
from ds2.training.state import Progress

log = logging.getLogger(__name__)


def settle(progress: Progress, plan: Sequence[Sequence[int]], utterances: Sequence[Utterance]) -> None:
    """Make `progress.batch` a position in the plan of the running epoch, and note which plan that is.

    A position counts batches of one plan: the same audio in the same batches. In another plan (other data, batching,
    speed factors or seed) it means nothing: the epoch begins again, with a warning, unless it had ended. A state of
    before plans were noted keeps a position that the plan has.
    """
    fingerprint = plan_fingerprint(plan, utterances)
    known = progress.plan != ""
    if progress.batch and progress.plan != fingerprint and (known or progress.batch > len(plan)):
        if known and progress.batch == progress.batches:
            progress.batch = len(plan)
        else:
            log.warning(
                "epoch %d begins again: it was stopped after batch %d of another plan; data, batching, augment.speed, "
                "augment.tempo or train.seed have changed. Weights, optimizer and step %d go on. To finish the epoch "
                "as it began, start with the former settings",
                progress.epoch, progress.batch, progress.step,
            )  # fmt: skip
            progress.batch = 0
    progress.plan, progress.batches = fingerprint, len(plan)


def plan_fingerprint(plan: Sequence[Sequence[int]], utterances: Sequence[Utterance]) -> str:
    """A digest of what each batch hears; folders may be a host's own, texts may be corrected."""
    digest = hashlib.sha256()
    for batch in plan:
        for index in batch:
            u = utterances[index]
            digest.update(f"{u.audio_filepath.name}\0{u.offset_s!r}\0{u.duration_s!r}\n".encode())
        digest.update(b"\n")
    return digest.hexdigest()[:16]

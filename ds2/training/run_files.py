"""The files that a run leaves: its best and last models, and the state from which it goes on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ds2.config.schema import Config
from ds2.distributed.communicator import Communicator
from ds2.model.checkpoint import save_model
from ds2.system.machine import git_commit
from ds2.text.alphabet import Alphabet
from ds2.training.state import TrainState, save_state


class RunFiles:
    """Writes a run folder's models and trainer state; all ranks call it, rank 0 writes.

    Args:
        run_dir: the folder.
        config: of the run.
        state: what is written, as it is at each call.
        alphabet: of the model.
        precision: that it is trained in.
        comm: the ranks.
    """

    def __init__(
        self, run_dir: Path, config: Config, state: TrainState, alphabet: Alphabet, precision: str, comm: Communicator
    ) -> None:
        self.run_dir, self.config, self.state = run_dir, config, state
        self.alphabet, self.precision, self.comm = alphabet, precision, comm

    def keep_best(self, scores: Mapping[str, float]) -> bool:
        """Write `best.safetensors` where these are the best scores so far; returns whether they are.

        Args:
            scores: "wer" and "cer" of the dev set; `train.metric` says which counts first, the other settles a draw.
        """
        progress = self.state.progress
        first, second = ("cer", "wer") if self.config.train.metric == "cer" else ("wer", "cer")
        best = {"wer": progress.best_wer, "cer": progress.best_cer}
        better = (scores[first], scores[second]) < (best[first], best[second])
        if better:
            progress.best_wer, progress.best_cer, progress.best_epoch = scores["wer"], scores["cer"], progress.epoch
            self._save_model("best", scores)
        return better

    def keep_last(self, metrics: Mapping[str, float]) -> None:
        """Write `last.safetensors`, and with `checkpoint.keep_last` above 1 that many epochs by number."""
        self._save_model("last", metrics)
        keep = self.config.checkpoint.keep_last
        if keep > 1 and self.comm.rank == 0:
            self._save_model(f"epoch-{self.state.progress.epoch:04d}", metrics)
            for old in sorted(self.run_dir.glob("epoch-*.safetensors"))[:-keep]:
                old.unlink()

    def save(self) -> None:
        """Write the trainer state, from which the run goes on exactly as if it had not stopped."""
        if self.comm.rank == 0:
            with self.comm.whereabouts.slow("saving"):
                save_state(self.run_dir, self.state, self.config)

    def _save_model(self, name: str, metrics: Mapping[str, float]) -> None:
        """Write the weights that evaluation uses as one self-contained model file."""
        if self.comm.rank != 0:
            return
        state, progress = self.state, self.state.progress
        facts = {
            **metrics,
            "epoch": progress.epoch,
            "step": progress.step,
            "precision": self.precision,
            "git_commit": git_commit(),
        }
        path = self.run_dir / f"{name}.safetensors"
        save_model(path, state.judged, state.features, self.alphabet, self.config, facts)

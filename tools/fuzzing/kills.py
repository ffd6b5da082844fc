"""Kill ds2 with -9 at random moments, start it again, and compare what it ends with to the unbroken run, bit for bit.

    python tools/fuzz.py kills --kills 4                   four kills of each work: some minutes
    python tools/fuzz.py kills --kills 40 --only train     docs/results/reliability.md shows the table

A chain starts one command again after each kill, until it ends by itself. On two ranks half of the kills end the whole
job, and half of them one rank: then the others must end by themselves within a minute. Faults are a chain whose result
differs from that of the unbroken run, one that fails, and temporary files that remain; the exit status is 1 if there
are any. Needs /proc (Linux).
"""

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import soundfile
from dispatch import MPI_AS_ROOT, mpirun, new_parser, parse
from safetensors import safe_open
from support.tiny import RATE_HZ, tiny_overrides_in

from ds2.data.manifest import Utterance, write_manifest
from ds2.system.files import read_log
from ds2.system.tensor_file import load

TEXTS = ("ab", "ba", "abc", "cab", "b a c", "c", "bca", "a b")
DS2 = (sys.executable, "-m", "ds2.cli")
KILLS_A_CHAIN = 8
OTHERS_END_S = 60.0
MAX_FAULTS = 8  # a command that fails by itself would never be killed often enough
PREPARE = (  # a corpus that takes about as long as Python's start
    "import sys; from ds2 import cli; from ds2.data.corpora import synthetic;"
    "synthetic.UTTERANCES.update(train=120, dev=10, test=10); sys.exit(cli.main())"
)
CACHE = (
    "import sys; from ds2.config.schema import DataConfig; from ds2.data.audio_cache import open_audio;"
    "from ds2.data.manifest import read_manifest;"
    "open_audio(read_manifest(sys.argv[1]), DataConfig(work_dir=sys.argv[2], cache='disk'))"
)


@dataclass(frozen=True)
class Work:
    """A command that is killed, and what it ends with.

    In the command FOLDER stands for the folder in which it starts, and MODEL for the model of the unbroken training.
    """

    name: str
    arguments: Sequence[str]
    result: Callable[[Path], object]  # of the folder
    ranks: int = 1

    def command(self, folder: Path) -> list[str]:
        """The command as it runs in `folder`, which is in a folder of this work."""
        model = str(model_file(folder.parents[1]))
        return [argument.replace("FOLDER", str(folder)).replace("MODEL", model) for argument in self.arguments]


@dataclass
class ChainCounts:
    """How the chains of one work ended."""

    kills: int = 0
    chains: int = 0
    equal: int = 0
    faults: list[str] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chains and print the table."""
    parser = new_parser(__doc__)
    parser.add_argument("--kills", type=int, default=4, help="of each work (default 4)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", help="works whose names begin so")
    options = parse(parser, arguments)
    started, faults = time.monotonic(), []
    print("| work | kills -9 | chains | equal | faults |\n|---|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory(prefix="ds2-kills-") as name:
        base = Path(name)
        train, *others = works(base)
        for work in (train, *others):
            if options.only and not work.name.startswith(tuple(options.only)):
                continue
            if "MODEL" in " ".join(work.arguments) and not model_file(base).is_file():
                folder = base / "train" / "unbroken"
                run_and_kill(train.command(folder), folder)
            draw = random.Random(f"{options.seed} {work.name}")
            count = chains(work, base / work.name.replace(" ", "-"), options.kills, draw)
            row = f"| {work.name} | {count.kills} | {count.chains} | {count.equal} | {len(count.faults)} |"
            print(row, *count.faults, sep="\n", flush=True)
            faults += count.faults
    print(f"seed {options.seed}, {time.monotonic() - started:.0f} s, commit {options.commit}")
    return 1 if faults else 0


def works(base: Path) -> list[Work]:
    """The commands that are killed, on a corpus that is made in `base`; the first makes the model of the others."""
    manifest, text = corpus(base / "corpus"), base / "text.txt"
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=4)) for _ in range(3000)]
    text.write_text("".join(" ".join(draw.choices(words, k=12)) + "\n" for _ in range(8000)), encoding="utf-8")
    train = (*DS2, "train", *training_settings(Path("FOLDER"), manifest))
    two_ranks = (mpirun(), "-n", "2", "--oversubscribe", *train, "comm=mpi", "comm.timeout_s=20")
    tuning = (*train, "checkpoint.init_from=MODEL", "alphabet.symbols='abcd '", "train.freeze=[convs]")
    lm_train = f"lm train {text} --output FOLDER/text.lm --hidden 32 --layers 1 --epochs 2 --join 2 --device cpu"
    python = (sys.executable, "-c")

    def ds2(command: str, *more: str) -> Sequence[str]:
        return (*DS2, *command.split(), *more)

    return [
        Work("train", train, trained),
        Work("train on 2 ranks", two_ranks, trained, ranks=2),
        Work("fine-tuning", tuning, trained),
        Work("export", ds2("export MODEL --to onnx --interface plain --out FOLDER/out/m.onnx"), _files("out/**/*")),
        Work("evaluate", ds2(f"evaluate MODEL {manifest} --device cpu --out FOLDER/report"), _files("report/**/*")),
        Work("lm build", ds2(f"lm build {text} --output FOLDER/text.lm --order 4"), _built),
        Work("lm train", ds2(f"{lm_train} --save-minutes 0.005", "--symbols", " abcdefghij"), lambda at: _built(at)[1]),
        Work("data prepare", (*python, PREPARE, "data", "prepare", "recipe=synthetic", "data.work_dir=FOLDER/corpus"),
             _files("corpus/**/*")),
        Work("data shards", ds2(f"data shards {manifest} FOLDER/shards --shard-mb 0.1"), _files("shards/**/*")),
        Work("audio cache", (*python, CACHE, str(manifest), "FOLDER/work"), _files("work/**/*.audio", order=False)),
    ]  # fmt: skip


def model_file(base: Path) -> Path:
    """The model of the unbroken training."""
    return base / "train" / "unbroken" / "run" / "best.safetensors"


def training_settings(folder: Path, manifest: Path) -> list[str]:
    """A training of a tiny model that takes a few seconds, with all that a state may hold."""
    more = ("model.dropout=0.1", "train.average_decay=0.9", "augment.speed=[0.9,1.1]", "checkpoint.every_steps=2")
    return [*tiny_overrides_in(folder, manifest), *more]


def corpus(folder: Path) -> Path:
    """Make recordings of noise with texts; returns their manifest."""
    folder.mkdir(parents=True)
    rng, utterances = np.random.default_rng(0), []
    for number in range(24):
        samples = int(RATE_HZ * rng.uniform(0.5, 1.2))
        path = folder / f"u{number}.flac"
        soundfile.write(path, 0.1 * rng.standard_normal(samples).clip(-3, 3), RATE_HZ)
        utterances.append(Utterance(path, samples / RATE_HZ, TEXTS[number % len(TEXTS)]))
    write_manifest(folder / "m.jsonl", utterances)
    return folder / "m.jsonl"


def trained(folder: Path) -> object:
    """Every tensor of the trainer state, the last loss that was logged for each step, and which models there are."""
    file = folder / "run" / "trainer.safetensors"
    tensors = {name: value.numpy().tobytes() for name, value in load(file)[0].items()}
    lines = read_log(folder / "run" / "log.jsonl")
    losses = {line["step"]: line["loss"] for line in lines if line["event"] == "train"}
    models = [name for name in ("best.safetensors", "last.safetensors") if (folder / "run" / name).is_file()]
    return tensors, losses, models


def _built(folder: Path) -> tuple[object, object]:
    """A language model's header and tensors; safetensors writes the entries of a header in any order."""
    with safe_open(str(folder / "text.lm"), framework="np") as file:
        return file.metadata(), {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118


def _files(pattern: str, *, order: bool = True) -> Callable[[Path], object]:
    """What a folder holds: names and content of files, paths of the folder left out; of content in any order, sizes."""

    def files(folder: Path) -> object:
        content = {
            str(path.relative_to(folder)): path.read_bytes().replace(str(folder).encode(), b"")
            for path in folder.glob(pattern)
            if path.is_file()
        }
        return content if order else {name: len(data) for name, data in content.items()}

    return files


def chains(work: Work, folder: Path, kills: int, draw: random.Random) -> ChainCounts:
    """Kill the work `kills` times, in as many chains as that takes."""
    count = ChainCounts()
    unbroken = folder / "unbroken"
    started = time.monotonic()
    if status := run_and_kill(work.command(unbroken), unbroken):
        count.faults.append(f"the unbroken run ended with status {status}: {last_output(unbroken)}")
        return count
    whole_s = time.monotonic() - started
    expected, ordinary = work.result(unbroken), {path.name for path in _temporary(unbroken)}  # torch's own caches
    while count.kills < kills and len(count.faults) < MAX_FAULTS:
        chain = folder / f"chain{count.chains}"
        count.chains += 1
        for kill in range(min(KILLS_A_CHAIN, kills - count.kills)):
            alone = work.ranks > 1 and draw.random() < 0.5
            started = time.monotonic()
            kill_after_s = draw.uniform(0.2, 1.05) * whole_s
            status = run_and_kill(work.command(chain), chain, kill_after_s, draw if alone else None)
            count.kills += status is None
            if status is not None:
                if kill == 0:  # a whole run that was over before: the machine is less busy than it was
                    whole_s = min(whole_s, time.monotonic() - started)
                break
        else:
            status = run_and_kill(work.command(chain), chain)
        if status:
            count.faults.append(f"chain {count.chains} ended with status {status}: {last_output(chain)}")
        elif work.result(chain) != expected:
            count.faults.append(f"chain {count.chains} has another result than the unbroken run")
        else:
            count.equal += 1
        leftovers = [path for path in _temporary(chain) if path.name not in ordinary]
        if leftovers:
            size = sum(path.stat().st_size for path in leftovers if path.is_file()) / 1e6
            files = f"{len(leftovers)} temporary files, {size:.1f} MB: {leftovers[0].name}"
            count.faults.append(f"chain {count.chains} left {files}")
        shutil.rmtree(chain, ignore_errors=True)
    return count


def _temporary(folder: Path) -> list[Path]:
    """Files that ds2 puts somewhere for a while; the folders of an mpirun that was killed are not its own."""
    paths = [path for path in folder.rglob("*") if path.suffix == ".partial" or path.parent == folder / "tmp"]
    return [path for path in paths if not path.name.startswith(("ompi.", "prte.", "pmix"))]


def last_output(folder: Path, name: str = "output.txt") -> str:
    """The end of what commands have printed into a file of a folder."""
    return (folder / name).read_text(errors="replace").strip()[-1000:].replace("\n", " / ")


def run_and_kill(
    command: Sequence[str], folder: Path, kill_after_s: float = 0.0, one_of: random.Random | None = None
) -> int | None:
    """Run a command in a folder, `tmp` in it for what is temporary: its status, or None where it was killed.

    Args:
        kill_after_s: 0 does not kill.
        one_of: draws the one process among ds2's that is killed; None kills all.
    """
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ, "TMPDIR": str(folder / "tmp"), "OMP_NUM_THREADS": "1", "DS2_CACHE_DIR": str(folder / "cache"),
        **MPI_AS_ROOT,
    }  # fmt: skip
    options = {"cwd": folder, "env": environment, "start_new_session": True}
    with (folder / "output.txt").open("ab") as output:
        job = subprocess.Popen(command, stdout=output, stderr=output, **options)
        try:
            return job.wait(kill_after_s or None)
        except subprocess.TimeoutExpired:
            ranks = [pid for pid in (job.pid, *_descendants(job.pid)) if _is_python(pid)]
            if ranks and one_of:
                _kill([one_of.choice(ranks)])
                with suppress(subprocess.TimeoutExpired):
                    job.wait(OTHERS_END_S)
                    return None
                output.write(b"ranks went on although one of them was killed\n")
            _kill([job.pid, *_descendants(job.pid)])
            job.wait()
            return None


def _descendants(process: int) -> list[int]:
    processes = []
    with suppress(OSError):
        for task in Path(f"/proc/{process}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                processes += [child, *_descendants(child)]
    return processes


def _is_python(process: int) -> bool:
    with suppress(OSError):
        program, *arguments = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
        return b"ds2.cli" in arguments and b"mpirun" not in program
    return False


def _kill(processes: Sequence[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, 9)

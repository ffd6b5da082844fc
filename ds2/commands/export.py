"""`ds2 export`: write a model as one file for sherpa-onnx, ONNX Runtime or torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ds2_ops.install import install_command

from ds2.commands.common import Parser, add_model, real
from ds2.config.schema import ConfigError
from ds2.model.checkpoint import LoadedModel, find_model, load_model
from ds2.model.shipped import is_shipped
from ds2.system.files import check_writable, sole_writer

_NAMES = {("onnx", False): "model.onnx", ("onnx", True): "model.int8.onnx", ("torch", False): "model.pt2"}


def make_parser() -> Parser:
    parser = Parser(
        prog="ds2 export",
        description="one file that needs no ds2: its inputs, outputs and states are described in docs/guide/export.md",
    )
    add_model(parser)
    parser.add_argument("--to", required=True, choices=["onnx", "torch"])
    parser.add_argument(
        "--out", type=Path,
        help="the file; by default in the folder `export` beside the model, or here for a model that comes with ds2",
    )  # fmt: skip
    parser.add_argument(
        "--interface", choices=["sherpa", "plain"],
        help="sherpa: what sherpa-onnx runs, the default for onnx; plain: samples in, log-probs out, for any model",
    )  # fmt: skip
    parser.add_argument("--chunk-ms", type=real(0, 60_000, above=True), default=160.0, help="longest chunk of audio")
    parser.add_argument("--int8", action="store_true", help="matrices in 8 bits: a quarter of the size, faster")
    return parser


def run(arguments: Sequence[str]) -> None:
    """`ds2 export MODEL --to TARGET`."""
    args = make_parser().parse_args(arguments)
    for_sherpa = args.to == "onnx" and args.interface != "plain"
    if args.to == "torch" and args.interface == "sherpa":
        raise ConfigError("sherpa-onnx reads ONNX only: take --to onnx, or --to torch --interface plain")
    if args.to == "torch" and args.int8:
        raise ConfigError("--int8 works with --to onnx only: take --to onnx, or leave --int8 out")
    file = find_model(args.model)
    path = args.out or (Path() if is_shipped(file) else file.parent) / "export" / _NAMES[args.to, args.int8]
    chunk_s = args.chunk_ms / 1000
    try:
        from ds2.export.files import TOKENS, export_onnx, export_torch

        check_writable(path, path.with_name(TOKENS), inputs=[file])
        with sole_writer(path):
            loaded = load_model(file)
            if args.to == "onnx":
                described = export_onnx(loaded, path, for_sherpa=for_sherpa, chunk_s=chunk_s, int8=args.int8)
            else:
                described = export_torch(loaded, path, chunk_s=chunk_s)
    except ImportError as error:
        raise ConfigError(f"ds2 export needs {error.name}: {install_command('export')}") from error
    tokens = path.with_name(TOKENS)
    _print_summary(path, tokens, loaded, described)
    if for_sherpa:
        print(
            f"{described['runs']}; send {described['tail_s']:.2f} s of silence after the last word. To try it:\n"
            f"  sherpa-onnx --nemo-ctc-model={path} --tokens={tokens} FILE.wav"
        )


def _print_summary(path: Path, tokens: Path, loaded: LoadedModel, described: dict[str, Any]) -> None:
    late_ms = 1000 * described["lag_frames"] * described["frame_s"]
    chunking = (
        f"chunks of {1000 * described['chunk_s']:g} ms, {late_ms:g} ms behind" if described["chunk"] else "utterances"
    )
    print(
        f"{path}: {path.stat().st_size / 2**20:.1f} MiB; {described['signal']} at {described['sample_rate_hz']} Hz in, "
        f"{chunking}; {len(loaded.alphabet)} labels in {tokens}"
    )
    if loaded.alphabet.pronunciations is not None:
        print("the labels are phones: what runs the file writes phones, and the search for words stays with ds2")

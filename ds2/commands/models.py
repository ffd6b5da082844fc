"""`ds2 models`: the models that come with ds2."""

from collections.abc import Sequence

from ds2.commands.common import Parser
from ds2.model import shipped


def make_parser() -> Parser:
    parser = Parser(
        prog="ds2 models",
        usage="%(prog)s [NAME]",
        description="the models that come with ds2: their names stand wherever a model does",
    )
    parser.add_argument("name", nargs="?", choices=shipped.names(), metavar="NAME", help="print this one's whole card")
    return parser


def run(arguments: Sequence[str]) -> None:
    """`ds2 models [NAME]`: print the cards of all models in short, or one in full."""
    name = make_parser().parse_args(arguments).name
    for listed in [name] if name else shipped.names():
        print(_text(listed, full=name is not None))


def _text(name: str, *, full: bool) -> str:
    card = shipped.read_card(name)
    lines = [
        f"{name}  {card.language}, {card.parameters / 1e6:.1f} M parameters, {shipped.size_bytes(name) / 1e6:.1f} MB "
        "with its language model",
        f"  {shipped.FOLDER / name}",
        f"  {'wrong, %':40s}  phones, greedy  words, language model",
        *(f"    {s.speech:38s}  {s.phones:14.1f}  {s.words:21.1f}" for s in card.scores),
    ]
    if full:
        lines += [f"  made from ({card.licence})"]
        lines += [f"    {s.name}: {s.amount}; {s.licence}; {s.address}" for s in card.sources]
        lines += [f"  by commit {card.commit}", *(f"    {command}" for command in card.made_by)]
        lines += [f"  {note}" for note in card.notes]
    return "\n".join(lines)

"""From command-line overrides to a checked Config by Hydra, with errors that suggest the nearest key."""

import functools
import logging
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn, get_origin

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, InterpolationResolutionError, OmegaConfBaseException

from ds2.config import convert
from ds2.config.check import check
from ds2.config.convert import FREE_FORM, read_yaml, text_keys
from ds2.config.schema import Config, ConfigError, DecodeConfig
from ds2.model.shipped import folder_of
from ds2.recognition.settings import decode_settings
from ds2.system.plain import did_you_mean
from ds2.text.pieces import read_pieces
from ds2.text.pronunciations import read_pronunciations

log = logging.getLogger(__name__)
PRIMARY_CONFIG = "train"
_RENAMED = {"recipe/librispeech_5h_phone": "recipe=librispeech_5h_sherpa"}  # goes with the next version
_QUOTED = r"'[^']*'|\"[^\"]*\"|"
_WORDS = re.compile(_QUOTED + r"[^\s,\[\]{}](?:[^,\[\]{}]*[^\s,\[\]{}])?")
_WORDS_OF_MAPPING = re.compile(_QUOTED + r"[^\s,:\[\]{}](?:[^,:\[\]{}]*[^\s,:\[\]{}])?")
_NUMBER_OR_BOOL = re.compile(r"[+-]?[\d.][\w.+-]*|true|false|[+-]?(?:nan|inf)", re.IGNORECASE)
_MARKS = re.compile(r"[~#!&;<>^`]")  # that Hydra allows in quotes only
_DEEPEST = 50  # brackets within each other: no setting has more than 3, and of 300 Hydra's parser recurses too deeply
_parsed = functools.lru_cache(OverridesParser.create().parse_override)  # each override is asked for several times
_HOME = re.compile(r"(?:^|(?<=[\[,\s]))~(?=/)")


class ConfigFolder(ConfigSource):
    """A folder of --config-dir: Hydra's `file://`, but a recipe needs no `# @package _global_` at its top.

    Files that are no YAML, or hold no mapping, are ConfigErrors.
    """

    @staticmethod
    def scheme() -> str:
        return "ds2"

    def load_config(self, config_path: str) -> ConfigResult:
        file = self._file(config_path)
        try:
            text = file.read_text(encoding="utf-8")
            values = read_yaml(text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: no UTF-8
            raise ConfigError(f"{file} is no YAML: {' '.join(str(error).split())}") from error
        if not isinstance(values, dict | None):
            raise ConfigError(f"{file} holds a {type(values).__name__}: expected lines `KEY: VALUE`")
        header = self._get_header_dict(text)
        if file.parent.name == "recipe" and header["package"] is None:
            header["package"] = "_global_"
        package = header["package"] or file.parent.name
        section, kind = ("", Config) if package == "_global_" else (package, convert.kind_within(Config, package))
        _refuse_containers(values or {}, kind, section, f"{file}: ")
        config = OmegaConf.create(values or {})
        return ConfigResult(provider=self.provider, path=self.full_path(), config=config, header=header)

    def is_group(self, config_path: str) -> bool:
        return Path(self.path, config_path).is_dir()

    def is_config(self, config_path: str) -> bool:
        return self._file(config_path).is_file()

    def available(self) -> bool:
        return self.is_group("")

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        names: list[str] = []
        for path in Path(self.path, config_path).iterdir():
            self._list_add_result(names, f"{config_path}/{path.name}", path.name, results_filter)
        return sorted(set(names))

    def _file(self, config_path: str) -> Path:
        return Path(self.path, self._normalize_file_name(config_path))


def _refuse_containers(value: Any, kind: Any, key: str, where: str = "") -> None:
    """Raise ConfigError for a list in the place of a mapping, or the reverse, of which Hydra names no key or value."""
    taken = list if get_origin(kind) is list else dict if is_dataclass(kind) or get_origin(kind) is dict else object
    if isinstance(value, list | dict) and (not isinstance(value, taken) or (taken is dict and None in value)):
        raise ConfigError(f"{where}{key}: {convert.expected(key, value)}")
    if isinstance(value, dict):
        for name, entry in value.items():
            _refuse_containers(entry, convert.kind_within(kind, name), f"{key}.{name}".lstrip("."), where)


def config_dir() -> Path:
    """Return the Hydra tree: `conf` in a checkout, `ds2/conf` in an installed wheel."""
    package = Path(__file__).resolve().parent.parent
    for candidate in (package / "conf", package.parent / "conf"):
        if (candidate / f"{PRIMARY_CONFIG}.yaml").is_file():
            return candidate
    places = f"{package / 'conf'} and {package.parent / 'conf'}"
    raise FileNotFoundError(f"no Hydra tree: looked for {PRIMARY_CONFIG}.yaml in {places}")


def choices(group: str, folders: Sequence[Path] | None = None) -> list[str]:
    """Return the names that a group has in folders of configs; None: in that of ds2."""
    trees = [config_dir()] if folders is None else folders
    return sorted({file.stem for tree in trees for file in (tree / group).glob("*.yaml")})


def with_search_path(arguments: Sequence[str]) -> list[str]:
    """Replace `--config-dir DIR` by the override `hydra.searchpath`."""
    remaining, folders = split_config_dirs(arguments)
    if folders:
        quoted = [str(folder.resolve()).replace("'", "\\'") for folder in folders]
        remaining.append("hydra.searchpath=[" + ",".join(f"'ds2://{path}'" for path in quoted) + "]")
    return remaining


def split_config_dirs(arguments: Sequence[str]) -> tuple[list[str], list[Path]]:
    """Return the other arguments, and the folders of `--config-dir`.

    Raises:
        ConfigError: a folder that does not exist, or with a file that ds2 has too.
    """
    remaining, folders = [], []
    pending = iter(arguments)
    for argument in pending:
        if argument in ("--config-dir", "-cd"):
            folders.append(next(pending, ""))
        elif argument.startswith("--config-dir="):
            folders.append(argument.split("=", 1)[1])
        else:
            remaining.append(argument)
    for folder in folders:
        if not Path(folder).is_dir():
            raise ConfigError(f"--config-dir {folder!r} is not a folder: give the one that holds your recipe/NAME.yaml")
        _refuse_taken_names(Path(folder))
    return remaining, [Path(folder) for folder in folders]


def _refuse_taken_names(folder: Path) -> None:
    """Raise ConfigError for a file that Hydra would not read, as ds2 has another one of that group and name."""
    for file in sorted(folder.glob("*/*.yaml")):
        name = file.relative_to(folder)
        ours = config_dir() / name
        if ours.is_file() and ours.read_bytes() != file.read_bytes():
            raise ConfigError(f"{file}: ds2 has a {name} too, which would be read instead: rename yours")


def compose_config(overrides: Sequence[str] = ()) -> Config:
    """Compose, convert and check the configuration of Hydra's overrides, such as `["recipe=an4", "model.depth=8"]`.

    Raises:
        ConfigError: an unknown key or group choice (the message suggests one), a wrong type, or values that
            contradict each other.
    """
    return compose_settings(overrides)[0]


def compose_settings(overrides: Sequence[str]) -> tuple[Config, str, str]:
    """As `compose_config`, but return what `read_config` returns."""
    composed = _compose(overrides)
    warn_of_repeated(overrides)
    return read_config(composed, overrides)


def warn_of_repeated(overrides: Sequence[str]) -> None:
    """Warn of settings that are set twice to different values: the last one counts."""
    last: dict[str, str] = {}
    for override in map(parse_override, overrides):
        key, line = override.get_key_element(), str(override.input_line)
        if last.setdefault(key, line) != line:
            log.warning("%s has no effect: %s comes after it", last[key], line)
        last[key] = line


def check_sweep(overrides: Sequence[str]) -> None:
    """Compose every value of a sweep (`a=1,2`), beside the first ones of others, before the first run starts.

    Raises:
        ConfigError: as `compose_config`, but for values that contradict each other: other runs of the sweep may work.
    """
    first = first_of_sweep(overrides)
    for index, override in enumerate(map(parse_override, overrides)):
        if override.is_sweep_override():
            for value in _sweep_values(override):
                point = [*first[:index], f"{override.get_key_element()}={value}", *first[index + 1 :]]
                _to_config(_compose(point), point)


def _compose(overrides: Sequence[str]) -> DictConfig:
    for override in map(parse_override, overrides):
        if override.is_sweep_override():
            key = override.get_key_element()
            raise ConfigError(
                f"{override.input_line} has several values: `ds2 train --multirun` trains a run for each; a list is "
                f"{key}=[A,B], and one text with a comma in it is quoted twice: \"{key}='A,B'\""
            )
        _check_choice(override)
    register_schema()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=str(config_dir()), version_base="1.3"):
            return compose(config_name=PRIMARY_CONFIG, overrides=hydra_overrides(overrides))
    except MissingConfigException as error:
        _raise_missing(error)
    except RecursionError as error:
        raise ConfigError(
            "a configuration has itself among its defaults; a recipe extends another one by its name alone: `- an4`, "
            "not `- /recipe: an4`"
        ) from error
    except (HydraException, OmegaConfBaseException, ValueError, OverflowError) as error:  # numbers of many digits
        _raise_explained(error, overrides)


def _to_config(composed: DictConfig, overrides: Sequence[str]) -> Config:
    try:
        # References see values with the types of their settings: ${optim.learning_rate} is 1.0 where 1 was written.
        typed = OmegaConf.create(convert.with_types(OmegaConf.to_container(composed)))
        return convert.to_config(OmegaConf.to_container(typed, resolve=True, throw_on_missing=True))
    except OmegaConfBaseException as error:
        _raise_explained(error, overrides)


def _raise_explained(error: Exception, overrides: Sequence[str]) -> NoReturn:
    """Raise ConfigError with what an error of Hydra, or that of OmegaConf behind it, means for the user."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        raise ConfigError(str(error).splitlines()[0]) from error
    key = str(cause.full_key or cause.key or "")
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        # Of an unknown section the error names that alone; the override has the whole key.
        names = [override.lstrip("+~").split("=")[0] for override in overrides]
        name = next((name for name in names if name.split(".")[0] == key), key)
        if name in convert.declared_settings():
            raise ConfigError(f"{name}: the recipe has a value in the place of its section: write KEY: VALUE below")
        convert.raise_unknown(name)
    if isinstance(cause, IndexError):
        name, count = key.rpartition("[")[0], len(cause.parent_node)
        raise ConfigError(f"{key}: the list has {count} entries, counted from 0; set it as a whole: {name}=[A,B]")
    detail = (cause.msg or str(cause)).splitlines()[0]
    explained = isinstance(cause, InterpolationResolutionError) or key not in convert.declared_settings()
    raise ConfigError(f"{key}: {detail if explained else convert.expected(key, cause.value)}") from error


def _check_choice(override: Override) -> None:
    """Raise ConfigError for an override that Hydra refuses without an explanation, or takes for something else."""
    group, choice, line = override.key_or_group, override.value(), str(override.input_line)
    settings, ours, parts = convert.declared_settings(), choices(group), group.split(".")
    if override.is_delete():
        setting = next((key for key in (".".join(parts[:2]), parts[0]) if key in settings), "")
        if ours:
            raise ConfigError(f"{line}: a choice cannot be taken away; choose one of {', '.join(ours)}")
        if setting and setting not in FREE_FORM:
            inner = ".KEY" * is_dataclass(settings[setting][1])
            raise ConfigError(f"{line}: a setting cannot be taken away; set it: {setting}{inner}=VALUE")
        return
    if group == "hydra.run.dir":
        raise ConfigError(f"{line} has no effect: name the folder of the run by run_dir=FOLDER")
    if group in FREE_FORM and not re.search(r"[\"'\\]", line):  # Hydra takes the last value of a key
        keys = re.findall(r"[{,]\s*([^\s{}\[\],:]+)\s*:", line)
        if twice := next((key for key in keys if keys.count(key) > 1), ""):
            raise ConfigError(f"{line}: {twice} is there twice; write each key once")
    added = override.is_add() or (bool(ours) and (override.is_force_add() or override.package is not None))
    if added and (ours or group in settings):
        raise ConfigError(f"{line}: ds2 has {group} in its place: write {group}=VALUE, without + and @")
    key, kind = parts[0], convert.kind_within(Config, parts[0])
    for depth, part in enumerate(parts[1:], 1):
        in_list = get_origin(kind) is list
        if in_list and not part.isdecimal():
            raise ConfigError(f"{key}: {convert.expected(key, {'.'.join(parts[depth:]): choice})}")
        key, kind = f"{key}[{part}]" if in_list else f"{key}.{part}", convert.kind_within(kind, part)
    names = choice if isinstance(choice, list) else [choice]
    if not ours or (is_dataclass(kind) and isinstance(choice, dict)):
        _refuse_containers(choice, kind, key)
    elif not names or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"{line}: choose one of {', '.join(ours)}, or leave {group}= out")


def read_config(composed: DictConfig, overrides: Sequence[str], run_dir: Path | None = None) -> tuple[Config, str, str]:
    """Convert a composed tree to a checked Config, and read the files it names: pieces, phones, the initial model.

    Args:
        overrides: of the command line; `checkpoint.init_from` does not change what they set.
        run_dir: replaces the config's own.

    Returns:
        The config; its settings that came from `checkpoint.init_from`, and those that differ from it, for the log.

    Raises:
        ConfigError: an unknown key, a wrong type, or values that do not work together.
        AlphabetError: `alphabet.pieces_file` cannot be read.
        UserError: `train.intermediate_lexicon` cannot be read.
        CheckpointError: `checkpoint.init_from` is no model.
    """
    config = _to_config(composed, overrides)
    check(config)
    settings = {override.key_or_group: override.value() for override in map(parse_override, overrides)}
    for section, name in (key.split(".") for key in FREE_FORM if settings.get(key) == {}):
        mapping = getattr(getattr(config, section), name)  # Hydra adds to that of the recipe, {} takes it away
        mine = {entry: value for entry, value in mapping.items() if f"{section}.{name}.{entry}" in settings}
        setattr(getattr(config, section), name, mine)
    if run_dir is not None:
        config.run_dir = str(run_dir)
    if not config.run_dir:
        raise ConfigError("run_dir is empty: name the folder of the run, such as run_dir=runs/mine")
    config.alphabet.lexicon = pronunciation_file(config.alphabet.lexicon)
    config.train.intermediate_lexicon = pronunciation_file(config.train.intermediate_lexicon)
    if config.alphabet.pieces_file and not config.alphabet.pieces:
        config.alphabet.pieces = read_pieces(Path(config.alphabet.pieces_file))
    replaced = differing = ""
    if config.checkpoint.init_from:
        replaced, differing = convert.inherit(config, _initial_config(config), overridden_keys(overrides))
        check(config)
    lexicon = config.train.intermediate_lexicon
    phones = list(read_pronunciations(Path(lexicon)).phones) if lexicon and config.model.intermediate else []
    if config.model.intermediate_phones not in ([], phones):
        raise ConfigError(
            "model.intermediate_phones follows from train.intermediate_lexicon: leave it out, and name the file"
        )
    config.model.intermediate_phones = phones
    return config, replaced, differing


def pronunciation_file(path: str) -> str:
    """Return the file of pronunciations: the path, or the model file of a run folder or of a name of `ds2 models`."""
    if not path or not folder_of(Path(path)).is_dir():
        return path
    from ds2.model.checkpoint import find_model  # imported late: most commands compose without torch

    return str(find_model(Path(path)))


def _initial_config(config: Config) -> Config:
    """Return the settings of the initial model, or of the run itself if it resumes."""
    from ds2.model.checkpoint import find_model  # imported late: most commands compose without torch
    from ds2.system.tensor_file import CheckpointError, read_metadata

    state = Path(config.run_dir) / "trainer.safetensors"
    resumed = config.checkpoint.resume and state.is_file()
    file = state if resumed else find_model(Path(config.checkpoint.init_from))
    metadata = read_metadata(file)
    if "config" not in metadata or (not resumed and metadata.get("kind") != "model"):
        raise CheckpointError(
            f"checkpoint.init_from={config.checkpoint.init_from}: {file} is a {metadata.get('kind')}, not a model: "
            "give a run folder, or its best.safetensors or last.safetensors"
        )
    try:
        source = convert.config_from_dict(metadata["config"])
    except ConfigError as error:
        raise CheckpointError(f"{file}: {error}") from error
    if source.alphabet.lexicon and not resumed:
        source.alphabet.lexicon = str(file)  # which has the pronunciations: the file of its training may be gone
    elif source.alphabet.lexicon and not Path(source.alphabet.lexicon).is_file():
        for model in (config.run_dir, config.checkpoint.init_from):  # the run's own has them too, once there is one
            with suppress(CheckpointError):
                source.alphabet.lexicon = str(find_model(Path(model)))
                break
    return source


def hydra_overrides(overrides: Sequence[str]) -> list[str]:
    """Return overrides in Hydra's grammar, with `++` for keys that the tree may lack.

    These are mappings whose keys the user chooses, and entries of model.convs, whose presets leave out defaults.
    """
    new = ("model.convs.", *(f"{mapping}{end}" for mapping in FREE_FORM for end in ".="))
    overrides = [_quote_words(override) for override in overrides]
    return [f"++{override}" if override.startswith(new) else override for override in overrides]


def overridden_keys(overrides: Sequence[str]) -> set[str]:
    """Return the keys and groups that overrides set."""
    return {parse_override(override).key_or_group.replace("/", ".") for override in overrides}


def first_of_sweep(overrides: Sequence[str]) -> list[str]:
    """Replace every sweep (`a=1,2`) by its first value, to check a multirun; raises as `parse_override`."""
    return [
        f"{override.get_key_element()}={_sweep_values(override)[0]}"
        if override.is_sweep_override()
        else str(override.input_line)
        for override in map(parse_override, overrides)
    ]


def _sweep_values(override: Override) -> list[str]:
    with suppress(HydraException, ValueError):  # of intervals and patterns; of range(1,2,0)
        if values := list(override.sweep_string_iterator()):
            return values
    raise ConfigError(f"{override.input_line} lists no values: write KEY=A,B or KEY=range(1,4), which is 1, 2 and 3")


def parse_override(override: str) -> Override:
    """Parse one override; raise ConfigError if it is not in Hydra's grammar, or no text."""
    if not override.isascii() and override != override.encode(errors="replace").decode():
        raise ConfigError(f"{override!r} is not UTF-8, as settings must be: rename the file, or set LC_ALL=C.UTF-8")
    if "=" not in override and override.endswith(".jsonl"):
        raise ConfigError(f"{override!r} is no setting: name manifests by data.train=[{override}] or data.dev=[...]")
    depth = max(accumulate((mark in "[{(") - (mark in "]})") for mark in override), default=0)
    if depth > _DEEPEST:
        key = override.partition("=")[0]
        raise ConfigError(f"{key[:_DEEPEST]}: {depth} brackets within each other, allowed are 3, as of model.convs")
    try:
        parsed = _parsed(_quote_words(override))
        if not parsed.key_or_group:
            raise ValueError("no key")
        return parsed
    except (HydraException, ValueError) as error:
        reason = " ".join(str(error).splitlines()[0].split())
        raise ConfigError(
            f"{override!r} is no override ({reason}): write key=value, and quote a value with blanks or brackets in it "
            "twice, once for the shell: \"alphabet.symbols='abc '\". Keys in braces are ASCII; others need a file: "
            "`replace: {é: e}` in MY_CONF/alphabet/mine.yaml, --config-dir MY_CONF alphabet=mine"
        ) from error


def _quote_words(override: str) -> str:
    """Quote the words of a value that Hydra's grammar does not allow, or would not take as they are.

    It allows no non-ASCII letters, marks such as # and &, and no second =, as in the folders of a sweep; and reads
    run_dir=2024_01 as 202401.
    """
    override = _expand_home(override)
    key, _, value = override.partition("=")
    if not value or "\\" in value or "${" in value:
        return override
    is_text = key in text_keys()
    words = _WORDS_OF_MAPPING if "{" in value else _WORDS

    def quote(word: re.Match[str]) -> str:
        if "'" in word[0] or '"' in word[0]:
            return word[0]
        is_name = value[word.end() :].lstrip().startswith(":")  # of an entry of a mapping
        plain = (
            word[0].isascii()
            and not _MARKS.search(word[0])
            and not (is_text and not is_name and ("=" in word[0] or _NUMBER_OR_BOOL.fullmatch(word[0])))
        )
        return word[0] if plain else f"'{word[0]}'"

    return f"{key}={words.sub(quote, value)}"


def _expand_home(override: str) -> str:
    """Put the home folder in the place of `~/` at the start of a text, as shells do elsewhere but not in KEY=~/PATH."""
    key, _, value = override.partition("=")
    if key not in text_keys() or "~/" not in value:
        return override
    home = os.path.expanduser("~")
    return f"{key}={_HOME.sub(lambda _: home, value)}"


def _raise_missing(error: MissingConfigException) -> NoReturn:
    wanted = error.missing_cfg_file or ""
    if new := _RENAMED.get(wanted):
        raise ConfigError(f"{wanted.replace('/', '=')} is called {new} now; an earlier run goes on with run_dir=FOLDER")
    options = list(error.options or choices(wanted.rpartition("/")[0]))
    hint = did_you_mean(wanted.rsplit("/", 1)[-1], options, cutoff=0.4)
    prefix = f"{hint} There are" if hint else "; there are"
    listing = f"{prefix} {', '.join(options)}" if options else ""
    raise ConfigError(f"there is no config {wanted!r}{listing}") from error


@functools.cache  # reading the schema takes a seventh of a composition
def register_schema() -> None:
    """Register the schema with Hydra as `schema`, the first default of the primary config, and folders of recipes."""
    Plugins.instance().register(ConfigFolder)
    ConfigStore.instance().store(name="schema", node=asdict(Config()))


def split_overrides(arguments: Sequence[str], section: str) -> tuple[list[str], list[str]]:
    """Return the arguments `SECTION=NAME` and `SECTION.KEY=VALUE`, and the others.

    Raises:
        ConfigError: a setting of another section, such as `model.hidden=512` of a trained model, which has it already.
    """
    is_own = re.compile(rf"{section}(?:\.[\w.]*)?=|hydra\.searchpath=").match  # as `with_search_path` adds
    overrides = [a for a in arguments if is_own(a)]
    others, sections = [a for a in arguments if a not in overrides], vars(Config())
    for other in others:
        name, _, rest = other.partition(".")
        if name in sections and re.match(r"[\w.]+=", rest) and not Path(other).exists():
            raise ConfigError(f"{other}: the only settings that can be given here are those of {section}")
    return [_expand_home(a) for a in overrides], others


def refuse_search_settings(overrides: Sequence[str]) -> None:
    """Refuse decoder settings beside --phrases, whose search is another one: they would have no effect.

    Raises:
        ConfigError: a setting other than `decode.times`, which captions ask for.
    """
    unused = [override for override in overrides if not override.startswith("decode.times=")]
    if unused:
        raise ConfigError(f"--phrases has a search of its own, without {', '.join(unused)}: leave out one of the two")


def resolve_options(overrides: Sequence[str], model_file: Path, config: Config, *, tuned: bool = True) -> DecodeConfig:
    """Return the decoder settings of a command line.

    The first that exists is the base: conf/decode/NAME.yaml of `decode=NAME`, the file that `ds2 lm tune` wrote beside
    the model (unless `tuned` is False), the model's own config. `decode.KEY=VALUE` changes single values.

    Raises:
        ConfigError: an unknown name, key, type or value, or a tuned file that does not fit.
    """
    quoted = [_quote_path(override) for override in overrides]
    if any(override.startswith("decode=") for override in overrides):
        return compose_config(quoted).decode
    options = decode_settings(model_file, config, overrides, tuned=tuned)
    warn_of_repeated(quoted)
    return options


def _quote_path(override: str) -> str:
    """Quote the path of a language model for Hydra, in whose grammar brackets and commas mean lists."""
    key, _, value = override.partition("=")
    if key not in ("decode.lm", "decode.rescore") or value[:1] in ("'", '"') or "${" in value:
        return override
    escaped = value.replace("\\", "\\\\").replace("'", "\\'") if "'" in value else value
    return f"{key}='{escaped}'"

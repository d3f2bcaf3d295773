"""What Hydra and OmegaConf object to, in one line a newcomer can act on, and what they let pass or trip over."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from shardwise.config import Config, nearest, needed, unknown_key, wrong_choice
from shardwise.errors import ConfigError
from shardwise.groups import WORDS

KEY = r"[A-Za-z_][\w/@.:-]*"


def check_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Hydra's flags, and the overrides; Hydra itself understands only flags that come first.

    Raises:
        ConfigError: a flag that there is not, or that is not supported here.
    """
    parser = get_args_parser()

    def refuse(message: str) -> Any:
        raise ConfigError(f"{message}; type --help for what there is")

    parser.error = refuse  # type: ignore[method-assign]  # argparse would print its usage and exit
    flags = parser.parse_intermixed_args(list(argv))
    if flags.experimental_rerun is not None:
        raise ConfigError("--experimental-rerun reads a pickle, which may run anything: type rerun=<run folder>")
    commands = {"--run": flags.run, "--multirun": flags.multirun, "--cfg": flags.cfg, "--info": flags.info}
    typed = [name for name, value in commands.items() if value]
    if len(typed) > 1:
        raise ConfigError(f"{' '.join(typed)}: only one of them can be typed")
    if flags.resolve and not flags.cfg:
        raise ConfigError("--resolve goes with --cfg: type --cfg job --resolve")
    if flags.hydra_help and flags.overrides:
        raise ConfigError("--hydra-help is typed alone")
    before = list(argv)
    for override in flags.overrides:
        before.remove(override)
    return before, flags.overrides


SEVERAL = ("callbacks",)
"""Groups of which several choices go together."""


def check_overrides(overrides: Sequence[str], groups: Mapping[str, Sequence[str]]) -> None:
    """Whether each override can be read, and names a file where it is about a group.

    Args:
        overrides: as typed.
        groups: group -> names of its choices.

    Raises:
        ConfigError: the first that cannot, with the form that can.
    """
    parser = OverridesParser.create()
    for text in overrides:
        try:
            parsed = parser.parse_override(text)
        except HydraException as error:
            raise ConfigError(_unreadable(text, groups, str(error))) from None
        group = parsed.key_or_group
        if not group:
            raise ConfigError(_unreadable(text, groups, ""))
        if group in groups and not parsed.is_delete() and not parsed.is_sweep_override():
            _check_choice(text, parsed, group, groups[group])


def _check_choice(text: str, parsed: Override, group: str, names: Sequence[str]) -> None:
    value = parsed.value()
    if isinstance(value, list) and all(isinstance(v, str) for v in value) and group not in SEVERAL:
        shown = f"{group}={'|'.join(names)}"
        raise ConfigError(f"{text}: {group} takes one choice ({shown}); a list is for callbacks=[a,b]")
    if isinstance(value, (str, Mapping)) or (isinstance(value, list) and all(isinstance(v, str) for v in value)):
        return
    shown = f"{group}={'|'.join(names)}" if names else f"{group}=<name>"
    raise ConfigError(
        f"{text}: {group} takes the name of one of its files{nearest(str(value), names)} ({shown}); "
        f"~{group} leaves the group out, {group}.<key>=... sets one of its keys"
    )


def _unreadable(text: str, groups: Mapping[str, Sequence[str]], error: str) -> str:
    key, equals, value = text.partition("=")
    if match := re.search(r"\w+ while evaluating '(.*)': (.*)", error):
        return f"{text}: {match[1]}: {match[2].strip()}; as in {key}=choice(1,2), range(1,9) or interval(0.1,0.9)"
    if not equals or not key.lstrip("+~"):
        owners = [group for group, names in groups.items() if text in names]
        hint = f"did you mean {owners[0]}={text}?" if owners else "--help lists what can be typed"
        return f"{text}: not of the form key=value; {hint}"
    if not re.fullmatch(rf"[+~]{{0,2}}{KEY}", key, flags=re.ASCII):
        return f"{text}: {key!r} is no key: a key is made of letters, digits, _ and dots, as in trainer.max_steps=100"
    if value.count("'") % 2 or value.count('"') % 2:
        return f"{text}: a quotation mark is open: '{key}=\"...\"' with both kinds reaches the program whole"
    quoted = value.replace('"', '\\"')
    return f"{text}: the value has characters that need quotation marks, two kinds of them: '{key}=\"{quoted}\"'"


def explain(error: BaseException, groups: Mapping[str, Sequence[str]]) -> str:
    """One line for what Hydra or OmegaConf objects to: the key or value, what is allowed, the nearest valid name."""
    chain = _chain(error)
    for link in chain:
        if isinstance(link, ConfigError):
            return str(link)
    text = "\n".join(str(link) for link in chain)
    if match := re.search(r"Could not find '([^']*)'\s+Available options in '([^']+)':\s((?:\s+\S+\n?)+)", text):
        options = re.findall(r"^\t(\S+)$", match[0], flags=re.MULTILINE)
        return str(wrong_choice(match[2], match[1].removeprefix(f"{match[2]}/"), options))
    if match := re.search(r"Could not find '([^'/]+)/([^']+)'", text):
        return f"{match[1]}={match[2]}: there is no file {match[1]}/{match[2]}.yaml on the search path"
    if match := re.search(r"Could not override '([^']+)'\. No match in the defaults list", text):
        return f"{match[1]}: no such group{nearest(match[1], [*groups, *WORDS])} (groups: {', '.join(groups)})"
    if match := re.search(r"Could not append to config\. An item is already at '([^']+)'", text):
        return f"+{match[1]}: the key exists already: leave the + out"
    if match := re.search(r"Could not delete from config\. (?:The value of )?'([^']+)' (?:does not exist|is)", text):
        return _not_removed(match[1] or match[2])
    if match := re.search(r"Ambiguous value for argument '([^']*)'", text):
        key, _, value = match[1].partition("=")
        if key in groups and key not in SEVERAL:
            return f"{match[1]}: several values are a sweep (-m {match[1]}), and {key} takes one choice"
        return f"{match[1]}: several values are a sweep (-m {match[1]}), and a list is {key}=[{value}]"
    if match := re.search(r"Sweep parameters? '(.*)' requires --multirun", text):
        return f"{match[1]}: several values are a sweep, which -m starts: type -m '{match[1]}'"
    for link in chain:
        if isinstance(link, OmegaConfBaseException) and link.full_key:
            return _explain_key(str(link.full_key), str(link).splitlines()[0], groups)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    shown = " ".join(line for line in lines if not line.startswith(("full_key", "object_type", "reference_type")))
    return re.sub(r"\s+", " ", shown)


def _explain_key(full_key: str, message: str, groups: Mapping[str, Sequence[str]]) -> str:
    """Which key under the schema is wrong, or which value."""
    parts = full_key.split(".")
    if parts[0] == "hydra":
        return f"{full_key}: Hydra has no such setting, or it takes no such value (--cfg hydra lists them): {message}"
    kind: Any = Config
    for depth, part in enumerate(parts):
        known = {f.name: f for f in fields(kind)}
        if depth == 0 and part in groups and part not in known:
            return f"{part} is a group without keys of its own: type {part}={'|'.join(groups[part]) or '...'}"
        if part not in known:
            names = [*known, *groups, *WORDS] if depth == 0 else list(known)
            return str(unknown_key(".".join(parts[: depth + 1]), dict.fromkeys(names)))
        kind = known[part].type
        if not is_dataclass(kind):
            break
    refused = r"Cannot (merge|assign)|is not Optional|is incompatible with|Invalid value"
    if full_key.startswith("strategy.plan") and re.search(refused, message):
        example = "strategy.plan={fc1:colwise,fc2:rowwise}"
        return f"strategy.plan: a mapping of module-name pattern -> style is needed, such as {example}"
    if "does not support deletion" in message:
        return _not_removed(full_key)
    if match := re.match(r"Interpolation key '([^']+)' not found", message):
        return f"{full_key}: it refers to {match[1]}, and there is no such key"
    if match := re.match(r".* while resolving interpolation: (?:Missing mandatory value: (.*)|(.*))", message):
        if match[1]:
            return f"{match[1]} is missing, and {full_key} refers to it: give it a value, such as {match[1]}=..."
        return f"{full_key}: {match[2]}"
    refused = r"could not be converted|is not a subclass of|is incompatible with|is not a valid"
    if match := re.match(rf"Value '(.*?)' (?:of type '.*' )?(?:{refused})", message):
        return f"{full_key}={match[1]}: {needed(known[part])} is needed"
    if "Invalid value assigned" in message and not is_dataclass(kind):
        return f"{full_key}: {needed(known[part])} is needed"
    return f"{full_key}: {message}"


def _not_removed(key: str) -> str:
    return f"~{key}: it is not there, or a part of the schema; a value is changed with {key}=<value>"


def _chain(error: BaseException) -> list[BaseException]:
    """The exception and what it came from, outermost first."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    return chain


def explain_yaml(error: yaml.MarkedYAMLError) -> str:
    """One line for a file that is no YAML: where, and what the parser stumbled over."""
    mark = error.problem_mark or error.context_mark
    where = f"{mark.name}, line {mark.line + 1}" if mark is not None else "a configuration file"
    return f"{where} is no YAML: {error.problem or error}; each line is 'key: value', indented with spaces"

"""Shell completion: a script for bash or zsh, and the words that it offers.

The script asks `m2forge __complete WORD...` at each TAB: the words after `m2forge`, the last of them incomplete. The
answer is one candidate per line: commands, options, files, and for `--set` config keys from the schema with the values
of those that have few. Lists and mappings in the TOML files on the line give their indices and names.
"""

import argparse
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

Commands: TypeAlias = Mapping[str, Callable[[argparse.ArgumentParser], None]]
"""The commands by name, each with the function that adds its arguments to a parser."""

_BASH = r"""# Completion of m2forge for bash 4 or newer:  eval "$(m2forge completion bash)"
_m2forge() {
    local line=${COMP_LINE:0:COMP_POINT} words mark
    IFS=$' \t\n' read -r -a words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    local word=${words[-1]}
    mapfile -t COMPREPLY < <("${words[0]}" __complete "${words[@]:1}" 2>/dev/null)
    # Bash replaces only what follows the last = or : of the word.
    for mark in = :; do
        if [[ $COMP_WORDBREAKS == *$mark* && $word == *$mark* ]]; then
            COMPREPLY=("${COMPREPLY[@]#"${word%"$mark"*}$mark"}")
        fi
    done
    # What goes on after a table, a key or a folder gets no space.
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=./] ]] && compopt -o nospace 2>/dev/null
    return 0
}
complete -F _m2forge m2forge
"""

_ZSH = r"""#compdef m2forge
# Completion of m2forge for zsh:  eval "$(m2forge completion zsh)"
_m2forge() {
    local -a found
    found=(${(f)"$("${words[1]}" __complete "${(@)words[2,CURRENT]}" 2>/dev/null)"})
    # What goes on after a table, a key or a folder gets no space.
    compadd -S '' -- ${(M)found:#*[=./]}
    compadd -- ${found:#*[=./]}
}
compdef _m2forge m2forge
"""


def script(shell: str) -> str:
    """The completion script for bash or zsh."""
    return {"bash": _BASH, "zsh": _ZSH}[shell]


def complete(words: Sequence[str], commands: Commands) -> list[str]:
    """The candidates for the last of `words`, which are those after `m2forge`."""
    *before, word = words or [""]
    if not before:
        return _starting(word, (*commands, "--help", "--version"))
    if before[0] not in commands:
        return []
    actions = _recorded(commands[before[0]])
    options = {option: action for action in actions for option in action.option_strings}
    option = options.get(before[-1])
    if option is not None and option.nargs != 0:
        return _complete_value(option, before, word)
    if word.startswith("-"):
        return _starting(word, (*options, "--help"))
    positionals = [action for action in actions if not action.option_strings]
    return list(dict.fromkeys(found for action in positionals for found in _complete_value(action, before, word)))


class _Recorder(argparse.ArgumentParser):
    """Remembers the arguments that a command adds."""

    def __init__(self) -> None:
        self.recorded: list[argparse.Action] = []
        super().__init__(add_help=False)

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        action = super().add_argument(*args, **kwargs)
        self.recorded.append(action)
        return action


def _recorded(add_arguments: Callable[[argparse.ArgumentParser], None]) -> list[argparse.Action]:
    recorder = _Recorder()
    add_arguments(recorder)
    return recorder.recorded


def _complete_value(action: argparse.Action, before: Sequence[str], word: str) -> list[str]:
    """The values of one option or positional argument."""
    if action.metavar == "KEY=VALUE":
        return _complete_key(before[0], action.option_strings[0], before[1:], word)
    if action.choices is not None:
        return _starting(word, map(str, action.choices))
    if action.metavar == "CONFIG":
        return _files(word, ".toml")
    if action.dest == "model":
        from m2forge.model.preset import DESCRIPTIONS

        return _starting(word, DESCRIPTIONS if before[0] == "params" else ()) + _files(word)
    return _files(word) if action.type is Path else []


def _starting(word: str, names: Iterable[str]) -> list[str]:
    return sorted({name for name in names if name.startswith(word)})


def _files(word: str, suffix: str = "") -> list[str]:
    """Folders, and files that end in `suffix`, as the word spells their folder."""
    folder, _, name = word.rpartition("/")
    written = word[: len(word) - len(name)]
    try:
        with os.scandir(Path(folder or ("/" if written else ".")).expanduser()) as entries:
            found = [(entry.name, entry.is_dir()) for entry in entries]
    except (OSError, RuntimeError):
        return []
    shown = [(entry, is_dir) for entry, is_dir in found if not entry.startswith(".") or name.startswith(".")]
    names = [entry + "/" * is_dir for entry, is_dir in shown if is_dir or entry.endswith(suffix)]
    return [written + found for found in _starting(name, names)]


# -- keys of a config -------------------------------------------------------------------------------------------------


def _complete_key(command: str, option: str, before: Sequence[str], word: str) -> list[str]:
    from m2forge.command_config import config_kinds
    from m2forge.config_class import Config, annotations_at, is_model, members
    from m2forge.config_schema import NAME, choices, inner_models, is_plain

    kind: type[Config] | None = config_kinds(command).get(option)
    if kind is None:
        return []
    key, equals, text = word.partition("=")
    *parents, name = key.split(".")
    path = tuple(int(part) if part.isdecimal() else part for part in parents)
    if equals:
        key_path = (*path, int(name) if name.isdecimal() else name)
        values = [value for annotation in annotations_at(kind, key_path) for value in choices(annotation)]
        return [f"{key}={value}" for value in _starting(text, (value.strip('"') for value in values))]
    found: list[str] = []
    for annotation in annotations_at(kind, path):
        for member in members(annotation):
            if is_model(member):
                for field, info in member.model_fields.items():
                    found += [f"{field}="] if is_plain(info.annotation) else []
                    found += [f"{field}."] if inner_models(info.annotation) else []
            elif below := inner_models(member):
                found += [f"{part}." for part in _parts_in_files(before, path, is_mapping=below[0][0][0] == NAME)]
    return [".".join((*parents, part)) for part in _starting(name, found)]


def _parts_in_files(words: Iterable[str], path: Sequence[str | int], *, is_mapping: bool) -> list[str]:
    """The indices of the list, or the names of the mapping, at `path` of the TOML files among `words`. Without files
    the list has one item, and the mapping no names."""
    found = [_at(Path(word).expanduser(), path) for word in words if word.endswith(".toml")]
    if is_mapping:
        return [str(name) for table in found if isinstance(table, dict) for name in table]
    lengths = [len(items) for items in found if isinstance(items, list)]
    return [str(index) for index in range(lengths[-1] if lengths else 1)]


def _at(file: Path, path: Sequence[str | int]) -> object:
    try:
        level: object = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    for part in path:
        if isinstance(level, Mapping):
            level = level.get(part)
        elif isinstance(level, list) and isinstance(part, int) and part < len(level):
            level = level[part]
        else:
            return None
    return level

"""Presets of agents: the name of a public agent in, its keys for the table `[agent]` out.

    [agent]
    preset = "claude-code"
    max_concurrent = 8

A preset's keys stand below those of the user: tables merge, every other value replaces the preset's. The resolved
configuration of a run holds the merged keys, so that a later change of the preset does not reach it.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path

from m2forge.config import TomlValue
from m2forge.errors import ConfigError, suggest

FOLDER = Path(__file__).parent / "presets"
KEY = "preset"


def preset_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def with_preset(agent: Mapping[str, TomlValue]) -> dict[str, TomlValue]:
    """The keys of `agent` over those of the preset that it names, if any."""
    name = agent.get(KEY)
    if name is None:
        return dict(agent)
    if not isinstance(name, str) or name not in preset_names():
        hint = suggest(str(name), preset_names())
        raise ConfigError(f"agent.preset: there is no preset {name!r}; {hint}")
    return _merged(tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8")), agent)


def _merged(below: Mapping[str, TomlValue], above: Mapping[str, TomlValue]) -> dict[str, TomlValue]:
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        merged[key] = _merged(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return merged

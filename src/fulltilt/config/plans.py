"""Between a Config and a Plan: the lever values of one are the lever values of the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fulltilt.config.loading import config_from_values, flatten, nest
from fulltilt.config.model import Config
from fulltilt.errors import ConfigError, format_nearest
from fulltilt.levers import load_catalogue
from fulltilt.records import Plan


def plan_of(config: Config) -> Plan:
    """A value for every lever. ``precision`` may still be "auto": ``levers.precision.resolve`` knows the device."""
    return Plan({name: _read(config, lever.key) for name, lever in load_catalogue().items()})


def apply_plan(config: Config, plan: Mapping[str, Any]) -> Config:
    """The same configuration with the lever values of ``plan``; their provenance then says "plan".

    Raises:
        ConfigError: no such lever, or a value it cannot take.
    """
    catalogue = load_catalogue()
    for name in plan.keys() - catalogue.keys():
        raise ConfigError(f"no lever named {name!r}; {format_nearest(name, catalogue)}")
    changes = {catalogue[name].key: value for name, value in plan.items()}
    before = flatten(config.to_values())
    changed = config_from_values(nest({**before, **changes}), base_dir=config.base_dir)
    after = flatten(changed.to_values())
    changed._source = config.source
    changed._provenance = {
        key: said if before[key] == after[key] else "plan" for key, said in config.provenance.items()
    }
    return changed


def _read(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value

"""Turn a Config into a Plan and back: the lever values of one are those of the other."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from fulltilt.config.loading import config_from_values, flatten, nest
from fulltilt.config.model import Config
from fulltilt.errors import ConfigError, format_nearest
from fulltilt.levers import load_catalogue
from fulltilt.records import Plan


def plan_of(config: Config) -> Plan:
    """Return a value for every lever; ``precision`` may still be "auto", as ``levers.precision.resolve`` reads it."""
    return Plan({name: operator.attrgetter(lever.key)(config) for name, lever in load_catalogue().items()})


def apply_plan(config: Config, plan: Mapping[str, Any]) -> Config:
    """Return the configuration with the lever values of ``plan``, whose provenance then says "plan"."""
    catalogue = load_catalogue()
    for name in plan.keys() - catalogue.keys():
        raise ConfigError(f"no lever named {name!r}; {format_nearest(name, catalogue)}")
    changes = {catalogue[name].key: value for name, value in plan.items()}
    before = flatten(config.to_values())
    changed = config_from_values(nest({**before, **changes}), base_dir=config.base_dir)
    after = flatten(changed.to_values())
    changed._source = config.source
    places = config.provenance.items()
    changed._provenance = {key: place if before[key] == after[key] else "plan" for key, place in places}
    return changed

"""Extract the tunable settings (levers) of a Config as a Plan."""

import operator

from fulltilt.config.model import Config
from fulltilt.levers import load_catalogue, load_inference_catalogue
from fulltilt.records import Plan


def plan_of(config: Config) -> Plan:
    """Return a value for every lever; ``precision`` may still be "auto", as ``levers.precision.resolve`` reads it."""
    return Plan({name: operator.attrgetter(lever.key)(config) for name, lever in load_catalogue().items()})


def inference_plan_of(config: Config) -> Plan:
    """Return a value for every lever of inference; ``precision`` may still be "auto"."""
    return Plan({name: operator.attrgetter(lever.key)(config) for name, lever in load_inference_catalogue().items()})

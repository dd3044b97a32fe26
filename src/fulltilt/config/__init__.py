"""YAML to a validated, resolved configuration, with the provenance of every value. Torch-free.

The names load on first use: pydantic and ruamel.yaml cost 0.15 s that ``--help`` does not owe.
"""

from typing import TYPE_CHECKING

from fulltilt._lazy import load_on_use

# ruff: noqa: F401

if TYPE_CHECKING:
    from fulltilt.config.bad_samples import parse_on_bad_sample
    from fulltilt.config.binding import bind_call, build_component, check_component, import_object
    from fulltilt.config.calls import ComponentCall, parse_call, parse_pipeline
    from fulltilt.config.loading import config_for_object, config_from_values, load_config, load_points
    from fulltilt.config.model import Config, schema
    from fulltilt.config.plans import inference_plan_of, plan_of
    from fulltilt.config.quantities import Interval, Warmup, parse_bytes, parse_duration_s, parse_interval, parse_warmup
    from fulltilt.config.rewriting import check_writable, write_settings

__getattr__, __dir__ = load_on_use(__name__, __file__)

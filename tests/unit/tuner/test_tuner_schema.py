"""The schema of ``tune --json``: what turns with the user's own settings showed, and what is no such document."""

import copy
from typing import get_args

import jsonschema
import pytest
from tests.unit.report.report_documents import VERIFICATION, build_document, build_effect, compare

from fulltilt.records.trial import TurnsWay
from fulltilt.stats import Comparison
from fulltilt.tuner.answer.result import read_schema
from fulltilt.tuner.answer.savings import Savings
from fulltilt.tuner.search.proof import LeverEffect

FASTER, OPEN = compare(32, 24, 41), compare(3, -4, 11)
EFFECTS = [build_effect("num_workers", 0, 2, FASTER), build_effect("fused_optimizer", False, True, OPEN, is_kept=False)]
PROVEN = build_document(FASTER, levers=EFFECTS, verification=VERIFICATION)
KEPT = build_document(OPEN, search={"stalled_pct": None})


@pytest.mark.parametrize(
    "document",
    [PROVEN, KEPT, build_document(), build_document(compare(-12, -15, -9), is_rival=True)],
    ids=["proven", "undecided", "alone", "same plan"],
)
def test_every_outcome_follows_the_schema(document):
    jsonschema.validate(document, read_schema())


@pytest.mark.parametrize(
    ("record", "name"), [(Savings, "savings"), (LeverEffect, "lever_effect"), (Comparison, "comparison")]
)
def test_the_schema_names_every_field_of_the_new_records(record, name):
    fields = set(record.__dataclass_fields__)
    part = read_schema()["$defs"][name]
    assert set(part["properties"]) == set(part["required"]) == fields


def test_the_schema_names_every_way_of_taking_turns():
    (enum,) = (each["turns"]["enum"] for each in find_properties(read_schema()) if "turns" in each)
    assert enum == [*get_args(TurnsWay), None]


def find_properties(schema):
    """Find the properties of every object below."""
    for name, part in schema.items() if isinstance(schema, dict) else ():
        if name == "properties":
            yield part
        yield from find_properties(part)


@pytest.mark.parametrize(
    ("document", "damage"),
    [
        (PROVEN, lambda d: d["picks"]["recommended"].pop("proven")),
        (PROVEN, lambda d: d["picks"]["recommended"].update(gain=None)),
        (PROVEN, lambda d: d["picks"]["recommended"].update(gain=OPEN)),  # proven, and not faster
        (PROVEN, lambda d: d["picks"]["recommended"]["gain"].update(ci_pct=[None, None])),
        (PROVEN, lambda d: d["picks"].pop("unproven")),
        (KEPT, lambda d: d["picks"]["unproven"].update(proven=True)),
        (KEPT, lambda d: d["picks"]["unproven"]["gain"].update(verdict="no gain")),
        (PROVEN, lambda d: d.pop("levers")),
        (PROVEN, lambda d: d["levers"][0].pop("is_kept")),
        (PROVEN, lambda d: d["levers"][0].update(names=[])),
        (PROVEN, lambda d: d["savings"].update(verdict="no gain")),
        (PROVEN, lambda d: d["savings"].pop("before_samples_per_s")),
        (PROVEN, lambda d: d["search"].update(stalled_pct=101)),
        (PROVEN, lambda d: d["search"].pop("n_groups")),
        (PROVEN, lambda d: d["search"].pop("takes_turns")),
        (PROVEN, lambda d: d["repeats"][0].update(group=None)),
        (PROVEN, lambda d: d["repeats"][0].update(group=0)),
        (PROVEN, lambda d: d["trials"][0].update(kind="baseline")),
        (PROVEN, lambda d: d["trials"][0].update(n_steps=0)),
    ],
)
def test_a_document_that_breaks_what_was_promised_of_turns_is_refused(document, damage):
    broken = copy.deepcopy(document)
    damage(broken)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, read_schema())

"""Synthetic documents that follow the JSON contract of ``fulltilt tune``, and a page taken apart."""

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

from fulltilt.levers import default_plan


def build_row(trial_id, *, status="ok", samples_per_s=1000.0, reason=None, **plan):
    phases = {"data_wait": 1.0, "h2d": None, "forward": 3.0, "backward": 5.0, "optimizer": 0.5, "other": 0.5}
    measured = {
        "phases_ms": {**phases, "step": 10.0},
        "samples_per_s": samples_per_s,
        "samples_per_s_ci95": [samples_per_s * 0.98, samples_per_s * 1.02],
        "memory_rss_peak_gib": 0.5,
    }
    plan = dict(default_plan()) | {"batch_size": 32, "num_workers": 0, "precision": "fp32"} | plan
    return {
        "id": trial_id, "status": status, "reason": reason, "why": "part of the grid", "kind": "end_to_end",
        "group": None, "stalled_pct": None, "plan": plan, "n_devices": 1, "batch_size_per_device": plan["batch_size"],
        "effective_batch_size": plan["batch_size"] * plan["accumulate"], "gpu_utilization_pct": None,
        "memory_allocated_peak_gib": None, "memory_reserved_peak_gib": None, "n_steps": 40, "seconds": 2.0,
        "null_reasons": {}, "notes": [], **(measured if status == "ok" else dict.fromkeys(measured)),
    }  # fmt: skip


def compare(gain_pct, low_pct, high_pct, *, n_groups=6):
    """A comparison in turns, with the verdict that goes with its interval."""
    verdict = "undecided" if not -2 < low_pct < high_pct < 2 else "equal"
    verdict = "faster" if low_pct > 1 else "slower" if high_pct < -1 else verdict
    return {"verdict": verdict, "gain_pct": gain_pct, "ci_pct": [low_pct, high_pct], "n_groups": n_groups}


def build_pick(row, *, rule="fastest", proven=None, gain=None, tied_with=(), recipe=(), numerics=()):
    changes = {"recipe": list(recipe), "numerics": list(numerics)}
    return {**row, "rule": rule, "proven": proven, "gain": gain, "tied_with": list(tied_with), "changes": changes}


ROWS = [
    build_row("t1"),
    build_row("t2", batch_size=64, samples_per_s=1500.0),
    build_row("t3", batch_size=128, status="out_of_memory", reason="used 2.1 GiB, the limit is <2.0 GiB>"),
]
PICK = build_pick(ROWS[1], tied_with=["t1"], recipe=["effective batch 32 → 64"])
MACHINE = {"cpu_model": "Some CPU", "n_cores_usable": 2, "memory_total_bytes": 2**33, "devices": []}
DOCUMENT = {
    "version": 1,
    "machine": {**MACHINE, "packages": {"torch": "2.13.0"}},
    "workload": {"name": "digits & <co>"},
    "trials": ROWS,
    "picks": {"recommended": PICK, "throughput": PICK, "efficiency": None, "memory": None, "unproven": None},
    "search": {
        "strategy": "exhaustive", "grid_size": 3, "n_trials": 3, "n_end_to_end": 3, "n_out_of_memory": 1,
        "n_groups": 0, "stalled_pct": None, "takes_turns": True, "seconds": 12.0,
    },
    "learning_rate": {"rule": "sqrt", "from": 0.1, "to": 0.14142},
    "epoch_seconds": {"estimate": 1.2, "ci95": [1.1, 1.3]},
    "levers": [],
    "hints": [{"rule": "data-wait", "trial_id": "t2", "text": "data wait is 10 % of the step", "evidence": {}}],
    "null_reasons": {},
}  # fmt: skip

OWN = build_row("t1", samples_per_s=9_000.0)
RATES = (9_210.0, 9_100.0, 9_300.0, 9_210.0, 9_400.0, 9_050.0)  # of the user's own plan, group by group


def build_effect(name, before, after, gain, *, is_kept=True):
    return {"names": [name], "before": [before], "after": [after], "gain": gain, "is_kept": is_kept}


def build_turns(plan, rates, *, first_id):
    """Rows of a plan that took turns, one a group."""
    rows = [build_row(f"t{first_id + n}", samples_per_s=rate, **plan) for n, rate in enumerate(rates)]
    return [
        row
        | {
            "kind": "repeat",
            "group": n,
            "stalled_pct": 0.4,
            "n_steps": 0,
            "phases_ms": None,
            "samples_per_s_ci95": None,
        }
        for n, row in enumerate(rows, start=1)
    ]


def build_document(gain=None, *, plan=None, is_rival=False, numerics=(), recipe=(), savings=None, search=None, **more):
    """What a search found that held one other plan against the user's own.

    Args:
        gain: Of the other plan in turns; None: there is nothing to compare.
        is_rival: It took turns and fell behind, so that no other plan than the user's own came out ahead.
    """
    plan = {"num_workers": 2, "fused_optimizer": True} | (plan or {})
    row, own = build_row("t2", samples_per_s=13_000.0, **plan), build_pick(OWN, rule="the settings as they were")
    is_worse = (more.get("verification") or {}).get("verdict") == "learns worse"
    proven = gain is not None and gain["verdict"] == "faster" and not is_worse
    other = build_pick(row, proven=proven, gain=gain, numerics=numerics, recipe=recipe)
    recommended = other if proven else own
    repeats = build_turns({}, RATES, first_id=10)
    if gain is not None:
        repeats += build_turns(plan, [rate * (1 + gain["gain_pct"] / 100) for rate in RATES], first_id=20)
    figures = {"verdict": "same plan"} if gain is None or is_rival or is_worse else compute_savings(gain)
    missing = dict.fromkeys(SAVINGS) | {"baseline_id": "t1", "recommended_id": "t2", "search_s": 240.0, "n_groups": 0}
    return DOCUMENT | {
        "trials": [OWN, row],
        "repeats": repeats,
        "user_plan": OWN["plan"],
        "baseline": OWN,
        "picks": {
            "recommended": recommended, "throughput": {**other}, "efficiency": None, "memory": None,
            "unproven": None if proven or is_rival or gain is None else other,
        },
        "search": DOCUMENT["search"] | {"n_groups": 6, "stalled_pct": 0.4} | (search or {}),
        "learning_rate": {"rule": "none", "from": 0.1, "to": 0.1},
        "savings": missing | figures | (savings or {}),
        "hints": [],
    } | more  # fmt: skip


def compute_savings(gain, *, before_s=2_220.0):
    before, speedup = RATES[0], 1 + gain["gain_pct"] / 100
    low_pct, high_pct = (100 * (1 - 1 / (1 + pct / 100)) for pct in gain["ci_pct"])
    saved_s = before_s * (1 - 1 / speedup)
    figures = {
        "verdict": gain["verdict"], "n_groups": gain["n_groups"], "n_samples": 50_000, "n_epochs": 30,
        "before_samples_per_s": before, "after_samples_per_s": before * speedup,
        "before_s": before_s, "after_s": before_s - saved_s, "saved_s": saved_s,
        "saved_s_ci": [before_s * low_pct / 100, before_s * high_pct / 100],
        "gain_pct": 100 * (1 - 1 / speedup), "gain_ci_pct": [low_pct, high_pct],
    }  # fmt: skip
    if gain["verdict"] == "faster":
        low, high = gain["ci_pct"]
        figures |= {"payback_s": 240 / (speedup - 1), "payback_s_ci": [24_000 / high, 24_000 / low]}
    return figures


VOID = ("meta", "br", "line", "circle", "rect", "polyline")


class Page(HTMLParser):
    def __init__(self, html):
        super().__init__()
        self.open, self.cells, self.text = [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        if tag == "td":
            self.cells.append("")

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)
        if "td" in self.open:
            self.cells[-1] += data


def read_svg(html):
    return ET.fromstring(re.search(r"(<svg.*?</svg>)</div>", html, re.S).group(1))


SAVINGS = {
    "verdict": "faster", "baseline_id": "t1", "recommended_id": "t2", "search_s": 240.0, "n_groups": 6,
    "n_samples": 50_000, "n_epochs": 30, "before_samples_per_s": 1000.0, "after_samples_per_s": 1557.0,
    "before_s": 11_400.0, "after_s": 7_320.0, "saved_s": 4_080.0, "saved_s_ci": [3_600.0, 4_500.0], "gain_pct": 35.8,
    "gain_ci_pct": [31.6, 39.5], "payback_s": 431.0, "payback_s_ci": [370.0, 520.0],
}  # fmt: skip


def with_savings(**changes):
    """The document with a proven gain, and other figures in its savings."""
    pick = PICK | {"proven": True, "gain": compare(55.7, 46.2, 65.3), "tied_with": []}
    picks = DOCUMENT["picks"] | {"recommended": pick, "throughput": pick}
    return DOCUMENT | {"savings": SAVINGS | changes, "picks": picks, "user_plan": ROWS[0]["plan"], "baseline": ROWS[0]}


BUSY = {"cpu_pressure_pct": 83.0}

VERIFICATION = {
    "verdict": "learns as well", "metric": "accuracy", "is_rising": True, "margin_pct": 1.0, "n_pairs": 3,
    "text": "learns as well: accuracy on the validation set of 360 samples after 2 epochs 0.9412 → 0.9398, …",
    "quality_before": 0.9412, "quality_after": 0.9398, "quality_change_pct": -0.15,
    "quality_change_ci95_pct": [-0.42, 0.11], "time_before_s": 62.0, "time_after_s": 43.0, "time_saved_pct": 31.0,
    "time_saved_ci95_pct": [25.0, 36.0], "settings": {"data.num_workers": 2}, "null_reasons": {},
    "runs": [
        {"arm": arm, "seed": seed, "quality": 0.94, "training_s": 62.0, "samples_per_s": 9e3, "folder": "f",
         "curve": [[0.5, 0.9], [1.0, 0.94]]}
        for arm in ("as it was", "recommended") for seed in (1, 2, 3)
    ],
}  # fmt: skip

ADVICE = {
    "trial_id": "t2",
    "bound": {"text": "80 % of the step is forward and backward"},
    "roof": None,
    "ceilings": [{"text": "the loader alone reaches 9,000 samples/s (t9)"}],
    "levers": [
        {"lever": "compile", "state": "not in the space", "text": "compile yes: was not run"},
        {"lever": "placement", "state": "not reached", "text": "placement ram: was not run, though it is in the space"},
        {"lever": "channels_last", "state": "tried alone", "text": "channels_last yes (t3) was 4 % slower"},
    ],
}

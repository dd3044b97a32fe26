"""A synthetic document in the shape of the JSON contract, and a page taken apart."""

from html.parser import HTMLParser

from fulltilt.levers import default_plan


def build_row(trial_id, *, status="ok", samples_per_s=1000.0, reason=None, **plan):
    ok = status == "ok"
    phases = {"data_wait": 1.0, "h2d": None, "forward": 3.0, "backward": 5.0, "optimizer": 0.5, "other": 0.5}
    return {
        "id": trial_id,
        "plan": dict(default_plan()) | {"batch_size": 32, "num_workers": 0, "precision": "fp32"} | plan,
        "status": status,
        "reason": reason,
        "phases_ms": {**phases, "step": 10.0} if ok else None,
        "samples_per_s": samples_per_s if ok else None,
        "samples_per_s_ci95": [samples_per_s * 0.98, samples_per_s * 1.02] if ok else None,
        "gpu_utilization_pct": None,
        "memory_reserved_peak_gib": None,
        "memory_rss_peak_gib": 0.5 if ok else None,
    }


ROWS = [
    build_row("t1"),
    build_row("t2", batch_size=64, samples_per_s=1500.0),
    build_row("t3", batch_size=128, status="out_of_memory", reason="used 2.1 GiB, the limit is <2.0 GiB>"),
]
PICK = {**ROWS[1], "rule": "fastest", "tied_with": ["t1"], "changes": {"recipe": ["effective batch 32 → 64"]}}
DOCUMENT = {
    "machine": {"cpu_model": "Some CPU", "n_cores_usable": 2, "packages": {"torch": "2.13.0"}},
    "workload": {"name": "digits & <co>"},
    "trials": ROWS,
    "picks": {"recommended": PICK, "throughput": PICK, "efficiency": None},
    "search": {"strategy": "exhaustive", "grid_size": 3, "n_trials": 3, "n_out_of_memory": 1, "seconds": 12.0},
    "learning_rate": {"rule": "sqrt", "from": 0.1, "to": 0.14142},
    "epoch_seconds": {"estimate": 1.2, "ci95": [1.1, 1.3]},
    "hints": [{"rule": "data-wait", "text": "data wait is 10 % of the step"}],
}


class Page(HTMLParser):
    def __init__(self, html):
        super().__init__()
        self.open, self.cells, self.text = [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br", "line", "circle", "rect", "polyline"):
            self.open.append(tag)
        if tag == "td":
            self.cells.append("")

    def handle_endtag(self, tag):
        if tag not in ("line", "circle", "rect", "polyline"):
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)
        if "td" in self.open:
            self.cells[-1] += data


SAVINGS = {
    "verdict": "faster", "baseline_id": "t1", "recommended_id": "t2", "search_s": 240.0, "n_pairs": 3,
    "n_samples": 50_000, "n_epochs": 30, "before_s": 11_400.0, "after_s": 7_320.0, "saved_s": 4_080.0,
    "saved_s_ci95": [3_600.0, 4_500.0], "gain_pct": 35.8, "gain_ci95_pct": [31.6, 39.5], "payback_s": 431.0,
    "payback_s_ci95": [370.0, 520.0],
}  # fmt: skip


def with_savings(**changes):
    return DOCUMENT | {"savings": SAVINGS | changes}


BUSY = {"cpu_pressure_pct": 83.0}


def with_runs(*busy, **changes):
    """A document that compares t1, t4 with t2, t5; those named ran on a busy machine, and so did t6 after them."""
    side = {"comparison": "abc"}
    rows = [ROWS[0] | side, ROWS[1] | side, ROWS[2]]
    repeats = [ROWS[0] | side | {"id": "t4"}, ROWS[1] | side | {"id": "t5"}, ROWS[1] | side | BUSY | {"id": "t6"}]

    def mark(row):
        return row | BUSY if row["id"] in busy else row

    pick = PICK | side
    return with_savings(compared_ids=["t1", "t2", "t4", "t5"], **changes) | {
        "trials": [mark(row) for row in rows],
        "repeats": [mark(row) for row in repeats],
        "baseline": mark(rows[0]),
        "picks": {"recommended": pick, "throughput": pick, "efficiency": None},
    }


ADVICE = {
    "trial_id": "t2",
    "bound": {"text": "80 % of the step is forward and backward"},
    "roof": None,
    "ceilings": [{"text": "the loader alone reaches 9,000 samples/s (t9)"}],
    "levers": [
        {"state": "not in the space", "text": "compile yes: was not run"},
        {"state": "not reached", "text": "placement ram: was not run, though it is in the space"},
        {"state": "tried alone", "text": "channels_last yes (t3) was 4 % slower"},
    ],
}

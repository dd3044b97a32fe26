"""Lengths, surface, simulated queue, policies, candidates, front: the parts of a search without a process."""

import dataclasses
import json
import math

import numpy as np
import pytest
from tests.unit.infer.fake_artefact import build_manifest

from fulltilt.cli import run_command
from fulltilt.cli._infer_search import _check_new, describe_search, print_search
from fulltilt.cli._shared import build_console
from fulltilt.config import config_for_object
from fulltilt.errors import FulltiltError, UsageError
from fulltilt.hardware import read_machine
from fulltilt.infer.artefact import write_manifest
from fulltilt.infer.check import plan_check
from fulltilt.infer.manifest import Accuracy, Policy
from fulltilt.infer.search.candidates import build_baseline, list_combinations, list_variants, name_plan
from fulltilt.infer.search.journal import FILE, Journal, OverError
from fulltilt.infer.search.policies import Goal, choose_policy, estimate_capacity, list_policies
from fulltilt.infer.search.result import Candidate, Live, SearchResult, choose, find_front
from fulltilt.infer.search.run import _note_acceptance, open_search_folder, plan_goal, write_chosen
from fulltilt.infer.search.simulate import (
    Service,
    Surface,
    compute_quantile_s,
    draw_arrivals,
    estimate_offline_samples_per_s,
    plan_points,
    simulate_responses_s,
)
from fulltilt.levers import Facts, Lever
from fulltilt.records import Plan, decode, dumps, encode
from fulltilt.stats import Comparison

LENGTHS = tuple(int(n) for n in np.clip(np.random.default_rng(1).lognormal(3.4, 0.6, 200), 4, 128))


def build_surface(seconds=lambda b, n: 0.001 + 1e-5 * b * n, batches=(1, 4, 16), lengths=(10, 100)):
    points = tuple((n, b) for n in lengths for b in batches)
    return Surface(points=points, seconds=tuple(seconds(b, n) for n, b in points))


@pytest.mark.parametrize(("batch", "length"), [(1, 10), (4, 100), (2, 55), (10, 30), (32, 100), (16, 150)])
def test_the_surface_is_exact_where_time_grows_with_the_elements(batch, length):
    assert build_surface().build_service().estimate_s(batch, length) == pytest.approx(0.001 + 1e-5 * batch * length)


def test_a_surface_of_one_batch_or_length_grows_with_it():
    one = build_surface(batches=(4,), lengths=(10,)).build_service()
    assert one.estimate_s(8, 10) == pytest.approx(2 * one.estimate_s(4, 10))
    assert one.estimate_s(1, 10) == one.estimate_s(4, 10), "nothing says that less is faster"


def test_points_are_left_out_where_a_call_would_take_too_long():
    points = plan_points(LENGTHS, 0.05, is_coarse=False, max_batch=64)
    assert max(batch for length, batch in points if length == max(LENGTHS)) == 16
    assert len({length for length, _ in points}) == 3
    few = plan_points(LENGTHS, 0.001, is_coarse=True, max_batch=64)
    assert {*few} < {*plan_points(LENGTHS, 0.001, is_coarse=False, max_batch=64)}
    assert plan_points(LENGTHS, 0.001, is_coarse=True, max_batch=1) == [p for p in few if p[1] == 1]


def test_the_simulated_queue_agrees_with_the_formula_for_one_sample_at_a_time():
    """M/D/1: mean wait is ρ s / 2 (1 - ρ)."""
    service, load = Service(estimate_s=lambda b, n: 0.01), 70
    arrivals = draw_arrivals((1,), 1, n=20_000)
    responses_s = simulate_responses_s(arrivals, load, Policy(max_batch=1), service)
    rho = 0.01 * load
    assert np.mean(responses_s) == pytest.approx(0.01 + rho * 0.01 / (2 * (1 - rho)), rel=0.1)


def test_calls_that_take_longer_in_a_server_lengthen_the_queue_as_the_formula_says():
    """M/M/1: mean response is 1 / (1 / s - rate)."""
    longer_s = np.random.default_rng(1).exponential(0.01, 5000)
    service, load = Service(estimate_s=lambda b, n: 0.0, call_s=longer_s), 60
    responses_s = simulate_responses_s(draw_arrivals((1,), 1, n=20_000), load, Policy(max_batch=1), service)
    assert np.mean(responses_s) == pytest.approx(1 / (100 - load), rel=0.1)


def test_a_request_ends_with_its_last_sample_and_pays_what_is_beside_the_model():
    arrivals = draw_arrivals((5,), 3, n=50)
    service = Service(estimate_s=lambda b, n: 0.01, request_s=(0.002,), sample_s=0.001)
    alone = simulate_responses_s(arrivals, 0.01, Policy(max_batch=2), service)
    assert alone == pytest.approx([2 * 0.01 + 3 * 0.001 + 0.002] * 50)
    assert simulate_responses_s(arrivals, 0.01, Policy(max_batch=4), service) == pytest.approx([0.015] * 50)


def test_other_code_or_limits_of_the_user_set_what_was_measured_aside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found, limit = [], "inference.max_metric_drop_pct=9"
    asked = [
        ("a = 1",),
        ("a = 1",),
        ("a = 2",),
        ("a = 2", limit),
        ("a = 2", limit),
        ("a = 2", limit, "speed.threads=1"),
    ]
    for text, *words in asked:
        (tmp_path / "code_of_a_user.py").write_text(text)
        checked = plan_check(config_for_object("code_of_a_user:a", words), needs_targets=False)
        with open_search_folder(checked, None, tmp_path / "search") as folder:
            found.append(folder.set_aside)
            (tmp_path / "search" / FILE).touch()
    assert [found[0], found[1], found[4]] == [None] * 3
    assert "changed: code of the workload" in found[2]
    assert "changed: limits" in found[3]
    assert "changed: threads" in found[5]


def test_an_overloaded_queue_has_no_percentile():
    service = Service(estimate_s=lambda b, n: 0.1)
    responses_s = simulate_responses_s(draw_arrivals((1,), 1), 20, Policy(), service, give_up_s=2.0)
    assert responses_s == []
    assert compute_quantile_s(responses_s, 0.99) == math.inf


def test_capacity_is_where_the_limit_is_reached():
    service, arrivals = Service(estimate_s=lambda b, n: 0.01), draw_arrivals((1,), 1)
    capacity = estimate_capacity(arrivals, Policy(), service, Goal(limit_s=0.05), 100.0)
    for rate, is_within in ((0.95 * capacity, True), (1.1 * capacity, False)):
        found_s = compute_quantile_s(simulate_responses_s(arrivals, rate, Policy(), service), 0.99)
        assert (found_s <= 0.05) == is_within
    assert estimate_capacity(arrivals, Policy(), service, Goal(limit_s=0.005), 100.0) == 0.0


def test_samples_of_like_length_together_need_less_time():
    service = build_surface().build_service()
    by_length = estimate_offline_samples_per_s(LENGTHS, Policy(max_batch=16), service)
    padded = estimate_offline_samples_per_s([128] * len(LENGTHS), Policy(max_batch=16), service)
    assert by_length > 2 * padded


PLAN = Plan(engine="eager", quantization="none", precision="fp32", cuda_graphs=False, threads=None)


@pytest.mark.parametrize(
    ("seconds", "largest"),
    [(lambda b, n: 0.02 + 0.0001 * b, 64), (lambda b, n: 0.01 * b, 1)],
    ids=["gains", "does not"],
)
def test_batches_are_large_only_where_that_gains_something(seconds, largest):
    lengths, surface = (1,) * 64, build_surface(seconds, batches=(1, 8, 64), lengths=(1,))
    service = surface.build_service()
    best = choose_policy(list_policies(lengths), service, lengths, Goal(), draw_arrivals((1,), 1))
    assert best.policy == Policy(max_batch=largest)


def test_a_limit_for_a_batch_bounds_the_policy():
    lengths, surface = (1,) * 64, build_surface(lambda b, n: 0.02 + 0.001 * b, (1, 8, 64), (1,))
    service = surface.build_service()
    goal = Goal(batch_limit_s=0.03)
    best = choose_policy(list_policies(lengths), service, lengths, goal, draw_arrivals((1,), 1))
    assert best.policy.max_batch == 8


def test_with_a_target_for_the_response_the_rate_within_it_decides():
    lengths, surface = (1,) * 64, build_surface(lambda b, n: 0.02 + 0.001 * b, (1, 8, 64), (1,))
    service = surface.build_service()
    goal = Goal(requests_per_s=20, quantile=0.99, limit_s=0.06)
    best = choose_policy(list_policies(lengths), service, lengths, goal, draw_arrivals((1,), 1))
    assert best.response_s <= 0.06
    assert best.capacity_requests_per_s < best.samples_per_s
    assert best.policy.max_batch > 1


@pytest.mark.parametrize(
    ("targets", "found"),
    [
        ("{}", (0.99, None, None, None)),
        ("{requests_per_s: 40, response_s: {p50: 1, p95: 2}, batch_latency_ms: {p99: 100}}", (0.95, 2.0, 0.1, 40)),
        ("{scenario: single, requests_per_s: 40, response_s: {p99: 1}}", (0.99, 1.0, None, None)),
    ],
)
def test_the_strictest_percentile_of_the_response_is_the_goal(targets, found):
    config = config_for_object("tests.unit.infer.small_encoder:workload", [f"targets={targets}"])
    checked = plan_check(config, needs_targets=False)
    goal = plan_goal(checked)
    assert (goal.quantile, goal.limit_s, goal.batch_limit_s, goal.requests_per_s) == found
    assert decode(Goal, encode(goal)) == goal


def test_a_target_of_the_response_that_no_load_held_is_told():
    row = build_row("eager fp32", 100, 0.0, 0.5, "baseline")
    (note,) = _note_acceptance(row, Goal(limit_s=1.0))
    assert note.startswith("targets.response_s was not held")
    assert _note_acceptance(row, Goal()) == []


def test_policies_bound_padded_elements_only_where_that_binds():
    for policy in list_policies(LENGTHS):
        assert policy.max_tokens is None or policy.max_batch * max(LENGTHS) > policy.max_tokens


def build_lever(name, values, *, obstacle=lambda value, plan, facts: None):
    nothing = {
        "key": f"inference.{name}",
        "summary": "",
        "doc": "",
        "trades": ("speed",),
        "stage": "compile",
        "type": str,
    }
    nothing |= {"apply": lambda setup, value: None, "observe": lambda setup: None}
    return Lever(name=name, default=values[0], candidates=lambda facts: values, obstacle=obstacle, **nothing)


def refuse_aot(value, plan, facts):
    return "no compiler" if value == "aot" else None


CATALOGUE = {
    "engine": build_lever("engine", ("eager", "aot", "onnx"), obstacle=refuse_aot),
    "quantization": build_lever("quantization", ("none", "int8")),
    "precision": build_lever("precision", ("fp32",)),
    "cuda_graphs": build_lever("cuda_graphs", (False,)),
    "threads": build_lever("threads", (None, 1)),
}
FACTS = Facts(device_type="cpu")


def test_candidates_are_all_combinations_that_can_apply_the_promising_ones_first():
    baseline = build_baseline(CATALOGUE, {"threads": None})
    plans, refused = list_combinations(CATALOGUE, FACTS, baseline)
    assert [name_plan(plan, baseline) for plan in plans] == ["onnx int8", "onnx fp32", "eager int8"]
    assert refused == dict.fromkeys(("aot fp32", "aot int8"), "engine=aot: no compiler")
    variants = list_variants(CATALOGUE, FACTS, plans[0])
    assert [name_plan(plan, baseline) for plan in variants] == ["onnx int8, 1 thread"]
    assert len(list_combinations(CATALOGUE, FACTS, baseline, CATALOGUE)[0]) == 2 * 2 * 2 - 1


def test_on_a_gpu_graphs_are_tried_with_each_engine_and_half_formats_first():
    catalogue = CATALOGUE | {
        "engine": build_lever("engine", ("eager", "compile")),
        "quantization": build_lever("quantization", ("none",)),
        "precision": build_lever("precision", ("fp32", "bf16")),
        "cuda_graphs": build_lever("cuda_graphs", (False, True)),
    }
    baseline = build_baseline(catalogue, {"threads": None})
    names = [name_plan(plan, baseline) for plan in list_combinations(catalogue, FACTS, baseline)[0]]
    assert names[:3] == ["eager bf16, cuda graphs", "compile bf16, cuda graphs", "compile bf16"]
    assert len(names) == 2 * 2 * 2 - 1


def test_batches_of_recorded_shapes_cost_what_they_are_filled_up_to():
    surface = dataclasses.replace(build_surface(lambda b, n: 0.001 * b * n, (1, 4, 16), (32, 64)), is_recorded=True)
    estimate_s = surface.build_service().estimate_s
    assert estimate_s(5, 33) == pytest.approx(estimate_s(8, 64)) == pytest.approx(0.001 * 8 * 64)


def test_the_baseline_keeps_the_users_threads():
    baseline = build_baseline(CATALOGUE, {"threads": 1})
    assert baseline["threads"] == 1
    assert name_plan(baseline, baseline) == "eager fp32"
    assert name_plan(baseline.replace(threads=None), baseline) == "eager fp32, all threads"


def build_row(name, rate, drop, gib, status="offered", **more):
    accuracy = Accuracy(sqnr_db=30.0, max_abs_error=0.0, n_samples=9, changed_labels_pct=drop)
    return Candidate(name=name, plan=PLAN, status=status, samples_per_s=rate, accuracy=accuracy, memory_gib=gib, **more)


def test_the_front_leaves_out_who_is_beaten_in_all_respects():
    rows = [
        build_row("eager fp32", 100, 0.0, 0.5, "baseline"),
        build_row("fast", 300, 1.0, 0.5),
        build_row("beaten", 200, 1.0, 0.5),
        build_row("small", 150, 0.0, 0.1),
        build_row("slow", 90, 0.0, 0.01, "slower"),
    ]
    assert [row.name for row in find_front(rows)] == ["fast", "small"]
    assert choose(rows, Goal()).name == "fast"
    rows[1].response_s = 0.03  # simulated
    assert [row.name for row in find_front(rows)] == ["fast", "small"]
    rows[2].live = Live(verdict="met", requests_per_s=9, quantile=0.99, limit_s=1, measured_s=0.1)
    assert [row.name for row in find_front(rows)] == ["fast", "beaten", "small"], "its response alone was measured"


def test_who_was_accepted_under_load_is_chosen_before_who_was_not():
    live = Live(verdict="met", requests_per_s=9, quantile=0.99, limit_s=1, measured_s=0.1, n_responses=500)
    goal = Goal(requests_per_s=9, limit_s=1.0)
    rows = [
        build_row("promising", 300, 0.0, 0.5, capacity_requests_per_s=30.0),
        build_row("accepted", 200, 0.0, 0.5, capacity_requests_per_s=20.0, live=live),
    ]
    assert choose(rows, goal).name == "accepted"


def test_a_journal_answers_once_and_a_recalled_answer_counts_as_long_as_it_took(tmp_path):
    now = [0.0]

    def find(limit_s):
        now[0] += 5.0
        return {"ok": 1}

    assert Journal(tmp_path, clock=lambda: now[0]).ask("build a", find) == {"ok": 1}
    again = Journal(tmp_path, clock=lambda: now[0])
    assert again.spent_s == 0.0, "decisions of the budget are made again as they were"
    assert again.ask("build a", lambda limit_s: pytest.fail("it was answered")) == {"ok": 1}
    now[0] += 2.0
    assert again.spent_s == 5.0 + 2.0


def test_a_place_where_the_artefact_cannot_go_is_told_before_the_search(tmp_path):
    (tmp_path / "file").touch()
    for place in ("file", "file/chosen", "."):
        with pytest.raises(UsageError, match=r"--artefact-out .*(is no folder|is no artefact)"):
            _check_new(tmp_path / place)
    assert _check_new(tmp_path / "new" / "chosen") == tmp_path / "new" / "chosen"
    (tmp_path / "latest").symlink_to("v3")
    assert _check_new(tmp_path / "latest") == tmp_path / "v3", "a folder takes no link's place"


@pytest.mark.parametrize("budget", ["0", "0s", "-5", "-5s", "abc", "nan", ""])
def test_a_budget_that_is_no_time_is_refused_by_its_name(budget, capsys):
    assert run_command(["infer", "search", "my_module:workload", "--budget", budget]) == 2
    assert f"--budget {budget!r} is not a duration" in capsys.readouterr().err


def test_a_damaged_artefact_is_not_chosen_with_the_digest_of_its_damage(tmp_path):
    source, target = tmp_path / "artefacts" / "eager-fp32", tmp_path / "chosen"
    source.mkdir(parents=True)
    (source / "weights.pt").write_bytes(b"whole")
    write_manifest(source, build_manifest())
    (source / "weights.pt").write_bytes(b"torn")
    with pytest.raises(FulltiltError, match=r"weights\.pt is not the file that was built; remove .*artefacts, and"):
        write_chosen(source, target, None)
    assert not target.exists()


def test_lines_of_a_journal_that_are_damaged_are_asked_again(tmp_path):
    Journal(tmp_path).ask("build a", lambda limit_s: 1)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"question": "build b"}\n{"qu\n[]\n5\nnull\n{}\n')
    again = Journal(tmp_path)
    assert again.ask("build a", lambda limit_s: 2) == 1
    assert again.ask("build b", lambda limit_s: 2) == 2


def test_what_there_was_no_time_for_is_asked_again_only_with_more(tmp_path):
    now = [0.0]

    def find(limit_s):
        now[0] += 30.0 if limit_s >= 30 else limit_s
        if limit_s < 30:
            raise OverError
        return "done"

    def ask(limit_s, expected_s=0.0):
        journal = Journal(tmp_path, clock=lambda: now[0])
        try:
            return journal.ask("build a", find, limit_s=limit_s, expected_s=expected_s), journal.spent_s
        except OverError:
            return None, journal.spent_s

    assert ask(100.0, expected_s=200.0) == (None, 0.0), "it is not begun"
    assert ask(10.0) == (None, 0.0), "nor with less"
    (tmp_path / FILE).unlink()
    assert ask(20.0) == ask(20.0) == (None, 20.0)
    assert now == [20.0], "the second time from the file"
    assert ask(50.0) == ask(1.0) == ("done", 20.0 + 30.0), "what was cut took its time too"


def build_result(tmp_path, n_refused):
    gain = Comparison(gain_pct=410.0, ci_pct=(380.0, 440.0), verdict="faster", n_groups=4)
    live = {"verdict": "met", "requests_per_s": 40.0, "quantile": 0.99, "limit_s": 0.1, "n_responses": 500}
    accuracy = Accuracy(
        sqnr_db=30.0, max_abs_error=0.1, n_samples=9, metric="accuracy", metric_fp32=0.978, metric_here=0.977
    )
    best = build_row("onnx int8", 510.0, 0.0, 0.1, "chosen", gain=gain, policy=Policy(max_batch=8))
    best.accuracy, best.live = accuracy, Live(measured_s=0.023, **live)
    rows = [best, build_row("eager fp32", 100.0, 0.0, 0.4, "baseline", response_s=0.0317)]
    rows += [
        Candidate(name=f"r{i}", plan=PLAN, status="refused", reason="it is 20 dB off " * 9) for i in range(n_refused)
    ]
    nothing = {"artefact": "chosen", "promise": None, "not_applicable": {"aot": "no compiler"}}
    told = {
        "seconds": 60.0,
        "budget_s": 600.0,
        "n_groups": 9,
        "cpu_pressure_pct": 9.0,
        "utc": "",
    }
    return SearchResult(
        workload="w",
        device="cpu",
        goal=Goal(requests_per_s=40.0, limit_s=0.1),
        lengths=(1, 1),
        chosen="onnx int8",
        gain=gain,
        front=("onnx int8",),
        candidates=tuple(rows),
        next="fulltilt infer serve chosen",
        notes=(),
        out_dir=str(tmp_path),
        machine=read_machine(),
        **nothing,
        **told,
    )


def test_the_last_screen_fits_and_begins_with_the_result(tmp_path, capsys):
    result = build_result(tmp_path, 30)
    print_search(build_console(is_screen=True), result, is_verbose=False)
    lines = capsys.readouterr().out.splitlines()
    assert "".join(lines[:2]).startswith(
        "onnx int8 answers 5.1 times as many samples a second as eager fp32 (4.8 to 5.4), p99 23 ms at 40 requests/s, "
        "accuracy 97.8 → 97.7 %."
    )
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    assert any(line.startswith("eager fp32") and "baseline" in line for line in lines)
    assert "31.7" not in "".join(lines), "a simulated response does not stand beside those that were measured"
    assert lines[-1] == "· next: fulltilt infer serve chosen"
    assert decode(SearchResult, json.loads(dumps(result))) == result, "another program can read it"


def test_the_first_sentence_says_how_many_were_not_tried_and_the_table_leaves_them_out(tmp_path, capsys):
    result = build_result(tmp_path, 4)
    rows = (*result.candidates, *(Candidate(name=name, plan=Plan()) for name in ("aot fp32", "aot bf16")))
    open_end = build_row(
        "compile fp32", 200.0, 0.0, 0.4, "untried", reason="the budget left no time before it was proven"
    )
    sentence = describe_search(dataclasses.replace(result, candidates=rows))
    assert sentence.endswith(f"; there was no time for 2 of {len(rows)} candidates.")
    assert "no time" not in describe_search(result)
    console = build_console(is_screen=True)
    for is_verbose, n_shown in ((False, 0), (True, 2)):
        print_search(console, dataclasses.replace(result, candidates=(*rows, open_end)), is_verbose=is_verbose)
        lines = capsys.readouterr().out.splitlines()
        assert sum(line.startswith("aot ") for line in lines) == n_shown
        assert any(line.startswith("compile fp32") for line in lines), "it was measured"
        assert ("· 2 more candidates in --verbose and result.json" in lines) != is_verbose


def test_the_first_sentence_tells_not_faster_from_not_accepted(tmp_path):
    result = dataclasses.replace(build_result(tmp_path, 1), chosen="eager fp32", gain=None)
    said = "eager fp32 stays, since nothing that is faster was accepted; it answers 100 samples/s."
    assert describe_search(result) == said
    slower = dataclasses.replace(result.candidates[0].gain, verdict="slower")
    result.candidates[0].gain = slower
    assert describe_search(result) == "Nothing is proven faster than eager fp32, which answers 100 samples/s."
    result.candidates[0].gain = None
    assert describe_search(result) == "Nothing is proven faster than eager fp32.", "its rate was not measured in turns"

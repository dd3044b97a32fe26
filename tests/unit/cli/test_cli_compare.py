"""``fulltilt compare``: what differs, what is called a difference, and what is refused with its reason."""

import copy
import json
import statistics

import pytest

from fulltilt.cli import run_command
from fulltilt.levers import default_plan
from fulltilt.report.compare_text import build_figures_table

MACHINE = {"cpu_model": "Some CPU", "packages": {"torch": "2.12.0", "numpy": "2.4"}}
RATES, FASTER = [1000.0, 1004.0, 998.0], [2000.0, 2004.0, 1997.0]
USER_PLAN = dict(default_plan()) | {"batch_size": 32, "num_workers": 0, "precision": "fp32"}
FAST_PLAN = USER_PLAN | {"channels_last": True}


def build_row(trial_id, rate, plan, *, kind="repeat", status="ok"):
    shared = {"memory_reserved_peak_gib": None, "memory_rss_peak_gib": 0.5}
    return shared | {"id": trial_id, "plan": plan, "kind": kind, "status": status, "samples_per_s": rate}


def build_search(rates, *, plan=FAST_PLAN, others=1.0, lucky=5000.0):
    """A search whose recommended plan ran once, at a lucky rate, and took turns once per rate."""
    pick = build_row("lucky", lucky, plan, kind="end_to_end")
    repeats = [build_row(f"r{n}", rate, plan) for n, rate in enumerate(rates)]
    rest = [build_row(f"u{n}", 100.0 * others + n, USER_PLAN | {"batch_size": n}, kind="end_to_end") for n in range(4)]
    return {
        "version": 1, "search": {"n_groups": len(rates)}, "user_plan": USER_PLAN,
        "machine": copy.deepcopy(MACHINE),
        "workload": {"name": "digits", "task": "classification", "model": "CNN", "n_parameters": 10, "n_samples": 1000},
        "trials": [pick, *rest],
        "repeats": repeats,
        "picks": {"recommended": pick, "throughput": pick, "efficiency": None},
        "epoch_seconds": {"estimate": 1000 / rates[0], "ci95": None},
    }  # fmt: skip


def compare(tmp_path, a, b, capsys, *, expect=0):
    files = tmp_path / "a.json", tmp_path / "b.json"
    for file, document, indent in zip(files, (a, b), (None, " "), strict=True):  # two files that are never copies
        file.write_text(json.dumps(document, indent=indent))
    assert run_command(["compare", *map(str, files), "--json", "-"]) == expect
    said = capsys.readouterr()
    return (json.loads(said.out) if expect == 0 else None), said.err


def find_figure(document, name="recommended: samples_per_s"):
    return next(figure for figure in document["figures"] if figure["name"] == name)


def test_the_time_of_an_epoch_is_compared_by_run_whatever_its_estimate_is_the_mean_of(tmp_path, capsys):
    rates = RATES, [1200.0, 1500.0, 1480.0]
    a, b = sides = build_search(rates[0], plan=USER_PLAN), build_search(rates[1])
    for side, own in zip(sides, rates, strict=True):
        side["epoch_seconds"]["estimate"] = 1000 / statistics.geometric_mean(own)
    document, _ = compare(tmp_path, a, b, capsys)
    speed, epoch = (find_figure(document, f"recommended: {name}") for name in ("samples_per_s", "epoch_seconds"))
    assert (1 + speed["change_pct"] / 100) * (1 + epoch["change_pct"] / 100) == pytest.approx(1, abs=1e-3)


def test_a_faster_pick_is_better_with_its_interval(tmp_path, capsys):
    a, b = build_search(RATES, plan=USER_PLAN), build_search([1200.0, 1204.0, 1197.0])
    document, said = compare(tmp_path, a, b, capsys)
    speed = find_figure(document)
    assert (speed["verdict"], speed["change_pct"]) == ("better", pytest.approx(20, abs=0.5))
    assert speed["ci_pct"][0] < 20 < speed["ci_pct"][1]
    assert 0 < speed["detectable_pct"] < 20
    assert find_figure(document, "recommended: epoch_seconds")["verdict"] == "better", "less time"
    assert find_figure(document, "recommended: memory_gib")["verdict"] is None, "turns read no memory: it ran once"
    assert document["picks"][0]["levers"] == [{"name": "channels_last", "a": False, "b": True}]
    assert "channels_last no → yes" in said
    a["workload"]["name"] = b["workload"]["name"] = "digits\x1b[31mred\x1b]0;owned\x07"
    assert "\x1b" not in compare(tmp_path, a, b, capsys)[1]


def test_only_good_turns_count_and_a_pick_under_two_names_is_shown_once(tmp_path, capsys):
    b = build_search(RATES, lucky=90000.0)
    b["repeats"].append(build_row("x", None, FAST_PLAN, status="error"))
    document, said = compare(tmp_path, build_search(RATES), b, capsys)
    speed = find_figure(document)
    assert (speed["n_a"], speed["n_b"], speed["change_pct"], speed["verdict"]) == (3, 3, pytest.approx(0), "tie")
    assert not [figure for figure in document["figures"] if figure["name"].startswith("throughput")]
    assert "throughput: on both sides the plan of recommended" in said


def test_noise_and_one_run_on_a_side_are_named_instead_of_a_winner(tmp_path, capsys):
    a, b = build_search([1000.0, 1400.0, 800.0]), build_search([1100.0, 1500.0, 850.0])
    document, said = compare(tmp_path, a, b, capsys)
    assert find_figure(document)["verdict"] == "too_noisy"
    assert find_figure(document)["detectable_pct"] > 20
    assert "too noisy to tell" in said
    document, said = compare(tmp_path, build_search([1000.0]), b, capsys)
    assert find_figure(document)["verdict"] is None
    assert "one run on a side" in find_figure(document)["reason"]
    assert "one run on a side" in said


def test_two_machines_get_figures_and_no_verdict(tmp_path, capsys):
    a, b = build_search(RATES), build_search(FASTER)
    b["machine"]["cpu_model"] = "Another CPU"
    document, said = compare(tmp_path, a, b, capsys)
    speed, reason = find_figure(document), "measured on two machines (cpu_model)"
    assert (speed["verdict"], speed["reason"]) == (None, reason)
    assert speed["change_pct"] == pytest.approx(100, abs=1)
    assert "cpu_model Some CPU → Another CPU" in said
    assert f"These two cannot be held against each other: {reason}." in said


@pytest.mark.parametrize("fact", ["n_parameters", "data", "optimizer", "device_name"])
def test_two_workloads_get_no_verdict(tmp_path, capsys, fact):
    a, b = build_search(RATES), build_search(FASTER)
    a["workload"][fact], b["workload"][fact] = 10, 11
    document, said = compare(tmp_path, a, b, capsys)
    reason = f"two different workloads ({fact})"
    assert find_figure(document)["reason"] == document["refusal"] == reason
    differences = [[row[key] for key in ("change_pct", "ci_pct", "detectable_pct")] for row in document["figures"]]
    assert differences == [[None, None, None]] * len(differences)
    assert document["control"] is None
    assert "%" not in said.partition("Figures")[2], "no difference in percent"
    assert said.count(reason) == 1, "said once, before the figures"
    assert said.index("two different workloads") < said.index("Figures")


@pytest.mark.parametrize("b", ["a.json", "copy.json", "folder", "folder/tune.json"])
def test_a_result_against_itself_is_refused_whatever_it_is_called(tmp_path, capsys, b):
    text = json.dumps(build_search([1000.0, 1004.0]))
    (tmp_path / "folder").mkdir()
    for name in ("a.json", "copy.json", "folder/tune.json"):
        (tmp_path / name).write_text(text)
    assert run_command(["compare", str(tmp_path / "a.json"), str(tmp_path / b)]) == 2
    assert "A and B are one and the same result" in capsys.readouterr().err


def test_plans_in_both_searches_tell_that_the_machine_changed_unless_the_versions_may_have(tmp_path, capsys):
    a, b = build_search(RATES), build_search([800.0, 804.0, 797.0], others=0.8)
    document, said = compare(tmp_path, a, b, capsys)
    assert (document["control"]["n_plans"], document["control"]["verdict"]) == (5, "slower")
    assert find_figure(document)["verdict"] is None
    for text in (find_figure(document)["reason"], said):
        assert "the machine changed between the two" in text
    b["machine"]["packages"]["torch"] = "2.13.0"
    document, _ = compare(tmp_path, a, b, capsys)
    assert document["differences"]["versions"] == [{"name": "torch", "a": "2.12.0", "b": "2.13.0"}]
    assert find_figure(document)["verdict"] == "worse"


def test_another_effective_batch_is_pointed_out(tmp_path, capsys):
    for change, is_told in (({"batch_size": 8, "accumulate": 4}, False), ({"batch_size": 64}, True)):
        sides = (build_search(RATES, plan=plan) for plan in (USER_PLAN, USER_PLAN | change))
        assert ("the effective batch differs, 32 against 64" in compare(tmp_path, *sides, capsys)[1]) is is_told


def test_what_the_search_shows_and_what_is_compared_are_both_named(tmp_path, capsys):
    """The table of a search has a plan's whole run; its choice, and the comparison, go by the plan's turns."""
    a, b = build_search([1000.0, 500.0, 4000.0], lucky=1000.0), build_search([1000.0, 2000.0, 8000.0], lucky=1000.0)
    document, said = compare(tmp_path, a, b, capsys)
    speed = find_figure(document)
    assert (speed["shown_a"], speed["a"]) == (1000.0, pytest.approx(2000 ** (1 / 3) * 100))
    assert speed["statistic_a"] == "geometric mean"
    assert "A and B: geometric means over n repetitions, each a run in a process of its own" in said
    assert "the tables of tune show a plan's whole run" in said
    assert "samples_per_s 1,000 and 1,000 (recommended)" in said


def write_training(folder, rates, *, plan=USER_PLAN, config=None, qualities=None, epoch_s=None):
    """A run folder with one evaluation an epoch; ``epoch_s``: training seconds to each of them."""
    folder.mkdir()
    started = {"event": "RunStarted", "name": "digits", "device": "cpu", "plan": plan, "n_parameters": 10}
    events = [started | {"n_samples": 1000, "config": config or {}}]
    for epoch, rate in enumerate(rates):
        at = {"epoch": epoch + 1, "step": 10 * (epoch + 1)}
        events.append(at | {"event": "EpochDone", "loss": 0.1, "seconds": 1000 / rate, "samples_per_s": rate})
        quality = qualities[epoch] if qualities else 0.9 + epoch / 100
        events.append(at | {"event": "Evaluated", "metrics": {"accuracy": quality}})
        if epoch_s is not None:
            events[-1]["training_seconds"] = (epoch + 1) * epoch_s
    write_events(folder, events)
    return folder


def write_events(folder, events):
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def compare_folders(a, b):
    result = a.parent / "c.json"
    assert run_command(["compare", str(a), str(b), "--json", str(result)]) == 0
    return json.loads(result.read_text())


def test_trainings_are_compared_by_their_epochs_without_a_verdict(tmp_path, capsys):
    a = write_training(tmp_path / "a", [10.0, 1000.0, 1010.0])
    b = write_training(tmp_path / "b", [10.0, 2000.0, 2010.0], plan=FAST_PLAN)
    document = compare_folders(a, b)
    speed = find_figure(document, "samples_per_s")
    assert speed["change_pct"] == pytest.approx(99.5, abs=0.5), "the first epoch is warm-up"
    assert speed["ci_pct"][0] > 50
    assert speed["verdict"] is None
    assert "one run on a side" in speed["reason"]
    assert find_figure(document, "validation accuracy")["a"] == pytest.approx(0.92)
    said = " ".join(capsys.readouterr().out.split())
    for words in (
        "run: channels_last no → yes",
        "geometric means over n repetitions, each an epoch of one run",
        "are of how epochs vary and not of how runs do",
        "speed is by its 3 epochs, its first left out, which warms up",
    ):
        assert words in said
    assert "intervals hold for all figures together" not in said


def test_trainings_are_compared_by_their_time_to_what_both_reached(tmp_path):
    a = write_training(tmp_path / "a", [1000.0] * 3, qualities=[0.5, 0.8, 0.7], epoch_s=1.5)
    b = write_training(tmp_path / "b", [1000.0] * 3, qualities=[0.4, 0.6, 0.9], epoch_s=1.5)
    document = compare_folders(a, b)
    time = find_figure(document, "training seconds to validation accuracy 0.8")
    assert (time["a"], time["b"], time["better"], time["verdict"]) == (3.0, 4.5, "lower", None)
    assert find_figure(document, "validation accuracy")["better"] == "higher"


def test_a_resumed_training_counts_its_epochs_once(tmp_path):
    folder = write_training(tmp_path / "a", [1000.0, 1000.0, 1000.0])
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    write_events(folder, [*events, {**events[0], "first_step": 10}, *events[3:]])
    document = compare_folders(folder, write_training(tmp_path / "b", [900.0, 900.0, 900.0]))
    assert find_figure(document, "samples_per_s")["n_a"] == 2, "three epochs, the first left out"


def test_two_data_sets_of_one_size_are_two_workloads_for_trainings_too(tmp_path, capsys):
    a, b = (
        write_training(tmp_path / name, [1000.0, 1010.0], config={"data": {"dataset": f"set_{name}"}}) for name in "ab"
    )
    assert compare_folders(a, b)["refusal"] == "two different workloads (data.dataset)"
    assert "%" not in capsys.readouterr().out.partition("Figures")[2]


def test_recipes_of_trainings_are_compared_by_their_time_to_quality(tmp_path):
    """Another optimizer makes two searches two workloads; of a training it is what is compared."""
    a, b = (
        write_training(tmp_path / name, [1000.0, 1010.0], config={"optim": {"optimizer": name}}, epoch_s=epoch_s)
        for name, epoch_s in (("sgd", 2.0), ("adamw", 1.0))
    )
    document = compare_folders(a, b)
    assert document["refusal"] is None
    assert {"name": "optim.optimizer", "a": "sgd", "b": "adamw"} in document["differences"]["workload"]
    time = find_figure(document, "training seconds to validation accuracy 0.91")
    assert time["change_pct"] == pytest.approx(-50.0)


def test_single_values_are_called_that(tmp_path, capsys):
    training = {"training_seconds": 2.0, "samples_per_s": 900.0, "reason": "finished", "metrics": {"accuracy": 0.9}}
    _, said = compare(tmp_path, training, training | {"samples_per_s": 1000.0}, capsys)
    assert "Figures (one value on either side)" in said
    assert "names no workload" in said


def build_benchmark(seconds, name="cli_start"):
    samples = {("help", "seconds"): seconds, ("empty", "seconds"): [1.0, 1.01, 0.99, 1.0]}
    samples |= {("loop", "overhead_us"): [-1.0, 2.0, 0.5, 1.0]}
    shared = {"case": "whole process", "unit_of_replication": "process"}
    arms = [
        shared | {"arm": arm, "metric": metric, "median": values[0], "n": len(values), "samples": values}
        for (arm, metric), values in samples.items()
    ]
    about = {"name": name, "claim": "It is quick.", "device": "cpu", "cpu_pressure_pct": 3.2}
    return about | {"machine": MACHINE, "versions": {"torch": "2.13.0"}, "arms": arms}


def test_benchmark_results_are_compared_arm_by_arm(tmp_path, capsys):
    a, b = build_benchmark([0.2, 0.201, 0.199, 0.2]), build_benchmark([0.25, 0.251, 0.249, 0.25])
    document, said = compare(tmp_path, a, b, capsys)
    verdicts = {figure["name"]: figure["verdict"] for figure in document["figures"]}
    assert verdicts["whole process, help: seconds"] == "higher"
    assert verdicts["whole process, empty: seconds"] in ("tie", "too_noisy")
    assert verdicts["whole process, loop: overhead_us"] is None
    assert "not above 0" in find_figure(document, "whole process, loop: overhead_us")["reason"]
    assert find_figure(document, "whole process, help: seconds")["confidence"] == pytest.approx(0.975)
    assert "waited for a core 3 %" in said


@pytest.mark.parametrize("kind", ["search", "benchmark", "training"])
def test_the_answer_and_what_matters_of_the_rest_fit_one_screen(tmp_path, capsys, kind):
    """A benchmark of 40 arms ended in its last figures, and the sentence stood two screens above them."""
    if kind == "search":
        sides = [build_search(RATES, plan=USER_PLAN), build_search([1200.0, 1204.0, 1197.0])]
        for side in sides:
            rows = [build_row(f"p{n}", 900.0 + n, FAST_PLAN | {"threads": n}, kind="end_to_end") for n in (1, 2, 3)]
            side["trials"] += rows
            side["picks"] |= dict(zip(("throughput", "efficiency", "memory"), rows, strict=True))
        sides[1]["machine"]["packages"] = {f"package-{n}": "1.0" for n in range(30)}
    elif kind == "benchmark":
        sides = [build_benchmark([0.2, 0.201, 0.199, 0.2]), build_benchmark([0.25, 0.251, 0.249, 0.25])]
        for side in sides:
            side["arms"] = [arm | {"case": f"case {n}"} for n in range(14) for arm in side["arms"]]
    if kind == "training":
        config = {"optim": {"lr": 0.1}, "data": {"transform": {"train": "random_flip | " * 40}}}
        paths = [write_training(tmp_path / "a", [10.0, 1000.0, 1010.0], config=config),
                 write_training(tmp_path / "b", [10.0, 2000.0, 2010.0], plan=FAST_PLAN)]  # fmt: skip
    else:
        paths = tmp_path / "a.json", tmp_path / "b.json"
        for path, side in zip(paths, sides, strict=True):
            path.write_text(json.dumps(side))
    words = ["compare", *map(str, paths)]
    assert run_command(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("B against A, of "), lines[0]
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    assert run_command([*words, "--verbose"]) == 0
    whole = capsys.readouterr().out
    assert "--verbose" not in whole
    assert "could detect" in whole
    assert len(whole) > len("\n".join(lines)), "with what is cut above"


def test_results_that_have_nothing_in_common_are_refused_by_name(tmp_path, capsys):
    other, b = build_benchmark([1.0, 1.0], name="loop_overhead"), build_benchmark([1.0, 1.0])
    said = [compare(tmp_path, a, b, capsys, expect=2)[1] for a in (other, build_search([1000.0]))]
    assert all(word in said[0] for word in ("cli_start", "loop_overhead"))
    assert all(word in said[1] for word in ("a result of tune", "one of benchmark"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no file or folder"),
        ("{", "cannot be read as JSON"),
        ("[1]", "is no result of tune, train, benchmark"),
        ('{"trials": [], "picks": {}}', "not whole"),
        (json.dumps(build_benchmark([0.2, "fast"])), "not whole: ValueError"),
        (json.dumps(build_search([1000.0, float("nan")])), "cannot be read as JSON (NaN is no value of JSON)"),
        (json.dumps(build_search([1000.0]) | {"trials": []}), "no row has the id and the rate of the pick recommended"),
        ("[" * 100_000, "cannot be read as JSON (maximum recursion depth exceeded"),
        (
            '{"version": 1, "command": "tune", "error": "no plan was run; give more", "remedy": "give more", "rc": 3}',
            "x.json says why tune has no result: no plan was run; give more\n",
        ),
        (
            '{"version": 2, "trials": [], "picks": {}}',
            "version 2 of the result format, this fulltilt reads version 1; ",
        ),
        ('{"version": null, "trials": [], "picks": {}}', "is of version None of the result format"),
    ],
)
def test_what_is_no_result_is_wrong_usage(tmp_path, capsys, text, message):
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text)
    assert run_command(["compare", str(path), str(path)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("rates", "said"), [(None, "neither tune.json nor events.jsonl"), ([], "no whole epoch")])
def test_a_folder_without_a_result_says_what_it_lacks(tmp_path, capsys, rates, said):
    folder = tmp_path if rates is None else write_training(tmp_path / "a", rates)
    assert run_command(["compare", str(folder), str(folder)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("interval", "said", "detectable"),
    [
        ([-100.0, 17_578_705_576.0], "-100 to more than +9,900 %", "more than 9,900 %"),
        ([-36.8, 58.4], "-36.8 to +58.4 %", "58.4 %"),
    ],
)
def test_an_interval_that_says_nothing_has_no_ten_digits(interval, said, detectable):
    row = {"name": "rate", "a": 1.0, "b": 1.2, "change_pct": 20.0, "ci_pct": interval, "detectable_pct": interval[1],
           "n_a": 2, "n_b": 3, "verdict": "too_noisy"}  # fmt: skip
    cells = [next(column.cells).plain for column in build_figures_table({"figures": [row]}).columns]
    assert said in cells
    assert cells[-1] == detectable

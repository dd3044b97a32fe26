"""What came of a search, in words: the sentence, and the screen that ends ``fulltilt tune``."""

import shlex

import pytest
from tests.unit.report.report_documents import (
    DOCUMENT,
    OWN,
    VERIFICATION,
    build_document,
    build_effect,
    build_row,
    compare,
)

from fulltilt.report.turns import find_other
from fulltilt.report.verdict import (
    build_screen,
    describe_epoch,
    describe_noise,
    describe_origins,
    describe_saving,
    describe_trainings,
    describe_verdict,
    list_changes,
)

FASTER, OPEN = compare(32, 24, 41), compare(3, -4, 11)
COMPARE = "fulltilt compare a.yaml data.num_workers=2 speed.fused_optimizer=true"
APPLY = "fulltilt tune a.yaml --apply a.yaml"
LONG_PLAN = {
    "batch_size": 16, "accumulate": 2, "num_workers": 12, "precision": "bf16", "compile": "max-autotune",
    "channels_last": True, "persistent_workers": True, "prefetch_factor": 8, "pin_memory": True, "placement": "ram",
}  # fmt: skip
WORSE = VERIFICATION | {"verdict": "learns worse", "quality_change_ci95_pct": [-4.0, -2.5]}
FAILED = build_row("t1", status="out_of_memory", reason="the process needed 31.4 GiB, the limit is 23.6 GiB")


NOT_TRIED = [
    {"lever": name, "value": value, "state": "not in the space"}
    for name, value in (("compile", True), ("num_workers", 8))
]


def without_own(baseline, **more):
    """A document in which the user's own settings have no speed: another plan is recommended for want of them."""
    document = build_document(FASTER)
    pick = document["picks"]["recommended"] | {"proven": None, "gain": None}
    return document | {"picks": document["picks"] | {"recommended": pick}, "savings": None, "repeats": [],
                       "baseline": baseline} | more  # fmt: skip


def without_turns():
    document = build_document(OPEN, search={"stopped_by_budget": True})
    other = document["picks"]["unproven"] | {"gain": None}
    return document | {"picks": document["picks"] | {"unproven": other}, "savings": None, "repeats": []}


def with_one_group():
    """A document of a search that ended after its first turns, which were shown as they were taken."""
    return without_turns() | {"repeats": [row for row in build_document(OPEN)["repeats"] if row["group"] == 1]}


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (
            build_document(FASTER),
            "1.32 × as fast as your settings (1.24 to 1.41), proven; recipe and numerics stay.",
        ),
        (build_document(FASTER, numerics=["precision fp32 → bf16"]), "proven; changes the numerics."),
        (build_document(FASTER, recipe=["effective batch 32 → 64"]), "proven; changes the recipe."),
        (build_document(FASTER, recipe=["micro-batch 32 → 16, effective"]), "proven; the effective batch stays."),
        (build_document(FASTER, verification=VERIFICATION), "proven; learns as well."),
        (
            build_document(FASTER, verification=WORSE),
            "Keep your settings: the fastest plan is 1.32 × as fast (1.24 to 1.41), but learned worse.",
        ),
        (
            build_document(OPEN),
            "Keep your settings, no gain is proven: the best other plan is between 4 % slower and 11 % faster.",
        ),
        (
            build_document(compare(60, 0.8, 150)),
            "another plan looks 1.60 × as fast (1.01 to 2.50), not proven yet.",
        ),
        (
            build_document(compare(30, -99, 9000)),
            "Keep your settings, no gain is proven: too little was measured to tell.",
        ),
        (
            build_document(compare(0.2, -0.9, 1.3)),
            "Keep your settings: the best other plan is as fast, within 1.3 %.",
        ),
        (build_document(compare(-7, -9, -5)), "Keep your settings: the best other plan is 5 to 9 % slower."),
        (
            build_document(compare(-12, -15, -9), is_rival=True),
            "Keep your settings: no other plan came out faster.",
        ),
        (
            build_document(compare(36, -90, 9000), is_rival=True),
            "Keep your settings, no gain is proven: too little was measured to tell.",
        ),
        (build_document() | {"trials": [OWN]}, "Keep your settings: no other plan ran to its end."),
        (without_own(FAILED), "Your settings ran out of memory; these run at 13,000 samples/s."),
        (without_own(None), "Your settings did not run; these run at 13,000 samples/s."),
        (
            without_turns(),
            "No result yet, keep your settings: the search ended before another plan was compared with them.",
        ),
        (with_one_group(), "no gain is proven: the search ended after too few turns to tell."),
        (
            without_turns() | {"verification": WORSE},
            "Keep your settings, no gain is proven: the best other plan learned worse.",
        ),
    ],
)
def test_the_sentence_says_what_to_do_and_the_interval_that_was_compared(document, said):
    sentence = describe_verdict(document)
    assert sentence.endswith(said)
    assert len(sentence) <= 100
    assert build_screen(document)[0] == sentence


SCREENS = {
    "proven": build_document(FASTER),
    "undecided": build_document(OPEN, search={"stalled_pct": 23.0, "takes_turns": False}),
    "same plan": build_document(compare(-12, -15, -9), is_rival=True),
    "own failed": without_own(FAILED | {"reason": "a reason " * 60}),
    "no turns": without_turns(),
    "few turns": with_one_group(),
    "checked": build_document(FASTER, verification=WORSE),
    "checked without turns": without_turns() | {"verification": WORSE},
    "everything": build_document(
        compare(412.3, 380.4, 450.6),
        plan=LONG_PLAN,
        numerics=["precision fp32 → bf16", "compile False → max-autotune"],
        recipe=["micro-batch 32 → 16, effective batch as before"],
        levers=[build_effect("num_workers", 0, 12, FASTER), build_effect("compile", False, "default", OPEN)],
        verification=VERIFICATION,
        learning_rate={"rule": "sqrt", "from": 0.1, "to": 0.14142},
        search={"stalled_pct": 23.0, "takes_turns": False, "stopped_by_budget": True},
        advice={"levers": [{"lever": f"a_lever_{n}", "state": "not in the space"} for n in range(9)]},
        workload={"name": "w", "optimizer": "SGD", "learning_rate": 0.1,
                  "taken_from": {"batch_size": "fulltilt's default", "optimizer": "the workload's own code"}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCREENS)
def test_whatever_came_of_it_fits_a_screen_and_nothing_is_cut(name):
    options = {"apply": APPLY, "source": "my_module:workload", "left_out": "more switches " * 12}
    lines = build_screen(SCREENS[name], files="runs/report.html", **options)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    assert lines[-1] == "files    runs/report.html"
    following = find_lines(SCREENS[name], "next", source=options["source"])
    assert len([line for line in following if not line.startswith("fulltilt ")]) <= 3
    assert any(line.startswith("apply ") for line in lines) == (name in ("proven", "own failed", "everything"))
    assert "…" not in "".join(lines).replace("=…", "")
    words = " ".join(lines).split()
    assert not {"arm", "arms", "group", "groups", "proof", "t1", "t2"} & set(words), "words of the inside, and ids"


def find_lines(document, label, **options):
    """The lines behind a label, those without one that follow included."""
    lines, found = build_screen(document, **options), []
    for line in lines:
        if line.startswith(f"{label} ") or (found and line.startswith("  ")):
            found.append(line[9:])
        elif found:
            break
    return found


def test_both_sides_show_the_speeds_that_were_compared_and_not_those_of_single_runs():
    """A user's plan that was kept was shown by one run's speed, 9,000, though its turns were compared."""
    kept = build_document(compare(-12, -15, -9), is_rival=True)
    for document, name, rate in ((build_document(OPEN), "other", "9,486"), (kept, "other", "8,105")):
        (own,), (other,) = find_lines(document, "yours"), find_lines(document, name)
        assert "9,210 samples/s" in own
        assert f"{rate} samples/s" in other
    assert "+3.0 % (−4 to +11)" in find_lines(build_document(OPEN), "other")[0]
    (pick,) = find_lines(build_document(FASTER), "pick")
    assert "12,157 samples/s" in pick
    assert pick.endswith("   ░ up to 1.41 ×"), "what the light part of its bar means"
    (narrow,) = find_lines(build_document(compare(32, 31.9, 32.1)), "pick")
    assert "░" not in narrow
    assert find_lines(without_turns(), "yours") == ["9,000 samples/s    512 MiB   in one run"]


def test_a_plan_that_fell_behind_is_shown_with_the_gain_of_its_turns():
    document = build_document(compare(-12, -15, -9), is_rival=True)
    other = find_other(document)
    assert (other["id"], other["gain"]["n_groups"]) == ("t2", 6)
    assert other["gain"]["gain_pct"] == pytest.approx(-12)
    assert find_other(document | {"repeats": document["repeats"][:7]}) is None, "one group says nothing of the next"


def test_a_plan_that_two_groups_alone_speak_for_is_shown_without_an_interval():
    """A budget that ended there ended the command with a TypeError."""
    document = build_document(compare(-12, -15, -9), is_rival=True)
    picks = {name: pick for name, pick in document["picks"].items() if not pick or pick["id"] != "t2"}
    document |= {"picks": picks, "repeats": document["repeats"][:8]}
    assert find_other(document)["gain"]["ci_pct"] is None
    assert find_lines(document, "other")[0].endswith("8,105 samples/s    512 MiB")


def test_each_change_says_what_it_is_worth_and_what_of_learning_it_touches():
    effects = [
        build_effect("num_workers", 0, 2, compare(19, 15, 24)),
        build_effect("channels_last", False, True, compare(0.2, -0.9, 1.3), is_kept=False),
    ]
    document = build_document(
        FASTER,
        plan={"batch_size": 16, "accumulate": 2, "precision": "bf16", "threads": 1},
        levers=effects,
        numerics=["precision fp32 → bf16"],
        recipe=["micro-batch 32 → 16, effective batch as before"],
    )
    batch, threads, workers, *rest, idle = list_changes(document)
    assert batch == "batch_size: 32 → 16, accumulate: 1 → 2 (effective batch stays)"
    assert " ".join(workers.split()) == "num_workers: 0 → 2 +19 % (+15 to +24)"
    assert rest == ["fused_optimizer: no → yes", "precision: fp32 → bf16 (numerics)"]
    assert threads == "threads: default → 1"
    assert idle == "left out, not shown to gain: channels_last yes (+0.2 %)"
    effects = [build_effect("num_workers", 0, 2, compare(16.0, -100, 1e8))]
    lines = list_changes(build_document(FASTER, plan={"num_workers": 2}, levers=effects))
    assert any(line.endswith(" +16 % (too noisy to tell)") for line in lines), "it gave an interval of nine digits"
    *_, last = list_changes(build_document(FASTER, plan=LONG_PLAN))
    assert last == "and 4 more settings, in the report"


def test_a_faster_plan_whose_changes_were_not_all_looked_at_is_not_taken():
    document = build_document(OPEN)
    document["picks"]["unproven"]["gain"] = FASTER
    said = "another plan is 1.32 × as fast (1.24 to 1.41), but which of its changes it needs is open."
    assert describe_verdict(document) == f"Keep your settings for now: {said}"
    own = dict(document["user_plan"])
    document["repeats"] = [*document["repeats"], document["repeats"][0] | {"plan": own, "status": "timeout"}]
    document |= {"savings": None}
    document["picks"]["unproven"]["gain"] = None
    assert describe_verdict(document) == "Keep your settings, no gain is proven: in turns they did not end in time."


def test_savings_are_said_in_hours_of_this_run_and_only_where_a_gain_is_taken():
    run, paid = describe_saving(build_document(FASTER))
    assert run == "8 min 58 s of this run's 37 min 00 s of training (7 min 10 s to 10 min 46 s; 30 epochs)"
    assert paid == "the search took 4 min 00 s: paid back after 12 min 30 s of training"
    short = build_document(FASTER, savings={"after_s": 60.0})
    assert describe_saving(short)[1] == "the search took 4 min 00 s, more than this run saves: 13 such runs pay it back"
    endless = build_document(FASTER, savings={"before_s": None, "after_s": None})
    assert describe_saving(endless) == [paid]
    assert describe_saving(build_document(OPEN)) == []
    assert describe_saving(build_document(FASTER, verification=WORSE)) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ["learns as well: accuracy 0.9412 → 0.9398, −0.15 % (−0.42 to +0.11), 3 trainings each",
              "time to the same quality 1 min 02 s → 43 s: saved 25 to 36 %"]),
        ({"time_saved_ci95_pct": [-250.0, 99.2]}, ["saved −250 to 99 %, which does not confirm the saving"]),
        ({"quality_after": None, "text": "learns worse: 1 of 3 trainings diverged"},
         ["learns worse: 1 of 3 trainings diverged"]),
    ],
)  # fmt: skip
def test_the_trainings_of_verify_say_what_was_learned_and_whether_time_was_saved(changes, said):
    lines = describe_trainings(build_document(FASTER, verification=VERIFICATION | changes))
    assert lines[-1].endswith(said[-1])
    assert lines[: len(said) - 1] == said[:-1]
    assert describe_trainings(build_document(FASTER)) == []


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (
            build_document(OPEN),
            ["to decide it, 5m at most:", f"{COMPARE} --budget 5m", "--apply-un"],
        ),
        (build_document(OPEN, search={"stalled_pct": 23.0}), ["search again when the machine is quiet", "--apply-unp"]),
        (without_turns(), ["a larger --budget: this one ended the search early"]),
        (build_document(FASTER), []),
        (
            build_document(FASTER, advice={"levers": NOT_TRIED}),
            ["not tried: compile, num_workers 8; add their values to benchmark: levers:"],
        ),
        (
            build_document(
                FASTER,
                advice={"levers": [{"lever": "precision", "value": "fp16", "state": "not in the space"}]},
                probes=[{"kind": "device", "plan": {"precision": "bf16"}}],
            ),
            ["not tried: precision fp16; add their values"],
        ),
        (build_document(compare(-7, -9, -5)), []),
    ],
)
def test_what_to_do_next_follows_from_how_the_search_ended(document, said):
    lines = find_lines(document, "next", source="a.yaml")
    assert len(lines) == len(said)
    assert all(words in line for words, line in zip(said, lines, strict=True))


def test_what_was_not_tried_is_one_line_however_much_it_is():
    """It took the last two of six lines under a verdict."""
    names = [f"a_lever_{n}" for n in range(12)]
    levers = [{"lever": name, "value": True, "state": "not in the space"} for name in names]
    (line,) = find_lines(build_document(FASTER, advice={"levers": levers}), "next", source="a.yaml")
    assert line.startswith("not tried: a_lever_0, a_lever_1 and ")
    assert line.endswith(" more; add their values to benchmark: levers:")


def test_a_command_is_suggested_only_where_it_can_be_run_as_it_stands():
    _, *command, _ = find_lines(build_document(OPEN, plan=LONG_PLAN), "next", source="a.yaml")
    assert [line.endswith(" \\") for line in command] == [True] * (len(command) - 1) + [False]
    words = shlex.split(" ".join(line.removesuffix("\\") for line in command))
    assert words[:3] == ["fulltilt", "compare", "a.yaml"]
    assert {"data.batch_size=16", "speed.precision=bf16", "data.pin_memory=true"} <= set(words)
    assert not any("compare" in line for line in find_lines(build_document(OPEN), "next", source="a.yaml optim.lr=1"))


def test_how_to_apply_it_is_said_where_there_is_something_to_take():
    taken = (build_document(FASTER), without_own(FAILED))
    kept = (build_document(OPEN), build_document(FASTER, verification=WORSE))
    again = "(reads this search: what ran does not run again)"
    assert [find_lines(document, "apply", apply=APPLY) for document in taken] == [[APPLY, again]] * 2
    early = build_document(FASTER, search={"stopped_by_budget": True})
    assert find_lines(early, "apply", apply=APPLY) == [
        APPLY,
        "(searches on as far as the budget allows, and writes what is proven then)",
    ]
    train = "fulltilt train my_module:workload speed.threads=1"
    assert find_lines(taken[0], "apply", apply=train) == [train]
    assert [find_lines(document, "apply", apply=APPLY) for document in kept] == [[]] * 2


def test_what_was_assumed_of_the_users_settings_is_said_with_where_it_came_from():
    """``tune module:workload`` called a batch size that nobody had named the user's own."""
    plan, workload = {"batch_size": 32}, {"optimizer": "SGD", "learning_rate": 0.1}
    default, code = "fulltilt's default", "the workload's own code"
    mixed = {"batch_size": default, "optimizer": code, "learning_rate": code}
    said, remedy = describe_origins(workload | {"taken_from": mixed}, plan, source="m:w")
    assert said == f"batch_size 32 ({default}); SGD, learning rate 0.1 ({code})"
    assert remedy == "yours differ? say so: fulltilt tune m:w data.batch_size=…"
    said, remedy = describe_origins(workload | {"taken_from": dict.fromkeys(mixed, default)}, plan)
    assert said == "batch_size 32, SGD, learning rate 0.1 (fulltilt's defaults)"
    assert remedy.endswith("tune(…, settings={'data.batch_size': …, 'optim.optimizer': …, 'optim.lr': …})")
    assert describe_origins(workload | {"taken_from": dict.fromkeys(mixed, "a.yaml")}, plan) == []
    places = mixed | {"batch_size": "/a/long path/to/a.yaml:12", "learning_rate": "alias lr (/a/b/a.yaml:17)"}
    said, _ = describe_origins(workload | {"taken_from": places | {"optimizer": default}}, plan)
    assert said == f"batch_size 32 (a.yaml:12); SGD ({default}); learning rate 0.1 (alias lr (a.yaml:17))"


NOISY_EPOCH = {"estimate": 0.19, "ci95": [0.00037, 101.0]}


@pytest.mark.parametrize(
    ("epoch", "said"),
    [
        (DOCUMENT["epoch_seconds"], ["one epoch takes about 1.2 s (1.1 s to 1.3 s)"]),
        (NOISY_EPOCH, ["one epoch takes about 0.19 s"]),
        ({"estimate": None, "ci95": None}, []),
    ],
)
def test_an_epoch_is_said_with_its_interval_where_that_tells_something(epoch, said):
    assert describe_epoch(DOCUMENT | {"epoch_seconds": epoch}) == said


def test_what_disturbed_a_comparison_is_said_and_how_plans_took_turns_then():
    assert describe_noise({"stalled_pct": 4.9, "waits_passively": False, "takes_turns": True}) == []
    stalled, passive, whole = describe_noise({"stalled_pct": 23.4, "waits_passively": True, "takes_turns": False})
    assert "up to 23 % of its time" in stalled
    assert "wait_policy" in passive
    assert "thread_affinity" in passive
    assert "whole runs in turn" in whole

"""Say what came of a search: one sentence, and the screen that ends ``fulltilt tune``."""

import math
import re
import statistics
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fulltilt.levers import BATCH, list_changed
from fulltilt.records import format_gib, format_rate
from fulltilt.report.gain import MANY, draw_bar, format_factor, format_gain, say_speedup
from fulltilt.report.summary import Document, count, format_duration, read_recommended
from fulltilt.report.table import format_value, read_memory_gib
from fulltilt.report.turns import find_other, has_stalled, list_settings, read_turns

WIDTH, N_LINES = 100, 24  # of the screen
N_CHANGES = 6  # that are shown; of more it says how many
N_NEXT = 3
DECIDE = "5m"  # of turns between two plans that a search left undecided
LABEL = 9  # columns before a line's text
WORTH = 52  # columns before what a change is worth
BAR = 32  # columns
TELLING_PCT = 300.0  # an interval that reaches further says only that too little was measured
DEFAULT = "fulltilt's default"


def describe_verdict(document: Document) -> str:
    """Say in one sentence what to do, and what that was measured to gain."""
    pick, savings = read_recommended(document), document.get("savings")
    if pick.get("proven"):
        where = "On this machine, as busy as it is: " if has_stalled(document["search"].get("stalled_pct")) else ""
        fast = say_speedup(pick["gain"], "as fast as your settings")
        return f"{where}{fast}, proven; {_say_learning(document, pick)}."
    other = document["picks"].get("unproven") or pick
    is_faster = (other.get("gain") or {}).get("verdict") == "faster"
    if learns_worse(document) and is_faster:
        return f"Keep your settings: the fastest plan is {say_speedup(other['gain'], 'as fast')}, but learned worse."
    if savings and is_faster:
        fast = say_speedup(other["gain"], "as fast")
        return f"Keep your settings for now: another plan is {fast}, but which of its changes it needs is open."
    if not savings:
        return _describe_unknown(document, pick)
    if savings["verdict"] == "same plan":
        if document["search"].get("stopped_by_budget") and not document["search"].get("n_groups"):
            return "No result yet, keep your settings: the search ended before another plan was compared with them."
        gain = (find_other(document) or {}).get("gain")
        if gain and gain["gain_pct"] > 0:  # the bars show it, and its groups do not agree
            return "Keep your settings, no gain is proven: too little was measured to tell."
        has_other = any(row["status"] == "ok" and row["id"] != pick["id"] for row in document["trials"])
        return f"Keep your settings: no other plan {'came out faster' if has_other else 'ran to its end'}."
    low_pct, high_pct = other["gain"]["ci_pct"]
    best = "the best other plan is"
    if savings["verdict"] == "equal":
        return f"Keep your settings: {best} as fast, within {max(-low_pct, high_pct):.1f} %."
    if savings["verdict"] == "slower" or high_pct <= 0:
        return f"Keep your settings: {best} {-high_pct:.0f} to {-low_pct:.0f} % slower."
    if high_pct > TELLING_PCT:
        return "Keep your settings, no gain is proven: too little was measured to tell."
    if low_pct > 0:
        fast = say_speedup(other["gain"], "as fast")
        return f"Keep your settings for now: another plan looks {fast}, not proven yet."
    return f"Keep your settings, no gain is proven: {best} between {-low_pct:.0f} % slower and {high_pct:.0f} % faster."


def learns_worse(document: Document) -> bool:
    """Whether the trainings of ``--verify`` showed that the fastest plan learns worse."""
    return (document.get("verification") or {}).get("verdict") == "learns worse"


def _describe_unknown(document: Document, pick: Mapping[str, Any]) -> str:
    """Say what there is where nothing was compared with the user's own settings."""
    if learns_worse(document):
        return "Keep your settings, no gain is proven: the best other plan learned worse."
    baseline, own = document.get("baseline"), document.get("user_plan")
    failed = [row for row in document.get("repeats") or () if row["plan"] == own and row["status"] != "ok"]
    ends = {"out_of_memory": "ran out of memory", "timeout": "did not end in time"}
    if failed:
        return f"Keep your settings, no gain is proven: in turns they {ends.get(failed[0]['status'], 'failed')}."
    if baseline and baseline["status"] == "ok" and read_turns(document, own):
        return "Keep your settings, no gain is proven: the search ended after too few turns to tell."
    if baseline and baseline["status"] == "ok":
        return "No result yet, keep your settings: the search ended before another plan was compared with them."
    end = ends.get(baseline["status"], "failed") if baseline else "did not run"
    rate = pick.get("samples_per_s")
    return f"Your settings {end}; these run{f' at {format_rate(rate)} samples/s' if rate else ''}."


def _say_learning(document: Document, pick: Mapping[str, Any]) -> str:
    if (document.get("verification") or {}).get("verdict") == "learns as well":
        return "learns as well"
    changes = pick.get("changes") or {}
    recipe = [line for line in changes.get("recipe", ()) if not line.startswith("micro-batch")]
    changed = [kind for kind, lines in (("recipe", recipe), ("numerics", changes.get("numerics"))) if lines]
    if changed:
        return f"changes the {' and the '.join(changed)}"
    return "the effective batch stays" if changes.get("recipe") else "recipe and numerics stay"


def build_screen(
    document: Document, *, files: str = "", apply: str = "", source: str = "", left_out: str | None = None
) -> list[str]:
    """Build the lines that end a search: at most a screen, the verdict first.

    Args:
        files: Where the report lies.
        apply: The command that writes the settings into a file; "" where that was done, or there is none.
        source: What was searched, as the command names it.
        left_out: What a search of more than was named would add.
    """
    is_better, other = is_worth_taking(document), find_other(document)
    following = [*([left_out] if left_out else []), *list_next(document, source=source)][:N_NEXT]
    lines = [
        *textwrap.wrap(describe_verdict(document), WIDTH),
        "",
        *_list_sides(document, other, "pick" if is_better else "other"),
        "",
        *_label("assumed", describe_origins(document.get("workload"), document.get("user_plan"), source=source)),
        *_label("change" if is_better else "differs", list_changes(document)),
        *_label("saves", describe_saving(document)),
        *_label("lr", describe_learning_rate(document)),
        *_label("checked", describe_trainings(document)),
        *_label("noise", describe_noise(document["search"])),
        *_label("next", following),
    ]
    end = [
        *_label("apply", _describe_apply(document, apply) if apply and is_better else ()),
        *_label("files", [files] if files else ()),
    ]
    return lines[: N_LINES - len(end)] + end


def _describe_apply(document: Document, command: str) -> list[str]:
    """Say which command takes the settings, and whether it searches again before it writes them."""
    if " --apply " not in command:
        return [command]
    is_early = document["search"].get("stopped_by_budget")
    return [
        command,
        "(searches on as far as the budget allows, and writes what is proven then)"
        if is_early
        else "(reads this search: what ran does not run again)",
    ]


def is_worth_taking(document: Document) -> bool:
    """Whether the recommended plan is proven, or runs where the user's own fails."""
    has_failed = (document.get("baseline") or {"status": "ok"})["status"] != "ok"
    return bool(read_recommended(document).get("proven") or has_failed)


def _label(name: str, texts: Iterable[str]) -> Iterator[str]:
    """Put the name before the first of the lines; what is too long goes on in the next; commands can be run so."""
    for text in texts:
        end = " \\" if text.startswith("fulltilt ") else ""
        width = WIDTH - LABEL - len(end)
        *lines, last = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]
        for line in (*(f"{line}{end}" for line in lines), last):
            yield f"{name:<{LABEL}}{line}"
            name = ""


def _list_sides(document: Document, other: Mapping[str, Any] | None, name: str) -> Iterator[str]:
    """List yours and the other plan as bars on one scale: their speeds in turns, which are what was compared.

    Args:
        name: Of the other plan.
    """
    baseline = document.get("baseline")
    own = list(read_turns(document, document.get("user_plan")).values())
    gain = (other or {}).get("gain")
    before = (document.get("savings") or {}).get("before_samples_per_s") or (statistics.median(own) if own else None)
    if before and baseline and other and gain:
        after = before * (1 + gain["gain_pct"] / 100)
        ends = [before * (1 + pct / 100) for pct in gain["ci_pct"] or ()]
        most = max([after, *ends])
        scale = max(before, min(most, 1.5 * after))
        yield _draw_side("yours", baseline, before, scale)
        bar = _draw_side(name, other, after, scale, ends)
        if name == "pick":  # the verdict says what it gains
            is_shown = "░" in bar and most <= scale
            yield f"{bar}   ░ up to {format_factor(most / before)} ×" if is_shown else bar
        else:
            is_shown = bool(ends) and gain["ci_pct"][1] <= TELLING_PCT
            yield f"{bar}   {_say_worth(gain)}" if is_shown else bar
        return
    for label, row, rate in (("yours", baseline, before), (name, other, None)):
        if row and row["status"] != "ok":
            yield from _label(label, [(row.get("reason") or row["status"]).partition("\n")[0]])
        elif row and (said := rate or row.get("samples_per_s")):
            yield f"{label:<{LABEL}}{format_rate(said)} samples/s{_say_memory(row)}{'' if rate else '   in one run'}"


def _draw_side(name: str, row: Mapping[str, Any], rate: float, scale: float, interval: Sequence[float] = ()) -> str:
    return f"{name:<{LABEL}}{draw_bar(rate, scale, interval, BAR)}  {format_rate(rate):>9} samples/s{_say_memory(row)}"


def _say_memory(row: Mapping[str, Any]) -> str:
    memory_gib = read_memory_gib(row)
    return "" if memory_gib is None else f" {format_gib(memory_gib):>10}"


def describe_origins(
    workload: Mapping[str, Any] | None, plan: Mapping[str, Any] | None, *, source: str = ""
) -> list[str]:
    """Say what was taken as the user's own without being written down, from where, and how to say it.

    Args:
        source: What was searched, as the command names it; "" where only Python can.
    """
    workload, plan = workload or {}, plan or {}
    origins, rate = workload.get("taken_from") or {}, workload.get("learning_rate")
    values = {
        "batch_size": f"batch_size {plan.get('batch_size')}",
        "optimizer": workload.get("optimizer"),
        "learning_rate": None if rate is None else f"learning rate {rate:g}",
    }
    if DEFAULT not in origins.values():
        return []
    by_origin: dict[str, list[str]] = {}
    for name, origin in origins.items():
        origin = re.sub(r"(^|\()[^()]*/(?=[^/]+:\d)", r"\1", origin)  # of a file and line, its name is enough
        by_origin.setdefault(origin, []).append(values[name] or name)
    said = "; ".join(f"{', '.join(parts)} ({origin})" for origin, parts in by_origin.items())
    said = said.replace(f"({DEFAULT})", f"({DEFAULT}s)") if len(by_origin[DEFAULT]) > 1 else said
    keys = {"batch_size": "data.batch_size", "optimizer": "optim.optimizer", "learning_rate": "optim.lr"}
    missing = [keys[name] for name, origin in origins.items() if origin == DEFAULT]
    how = f"fulltilt tune {source} {' '.join(f'{key}=…' for key in missing)}"
    if not source:
        how = f"tune(…, settings={{{', '.join(f'{key!r}: …' for key in missing)}}})"
    return [said, f"yours differ? say so: {how}"]


def _say_setting(value: Any) -> str:
    return "default" if value is None else format_value(value)


def list_changes(document: Document) -> list[str]:
    """List what the other plan has otherwise than the user's, each with what it was measured to be worth."""
    other, own = find_other(document) or {}, document.get("user_plan") or {}
    plan, effects = other.get("plan") or {}, document.get("levers") or ()
    worth = {name: effect["gain"] for effect in effects for name in effect["names"]}
    lines = []
    for names in list_changed(own, plan):
        text = ", ".join(f"{name}: {_say_setting(own.get(name))} → {_say_setting(plan[name])}" for name in names)
        text += _say_kinds(names, other)
        gain = worth.get(names[0])
        lines.append(f"{text:<{WORTH - 1}} {_say_worth(gain)}" if gain else text)
    if (more := len(lines) - N_CHANGES) > 1:
        lines = [*lines[:N_CHANGES], f"and {count(more, 'more setting')}, in the report"]
    idle = [
        f"{name} {format_value(value)} ({format_gain(effect['gain']['gain_pct'])})"
        for effect in effects
        if not effect["is_kept"]
        for name, value in zip(effect["names"], effect["after"], strict=True)
    ]
    return [*lines, f"left out, not shown to gain: {', '.join(idle)}"] if idle else lines


def _say_kinds(names: Sequence[str], row: Mapping[str, Any]) -> str:
    """Say in brackets what of learning a change touches."""
    starts = ("effective batch", "micro-batch") if names[0] in BATCH else names
    found = {
        kind: line
        for kind, lines in (row.get("changes") or {}).items()
        for line in lines
        if line.startswith(tuple(f"{start} " for start in starts))
    }
    if found.get("recipe", "").startswith("micro-batch"):
        return " (effective batch stays)"
    return f" ({', '.join(found)})" if found else ""


def _say_worth(gain: Mapping[str, Any]) -> str:
    low, high = gain["ci_pct"]
    if 1 + gain["gain_pct"] / 100 >= MANY:
        return say_speedup(gain)
    if high > TELLING_PCT:
        return f"{format_gain(gain['gain_pct'])} (too noisy to tell)"
    digits = 1 if max(abs(low), abs(high)) < 9.95 else 0
    return f"{format_gain(gain['gain_pct'])} ({low:+z.{digits}f} to {high:+z.{digits}f})".replace("-", "−")


def describe_saving(document: Document) -> list[str]:
    """Say what the user's own run takes before and after, and when the search has paid for itself."""
    savings = document.get("savings") or {}
    if savings.get("verdict") != "faster" or not is_worth_taking(document):
        return []
    lines = []
    if savings["before_s"] is not None:
        before, saved = format_duration(savings["before_s"]), format_duration(savings["saved_s"])
        low, high = map(format_duration, savings["saved_s_ci"])
        lines.append(f"{saved} of this run's {before} of training ({low} to {high}; {savings['n_epochs']} epochs)")
    took, after = format_duration(savings["search_s"]), format_duration(savings["payback_s"])
    if savings["after_s"] is not None and savings["payback_s"] > savings["after_s"]:
        n_runs = math.ceil(savings["payback_s"] / savings["after_s"])
        return [*lines, f"the search took {took}, more than this run saves: {n_runs} such runs pay it back"]
    return [*lines, f"the search took {took}: paid back after {after} of training"]


def describe_trainings(document: Document) -> list[str]:
    """Say in short what the trainings of ``--verify`` came to, and whether they confirm the saving."""
    made = document.get("verification") or {}
    if not made:
        return [note for note in document.get("notes") or () if note.startswith("--verify came to no verdict")]
    if made.get("quality_after") is None:
        return [made["text"]]
    (low, high), n = made["quality_change_ci95_pct"], made["n_pairs"]
    said = f"{made['verdict']}: {made['metric']} {made['quality_before']:.4g} → {made['quality_after']:.4g}"
    said += f", {made['quality_change_pct']:+.2f} % ({low:+.2f} to {high:+.2f})"
    lines = [f"{said}, {n} trainings each".replace("-", "−")]
    before, after = format_duration(made["time_before_s"]), format_duration(made["time_after_s"])
    low, high = made["time_saved_ci95_pct"]
    time = f"time to the same quality {before} → {after}: saved {low:.0f} to {high:.0f} %".replace("-", "−")
    is_claimed = (document.get("savings") or {}).get("verdict") == "faster"
    return [*lines, f"{time}, which does not confirm the saving" if is_claimed and low <= 0 else time]


def describe_noise(turns: Mapping[str, Any]) -> list[str]:
    """Say what disturbed a comparison, where something did.

    Args:
        turns: The ``search`` of a document, or what ``fulltilt compare`` measured.
    """
    lines = []
    if has_stalled(turns.get("stalled_pct")):
        lines.append(f"the machine was busy: a plan spent up to {turns['stalled_pct']:.0f} % of its time in stalls")
    if turns.get("waits_passively"):
        how = "threads sleep while they wait (wait_policy), on a core each where they can (thread_affinity)"
        lines.append(f"the machine was busy, so that plans took turns in another way: {how}")
    if turns.get("takes_turns") is False:
        lines.append("the plans could not live at the same time: whole runs in turn, which drift disturbs more")
    return lines


def list_warnings(document: Document, *, source: str = "") -> list[str]:
    """List what a user has to know beside the verdict: what disturbed it, what failed, what helps an open one."""
    failed = () if document.get("verification") else describe_trainings(document)
    is_open = bool(document["search"].get("stopped_by_budget")) and not is_worth_taking(document)
    return [*describe_noise(document["search"]), *failed, *(list_next(document, source=source)[:1] if is_open else ())]


def list_next(document: Document, *, source: str = "") -> list[str]:
    """List what would help next, a few lines at most.

    Args:
        source: What was searched, as the command names it; "" where no command says it in one word.
    """
    search, savings = document["search"], document.get("savings") or {}
    advice = (document.get("advice") or {}).get("levers") or ()
    missing = dict.fromkeys(_name_missing(document, part) for part in advice if part["state"] == "not in the space")
    lines, is_busy = [], has_stalled(search.get("stalled_pct")) or search.get("waits_passively")
    if search.get("stopped_by_budget") and is_busy:
        lines.append("a larger --budget: the same command goes on from here; or a quiet machine, with a new --out")
    elif search.get("stopped_by_budget"):
        lines.append("a larger --budget: this one ended the search early; the same command goes on from here")
    elif is_busy:
        lines.append("search again when the machine is quiet, with --out and a new folder")
    elif savings.get("verdict") == "undecided" and source and " " not in source:
        changed = list_settings(document.get("user_plan") or {}, (find_other(document) or {}).get("plan") or {})
        words = " ".join(f"{key}={value}" for key, _, value in changed)
        lines += [f"to decide it, {DECIDE} at most:", f"fulltilt compare {source} {words} --budget {DECIDE}"]
    changes, is_taken = read_recommended(document).get("changes") or {}, is_worth_taking(document)
    is_checked = bool(document.get("verification"))
    if is_taken and not is_checked and changes.get("numerics"):
        lines.append("numerics: results differ by rounding; --verify trains both and compares what is learned")
    if missing:
        lines.append(_list_missing([*missing]))
    is_open = savings.get("verdict") == "undecided" and not search.get("stopped_by_budget")
    if (is_checked or not is_taken) and (is_open or learns_worse(document)):
        lines.append("--apply FILE --apply-unproven writes the other plan all the same")
    return lines[:N_NEXT]


def _list_missing(names: Sequence[str]) -> str:
    """List what was not tried in one line of the screen."""
    end = "; add their values to benchmark: levers:"
    said = f"not tried: {', '.join(names)}{end}"
    for n_shown in range(len(names) - 1, 0, -1):
        if len(said) <= WIDTH - LABEL:
            break
        said = f"not tried: {', '.join(names[:n_shown])} and {len(names) - n_shown} more{end}"
    return said


def _name_missing(document: Document, part: Mapping[str, Any]) -> str:
    """Name a lever that was not tried; of one that other values were tried of, in a probe too, the value."""
    ran = [*document["trials"], *(probe for probe in document.get("probes") or () if probe["kind"] != "memory")]
    values = {repr(row["plan"].get(part["lever"])) for row in ran}
    return f"{part['lever']} {format_value(part['value'])}" if len(values) > 1 else part["lever"]


def describe_epoch(document: Document) -> list[str]:
    """Say how long one pass over the training set takes with the recommended plan."""
    epoch = document.get("epoch_seconds") or {}
    if not epoch.get("estimate"):
        return []
    text = f"one epoch takes about {format_duration(epoch['estimate'])}"
    if epoch.get("ci95") and epoch["ci95"][1] < 100 * epoch["ci95"][0]:
        low, high = map(format_duration, epoch["ci95"])
        text += f" ({low} to {high})"
    return [text]


def describe_learning_rate(document: Document) -> list[str]:
    """Say how the learning rate follows the effective batch, where a plan with another one is recommended."""
    rate = document.get("learning_rate") if is_worth_taking(document) else None
    if not rate or rate.get("from") is None or rate.get("to") is None or rate["from"] == rate["to"]:
        return []
    return [f"learning rate {rate['from']:g} → {rate['to']:g} by the {rate['rule']} rule: the effective batch changed"]

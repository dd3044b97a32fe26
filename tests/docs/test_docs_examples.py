"""Every command, link and file that the documents name exists and parses."""

import re
import shlex
from pathlib import Path

import pytest

from fulltilt.cli import build_parser
from fulltilt.cli._shared import read_config
from fulltilt.config import load_points
from fulltilt.levers import load_catalogue

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
OURS = ("configs/", "recipes/")
DOORS = {
    "scripts/analysis/benchmark_gpu.py": "tune",
    "scripts/train.py": "train",
    "scripts/train_bilm.py": "train",
    "train.py": "contrastive",
}


def find_commands(text):
    """``fulltilt …`` and ``python scripts/… …`` lines of code blocks, continuation lines joined, comments cut."""
    for block in re.findall(r"```\w*\n(.*?)```", text, re.S):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.split(" # ")[0].split("  #")[0], comments=True) if line.strip() else []
            if words[:1] == ["fulltilt"]:
                yield words[1:]
            elif words[:1] == ["python"] and words[1] in DOORS:
                yield [DOORS[words[1]], *words[2:]]


COMMANDS = [(page.name, command) for page in PAGES for command in find_commands(page.read_text())]


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=lambda x: x if isinstance(x, str) else " ".join(x))
def test_a_documented_command_parses_and_its_files_exist(page, command, monkeypatch):
    monkeypatch.chdir(ROOT)
    args = build_parser(command[0]).parse_args(command)
    for name in (getattr(args, "config", None), getattr(args, "config_flag", None), getattr(args, "apply", None)):
        if name and name.startswith(OURS):
            assert Path(name).exists()
    config = getattr(args, "config", None) or getattr(args, "config_flag", None) or ""
    if config.startswith(OURS) and command[0] == "lab":
        assert len(load_points(config, args.overrides)) > 1
    elif config.startswith(OURS):
        read_config(args)  # with the words and flags on top of the file; no data is read


def test_the_documents_show_commands_at_all():
    assert len(COMMANDS) >= 10


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_pictures_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_the_readme_stays_one_screen():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 60


def test_every_measured_claim_of_the_readme_names_a_result_file():
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("|")][2:]
    assert rows
    for row in rows:
        assert re.search(r"\(benchmarks/results/[\w.-]+\.json\)", row), row


def test_every_make_target_says_what_it_does():
    makefile = (ROOT / "Makefile").read_text()
    targets = re.search(r"^\.PHONY: (.*)$", makefile, re.M).group(1).split()
    explained = re.findall(r"^([a-z-]+):.*?## \w", makefile, re.M)
    assert sorted(targets) == sorted(explained)


def test_every_lever_has_a_doc_worth_the_name():
    for lever in load_catalogue().values():
        assert len(lever.doc) > 80, lever.name
        assert lever.summary.endswith("."), lever.name

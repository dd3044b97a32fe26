"""Where a script takes its training steps, and what runs at each of them, told from its text."""

from __future__ import annotations

import textwrap

import pytest

from fulltilt.doctor.read import read_scripts

STEP = "loss = criterion(model(x), y); loss.backward(); optimizer.step()"


def _read(folder, **files):
    for name, code in files.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(code))
    return read_scripts([str(folder)])


def _list_loops(folder, code):
    """The source lines of the hot loops."""
    lines = textwrap.dedent(code).splitlines()
    return [lines[hot.loop.lineno - 1].strip() for hot in _read(folder, train=code).hot_loops]


@pytest.mark.parametrize(
    ("code", "loops"),
    [
        pytest.param(
            f"for epoch in range(9):\n    for x, y in loader:\n        {STEP}", ["for x, y in loader:"], id="inner"
        ),
        pytest.param(
            """
            while True:
                for micro in range(4):
                    scaler.scale(model(x) / 4).backward()
                scaler.step(optimizer)
            """,
            ["while True:"],
            id="micro-batches",
        ),
        pytest.param(
            """
            for epoch in range(9):
                for x in loader:
                    model(x).backward()
                    update_by_hand(model)
                scheduler.step()
            """,
            ["for x in loader:"],
            id="a scheduler is no optimizer",
        ),
        pytest.param(
            """
            def accumulate(batches):
                for x in batches:
                    model(x).backward()

            for step in range(100):
                accumulate(batches)
                for optimizer in optimizers:
                    optimizer.step()
            """,
            ["for step in range(100):"],
            id="micro-batches in a function",
        ),
        pytest.param(
            """
            for i in range(20):
                def closure():
                    loss = model(x)
                    loss.backward()
                    return loss
                optimizer.step(closure)
            """,
            ["for i in range(20):"],
            id="closure",
        ),
        pytest.param(
            """
            for x, y in loader:
                model(x).backward(); optimizer_a.step()
            for x, y in other:
                model(x).backward(); optimizer_b.step()
            """,
            ["for x, y in loader:", "for x, y in other:"],
            id="two",
        ),
        pytest.param(
            "for x in loader:\n    loss_scaler(loss, optimizer, parameters=p)", ["for x in loader:"], id="scaler"
        ),
        pytest.param(
            "while loss > 1:\n    loss = model(x); loss.backward(); adam.step()", ["while loss > 1:"], id="while"
        ),
        pytest.param("for x in loader:\n    print(model(x))", [], id="no training"),
        pytest.param(f"def training_step(x, y):\n    {STEP}", [], id="a framework has the loop"),
    ],
)
def test_hot_loop_is_where_backward_and_step_are(tmp_path, code, loops):
    assert _list_loops(tmp_path, code) == loops


def test_calls_are_followed_through_functions_methods_and_files(tmp_path):
    reading = _read(
        tmp_path,
        train="""
            from model import Net
            from steps import Trainer
            import meters

            trainer = Trainer()
            net = Net().to(device)
            for x, y in loader:
                trainer.fit(net(x.to(device)), y)
                meters.note(trainer)
            """,
        steps="""
            class Base:
                def note(self, loss):
                    self.last = loss.item()

            class Meter:
                def add(self, loss):
                    self.total += float(loss.sum())

            class Trainer(Base):
                def __init__(self):
                    self.meter = Meter()

                def fit(self, x, y):
                    loss = criterion(x, y)
                    self.optimizer.zero_grad(); loss.backward(); self.optimizer.step()
                    self.note(loss)
                    self.meter.add(loss)
            """,
        model="""
            class Net(nn.Module):
                def forward(self, x):
                    return x * self.scale.item()
            """,
        meters="""
            from functools import lru_cache

            def note(trainer):
                look_up()
                helper = lambda: trainer.a.item()

            @lru_cache
            def look_up():
                return table.item()

            def never_called(loss):
                return loss.item()
            """,
    )
    assert [hot.loop.lineno for hot in reading.hot_loops] == [8]
    assert [finding.evidence["code"] for finding in reading.findings] == [
        "return x * self.scale.item()",
        "self.last = loss.item()",
        "self.total += float(loss.sum())",
    ]
    assert all("train.py:8" in finding.evidence["why_hot"] for finding in reading.findings)
    assert reading.findings[1].evidence["why_hot"].endswith("through fit()")


@pytest.mark.parametrize(
    ("body", "is_hot"),
    [
        ("if step % 10: continue\nloss.item()", False),
        ("if step != last_step: continue\nloss.item()", False),
        ("if not math.isfinite(total): continue\nloss.item()", True),
        ("if step >= n_steps: break\nloss.item()", True),
        ("if loss.item() > 9: stop()", True),
        ("if loud: loss.item()", False),
        ("x = loss.item() if loud else 0", False),
        ("step % 10 == 0 and note(loss.item())", False),
        ("try:\n    save()\nexcept OSError:\n    loss.item()", False),
        ("with timer:\n    for _ in range(3):\n        loss.item()", True),
        ("while out.sum().item() > 1: out = out / 2", True),
        ("def later():\n    return loss.item()", False),
    ],
)
def test_what_is_guarded_does_not_run_at_every_step(tmp_path, body, is_hot):
    code = f"for step, (x, y) in enumerate(loader):\n    {STEP}\n" + textwrap.indent(body, "    ")
    assert bool(_read(tmp_path, train=code).findings) is is_hot


def test_an_import_is_followed_to_the_module_that_it_names(tmp_path):
    for package in ("ours", "theirs"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "meters.py").write_text(f"def note(x):\n    {package} = x.item()\n")
    code = f"from theirs.meters import note\nx = 1.0\nfor x, y in batches:\n    {STEP}\n    note(loss)\n"
    assert [finding.evidence["code"] for finding in _read(tmp_path, train=code).findings] == ["theirs = x.item()"]


@pytest.mark.parametrize(
    ("code", "line"),
    [
        pytest.param(
            f"def note(v):\n    v.item()\nv = 1.0\nfor x, y in loader:\n    {STEP}\n    note(out)\n",
            2,
            id="a parameter is not the name outside",
        ),
        pytest.param(f"while loss.item() > 1:\n    {STEP}\n", 1, id="a while loop's condition is part of its step"),
        pytest.param(
            f"a = 1\n\x0c\nfor x, y in loader:\n    {STEP}\n    t = loss.item()\n", 5, id="lines as Python counts"
        ),
    ],
)
def test_the_one_finding_is_at_its_line(tmp_path, code, line):
    assert [finding.line for finding in _read(tmp_path, train=code).findings] == [line]

"""``fulltilt doctor read``: what the rules say of a script by reading it, and what a user sees of that."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from fulltilt.cli import run_command
from fulltilt.doctor.read import read_scripts

SLOW = Path(__file__).parents[3] / "scripts" / "slow_train.py"
IMPORTS = "import io, json, time, re\nimport h5py\nimport numpy as np\nimport pandas as pd\nimport torch\n"
LOOP = """
for step, (x, y) in enumerate(loader):
    x, target = x.to(device), y.to(device)
    out = model(x)
    loss = criterion(out, target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
DATASET = """
class Digits(torch.utils.data.Dataset):
    def __getitem__(self, index):
        image = self.images[index]
"""


def _find(tmp_path, code):
    """(rule, source line) of every finding."""
    script = tmp_path / "train.py"
    script.write_text(IMPORTS + code)
    return [(finding.rule, finding.evidence["code"]) for finding in read_scripts([str(script)]).findings]


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("losses.append(loss.item())", "host-sync"),
        ("total += float(loss)", "host-sync"),
        ("correct += int((out.argmax(1) == target).sum())", "host-sync"),
        ("guess = out.argmax(1).cpu().numpy()", "host-sync"),
        ("seen.extend(target.tolist())", "host-sync"),
        ("print(step, loss)", "host-sync"),
        ("bar.set_description(f'{loss:.3f}')", "host-sync"),
        ("torch.save(model.state_dict(), 'last.pt')", "file-write"),
        ("torch.save({k: v.cpu() for k, v in model.state_dict().items()}, 'last.pt')", "file-write"),
        ("np.savez('last.npz', step=step)", "file-write"),
        ("open('log.txt', mode='a').write('step')", "file-write"),
        ("folder.joinpath('log.json').write_text(json.dumps(history))", "file-write"),
        ("frame.to_csv('log.csv')", "file-write"),
        ("figure.savefig('loss.png')", "file-write"),
    ],
)
def test_what_costs_at_every_step_is_one_finding(tmp_path, line, rule):
    assert _find(tmp_path, LOOP + f"    {line}\n") == [(rule, line)]
    assert _find(tmp_path, LOOP + f"    if step % 100 == 0:\n        {line}\n") == []
    assert _find(tmp_path, LOOP + f"{line}\n") == []


@pytest.mark.parametrize(
    "line",
    [
        "running += loss.detach()",
        "history = dict(a=1); rows = history.items()",
        "mean = np.mean(window).item()",
        "window = np.zeros(9); shown = window.tolist()",
        "k = torch.randint(0, 9, (1,)).item()",
        "bias = 5 * torch.randn(1); shown = bias.item()",
        "seen = np.zeros(9); seen = seen + 1; shown = seen.tolist()",
        "names = [classes[i] for i in y.tolist()]",
        "print(f'step {step}')",
        "print(loss_name, float(lr), int(step))",
        "model.cpu()",
        "text = json.dumps(history); rate = float(out.shape[0])",
        "lines = open('list.txt').read(); more = open('list.bin', 'rb').read()",
        "frame.to_json()",
    ],
)
def test_what_costs_nothing_there_is_no_finding(tmp_path, line):
    assert _find(tmp_path, LOOP + f"    {line}\n") == []


WRITES = """
    with open("a.json", "w") as file:
        json.dump(history, file)
    with open("b.txt", "a") as file:
        file.write("loss")
        json.dump(history, file, indent=1)
    log = open("c.txt", "w")
    log.close()
"""
LOOPS = "        for y in range(h):\n            for x in range(w):\n                image[y, x] = [2 * v for v in z]\n"


@pytest.mark.parametrize(
    ("code", "rule", "lines"),
    [
        (
            LOOP
            + "    value = loss.item()\n    total = total + value\n    print(f'{total:.3f}', float(value), value)\n",
            "host-sync",
            ["value = loss.item()"],
        ),
        (LOOP + "    loss = loss.item()\n    print(loss)\n", "host-sync", ["loss = loss.item()"]),
        (
            LOOP + WRITES,
            "file-write",
            ["json.dump(history, file)", 'file.write("loss")', 'log = open("c.txt", "w")'],
        ),
        (DATASET + LOOPS, "slow-transform", ["for y in range(h):"]),
    ],
    ids=["a number read is a number", "in place", "a file at the line that writes", "loops inside a slow loop"],
)
def test_what_belongs_together_is_told_once(tmp_path, code, rule, lines):
    assert _find(tmp_path, code) == [(rule, line) for line in lines]


@pytest.mark.parametrize(
    "body",
    [
        "for y in range(height): rows[y] = image[y] * 2",
        "image = [(pixel - low) / span for pixel in image]",
        "ids = [self.vocabulary[token] for token in self.texts[index].split()]",
        "image = np.vectorize(stretch)(image)",
        "label = pd.read_csv(self.table).label[index]",
        "label = h5py.File(self.path)['label'][index]",
        "image = self.enlarge(image)",
        "pattern = re.compile('[a-z]')",
        "time.sleep(0.1)",
    ],
)
def test_what_is_slow_for_every_sample_is_found(tmp_path, body):
    helper = "    def enlarge(self, image):\n        return [[v * 2 for v in row] for row in image]\n"
    found = _find(tmp_path, f"{DATASET}        {body}\n        return image\n{helper}")
    assert [rule for rule, _ in found] == ["slow-transform"]


@pytest.mark.parametrize(
    "body",
    [
        "image = Image.open(self.paths[index])",
        "image = np.load(self.paths[index])",
        "path = self.folder / self.names[index]; image = torch.load(path)",
        "for transform in self.transforms: image = transform(image)",
        "for i in range(len(self.transforms)): image = self.transforms[i](image)",
        "files = [self.root + '/' + part for part in self.parts[index]]",
        "for channel in range(3): image[channel] -= self.mean[channel]",
        "views = [self.augment(image) for _ in range(self.n_views)]",
        "fields = {key: self.columns[key][index] for key in self.keys}",
        "if self.file is None: self.file = h5py.File(self.path)",
        "noise = np.load(random.choice(self.noises))",
    ],
)
def test_what_a_sample_needs_is_not_slow(tmp_path, body):
    assert _find(tmp_path, f"{DATASET}        {body}\n        return image\n") == []


def test_transforms_and_collate_functions_are_read_as_such(tmp_path):
    code = """
    def stretch(image):
        return [v * 2 for v in image]

    class Blur:
        def __call__(self, image):
            for x in range(self.width): image[x] += 1
            return image

    def unused(image):
        return [v * 3 for v in image]

    def collate(batch):
        for i, (image, n) in enumerate(batch):
            padded[i, :n] = image
        return padded, [sum(v * v for v in image) for image, _ in batch]

    class Numbers:
        def __getitem__(self, index):
            return [n + 1 for n in self.numbers]

    transform = Compose([Blur(), Lambda(lambda image: [v - 1 for v in image]), stretch])
    loader = DataLoader(ImageFolder("data", transform=transform), collate_fn=partial(collate, n_max=9))
    other = DataLoader(Numbers())
    """
    assert [line for _, line in _find(tmp_path, textwrap.dedent(code))] == [
        "return [v * 2 for v in image]",
        "for x in range(self.width): image[x] += 1",
        "return padded, [sum(v * v for v in image) for image, _ in batch]",
        "return [n + 1 for n in self.numbers]",
        "transform = Compose([Blur(), Lambda(lambda image: [v - 1 for v in image]), stretch])",
    ]


def test_the_three_faults_of_the_slow_script_are_found_as_a_user_sees_them(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(SLOW.parents[1])
    assert run_command(["doctor", "read", "scripts/slow_train.py", "--json", str(tmp_path / "found.json")]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == (
        "3 places in scripts/slow_train.py may cost time at every step; nothing was run: "
        "`fulltilt doctor watch -- python scripts/slow_train.py` measures them"
    )
    lines = [line.strip() for line in SLOW.read_text().splitlines()]
    expected = {
        "slow-transform": "stretched.append([(pixel - low) / (high - low) for pixel in row])",
        "host-sync": "total += loss.item()",
        "file-write": "json.dump(history, file, indent=2)",
    }
    places = {rule: lines.index(code) + 1 for rule, code in expected.items()}
    assert out[1::3] == [f"scripts/slow_train.py:{line}  {rule}" for rule, line in places.items()]
    assert [line.strip() for line in out[2::3]] == [*expected.values()]
    document = json.loads((tmp_path / "found.json").read_text())
    assert [finding["rule"] for finding in document["findings"]] == [*expected]
    assert {finding["verdict"] for finding in document["findings"]} == {"unconfirmed"}
    assert all(finding["gain_pct"] is None and finding["fix"] for finding in document["findings"])
    assert document["checked"] == ["host-sync", "slow-transform", "file-write"]
    assert document["steps"] == {"n": 0, "wall_ms_median": None}
    assert document["version"] == 1


def test_many_findings_fit_one_screen(tmp_path, capsys):
    (tmp_path / "train.py").write_text(LOOP + "    note(loss.item())\n" * 30)
    assert run_command(["doctor", "read", str(tmp_path)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("30 places in ")
    assert out[-1] == "and 25 more; --verbose prints all"
    assert sum(1 + len(line) // 100 for line in out) <= 24
    assert run_command(["doctor", "read", str(tmp_path), "--verbose"]) == 0
    assert capsys.readouterr().out.count("  host-sync\n") == 30


def test_a_folder_is_read_without_what_is_not_the_users(tmp_path, capsys):
    slow = LOOP + "    loss.item()\n"
    for name in ("src/train.py", ".git/hook.py", "env/lib/site.py", "lib/site-packages/torch.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(slow)
    (tmp_path / "env" / "pyvenv.cfg").touch()
    (tmp_path / "broken.py").write_text("a = 1\nb = (\n")
    (tmp_path / "binary.py").write_bytes(b"\0\1")
    (tmp_path / "runs_if_imported.py").write_text("raise SystemExit('imported')\n")
    assert run_command(["doctor", "read", str(tmp_path), "--json", "-"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert [finding["file"] for finding in document["findings"]] == [str(tmp_path / "src" / "train.py")]
    assert f"not read: {tmp_path / 'broken.py'}:2: '(' was never closed" in captured.err
    assert len(document["unread"]) == 2


@pytest.mark.parametrize(
    ("files", "path", "said"),
    [
        ({}, "nowhere.py", "is not there; name a Python file or a folder of them"),
        ({"README.md": "text"}, ".", "holds no Python file; name the training script or its folder"),
        ({"train.py": "print 'Python 2'"}, "train.py", "train.py:1: Missing parentheses"),
    ],
)
def test_what_cannot_be_read_is_wrong_usage(tmp_path, capsys, monkeypatch, files, path, said):
    monkeypatch.chdir(tmp_path)
    for name, text in files.items():
        Path(name).write_text(text)
    assert run_command(["doctor", "read", path]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "trainer.fit(model)\n",
            "no training loop was found (a loop around .backward()), perhaps a framework has it; ",
        ),
        (LOOP, "nothing that every step does outside of an `if` to remark on, in the loop at train.py:2; "),
    ],
)
def test_a_script_without_a_loop_or_without_a_fault_is_told_in_one_sentence(tmp_path, capsys, monkeypatch, code, said):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(code)
    assert run_command(["doctor", "read", "train.py"]) == 0
    assert capsys.readouterr().out.startswith(f"train.py: {said}")

"""``fulltilt doctor watch`` around real training scripts: what it finds, and that it changes nothing."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.lab_cases import wait_for

from fulltilt.attach.launch import SITE

ROOT = Path(__file__).parents[2]
SLOW = ROOT / "scripts" / "slow_train.py"
N_STEPS = 180

WITH_WORKERS = """
import os, sys, torch
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self):
        return 144
    def __getitem__(self, index):
        total = 0
        for n in range(3000):
            total += n * index % 7  # line 11
        return torch.tensor([float(total)]), torch.tensor([float(index)])

if __name__ == "__main__":
    loader = DataLoader(Squares(), batch_size=4, num_workers=2, multiprocessing_context=sys.argv[1])
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    print("marker", os.environ.get("OWN_SITECUSTOMIZE"), [p for p in sys.path if "inside" in p])
    sys.exit(7)
"""


def run(*words, cwd, **options):
    done = subprocess.run([sys.executable, *map(str, words)], cwd=cwd, capture_output=True, text=True, **options)
    done.lines = done.stdout.splitlines()
    return done


def watch(*words, cwd, flags=(), **options):
    return run("-m", "fulltilt", "doctor", "watch", *flags, "--", sys.executable, *words, cwd=cwd, **options)


@pytest.fixture(scope="module")
def slow_train(tmp_path_factory):
    """The slow script plain and watched, each in a folder of its own, with what they left and printed."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("plain", "watched")}
    words = ("slow_train.py", "--steps", N_STEPS, "--out", "made")
    for folder in folders.values():
        (folder / "slow_train.py").write_text(SLOW.read_text())
    plain = run(*words, cwd=folders["plain"])
    watched = watch(*words, cwd=folders["watched"], flags=("--json", "report.json"))
    document = json.loads((folders["watched"] / "report.json").read_text())
    return folders, plain, watched, document


def test_the_script_is_as_it_was(slow_train):
    folders, plain, watched, _ = slow_train
    assert plain.returncode == watched.returncode == 0, watched.stderr
    assert watched.lines[: len(plain.lines)] == plain.lines, "its output, with the last loss to the last bit"
    made = {name: sorted(path.name for path in (folder / "made").iterdir()) for name, folder in folders.items()}
    assert made["plain"] == made["watched"] == ["history.json", "model.pt"]
    for name in made["plain"]:  # the history holds the loss of each of the steps
        assert (folders["plain"] / "made" / name).read_bytes() == (folders["watched"] / "made" / name).read_bytes()
    assert len(json.loads((folders["watched"] / "made" / "history.json").read_text())) == N_STEPS


def test_the_step_is_divided_without_a_rest(slow_train):
    *_, document = slow_train
    shares = document["breakdown_pct"]
    assert [*shares] == ["data_wait", "forward", "backward", "optimizer", "host_sync", "file_write", "unknown"]
    assert sum(shares.values()) == pytest.approx(100)
    assert all(share > -0.01 for share in shares.values())
    assert shares["unknown"] < 15
    assert document["steps"]["n"] == N_STEPS
    assert document["overhead_us_per_step"] > 0


def find_line(text):
    return next(n for n, line in enumerate(SLOW.read_text().splitlines(), 1) if text in line)


def test_the_three_faults_are_found_with_file_and_line(slow_train):
    *_, document = slow_train
    found = {finding["rule"]: finding for finding in document["findings"]}
    assert set(found) == {"host-sync", "slow-transform", "file-write"}
    assert {finding["file"] for finding in found.values()} == {"slow_train.py"}
    assert found["host-sync"]["line"] == find_line("loss.item()")
    assert found["file-write"]["line"] == find_line("json.dump(")
    assert found["slow-transform"]["evidence"]["function"] == "StretchedDigits.__getitem__"
    assert found["slow-transform"]["line"] in (find_line("for pixel in row"), find_line("for row in image"))
    sync = found["host-sync"]
    assert (sync["verdict"], sync["gain_pct"]) == ("unconfirmed", None)
    assert sync["evidence"]["host_part_ms"] > 0
    assert sync["evidence"]["calls_per_step"] == pytest.approx(1, abs=0.05)


def test_the_file_is_proved_in_the_run(slow_train):
    *_, document = slow_train
    write = next(finding for finding in document["findings"] if finding["rule"] == "file-write")
    assert write["evidence"]["n_rounds"] >= 4
    assert document["a_a"]["effect_pct"] is not None
    if "not_proved" in write["evidence"]:  # the site differed from itself: once in a hundred runs, or a busy machine
        assert write["verdict"] == "unconfirmed"
        assert write["gain_pct"] is None
    else:
        low, high = write["gain_ci95_pct"]
        assert low < write["gain_pct"] < high
        assert low < 2 * write["ceiling_pct"], "no more is gained than the writes were seen to take, nor much less"
        assert high > write["ceiling_pct"] / 2
        assert write["verdict"] == ("act" if low > 1 else "note")
    assert write["numerics"] == "equal"


def test_the_report_fits_a_screen_and_begins_with_the_result(slow_train):
    _, plain, watched, document = slow_train
    lines = watched.lines[len(plain.lines) + 1 :]
    assert "slow_train.py:" in lines[0]
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    assert json.loads(Path(slow_train[0]["watched"], "runs/doctor/slow_train/report.json").read_text()) == document


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_data_workers_are_seen_and_the_exit_code_is_handed_on(tmp_path, start_method):
    (tmp_path / "train.py").write_text(WITH_WORKERS)
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import os; os.environ['OWN_SITECUSTOMIZE'] = 'ran'")
    environment = {**os.environ, "PYTHONPATH": str(own)}
    done = watch("train.py", start_method, cwd=tmp_path, flags=("--json", "r.json"), env=environment)
    assert done.returncode == 7, done.stderr
    assert done.lines[0] == "marker ran []", "the user's own sitecustomize runs, and sys.path is as it was"
    document = json.loads((tmp_path / "r.json").read_text())
    transform = next(finding for finding in document["findings"] if finding["rule"] == "slow-transform")
    assert transform["line"] in (10, 11, 12)
    assert transform["evidence"]["in_worker"]


def test_a_command_without_steps_gets_one_sentence_and_its_own_code(tmp_path):
    done = watch("-c", "print('hello'); raise SystemExit(5)", cwd=tmp_path, flags=("--json", "-"))
    assert done.returncode == 5
    document = json.loads(done.stdout)
    assert document["steps"]["n"] == 0
    assert document["findings"] == []
    assert done.stderr.splitlines()[0] == "hello"
    assert "no optimizer step was seen" in done.stderr


AWKWARD = """
import contextlib, json, os, sys, torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.head = nn.Linear(8, 1)
    def forward(self, x):
        return self.body(x)

class Careful(torch.optim.SGD):  # an optimizer whose step calls another one's
    def __init__(self, inner):
        super().__init__(inner.param_groups[0]["params"], lr=0.1)
        self.inner = inner
    def step(self, closure=None):
        self.inner.step()
        with contextlib.suppress(ValueError):
            raise ValueError("as a failed update inside")

class Data(torch.utils.data.Dataset):
    def __getitem__(self, index):
        if index >= 60:
            raise IndexError
        return torch.full((8,), float(index))
    def __len__(self):
        raise NotImplementedError

torch.manual_seed(0)
net = Net()
optimizer = Careful(torch.optim.SGD(net.parameters(), lr=1e-3))
sampler = torch.utils.data.BatchSampler(range(60), 2, drop_last=False)
for epoch in range(2):
    for x in torch.utils.data.DataLoader(Data(), batch_sampler=sampler):
        loss = net.head(net(x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.save(net.state_dict(), f"{epoch}-{int(x[0, 0])}.pt")
        with open("state.json", "w") as file:
            json.dump({"loss": loss.item()}, fp=file)
        print(json.load(open("state.json")), file.name)
        file.close()
        sys.stdout.flush()
print(repr(loss.item()))
"""


@pytest.mark.slow
def test_awkward_scripts_run_as_they_do_alone(tmp_path):
    """Optimizers inside optimizers, a loader without a length, a file that is read back, a new file every step."""
    said = {}
    for name in ("plain", "watched"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(AWKWARD)
        command = run if name == "plain" else watch
        said[name] = command("-W", "ignore::ResourceWarning", "train.py", cwd=tmp_path / name)
        assert said[name].returncode == 0, said[name].stderr
    assert said["watched"].lines[: len(said["plain"].lines)] == said["plain"].lines
    document = json.loads((tmp_path / "watched" / "runs" / "doctor" / "train" / "report.json").read_text())
    writes = [finding for finding in document["findings"] if finding["rule"] == "file-write"]
    saved = next(finding for finding in writes if finding["evidence"]["call"] == "torch.save")
    assert "torch.save(" in AWKWARD.splitlines()[saved["line"] - 1]
    assert saved["evidence"]["not_proved"] == "it is another file each time"
    assert all(finding["verdict"] == "unconfirmed" for finding in writes), "what is read back proves nothing"


@pytest.mark.parametrize(
    ("script", "flags", "code", "said"),
    [
        ("raise SystemExit(7)", (), 7, ""),
        ("import os; os.mkdir('runs'); open('runs/doctor', 'w'); raise SystemExit(7)", (), 7, "no report was written"),
        ("print('it ran')", ("--out", "file/below"), 2, "file is no folder, and one is needed; give another"),
        ("pass", ("--gate",), 0, ""),  # only acts are a failure
        *[(f"import os; os.kill(os.getpid(), {n})", (), 128 + n, "") for n in (signal.SIGTERM, signal.SIGKILL)],
    ],
)
def test_the_exit_code_is_that_of_the_command(tmp_path, script, flags, code, said):
    (tmp_path / "file").touch()
    done = watch("-c", script, cwd=tmp_path, flags=flags)
    assert done.returncode == code
    assert said in done.stderr
    assert "it ran" not in done.stdout, "refused before, not after"


def test_a_program_that_is_not_there_is_wrong_usage(tmp_path):
    done = run("-m", "fulltilt", "doctor", "watch", "--", "no-such-program", cwd=tmp_path)
    assert done.returncode == 2
    assert "no-such-program cannot be started" in done.stderr


def test_a_broken_observer_leaves_the_script_alone(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(SITE), "FULLTILT_ATTACH": "no JSON"}
    done = run("-c", "import torch; print('ran')", cwd=tmp_path, env=environment)
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert "this process is not watched" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent is gone")
def test_a_command_whose_observer_is_killed_is_asked_to_end(tmp_path):
    script = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    words = [sys.executable, "-m", "fulltilt", "doctor", "watch", "--", sys.executable, "-c", script]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        command = int(process.stdout.readline())
        process.kill()
    wait_for(lambda: not Path(f"/proc/{command}/exe").exists())


def test_sigterm_is_handed_on_to_the_command(tmp_path):
    script = "import time; print('up', flush=True); time.sleep(600)"
    words = [sys.executable, "-m", "fulltilt", "doctor", "watch", "--", sys.executable, "-c", script]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "up\n"
        process.terminate()
        assert process.wait(60) == 143

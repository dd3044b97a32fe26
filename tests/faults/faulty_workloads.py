"""Workloads as a user would write them, each with one thing wrong: small, and real in everything else."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import chaos_bodies
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import fulltilt

MARK = "FULLTILT_CHAOS"  # of leftovers.py: tells our names in /dev/shm from others'
MIB = 2**20
N_SAMPLES = 256


class Net(nn.Module):
    """``do`` is called in the forward pass of the third step, and returns what to add to the outputs."""

    def __init__(self, do=None):
        super().__init__()
        self.layer = nn.Linear(8, 2)
        self.do, self.n_calls = do, 0

    def forward(self, x):
        self.n_calls += 1
        outputs = self.layer(x)
        if self.do is not None and self.n_calls == 3:
            found = self.do()
            outputs = outputs if found is None else outputs + found
        return outputs


class WorkerEnds(Dataset):
    """``do`` is called where sample 40 is loaded: in a data worker, where there are any."""

    def __init__(self, do):
        self.do = do

    def __len__(self):
        return N_SAMPLES

    def __getitem__(self, index):
        if index == 40:
            self.do()
        return torch.zeros(8), index % 2


class LargeSamples(WorkerEnds):
    def __getitem__(self, index):
        return torch.zeros(MIB), index % 2


def dataset():
    x = torch.randn(N_SAMPLES, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())


def send(number):
    os.kill(os.getpid(), number)


def raise_error(error):
    raise error


def hang(ignore=False):
    if ignore:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(3600)


def allocate():
    """Held by a frame of the traceback, as a model's activations are."""
    held = []
    while True:
        held.append(torch.ones(MIB))


def allocate_in_python():
    held = []
    while True:
        held.append(bytes(1000))


def set_own_limit():
    chaos_bodies.limit_data(64 * MIB)
    allocate()


def print_error():
    print("ERROR: CUDA error: out of memory\nTraceback (most recent call last):\nMemoryError")
    print("Killed", file=sys.stderr)


def start_family():
    for is_loner in (False, True):
        subprocess.Popen(["sleep", "3600"], start_new_session=is_loner)
    threading.Thread(target=hang, daemon=True).start()


def hang_in_company():
    start_family()
    leave_files()
    hang()


def leave_files():
    tempfile.mkdtemp(prefix="pymp-")
    Path(f"/dev/shm/torch_{os.getpid()}_{os.environ[MARK]}_0").write_bytes(b"x")
    torch.ones(MIB).share_memory_()


def load_without_room():
    if not chaos_bodies.mount_small_shm():
        raise PermissionError("no /dev/shm of its own")
    return LargeSamples(None)


def iterate_inside():
    """A loader with workers of its own inside the step."""
    for _ in DataLoader(WorkerEnds(lambda: send(signal.SIGKILL)), num_workers=1):
        pass


def corrupt_answers():
    garbage = b'42\n{"failure": 7}\n{"measurement": {"samples_per_s": "fast"}}\n\xff{"half\n'
    n_written = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the listing's own is gone by now
            if int(path.name) > 2 and os.readlink(path).startswith("socket:"):
                n_written += os.write(int(path.name), garbage)
    assert n_written, "there is no socket that answers go through"


def workload(do=None, data=dataset, loss=None, optimizer=None, model=None):
    model = model or (lambda: Net(do))
    return fulltilt.Workload(
        model=model, dataset=data, loss=loss or nn.CrossEntropyLoss(), optimizer=optimizer, name="faulty"
    )


fine = workload()
raise_later = workload(lambda: raise_error(ValueError("planted in forward")))
raise_in_loss = workload(loss=lambda outputs, targets: raise_error(ValueError("planted in the loss")))
raise_in_model = workload(model=lambda: raise_error(ValueError("planted in the model")))
raise_in_dataset = workload(data=lambda: raise_error(ValueError("planted in the dataset")))
raise_in_optimizer = workload(optimizer=lambda parameters: raise_error(ValueError("planted in the optimizer")))
raise_in_worker = workload(data=lambda: WorkerEnds(lambda: raise_error(ValueError("planted in a worker"))))
say_nan = workload(loss=lambda outputs, targets: outputs.sum() * float("nan"))
exit_clean = workload(lambda: sys.exit(0))
interrupt = workload(lambda: raise_error(KeyboardInterrupt()))

say_cuda_memory = workload(lambda: raise_error(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")))
worker_says_memory = workload(data=lambda: WorkerEnds(lambda: raise_error(MemoryError("no room for sample 40"))))
fill_memory = workload(allocate)
fill_memory_in_python = workload(allocate_in_python)
fill_memory_in_worker = workload(data=lambda: WorkerEnds(allocate))
fill_own_limit = workload(set_own_limit)
fill_shared_memory = workload(data=load_without_room)
allocate_too_much = workload(lambda: torch.empty(1 << 50))

kill = workload(lambda: send(signal.SIGKILL))
segfault = workload(lambda: ctypes.string_at(0))
bus_error = workload(chaos_bodies.read_cut_file)
kill_worker = workload(data=lambda: WorkerEnds(lambda: send(signal.SIGKILL)))
segfault_worker = workload(data=lambda: WorkerEnds(lambda: ctypes.string_at(0)))
bus_error_worker = workload(data=lambda: WorkerEnds(chaos_bodies.read_cut_file))
exit_worker = workload(data=lambda: WorkerEnds(lambda: os._exit(7)))
kill_inner_worker = workload(iterate_inside)

hang_in_step = workload(hang)
hang_ignoring = workload(lambda: hang(ignore=True))
hang_worker = workload(data=lambda: WorkerEnds(hang))
stop_itself = workload(lambda: send(signal.SIGSTOP))
hang_in_model = workload(model=hang)
hang_with_family = workload(hang_in_company)

print_and_go_on = workload(print_error)
leave_family = workload(start_family)
leave_names = workload(leave_files)
write_to_pipe = workload(corrupt_answers)

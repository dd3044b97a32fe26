"""What the tests of tasks share: files of CIFAR-10 with a few random images, and plain steps on one batch."""

import pickle

import torch


def write_cifar10(folder, n_samples):
    generator = torch.Generator().manual_seed(0)
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        pixels = torch.randint(256, (n_samples, 3072), generator=generator, dtype=torch.uint8).numpy()
        content = {b"data": pixels, b"labels": [i % 10 for i in range(n_samples)]}
        (folder / name).write_bytes(pickle.dumps(content))


def take_steps(optimizer, compute_loss, n_steps):
    """Return the losses before each step."""
    losses = []
    for _ in range(n_steps):
        optimizer.zero_grad()
        loss = compute_loss()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses

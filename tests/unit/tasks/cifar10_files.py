"""The files of CIFAR-10 with a few random images, for the tests of configurations."""

import pickle

import torch


def write_cifar10(folder, n_samples):
    generator = torch.Generator().manual_seed(0)
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        pixels = torch.randint(256, (n_samples, 3072), generator=generator, dtype=torch.uint8).numpy()
        content = {b"data": pixels, b"labels": [i % 10 for i in range(n_samples)]}
        (folder / name).write_bytes(pickle.dumps(content))

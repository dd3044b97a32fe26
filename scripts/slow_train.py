"""A small CNN on scikit-learn's digits, in plain PyTorch. Deliberately slow, in three ways that real scripts are:

1. the loss is read from the device at every step, for a running mean;
2. the dataset stretches the contrast of each image pixel by pixel, in Python;
3. the history is written to a JSON file, whole, at every step.

``fulltilt doctor read scripts/slow_train.py`` finds the three lines by reading, ``fulltilt doctor watch -- python
scripts/slow_train.py`` by watching a run, and says what each is worth. Nothing in here knows of fulltilt.
"""

import argparse
import json
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

SIZE = 24  # pixels along an edge, three times the digits' own 8


class StretchedDigits(Dataset):
    """Digits, enlarged, with the contrast of each image stretched to the whole range."""

    def __init__(self):
        digits = load_digits()
        self.images = digits.images
        self.labels = torch.as_tensor(digits.target)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index].repeat(SIZE // 8, axis=0).repeat(SIZE // 8, axis=1)
        low, high = image.min(), image.max()
        stretched = []
        for row in image:
            stretched.append([(pixel - low) / (high - low) for pixel in row])
        return torch.tensor(stretched, dtype=torch.float32).unsqueeze(0), self.labels[index]


def build_model():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (SIZE // 4) ** 2, 10),
    )


def main():
    parser = argparse.ArgumentParser(description="Train a small CNN on digits.")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--out", type=Path, default=Path("runs/slow_train"))
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)  # so small a model gains nothing from more, and loses where other work uses the cores
    device = "cuda" if torch.cuda.is_available() else "cpu"
    args.out.mkdir(parents=True, exist_ok=True)
    loader = DataLoader(StretchedDigits(), batch_size=args.batch_size, shuffle=True, drop_last=True)
    model = build_model().to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    settings = {"model": "cnn", "optimizer": "adamw", "lr": args.lr, "batch_size": args.batch_size, "size": SIZE}
    settings["classes"] = list(range(10))
    history = []
    total = 0.0
    step = 0
    while step < args.steps:
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            loss = criterion(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1

            total += loss.item()
            history.append({"step": step, "mean_loss": total / step, "settings": settings})
            with open(args.out / "history.json", "w") as file:
                json.dump(history, file, indent=2)
            if step % 50 == 0:
                print(f"step {step}: mean loss {total / step:.4f}")
            if step == args.steps:
                break

    torch.save(model.state_dict(), args.out / "model.pt")
    print(f"final loss {loss.item()!r}")


if __name__ == "__main__":
    main()

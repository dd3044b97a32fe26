"""A small text classifier with real padding: token ids of several lengths, masked attention, a mean over tokens."""

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

import fulltilt
from fulltilt.tasks.metrics import accuracy

VOCABULARY, WIDTH, HEADS, CLASSES = 50, 32, 4, 3


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        wide = 4 * width
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width))

    def forward(self, x_BTC, mask_B11T):
        B, T, C = x_BTC.shape
        q, k, v = self.qkv(self.norm(x_BTC)).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask_B11T)
        x_BTC = x_BTC + self.out(mixed.transpose(1, 2).reshape(B, T, C))
        return x_BTC + self.mlp(x_BTC)


class Encoder(nn.Module):
    """Token ids (B, T), 0 is padding → scores (B, n_classes), or token states (B, T, C) beside them."""

    def __init__(self, states=False, masks=True):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, HEADS) for _ in range(2))
        self.head, self.states, self.masks = nn.Linear(WIDTH, CLASSES), states, masks

    def forward(self, ids_BT):
        is_token_BT = ids_BT != 0 if self.masks else torch.ones_like(ids_BT, dtype=torch.bool)
        x_BTC = self.tokens(ids_BT) + self.positions(torch.arange(ids_BT.shape[1], device=ids_BT.device))
        for block in self.blocks:
            x_BTC = block(x_BTC, is_token_BT[:, None, None, :])
        weights_BT1 = is_token_BT[..., None].to(x_BTC.dtype)
        scores_BK = self.head((x_BTC * weights_BT1).sum(1) / weights_BT1.sum(1))
        return {"scores": scores_BK, "states": x_BTC} if self.states else scores_BK


class Texts(Dataset):
    def __init__(self, n=40, longest=17):
        self.n, self.longest = n, longest

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        draws = torch.Generator().manual_seed(index)
        length = int(torch.randint(3, self.longest + 1, (), generator=draws))
        return torch.randint(1, VOCABULARY, (length,), generator=draws), index % CLASSES


def collate(samples):
    ids, labels = zip(*samples, strict=True)
    return pad_sequence(list(ids), batch_first=True), torch.tensor(labels)


def score(outputs, targets):
    return accuracy(outputs["scores"] if isinstance(outputs, dict) else outputs, targets)


def build(**options):
    model = lambda: Encoder(**options)  # noqa: E731
    return fulltilt.Workload(
        model=model, dataset=Texts, loss=nn.CrossEntropyLoss(), collate=collate, metrics={"accuracy": score}
    )


workload, with_states, unmasked = build(), build(states=True), build(masks=False)

"""Write on from prompts: our own GPT with its cache, a Hugging Face model by its ``generate``."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fulltilt.errors import FulltiltError, UsageError
from fulltilt.tasks.models.gpt import GPT

OnWords = Callable[[Sequence[int]], bool | None]
"""Gets the new word of every row as soon as it is on the host; true ends the writing."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the next word is chosen; by default the likeliest one.

    Attributes:
        temperature: Above 0, words are drawn by their probability, the flatter the higher it is.
        top_k: Only so many of the likeliest words are drawn from.
    """

    temperature: float = 0.0
    top_k: int | None = None
    seed: int = 0


GREEDY = Sampling()


class Generate(Protocol):
    """Writes ``n_new`` words behind each prompt; prompts of different lengths share a batch.

    Raises:
        UsageError: a prompt is empty, or it does not fit with its continuation.
    """

    def __call__(
        self, prompts: Sequence[Sequence[int]], n_new: int, on_words: OnWords, sampling: Sampling = GREEDY
    ) -> None: ...


def find_generate(model: nn.Module) -> Generate | None:
    """Return how ``model`` writes text; None where it does not.

    Our own GPT by its cache; others by their method ``generate``, as transformers has it.
    """
    if isinstance(model, GPT):
        return functools.partial(generate, model)
    if callable(getattr(model, "generate", None)) and hasattr(model, "generation_config"):
        return functools.partial(generate_by_transformers, model)
    return None


def find_max_length(model: Any) -> int | None:
    """Return the words of the longest text, prompt and continuation together; None where nobody says."""
    return getattr(model, "max_len", None) or getattr(getattr(model, "config", None), "max_position_embeddings", None)


def find_vocabulary_size(model: Any) -> int:
    return model.embedding.word.num_embeddings if isinstance(model, GPT) else model.config.vocab_size


@torch.no_grad()
def generate(
    model: GPT, prompts: Sequence[Sequence[int]], n_new: int, on_words: OnWords, sampling: Sampling = GREEDY
) -> None:
    """Read all prompts at once, then one word of each row a step; see ``Generate``.

    Device: synchronises once a word, which goes to the host.
    """
    check_lengths(prompts, n_new, model.max_len)
    device = model.embedding.word.weight.device
    n_words_B = torch.tensor([len(prompt) for prompt in prompts], device=device)
    words_BT = _fill([list(prompt) for prompt in prompts], device)
    generator = torch.Generator(device).manual_seed(sampling.seed)
    cache = model.build_cache(len(prompts), words_BT.shape[1] + n_new)
    scores_BV = model.read_on(words_BT, cache, n_words_B)
    for number in itertools.count(1):
        chosen_B = choose(scores_BV, sampling, generator)
        if on_words(chosen_B.tolist()) or number == n_new:
            return
        scores_BV = model.read_on(chosen_B[:, None], cache)


def choose(scores_BV: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """Choose the next word (B,) of each row.

    Raises:
        FulltiltError: a score is NaN or infinite.
    """
    if not scores_BV.isfinite().all():
        raise FulltiltError("the model's scores are NaN or infinite; train it anew, or use another precision")
    if sampling.temperature <= 0:
        return scores_BV.argmax(-1)
    scores_BV = scores_BV.float() / sampling.temperature
    if sampling.top_k is not None:
        least_B1 = scores_BV.topk(min(sampling.top_k, scores_BV.shape[1]), dim=-1).values[:, -1:]
        scores_BV = scores_BV.masked_fill(scores_BV < least_B1, float("-inf"))
    return torch.multinomial(scores_BV.softmax(-1), 1, generator=generator)[:, 0]


class _EndedError(Exception):
    """Leaves a foreign ``generate`` from inside."""


class _Streamer:
    """What ``transformers`` hands new words to, the prompts first."""

    def __init__(self, on_words: OnWords) -> None:
        self._on_words, self._has_prompts = on_words, False

    def put(self, words: Tensor) -> None:
        if not self._has_prompts:
            self._has_prompts = True
        elif self._on_words(words.tolist()):
            raise _EndedError

    def end(self) -> None:
        pass


@torch.no_grad()
def generate_by_transformers(
    model: Any, prompts: Sequence[Sequence[int]], n_new: int, on_words: OnWords, sampling: Sampling = GREEDY
) -> None:
    """Have a model of Hugging Face write by its own ``generate``; prompts are padded on the left. See ``Generate``."""
    check_lengths(prompts, n_new, find_max_length(model))
    longest = max(map(len, prompts))
    rows = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    marks = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    drawn: dict[str, Any] = {"do_sample": False}
    if sampling.temperature > 0:
        torch.manual_seed(sampling.seed)
        drawn = {"do_sample": True, "temperature": sampling.temperature, "top_k": sampling.top_k or 0}
    with contextlib.suppress(_EndedError):
        model.generate(
            torch.tensor(rows, device=model.device),
            attention_mask=torch.tensor(marks, device=model.device),
            max_new_tokens=n_new,
            min_new_tokens=n_new,  # as many as were asked for, whatever the model thinks of the end
            pad_token_id=0,
            streamer=_Streamer(on_words),
            **drawn,
        )


def check_lengths(prompts: Sequence[Sequence[int]], n_new: int, max_length: int | None) -> None:
    lengths = [len(prompt) for prompt in prompts]
    if not lengths or min(lengths) < 1:
        raise UsageError("a prompt is empty; give at least one word to write on from")
    if n_new < 1:
        raise UsageError(f"{n_new} new words were asked for; ask for 1 or more")
    if max_length is not None and max(lengths) + n_new > max_length:
        raise UsageError(
            f"a prompt of {max(lengths)} words and {n_new} new ones are {max(lengths) + n_new}, the model was trained "
            f"on {max_length}; give a shorter prompt, or ask for fewer words"
        )


def _fill(rows: list[list[int]], device: torch.device) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)

"""Write on from prompts: our own GPT with its cache, a Hugging Face model by its ``generate``."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from fulltilt.errors import FulltiltError, UsageError
from fulltilt.tasks.models.gpt import GPT

OnWords = Callable[[Sequence[int]], bool | None]
"""Gets the new word of every row as soon as it is on the host; true ends the writing."""


class Sampling(BaseModel):
    """How the next word is chosen; by default the likeliest one.

    Attributes:
        temperature: Above 0, words are drawn by their probability, the flatter the higher it is.
        top_k: Only so many of the likeliest words are drawn from.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    temperature: Annotated[float, Ge(0)] = 0.0
    top_k: Annotated[int, Gt(0)] | None = None
    seed: Annotated[int, Ge(0), Le(2**63)] = 0


GREEDY = Sampling()
COLD = 1e-6  # a temperature below it draws the likeliest word always, and scores over it would be infinite


@dataclasses.dataclass(frozen=True, slots=True)
class Writer:
    """Writes text with a model.

    Attributes:
        max_length: Words of the longest text, prompt and continuation together; None where nobody says.
    """

    model: Any
    max_length: int | None
    n_vocabulary: int

    def __call__(
        self, prompts: Sequence[Sequence[int]], n_new: int, on_words: OnWords, sampling: Sampling = GREEDY
    ) -> None:
        """Write ``n_new`` words behind each prompt; prompts of different lengths share a batch.

        Raises:
            UsageError: a prompt is empty, or it does not fit with its continuation.
        """
        self.check_lengths(prompts, n_new)
        with torch.no_grad():
            write = generate if isinstance(self.model, GPT) else generate_by_transformers
            write(self.model, prompts, n_new, on_words, sampling)

    def check_lengths(self, prompts: Sequence[Sequence[int]], n_new: int) -> None:
        lengths = [len(prompt) for prompt in prompts]
        if min(lengths) < 1:
            raise UsageError("a prompt is empty; give at least one word to write on from")
        if self.max_length is not None and max(lengths) + n_new > self.max_length:
            raise UsageError(
                f"a prompt of {max(lengths)} words and {n_new} new ones are {max(lengths) + n_new}, the model was "
                f"trained on {self.max_length}; give a shorter prompt, or ask for fewer words"
            )


def find_writer(model: nn.Module) -> Writer | None:
    """Find what writes text in a model, which levers may have wrapped; None where nothing does.

    Our own GPT does by its cache; others by their method ``generate``, as transformers has it.
    """
    for module in model.modules():
        if isinstance(module, GPT):
            return Writer(module, module.max_len, module.embedding.word.num_embeddings)
        if callable(getattr(module, "generate", None)) and hasattr(module, "generation_config"):
            config: Any = module.config
            return Writer(module, getattr(config, "max_position_embeddings", None), config.vocab_size)
    return None


def generate(model: GPT, prompts: Sequence[Sequence[int]], n_new: int, on_words: OnWords, sampling: Sampling) -> None:
    """Read all prompts at once, then one word of each row a step.

    Device: synchronises once a word, which goes to the host.
    """
    device = model.embedding.word.weight.device
    n_words_B = torch.tensor([len(prompt) for prompt in prompts], device=device)
    rows = [torch.tensor(prompt, device=device) for prompt in prompts]
    words_BT = nn.utils.rnn.pad_sequence(rows, batch_first=True)
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
    if sampling.temperature < COLD:
        return scores_BV.argmax(-1)
    scores_BV = scores_BV.float() / sampling.temperature
    if sampling.top_k is not None:
        least_B1 = scores_BV.topk(min(sampling.top_k, scores_BV.shape[1]), dim=-1).values[:, -1:]
        scores_BV = scores_BV.masked_fill(scores_BV < least_B1, float("-inf"))
    return torch.multinomial(scores_BV.softmax(-1), 1, generator=generator)[:, 0]


def generate_by_transformers(
    model: Any, prompts: Sequence[Sequence[int]], n_new: int, on_words: OnWords, sampling: Sampling
) -> None:
    """Have a model of Hugging Face write by its own ``generate``; prompts are padded on the left."""

    def tell(words_BT: Tensor, scores: Any, **_: Any) -> Tensor:
        """Hand the new words on, in the form of a stopping criterion of transformers."""
        return torch.full((len(words_BT),), bool(on_words(words_BT[:, -1].tolist())), device=words_BT.device)

    longest = max(map(len, prompts))
    rows = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    marks = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    drawn: dict[str, Any] = {"do_sample": False}
    if sampling.temperature >= COLD:
        torch.manual_seed(sampling.seed)
        drawn = {"do_sample": True, "temperature": sampling.temperature, "top_k": sampling.top_k or 0}
    model.generate(
        torch.tensor(rows, device=model.device),
        attention_mask=torch.tensor(marks, device=model.device),
        max_new_tokens=n_new,
        min_new_tokens=n_new,  # as many as were asked for, whatever the model thinks of the end
        pad_token_id=0,
        stopping_criteria=[tell],
        **drawn,
    )

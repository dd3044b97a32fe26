"""Requests for text, answered one after the other from real prompts. Imports torch."""

import random
import time
from typing import Any

from fulltilt.errors import FulltiltError, UsageError
from fulltilt.infer.generate.decoding import Generate, find_generate, find_max_length
from fulltilt.infer.served import ServedModel
from fulltilt.measure.nested import find_tensor

NEW_TOKENS = 64  # of a request, where nobody says otherwise
SHARES = (0.125, 0.5)  # of a sample of the data that a prompt has, from … to


class TextRequests:
    """Answers requests as ``ServedModel`` does, by writing on from prompts.

    A prompt is the beginning of a sample of the data, an eighth to a half of it, by a fixed seed.

    Attributes:
        first_s: Of each answered request, the seconds from its begin until its first words were on the host.
        words: What each row of the last request was answered.

    Raises:
        UsageError: the longest prompt does not fit with its continuation.
    """

    def __init__(self, model: ServedModel, *, new_tokens: int, seed: int) -> None:
        self._model, self.n_new = model, new_tokens
        generate = find_generate(model.module)
        assert generate is not None
        self._generate: Generate = generate
        self._max_length = find_max_length(model.module)
        if self._max_length is not None and new_tokens >= self._max_length:
            raise UsageError(
                f"targets.new_tokens {new_tokens} leaves no word for a prompt: the model was trained on texts of "
                f"{self._max_length}; ask for fewer"
            )
        self.dataset_name = f"{model.dataset_name}, cut to prompts, {new_tokens} new words each"
        self.weights, self.notes, self.n_parameters = model.weights, model.notes, model.n_parameters
        self.read_levers = model.read_levers
        self._draws = random.Random(seed)
        self.first_s: list[float] = []
        self.words: list[list[int]] = []

    def answer(self) -> float:
        """Answer the next request and return its seconds. Waits for the device.

        Raises:
            FulltiltError: the model ended before it had written what was asked for.
        """
        words = find_tensor(self._model.take_inputs())
        assert words is not None
        prompts = [self._cut(row) for row in words.tolist()]
        columns: list[Any] = []
        begin_s = time.perf_counter()

        def note(words: Any) -> None:
            if not columns:
                self.first_s.append(time.perf_counter() - begin_s)
            columns.append(words)

        with self._model.in_force():
            self._generate(prompts, self.n_new, note)
        call_s = time.perf_counter() - begin_s
        if len(columns) != self.n_new:
            raise FulltiltError(f"the model wrote {len(columns)} words of {self.n_new}; lower targets.new_tokens")
        self.words = [list(row) for row in zip(*columns, strict=True)]
        return call_s

    def _cut(self, words: list[int]) -> list[int]:
        room = len(words) if self._max_length is None else self._max_length - self.n_new
        low, high = (max(1, int(share * len(words))) for share in SHARES)
        return words[: min(room, self._draws.randint(low, high))]

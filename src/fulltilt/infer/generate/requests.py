"""Requests for text, answered one after the other from real prompts. Imports torch."""

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fulltilt.errors import FulltiltError, UsageError
from fulltilt.infer.generate.decoding import Writer
from fulltilt.infer.joining import Sample
from fulltilt.infer.measuring import Requests
from fulltilt.infer.targets import Load

SHARES = (0.125, 0.5)  # of a sample of the data that a prompt has, from … to


class TextRequests(Requests):
    """Answers requests by writing on from prompts: beginnings of samples, an eighth to a half, by a fixed seed.

    Raises:
        UsageError: no prompt fits with its continuation.
    """

    def __init__(self, writer: Writer, samples: Sequence[Sample], load: Load, said: Mapping[str, Any]):
        room = None if writer.max_length is None else writer.max_length - load.new_tokens
        if room is not None and room < 1:
            raise UsageError(
                f"targets.new_tokens {load.new_tokens} leaves no word for a prompt: the model was trained on texts of "
                f"{writer.max_length}; ask for fewer"
            )
        inputs = f"{said['inputs']}, cut to prompts, {load.new_tokens} new words each"
        super().__init__(self._write, samples, load.samples_per_request, {**said, "inputs": inputs})
        self._writer, self._n_new, self._room, self._draws = writer, load.new_tokens, room, random.Random(load.seed)

    def _write(self, samples: Sequence[Sample]) -> None:
        prompts = [self._cut(words.tolist()) for words, *_ in samples]
        times_s: list[float] = []
        begin_s = time.perf_counter()
        self._writer(prompts, self._n_new, lambda words: times_s.append(time.perf_counter() - begin_s))
        self.first_s.append(times_s[0])
        if len(times_s) != self._n_new:
            raise FulltiltError(f"the model wrote {len(times_s)} words of {self._n_new}; lower targets.new_tokens")

    def _cut(self, words: list[int]) -> list[int]:
        low, high = (max(1, int(share * len(words))) for share in SHARES)
        return words[: self._draws.randint(low, high)][: self._room]

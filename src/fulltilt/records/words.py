"""How text is split into words, and the number that each word has."""

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from fulltilt.errors import DataError
from fulltilt.records._codec import loads

UNKNOWN, END, PAD = "<unk>", "<eos>", "<pad>"
WORDS_FILE = "words.json"

Tokenizer = Literal["whitespace", "words"]
_WORD = re.compile(r"<\w+>|\w+(?:['’]\w+)*|([^\w\s])\1*")  # the same sign repeated is one word


def split_line(line: str, tokenizer: Tokenizer) -> list[str]:
    """Split a line into words and ``<eos>``; an empty line gives nothing.

    ``whitespace`` is for text that is tokenised already, as WikiText is; ``words`` separates punctuation.
    """
    words = line.split() if tokenizer == "whitespace" else [found[0] for found in _WORD.finditer(line)]
    return [*words, END] if words else []


@dataclasses.dataclass(frozen=True, kw_only=True)
class WordTable:
    """The words that a model was trained on, kept with it; the index of a word is its number.

    Attributes:
        max_length: Words of the longest text that the model takes; a longer one is cut. None: no limit.
        ends_lines: A line ends with ``<eos>``, as language models read text.
    """

    words: tuple[str, ...]
    tokenizer: Tokenizer
    max_length: int | None = None
    ends_lines: bool = False

    @functools.cached_property
    def numbers(self) -> Mapping[str, int]:
        return {word: number for number, word in enumerate(self.words)}

    @classmethod
    def read(cls, folder: Path) -> "WordTable | None":
        """Read the words that a training or an artefact keeps in its folder; None: it keeps none.

        Raises:
            DataError: the file is damaged.
        """
        path = folder / WORDS_FILE
        try:
            return loads(cls, path.read_bytes()) if path.is_file() else None
        except ValueError as error:
            raise DataError(f"{path} cannot be read ({error}); train or build anew") from None

    def encode(self, text: str) -> list[int]:
        """Turn text into numbers; a word that the training did not have becomes ``<unk>``."""
        *lines, rest = text.split("\n")
        words = [word for line in lines for word in split_line(line, self.tokenizer)]
        words += split_line(rest, self.tokenizer)[:-1]
        unknown = self.numbers[UNKNOWN]
        kept = words if self.ends_lines else [word for word in words if word != END]
        return [self.numbers.get(word, unknown) for word in kept[: self.max_length]]

    def decode(self, numbers: Iterable[int]) -> str:
        words: Sequence[str] = [self.words[number] for number in numbers]
        return " ".join(words).replace(f"{END} ", "\n").replace(END, "\n")

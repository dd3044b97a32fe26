"""A plan: one value for every lever, hashable and comparable, in a stable order."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any


class Plan(Mapping[str, Any]):
    """A complete, runnable choice: lever name → value. It is immutable.

    ``plan["batch_size"]`` is samples per micro-step over all devices; the effective batch is
    ``batch_size × accumulate``.
    """

    __slots__ = ("_hash", "_values")

    def __init__(self, values: Mapping[str, Any] | None = None, /, **more: Any):
        merged = {**(values or {}), **more}
        self._values: dict[str, Any] = {name: merged[name] for name in sorted(merged)}
        self._hash = hash(self.key)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type["Plan"], tuple[dict[str, Any]]]:
        return Plan, (self._values,)  # another process hashes texts in its own way

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and self._values == dict(other)

    def __repr__(self) -> str:
        return f"Plan({', '.join(f'{k}={v!r}' for k, v in self._values.items())})"

    def replace(self, **changes: Any) -> "Plan":
        """Return the same plan with some levers changed."""
        return Plan(self._values, **changes)

    @property
    def key(self) -> str:
        """Return a text of the plan: equal plans have equal texts, in every process and release."""
        return json.dumps(self._values, sort_keys=True, separators=(",", ":"))

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.key.encode()).hexdigest()[:12]

    @property
    def effective_batch_size(self) -> int:
        return int(self["batch_size"]) * int(self.get("accumulate", 1))

    def to_json(self) -> dict[str, Any]:
        return dict(self._values)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Plan":
        return cls(data)

"""Strict access to a released config.json: a missing or odd key is an error that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from optimus.errors import UserError, show_value
from optimus.job.yaml_nodes import read_text

MAX_DIMENSION = 1_000_000_000
COPY_HINT = "released files lean on class defaults here: add the key to a copy, or write dimensions by hand"


class HfConfig:
    """One object of a config.json; `derived` collects what was computed rather than read."""

    def __init__(self, values: dict[str, Any], file: str, prefix: str = "", derived: list[str] | None = None):
        self.values, self.file, self.prefix = values, file, prefix
        self.derived: list[str] = [] if derived is None else derived

    def error(self, key: str, problem: str, hint: str, value: object = None) -> UserError:
        return UserError(field=f"{self.prefix}{key}", value=value, problem=problem, hint=hint, file=self.file)

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def get(self, *keys: str) -> Any:
        """The value of the first of `keys` that is there."""
        for key in keys:
            if self.has(key):
                return self.values[key]
        raise self.error(keys[0], "is missing", COPY_HINT)

    def count(self, *keys: str, least: int = 1) -> int:
        value = self.get(*keys)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_DIMENSION:
            raise self.error(
                keys[0], f"is not a whole number, {least} or more", "correct the file", _json(value)
            )
        return value

    def counts(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers."""
        value = self.get(key)
        if not isinstance(value, list) or len(value) > 1000:
            raise self.error(key, "is not a list of whole numbers", "correct the file", _json(value))
        inside = HfConfig(
            {f"{key}[{i}]": item for i, item in enumerate(value)}, self.file, self.prefix, self.derived
        )
        return tuple(inside.count(name, least=0) for name in inside.values)

    def number(self, key: str) -> float:
        value = self.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < MAX_DIMENSION:
            raise self.error(key, "is not a number, more than 0", "correct the file", _json(value))
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if not isinstance(value, bool):
            raise self.error(key, "is not true or false", "correct the file", _json(value))
        return value

    def word(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str):
            raise self.error(key, "is not text", "correct the file", _json(value))
        return value

    def inner(self, key: str) -> HfConfig:
        """A nested object."""
        value = self.get(key)
        if not isinstance(value, dict):
            raise self.error(key, "is not an object", "correct the file", _json(value))
        return HfConfig(value, self.file, f"{self.prefix}{key}.", self.derived)

    def derive(self, key: str, value: Any, how: str) -> Any:
        """A value that the file leaves out; said in the model's source."""
        self.derived.append(f"{self.prefix}{key} = {show_value(value)} ({how})")
        return value


def _json(value: object) -> str:
    """As it stands in the file: text in quotes."""
    return json.dumps(value, ensure_ascii=True)


def load_config(path: Path) -> HfConfig:
    """The object of a config.json: strict JSON, no NaN, no key twice."""
    text, file = read_text(path), str(path)

    def refuse(field: str, problem: str, hint: str) -> UserError:
        return UserError(field=field, problem=problem, hint=hint, file=file)

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in items:
            if key in found:
                raise refuse(show_value(key), "is given twice", "keep one")
            found[key] = value
        return found

    def constant(name: str) -> Any:
        raise refuse("JSON", f"has {name}, which is not a finite number", "write a finite number")

    try:
        values = json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except json.JSONDecodeError as error:
        problem, hint = f"is not valid: {error.msg}", "check the brackets, commas and quotes"
        raise UserError(field="JSON", problem=problem, hint=hint, file=file, line=error.lineno) from None
    except (ValueError, RecursionError):
        raise refuse("JSON", "is nested too deeply or has too long a number", "use a released file") from None
    if not isinstance(values, dict):
        raise refuse("JSON", "is not an object", "use the config.json of a released model")
    return HfConfig(values, file)

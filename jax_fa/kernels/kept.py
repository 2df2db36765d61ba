"""Values kept in shared memory as words: named tuples of integers, written once and read anew.

What a loop reads anew in each step occupies no registers between the steps.
"""

import typing
from collections.abc import Iterator
from typing import Any

from cutlass import Boolean, Int32


def words_of(value: Any) -> list:
    """The words of an integer, or of a named tuple of such and of further tuples."""
    if isinstance(value, tuple):
        return [word for field in value for word in words_of(field)]
    return [Int32(value)]


def num_words(kind: type) -> int:
    """The number of words of a value of ``kind``."""
    fields = _fields(kind)
    return sum(map(num_words, fields)) if fields else 1


def read(kind: type[Any], words: Iterator[Int32]) -> Any:
    """A value of ``kind`` of its next ``words``."""
    fields = _fields(kind)
    if fields:
        return kind(*(read(field, words) for field in fields))
    word = next(words)
    return word != 0 if kind is Boolean else word


def _fields(kind: type) -> list[type]:
    """The types of the fields of a named tuple, none of another type."""
    if not hasattr(kind, "_fields"):
        return []
    return list(typing.get_type_hints(kind).values())

"""Compares the kernels of two builds: ``python -m jax_fa.aot.compare BEFORE AFTER``.

Both are folders with archives of PTX, which ``python -m jax_fa.aot --output`` fills and an
installation has (``jax_fa/ptx``). Texts are equal if they are once kernels have numbers for names:
these spell the Python types of arguments. The exit status is 1 if a text or a variant differs.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from jax_fa.spec import ptx_archives


def without_names(ptx: str) -> str:
    """PTX with numbers for the names of its kernels."""
    names = list(dict.fromkeys(re.findall(r"\.entry\s+([\w$]+)", ptx)))
    if not names:
        return ptx
    number = {name: f"kernel{i}" for i, name in enumerate(names)}
    longest_first = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    return re.sub(longest_first, lambda match: number[match[0]], ptx)


def first_difference(one: str, other: str) -> str:
    """The first line in which two texts differ, as both have it; "" if they are equal."""
    lines = zip_longest(one.splitlines(), other.splitlines(), fillvalue="(the end)")
    pairs = ((n, a, b) for n, (a, b) in enumerate(lines, 1) if a != b)
    return next((f"line {n}: {a.strip()!r} and {b.strip()!r}" for n, a, b in pairs), "")


def compare(before: Path, after: Path) -> dict[str, str]:
    """In what each variant of either folder differs, by name; "" where it does not."""
    folders = (before, after)
    found = [ptx_archives.read_all(folder) for folder in folders]
    differences = {}
    for name in sorted(found[0].keys() | found[1].keys()):
        lacking = [str(f) for f, texts in zip(folders, found, strict=True) if name not in texts]
        if lacking:
            difference = f"is not in {lacking[0]}"
        else:
            both = (without_names(texts[name].decode()) for texts in found)
            difference = first_difference(*both)
        differences[name] = difference
    return differences


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m jax_fa.aot.compare", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for name in ("before", "after"):
        parser.add_argument(name, type=Path, metavar=name.upper(), help="a folder")
    options = parser.parse_args(arguments)
    differences = compare(options.before, options.after)
    if not differences:
        parser.error(f"neither {options.before} nor {options.after} holds PTX")
    for name, difference in differences.items():
        if difference:
            print(f"{name}: {difference}")  # noqa: T201
    different = sum(map(bool, differences.values()))
    print(f"{len(differences)} variants, {different} of them different")  # noqa: T201
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())

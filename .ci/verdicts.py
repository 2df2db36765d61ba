"""Fails for what `python -m jax_fa.analysis DIR --json FILE` found wrong, spills among it.

Usage: .ci/verdicts.py FILE
"""

import json
import sys


def complaints(reports):
    for report in reports:
        for problem in report["problems"]:
            yield f"{report['name']}: {problem}"


def main(path):
    with open(path) as file:
        reports = [r for r in json.load(file)["variants"] if "problems" in r]
    found = list(complaints(reports))
    found.append(f"{len(reports)} variants inspected, {len(found)} complaints")
    sys.stdout.write("\n".join(found) + "\n")
    return 1 if len(found) > 1 or not reports else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

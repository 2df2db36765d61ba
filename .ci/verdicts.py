"""Fails for what `python -m jax_fa.inspect DIR --json FILE` found wrong, but for known spills.

Usage: .ci/verdicts.py FILE
"""

import fnmatch
import json
import sys

# Variants that may use stack memory, and how many bytes. Those that no longer do have to leave.
KNOWN = {
    "fwd_sm1?0_*_d192v128_general*": 8,
}


def complaints(reports):
    for pattern in KNOWN:
        found = [r for r in reports if fnmatch.fnmatchcase(r["name"], pattern)]
        if found and not any(report["stack_bytes"] for report in found):
            yield f"{pattern}: spills nothing any more; take it out of {__file__}"
    for report in reports:
        known = [KNOWN[p] for p in KNOWN if fnmatch.fnmatchcase(report["name"], p)]
        is_known = 0 < report["stack_bytes"] <= max(known, default=0)
        for problem in report["problems"]:
            if not (is_known and ("of stack" in problem or "local memory" in problem)):
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

#!/usr/bin/env python3
"""Asks a doctest program for its cases: check_cases.py PROGRAM SOURCE...

Every case that stands in a source must be in the program, whichever way its sources were compiled.
"""
import collections
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

CASE = re.compile(r"\s*TEST_CASE(_FIXTURE|_CLASS|_TEMPLATE|_TEMPLATE_DEFINE)?\(")


def written(source):
    """How many cases stand in the source, and how many more under #if."""
    depth, always, sometimes = 0, 0, 0
    for line in source.read_text().splitlines():
        if re.match(r"\s*#\s*if", line):
            depth += 1
        elif re.match(r"\s*#\s*endif", line):
            depth -= 1
        elif CASE.match(line):
            always, sometimes = always + (depth == 0), sometimes + (depth > 0)
    return always, sometimes


def main():
    program, *sources = sys.argv[1:]
    sources = [Path(source).resolve() for source in sources]
    listing = subprocess.run([program, "--list-test-cases", "--reporters=xml", "--no-skip"],
                             capture_output=True, text=True, check=True).stdout
    built = collections.defaultdict(set)  # a template is a case for each of its types, on one line
    for case in ElementTree.fromstring(listing).iter("TestCase"):
        built[Path(case.get("filename")).resolve()].add(case.get("line"))
    wrong = 0
    for source in sources:
        always, sometimes = written(source)
        count = len(built[source])
        if not always <= count <= always + sometimes:
            wrong += 1
            print(f"{source} has {always} cases and {sometimes} under #if; {program} has {count}")
    total = sum(len(built[source]) for source in sources)
    print(f"check_cases: {total} cases of {len(sources)} sources, {wrong} sources incomplete")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

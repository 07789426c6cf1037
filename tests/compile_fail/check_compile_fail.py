#!/usr/bin/env python3
"""Runs one compile-fail case: a source that must be refused with the right words, and its twin.

A case is a .cpp of this form:

    #if MEGA_TWIN
      ... the corrected line ...
    #else
      // mega-expect: "regular expression"
      ... the wrong line ...
    #endif

The compiler must refuse it, point at the line below mega-expect, and print text that matches the
expression. With MEGA_TWIN=1 the same source must compile.
"""
import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

EXPECT = re.compile(r'^\s*// mega-expect: "(.+)"$')


def compile_case(compiler, include, case, twin):
    command = [compiler, "-std=c++20", f"-DMEGA_TWIN={twin}", f"-I{include}"]
    if "nvcc" in Path(compiler).name:
        command += ["-x", "cu", "-c", "-o", "/dev/null"]
    else:
        command += ["-fsyntax-only"]
    done = subprocess.run(command + [str(case)], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def check(compiler, include, case):
    """None if the case holds, else what is wrong with it."""
    lines = case.read_text().splitlines()
    expected = [(n, EXPECT.match(line).group(1)) for n, line in enumerate(lines, 1)
                if EXPECT.match(line)]
    if len(expected) != 1:
        return f"{case.name} has {len(expected)} lines of the form // mega-expect: \"...\"; one is right"
    number, expression = expected[0][0] + 1, expected[0][1]
    code, text = compile_case(compiler, include, case, 0)
    if code == 0:
        return f"{case.name} compiles, but line {number} should be refused"
    if not re.search(expression, text):
        return f"{case.name} is refused without a text that matches {expression!r}:\n{text}"
    place = rf"{re.escape(case.name)}[:(]{number}\b|line {number} of \S*{re.escape(case.name)}"
    if not re.search(place, text):
        return f"{case.name} is refused, but not at line {number}:\n{text}"
    code, text = compile_case(compiler, include, case, 1)
    if code != 0:
        return f"the corrected twin of {case.name} does not compile:\n{text}"
    return None


SELF_TEST = {
    # text of the case -> a word of the complaint, or None where the case holds
    '#if MEGA_TWIN\nint x = 1;\n#else\n// mega-expect: "undeclared|not declared"\nint x = y;\n#endif\n':
        None,
    '#if MEGA_TWIN\nint x = 1;\n#else\n// mega-expect: "."\nint x = 2;\n#endif\n': "compiles",
    '#if MEGA_TWIN\nint x = 1;\n#else\n// mega-expect: "no such words"\nint x = y;\n#endif\n': "matches",
    '#if MEGA_TWIN\nint x = 1;\n#else\n// mega-expect: "y"\nint x = 2;\nint z = y;\n#endif\n':
        "not at line",
    '#if MEGA_TWIN\nint x = w;\n#else\n// mega-expect: "y"\nint x = y;\n#endif\n': "twin",
    'int x = y;\n': "has 0 lines",
}


def self_test(compiler, include):
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        case = Path(scratch) / "crafted.cpp"
        for text, complaint in SELF_TEST.items():
            case.write_text(text)
            said = check(compiler, include, case)
            if (said is None) != (complaint is None) or (complaint and complaint not in said):
                print(f"self-test: expected {complaint!r}, the check said {said!r} of\n{text}")
                failed += 1
    print(f"check_compile_fail: self-test, {len(SELF_TEST)} cases, {failed} failed")
    return 1 if failed else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", type=Path, nargs="?")
    parser.add_argument("--self-test", action="store_true")
    parser.add_argument("--compiler", default="g++")
    parser.add_argument("--include", type=Path, default=Path(__file__).parents[2] / "include")
    arguments = parser.parse_args()
    if arguments.self_test:
        return self_test(arguments.compiler, arguments.include)
    if arguments.case is None:
        parser.error("a case or --self-test is required")
    complaint = check(arguments.compiler, arguments.include, arguments.case)
    if complaint:
        print(complaint)
    return 1 if complaint else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Compares the object code of two ways to write one thing: both must be the same instructions.

A case is a .cpp that defines `extern "C" ... subject(...)` twice:

    #if MEGA_BARE
      ... by hand, without the abstraction ...
    #else
      ... with it ...
    #endif

Both are compiled with -O2. The instructions of `subject`, with their relocations, and the sizes of
the object's data must be equal.
"""
import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path


def object_of(compiler, include, case, bare, scratch):
    output = Path(scratch) / f"{case.stem}_{bare}.o"
    command = [compiler, "-std=c++20", "-O2", "-DNDEBUG", f"-DMEGA_BARE={bare}", f"-I{include}",
               "-fno-asynchronous-unwind-tables", "-c", str(case), "-o", str(output)]
    subprocess.run(command, check=True)
    return output


def instructions(objdump, path):
    """The instructions and relocations of `subject`, without addresses."""
    done = subprocess.run([objdump, "-d", "-r", "--no-show-raw-insn", "--disassemble=subject",
                           str(path)], check=True, capture_output=True, text=True)
    lines = []
    for line in done.stdout.splitlines():
        match = re.match(r"^\s+[0-9a-f]+:\s+(.+)$", line)
        if match:
            lines.append(re.sub(r"\s+", " ", match.group(1)).strip())
    if not lines:
        raise SystemExit(f"{path.stem} defines no function named subject")
    return lines


def data_sizes(objdump, path):
    """Bytes of the object's data sections, in all."""
    done = subprocess.run([objdump, "-h", str(path)], check=True, capture_output=True, text=True)
    sizes = {}
    for line in done.stdout.splitlines():
        match = re.match(r"^\s+\d+ \.(data|bss|rodata|tdata|tbss)\S*\s+([0-9a-f]+)", line)
        if match:
            sizes[match.group(1)] = sizes.get(match.group(1), 0) + int(match.group(2), 16)
    return {name: size for name, size in sizes.items() if size}


def check(arguments, case):
    """None if both ways give the same code, else the difference."""
    with tempfile.TemporaryDirectory() as scratch:
        paths = [object_of(arguments.compiler, arguments.include, case, bare, scratch)
                 for bare in (1, 0)]
        bare, dressed = (instructions(arguments.objdump, path) for path in paths)
        bare_data, dressed_data = (data_sizes(arguments.objdump, path) for path in paths)
    if bare != dressed:
        width = max(map(len, bare)) + 2
        rows = [f"{a:<{width}}| {b}" for a, b in zip(bare + [""] * len(dressed),
                                                     dressed + [""] * len(bare)) if a or b]
        return (f"{case.stem}: {len(bare)} instructions by hand, {len(dressed)} with the abstraction\n"
                + "\n".join(rows))
    if bare_data != dressed_data:
        return f"{case.stem}: data {bare_data} by hand, {dressed_data} with the abstraction"
    return None


SELF_TEST = [
    ('extern "C" int subject(int a) { return a + MEGA_BARE * 0; }', True),
    ('extern "C" int subject(int a) { return MEGA_BARE ? a : a + 1; }', False),
    ('#if !MEGA_BARE\nint counter = 7;\n#endif\nextern "C" int subject(int a) { return a; }', False),
    ('extern "C" void f(); extern "C" void g();\n'
     'extern "C" void subject() { MEGA_BARE ? f() : g(); }', False),
]


def self_test(arguments):
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        case = Path(scratch) / "crafted.cpp"
        for text, same in SELF_TEST:
            case.write_text(text + "\n")
            if (check(arguments, case) is None) != same:
                print(f"self-test: expected {'the same' if same else 'a difference'} for\n{text}")
                failed += 1
    print(f"compare_object_code: self-test, {len(SELF_TEST)} cases, {failed} failed")
    return 1 if failed else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", type=Path, nargs="?")
    parser.add_argument("--self-test", action="store_true")
    parser.add_argument("--compiler", default="g++")
    parser.add_argument("--objdump", default="objdump")
    parser.add_argument("--include", type=Path, default=Path(__file__).parents[2] / "include")
    arguments = parser.parse_args()
    if arguments.self_test:
        return self_test(arguments)
    if arguments.case is None:
        parser.error("a case or --self-test is required")
    complaint = check(arguments, arguments.case)
    if complaint:
        print(complaint)
    return 1 if complaint else 0


if __name__ == "__main__":
    sys.exit(main())

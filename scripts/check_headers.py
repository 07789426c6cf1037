#!/usr/bin/env python3
"""Compiles every .hpp alone, and measures what including it costs.

    alone    each header is the first include of a source, twice; warnings are errors. The CPU
             seconds go to --times, with those of a reference source compiled in the same run.
    budget   judges the measured times as ratios to the reference source; prints the ten slowest
    hostile  all headers after their outside headers, with macros defined that other libraries define

A header whose packages are absent is named and left out.
"""
import argparse
import concurrent.futures
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.dont_write_bytecode = True  # the source tree stays as it is
sys.path.insert(0, str(Path(__file__).parent))
import check_includes  # noqa: E402

FLAGS = ["-std=c++20", "-O0", "-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Werror"]

# The unit of the budgets: what a source pays for the most common standard headers.
REFERENCE = ("array", "memory", "span", "stdexcept", "string", "vector")

# Budgets in reference sources, by pattern. mega.hpp has a second one: a multiple of the standard
# headers that it pulls in.
BUDGETS = {r"^mega\.hpp$": 4.0, r"^core/": 1.25}
UMBRELLA_OVER_STANDARD = 2.0

# Lines of one compilation's diagnostics that are worth printing: the first errors cause the rest.
SHOWN_LINES = 30

# Macros that headers of the C library, and of other systems, define as ordinary words: complex.h,
# termios.h, math.h, sys/sysmacros.h, the compiler's GNU dialect, windows.h. Its min and max are not
# among them, since std::min is used throughout; --macro adds words to a run.
HOSTILE = ("I", "B0", "ECHO", "DOMAIN", "OVERFLOW", "HUGE", "major", "minor", "linux", "unix",
           "small", "far", "near", "interface")


def sources_text(names):
    return "".join(f"#include <{name}>\n" for name in names)


def outside_headers(root, names):
    """The headers that are not mega's, of the named headers and of all that they include."""
    seen, outside, open_names = set(), set(), list(names)
    while open_names:
        name = open_names.pop()
        if name in seen or not (root / name).exists():
            continue
        seen.add(name)
        for _, _, target in check_includes.includes_of(root / name):
            if target.startswith("mega/"):
                open_names.append(target[len("mega/"):])
            else:
                outside.add(target)
    return sorted(outside)


class Compiler:
    def __init__(self, command, include, system, scratch):
        self.command, self.scratch = command, scratch
        self.folders = [f"-I{include}"] + [f"-isystem{folder}" for folder in system]

    def compile(self, label, text, flags):
        """Compiles text; gives (CPU seconds, diagnostics or None)."""
        stem = re.sub(r"\W", "_", label)
        source = Path(self.scratch) / f"{stem}.cpp"
        source.write_text(text)
        command = [self.command, *flags, *self.folders, "-c", str(source), "-o",
                   str(source.with_suffix(".o"))]
        log = source.with_suffix(".log")
        with open(log, "w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        seconds = usage.ru_utime + usage.ru_stime
        if process.returncode == 0:
            return seconds, None
        return seconds, "\n".join(log.read_text().splitlines()[:SHOWN_LINES])

    def has(self, header):
        return self.compile(f"has {header}", f"#if !__has_include(<{header}>)\n#error\n#endif\n",
                            ["-std=c++20", "-E"])[1] is None


def usable(compiler, root):
    """The .hpp whose packages are here; names those that are left out."""
    has = functools.lru_cache(maxsize=None)(compiler.has)
    names = []
    for path in sorted(root.rglob("*.hpp")):
        name = path.relative_to(root).as_posix()
        opt_in = check_includes.is_opt_in(name)
        absent = [h for h in outside_headers(root, [name]) if not has(h)] if opt_in else []
        if absent:
            print(f"left out: mega/{name} needs {', '.join(absent)}")
        else:
            names.append(name)
    return names


def alone(compiler, root, times, jobs):
    names = usable(compiler, root)
    reference = sources_text(REFERENCE)
    standard = sources_text(outside_headers(root, ["mega.hpp"]))
    work = [(name, f"#include <mega/{name}>\n" * 2) for name in names]
    # The judged ones are measured three times, spread over the run; the least disturbed counts. All
    # are compiled with the flags of the headers: a ratio compares what is included, and the
    # compiler's search for warnings is a cost of the flags.
    judged = [("reference", reference), ("standard", standard),
              ("mega.hpp", "#include <mega/mega.hpp>\n")]
    step = max(1, len(work) // 3)
    work = judged + work[:step] + judged + work[step:] + judged

    def compile_one(item):
        index, (label, text) = item
        return label, compiler.compile(f"{index} {label}", text, FLAGS)

    seconds, failed = {}, []
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for label, (cost, diagnostics) in pool.map(compile_one, enumerate(work)):
            seconds[label] = min(cost, seconds.get(label, cost))
            if diagnostics is not None:
                failed.append(label)
                print(f"--- {label} does not compile alone\n{diagnostics}")
    if times:
        Path(times).write_text(json.dumps(seconds, indent=1))
    print(f"check_headers: {len(names)} headers alone and twice, {len(set(failed))} failed")
    return 1 if failed else 0


def budget(times):
    seconds = json.loads(Path(times).read_text())
    reference, standard = seconds.pop("reference"), seconds.pop("standard")
    over = []
    for name, cost in seconds.items():
        limit = next((ratio for pattern, ratio in BUDGETS.items() if re.match(pattern, name)), None)
        if limit and cost > limit * reference:
            over.append(f"mega/{name} costs {cost / reference:.2f} reference sources; {limit} allowed")
    umbrella = seconds["mega.hpp"]
    if umbrella > UMBRELLA_OVER_STANDARD * standard:
        over.append(f"mega/mega.hpp costs {umbrella / standard:.2f} times its standard headers; "
                    f"{UMBRELLA_OVER_STANDARD} allowed")
    print(f"reference source {reference:.2f} s; mega.hpp {umbrella:.2f} s = "
          f"{umbrella / reference:.2f} reference sources = "
          f"{umbrella / standard:.2f} x its standard headers\n")
    print("| header | CPU s | reference sources |\n|---|---|---|")
    for name, cost in sorted(seconds.items(), key=lambda item: -item[1])[:10]:
        print(f"| mega/{name} | {cost:.2f} | {cost / reference:.2f} |")
    for line in over:
        print(f"over budget: {line}")
    return 1 if over else 0


def hostile(compiler, root, macros):
    names = usable(compiler, root)
    text = sources_text(outside_headers(root, names))
    for macro in macros:
        text += f"#undef {macro}\n#define {macro} (mega_hostile_macro)\n"
    text += sources_text(f"mega/{name}" for name in names)
    _, diagnostics = compiler.compile("hostile", text, FLAGS)
    if diagnostics is not None:
        print(diagnostics)
        print(f"a header uses a word that others define as a macro: {', '.join(macros)}")
    print(f"check_headers: {len(names)} headers under {len(macros)} hostile macros: "
          f"{'clean' if diagnostics is None else 'failed'}")
    return 0 if diagnostics is None else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mode", choices=("alone", "budget", "hostile"))
    parser.add_argument("--compiler", default=os.environ.get("CXX", "g++"))
    parser.add_argument("--include", type=Path, default=Path(__file__).parents[1] / "include")
    parser.add_argument("--system", action="append", default=[], help="folder of a package's headers")
    parser.add_argument("--times", help="file with the measured CPU seconds")
    parser.add_argument("--macro", action="append", default=[], help="one more hostile macro")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    if arguments.mode == "budget":
        return budget(arguments.times)
    scratch = tempfile.mkdtemp(prefix="mega-headers-")
    try:
        compiler = Compiler(arguments.compiler, arguments.include, arguments.system, scratch)
        root = arguments.include / "mega"
        if arguments.mode == "alone":
            return alone(compiler, root, arguments.times, arguments.jobs)
        return hostile(compiler, root, HOSTILE + tuple(arguments.macro))
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    sys.exit(main())

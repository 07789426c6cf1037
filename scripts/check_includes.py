#!/usr/bin/env python3
"""Who may include whom in include/mega: proves the rules of the house on the sources.

    scripts/check_includes.py              checks include/ of this repository
    scripts/check_includes.py --self-test  proves that each rule catches its crafted violation

Each violation is one line: file:line, the rule's name, what is wrong. Conditional includes count.
"""
import argparse
import re
import sys
import tempfile
from pathlib import Path

# Outside of cuda/, headers without kernels that need NVIDIA's.
VENDOR_HEADERS = ("comm/detail/nccl_calls.hpp", "comm/detail/process_ends.hpp",
                  "comm/detail/process_world.hpp", "comm/device_channel.hpp",
                  "comm/device_self.hpp", "comm/nccl.hpp", "comm/nccl_process.hpp",
                  "nn/cublas.hpp", "nn/cublas_lt.hpp", "nn/cudnn_attention.hpp",
                  "nn/detail/cudnn_graph.hpp", "scan/cuda_recorder.hpp")

# Headers that need a package, or that not every trainer needs: included by name, never by mega.hpp.
OPT_IN = ("nn/attention_limits.hpp", "nn/blas.hpp", "nn/cublas.hpp", "nn/cublas_lt.hpp", "nn/cudnn_attention.hpp",
          "nn/detail/cudnn_graph.hpp", "comm/device_channel.hpp", "comm/device_self.hpp",
          "comm/mpi.hpp", "comm/nccl.hpp", "comm/nccl_process.hpp", "comm/bootstrap.hpp", "comm/emulated_link.hpp",
          "comm/control_channel.hpp", "comm/detail/", "train/share_algorithms.hpp",
          "data/jsonl.hpp", "ckpt/", "ranges/", "scope/server.hpp", "cuda/", "host/host_async.hpp",
          # policies beyond interleaved 1F1B, and what adapts or relaxes an order
          "dpp/zero_bubble.hpp", "dpp/v_schedule.hpp", "dpp/dual_pipe_v.hpp", "dpp/adaptive.hpp",
          "dpp/look_ahead.hpp", "dpp/look_ahead_dispatch.hpp", "train/dial.hpp",
          "train/stall_meter.hpp",
          # what plans, draws and explains rather than trains
          "dpp/auto_schedule.hpp", "dpp/balance.hpp", "dpp/cluster_simulator.hpp", "dpp/csv.hpp",
          "dpp/layout.hpp", "dpp/metrics.hpp", "dpp/named_orders.hpp", "dpp/passes.hpp", "dpp/proof.hpp",
          "dpp/search_problem.hpp", "dpp/svg.hpp", "dpp/timeline.hpp",
          "dpp/timeline_json.hpp", "dpp/transfer_order.hpp", "scan/")

# Where modules meet: these may include every module; all others keep to core/ and concepts.hpp.
MEETING_PLACES = ("train", "ranges")

# Where operations run: the modules that run some may include these too.
DEVICE_LAYERS = ("host", "cuda")
DEVICE_USERS = ("comm", "nn", "optim", "scan", "scope", "cuda")

# Standard headers that cost each user's every source more than their worth.
HEAVY = ("iostream", "regex", "format", "filesystem", "ranges", "chrono", "thread")
LIGHT_MODULES = ("core", "nn")

VENDOR = re.compile(r"^(cuda|cublas|cudnn|cufile|curand|nccl|nvtx|nvToolsExt|cooperative_groups)")
DEVICE_ALGORITHMS = re.compile(r"^(cub|thrust)/")
STANDARD = re.compile(r"^[a-z0-9_]+$")
SYSTEM = re.compile(r"^(sys|netinet|arpa|linux|bits)/|^(unistd|fcntl|dirent|signal|poll|pthread|sched"
                    r"|errno|string|stdio|stdlib|time|dlfcn|immintrin|emmintrin|x86intrin|math|limits|stdint"
                    r"|inttypes|stddef|assert|ftw|glob|termios|getopt|malloc)\.h$")
INCLUDE = re.compile(r"^\s*#\s*include\s*([<\"])([^>\"]+)[>\"]")


def strip_comments(text):
    """Blanks comments, and keeps line numbers."""
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), text, flags=re.S)
    return re.sub(r"//[^\n]*", "", text)


def includes_of(path):
    """Yields (line number, opening delimiter, header) for every include of the file."""
    for number, line in enumerate(strip_comments(path.read_text()).splitlines(), 1):
        match = INCLUDE.match(line)
        if match:
            yield number, match.group(1), match.group(2)


def is_opt_in(name):
    return name.endswith(".cuh") or any(
        name == entry or (entry.endswith("/") and name.startswith(entry)) for entry in OPT_IN)


def module_of(name):
    return name.split("/")[0] if "/" in name else ""


def check(include_dir):
    """All violations below include_dir, as (file:line, rule, sentence)."""
    root = include_dir / "mega"
    headers = sorted(p for p in root.rglob("*") if p.suffix in (".hpp", ".cuh"))
    names = {p.relative_to(root).as_posix() for p in headers}
    short = {name.split("/")[-1] for name in names}
    graph = {}
    found = []

    for path in headers:
        name = path.relative_to(root).as_posix()
        module = module_of(name)
        graph[name] = []

        def report(line, rule, sentence):
            found.append((f"mega/{name}:{line}", rule, sentence))

        lines = path.read_text().splitlines()
        if not lines or not lines[0].startswith("/// @file"):
            report(1, "form", "the first line says what the file is: /// @file ...")
        if "#pragma once" not in lines:
            report(1, "form", "#pragma once is missing")

        for line, delimiter, target in includes_of(path):
            if delimiter == '"':
                report(line, "angle", f'"{target}" must be <mega/...> with its full path')
                continue
            if not target.startswith("mega/"):
                check_outside(name, module, target, short, lambda r, s: report(line, r, s))
                continue
            inner = target[len("mega/"):]
            if inner not in names:
                report(line, "exists", f"<{target}> does not exist")
                continue
            graph[name].append((line, inner))
            check_inside(name, module, inner, lambda r, s: report(line, r, s))

    found += check_umbrella(names, graph)
    found += check_cycles(graph)
    return found


def check_outside(name, module, target, short, report):
    """An include of a header that is not mega's."""
    if target in short:
        report("angle", f"<{target}> must be <mega/...> with its full path")
    if module in LIGHT_MODULES and target in HEAVY:
        report("heavy", f"<{target}> is not allowed in {module}/: it costs every user's compile time")
    if VENDOR.match(target):
        if not (module == "cuda" or name.endswith(".cuh") or name in VENDOR_HEADERS):
            report("vendor", f"<{target}> belongs in cuda/, a .cuh or one of "
                             + ", ".join(VENDOR_HEADERS))
    elif DEVICE_ALGORITHMS.match(target):
        if not name.endswith(".cuh"):
            report("vendor", f"<{target}> belongs in a .cuh")
    elif target.startswith("range/v3/"):
        if module != "ranges":
            report("package", f"<{target}> belongs in ranges/")
    elif not (STANDARD.match(target) or SYSTEM.match(target)):
        if not is_opt_in(name):
            report("package", f"<{target}> is no standard header; a header that needs a package is "
                              "opt-in")


def check_inside(name, module, inner, report):
    """An include of another mega header."""
    other = module_of(inner)
    if inner == "mega.hpp":
        report("umbrella", "nothing inside include/ includes mega.hpp")
        return
    if name.endswith(".hpp") and inner.endswith(".cuh"):
        report("cuh", f"a .hpp never includes a .cuh: <mega/{inner}>")
    if "/detail/" in f"/{inner}" and other != module:
        report("detail", f"<mega/{inner}> is internal to {other}/")
        return
    if name == "mega.hpp" or module in MEETING_PLACES or name == "device.cuh":
        return
    meets_in_concepts = inner == f"{other}/concepts.hpp" and module != "core"
    if other in ("", "core") or meets_in_concepts:
        return
    if name == f"{module}/concepts.hpp":
        report("layers", f"concepts stand on core/ and other concepts, not on <mega/{inner}>")
        return
    if other == module:
        return
    if module in DEVICE_USERS and other in DEVICE_LAYERS:
        return
    report("layers", f"{module}/ may reach {other}/ only through core/ or <mega/{other}/concepts.hpp>,"
                     f" not <mega/{inner}>")


def check_umbrella(names, graph):
    """mega.hpp reaches no opt-in header, and lists every other one."""
    if "mega.hpp" not in names:
        return [("mega/mega.hpp:1", "umbrella", "the umbrella header is missing")]
    found = []
    came_from = {"mega.hpp": None}
    open_names = ["mega.hpp"]
    while open_names:
        name = open_names.pop()
        for _, inner in graph[name]:
            if inner not in came_from:
                came_from[inner] = name
                open_names.append(inner)
    for name in sorted(filter(is_opt_in, came_from)):
        chain = [name]
        while came_from[chain[-1]]:
            chain.append(came_from[chain[-1]])
        found.append(("mega/mega.hpp:1", "umbrella",
                      "mega.hpp reaches an opt-in header: " + " <- ".join(chain)))
    listed = {inner for _, inner in graph["mega.hpp"]}
    for name in sorted(names - listed - {"mega.hpp"}):
        if not is_opt_in(name) and "/detail/" not in name:
            found.append(("mega/mega.hpp:1", "umbrella", f"mega.hpp does not list <mega/{name}>"))
    return found


def check_cycles(graph):
    """No header reaches itself."""
    found = []
    state = {}

    def visit(name, stack):
        state[name] = "open"
        for line, inner in graph[name]:
            if state.get(inner) == "open":
                loop = stack[stack.index(inner):] + [inner] if inner in stack else [name, inner]
                found.append((f"mega/{name}:{line}", "cycle", " -> ".join(loop)))
            elif inner not in state:
                visit(inner, stack + [inner])
        state[name] = "done"

    for name in sorted(graph):
        if name not in state:
            visit(name, [name])
    return found


# A house in order, and one violation a rule: (rule, file, text added to it).
CLEAN = {
    "version.hpp": "",
    "core/error.hpp": "#include <string>",
    "host/stream.hpp": "#include <thread>",
    "optim/adamw.hpp": "#include <mega/host/stream.hpp>",
    "comm/concepts.hpp": "#include <mega/core/error.hpp>",
    "comm/thread.hpp": "#include <mega/comm/concepts.hpp>\n#include <thread>",
    "comm/detail/ring.hpp": "",
    "comm/nccl.hpp": "#include <mega/comm/concepts.hpp>\n#include <nccl.h>",
    "scope/concepts.hpp": "",
    "scope/recorder.hpp": "#include <mega/scope/concepts.hpp>",
    "dpp/schedule.hpp": "#include <mega/scope/concepts.hpp>\n// #include <mega/scope/recorder.hpp>",
    "ckpt/reader.hpp": "#include <mega/core/error.hpp>\n#include <nlohmann/json.hpp>",
    "nn/norm.cuh": "#include <cub/block/block_reduce.cuh>",
    "train/trainer.hpp": "#include <mega/dpp/schedule.hpp>\n#include <mega/comm/thread.hpp>",
    "ranges/views.hpp": "#include <range/v3/view/iota.hpp>",
}
VIOLATIONS = [
    ("angle", "dpp/schedule.hpp", '#include "concepts.hpp"'),
    ("angle", "dpp/schedule.hpp", "#include <recorder.hpp>"),
    ("exists", "dpp/schedule.hpp", "#include <mega/dpp/absent.hpp>"),
    ("layers", "dpp/schedule.hpp", "#include <mega/scope/recorder.hpp>"),
    ("layers", "dpp/schedule.hpp", "#include <mega/host/stream.hpp>"),
    ("layers", "core/error.hpp", "#include <mega/scope/concepts.hpp>"),
    ("layers", "scope/recorder.hpp", "  #  include <mega/comm/thread.hpp>"),
    ("layers", "comm/concepts.hpp", "#include <mega/host/stream.hpp>"),
    ("layers", "scope/concepts.hpp", "#include <mega/scope/recorder.hpp>"),
    ("cuh", "train/trainer.hpp", "#include <mega/nn/norm.cuh>"),
    ("heavy", "core/error.hpp", "#include <iostream>"),
    ("heavy", "core/error.hpp", "#include <thread>"),
    ("umbrella", "train/trainer.hpp", "#include <mega/ckpt/reader.hpp>"),
    ("umbrella", "dpp/schedule.hpp", "#include <mega/mega.hpp>"),
    ("umbrella", "fbd/unlisted.hpp", ""),
    ("detail", "train/trainer.hpp", "#include <mega/comm/detail/ring.hpp>"),
    ("vendor", "scope/recorder.hpp", "#include <cuda_runtime.h>"),
    ("vendor", "scope/recorder.hpp", "#include <cub/cub.cuh>"),
    ("package", "core/error.hpp", "#include <nlohmann/json.hpp>"),
    ("package", "ckpt/reader.hpp", "#include <range/v3/all.hpp>"),
    ("cycle", "scope/concepts.hpp", "#include <mega/scope/recorder.hpp>"),
]


def self_test():
    """Every rule fires on its violation, and none on the clean house."""
    failures = 0

    def run(case, extra, expected):
        nonlocal failures
        with tempfile.TemporaryDirectory() as scratch:
            root = Path(scratch) / "mega"
            files = dict(CLEAN)
            listed = [n for n in files if not is_opt_in(n) and "/detail/" not in n]
            files["mega.hpp"] = "\n".join(f"#include <mega/{n}>" for n in listed)
            for name, text in extra.items():
                files[name] = files.get(name, "") + "\n" + text
            for name, text in files.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(f"/// @file  Crafted.\n#pragma once\n{text}\n")
            rules = {rule for _, rule, _ in check(Path(scratch))}
        if rules != expected if not expected else not expected <= rules:
            print(f"self-test: {case}: expected {expected or 'nothing'}, found {rules or 'nothing'}")
            failures += 1

    run("clean house", {}, set())
    for rule, name, text in VIOLATIONS:
        run(f"{name} with {text}", {name: text}, {rule})
    print(f"check_includes: self-test, {len(VIOLATIONS) + 1} cases, {failures} failed")
    return 1 if failures else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--self-test", action="store_true")
    parser.add_argument("--include", type=Path, default=Path(__file__).parents[1] / "include")
    arguments = parser.parse_args()
    if arguments.self_test:
        return self_test()
    found = check(arguments.include)
    for place, rule, text in found:
        print(f"{place}: [{rule}] {text}")
    if found:
        print(f"check_includes: {len(found)} violations")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

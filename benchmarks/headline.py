#!/usr/bin/env python3
"""Measures pipelines, layouts, a slow GPU and a killed process on as many GPUs as there are, and writes Markdown tables.

    benchmarks/headline.py --bin build-cuda/bin --out headline --peer torch_lm.py --time-limit 570
    benchmarks/headline.py --bin build-cuda/bin --out two --pp 2 --most 2             what two GPUs can do of it
    benchmarks/headline.py --backend host --bin build/bin --out rehearsal --quick     the same with tiny models on thread ranks
    benchmarks/headline.py --bin build-cuda/bin --dry-run                             asks the programs what they would refuse; needs no GPU
    benchmarks/headline.py --out headline --tables                                    the tables again, from the logs

Rows run in order of worth; a row that needs more GPUs than there are, or longer than is left, is listed as not run. Rows run beside each other
where the GPUs suffice. After each row OUT/tables.md is written anew, so that a run which is ended early leaves what it has. OUT/rows/NAME/ has
the commands and their output.

A peer is a program of the user's own, as benchmarks/compare_gpu.sh --help describes it, which also takes --chunks V, --split of every stage, and
--schedule 1F1B, Interleaved1F1B, LoopedBFS and ZBVZeroBubble.

Exit codes: 0 every row that ran showed what it should, 1 not every one, 2 wrong usage.
"""
import argparse
import concurrent.futures
import datetime
import json
import os
import pathlib
import platform
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

sys.dont_write_bytecode = True  # the tree is no place for it
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import headline_rows  # noqa: E402
import headline_tables  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent
PARTS = {1: "pipelines", 2: "layouts", 3: "a slow GPU", 4: "a killed process"}
PEER_ENDS_WITHIN = 10  # seconds behind its line
OURS = ("train", "processes", "resumed", "whole")  # purposes whose program has --dry-run


class NotRun(Exception):
    pass


class RowFailed(Exception):
    def __init__(self, status, why):
        super().__init__(why)
        self.status, self.why = status, why


def last_line(path):
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"


def shown(argv):
    return " ".join(shlex.quote(str(word)) for word in argv)


# --- processes ---
class Processes:
    """All that run, so that an interrupted session leaves none."""

    def __init__(self):
        self.lock = threading.Lock()
        self.running = set()
        self.ended = False

    def start(self, argv, log, env=None):
        with self.lock:
            if self.ended:
                raise NotRun("interrupted")
            with open(log, "ab") as out:
                out.write(f"$ {shown(argv)}\n".encode())
                out.flush()
                try:
                    process = subprocess.Popen([str(word) for word in argv], stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                                               env={**os.environ, **(env or {})}, start_new_session=True)
                except OSError as error:
                    raise NotRun(f"{argv[0]}: {error.strerror}") from error
            self.running.add(process)
            return process

    def kill(self, process):
        """And all that it has started, also what it has given sessions of their own."""
        if process.poll() is None:
            for pid in [process.pid, *processes_below(process.pid)]:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            process.wait()
        with self.lock:
            self.running.discard(process)

    def end(self):
        with self.lock:
            self.ended = True
            left = list(self.running)
        for process in left:
            self.kill(process)


# --- one row ---
class Running:
    """A row while it runs: its folder, its GPUs, its deadline."""

    def __init__(self, row, session, devices, seconds):
        self.row, self.session, self.setup = row, session, session.setup
        self.folder = session.out / "rows" / row.name()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.end = time.monotonic() + seconds
        self.seconds = seconds
        self.env = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices)), "CUDA_MODULE_LOADING": "EAGER", "NCCL_NVLS_ENABLE": "0"} \
            if self.setup.backend == "cuda" else {}
        self.commands = headline_rows.commands(row, self.setup, self.folder)
        self.peer = ""

    def log(self, purpose):
        return self.folder / f"{purpose}.txt"

    def start(self, purpose, argv, env=None):
        return self.session.processes.start(argv, self.log(purpose), {**self.env, **(env or {})})

    def wait(self, purpose, process):
        try:
            code = process.wait(max(0.1, self.end - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise RowFailed("killed", f"{purpose} after {self.seconds:.0f} s") from None
        finally:
            self.session.processes.kill(process)
        return code

    def call(self, purpose, argv=None):
        """Runs it to its end. @throws RowFailed"""
        code = self.wait(purpose, self.start(purpose, argv or self.commands[purpose]))
        if code == 2:
            raise RowFailed("refused", last_line(self.log(purpose)))
        if code:
            raise RowFailed("failed", f"{purpose}: code {code}: {last_line(self.log(purpose))}")

    def call_for_json(self, purpose):
        """Its standard output is one JSON object."""
        with open(self.log(purpose), "wb") as errors, open(self.folder / f"{purpose}.json", "wb") as out:
            done = subprocess.run([str(word) for word in self.commands[purpose]], stdin=subprocess.DEVNULL, stdout=out, stderr=errors, check=False,
                                  timeout=max(1, self.end - time.monotonic()))
        if done.returncode:
            raise RowFailed("failed", f"{purpose}: code {done.returncode}: {last_line(self.log(purpose))}")

    def until(self, true, seconds, what):
        """Waits for a condition. @throws RowFailed"""
        end = min(self.end, time.monotonic() + seconds)
        while not true():
            if time.monotonic() > end:
                raise RowFailed("failed", what)
            time.sleep(0.02)

    def go(self):
        (self.folder / "commands.txt").write_text("".join(f"{purpose}: {shown(argv)}\n" for purpose, argv in self.commands.items()))
        getattr(self, self.row.kind)()
        for path in self.folder.glob("trace"):
            if not self.session.keeps_traces:
                shutil.rmtree(path)
        shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)

    # --- kinds ---
    def windows(self):
        self.plan_on_host()
        self.call("train")
        self.call_for_json("plan")
        try:
            self.call_for_json("metrics")
        except RowFailed:
            pass  # what it said is in the log; speed and memory are measured all the same

    def speed(self):
        self.plan_on_host()
        if self.setup.measures_by_bench(self.row):
            self.expect_room()
        # The algorithms of matrix products that earlier rows have timed; a copy, since rows run beside each other.
        own, kept = self.folder / headline_rows.TUNED, self.session.out / headline_rows.TUNED
        if kept.exists():
            shutil.copyfile(kept, own)
        self.call("train")
        if own.exists():
            write_whole(kept, own.read_text())
        if "peer" in self.commands:
            try:
                self.call_peer()
            except (RowFailed, NotRun) as error:  # says nothing of ours
                self.peer = str(error)

    def call_peer(self):
        """Until it has printed its line: some wait for each other for minutes before they end. @throws RowFailed"""
        process = self.start("peer", self.commands["peer"])
        while process.poll() is None and not self.peer_has_said() and time.monotonic() < self.end:
            time.sleep(0.1)
        if self.peer_has_said():
            self.end = min(self.end, time.monotonic() + PEER_ENDS_WITHIN)
        try:
            code = self.wait("peer", process)
        except RowFailed:
            if not self.peer_has_said():
                raise
        else:
            if code:
                raise RowFailed("failed", f"peer: code {code}: {last_line(self.log('peer'))}")

    def peer_has_said(self):
        return bool(headline_tables.peer_line(self.log("peer").read_text(errors="replace")))

    def losses(self):
        self.call("train")

    def plan_on_host(self):
        """Programs for GPUs print the plan beside what was measured."""
        if self.setup.backend == "host":
            self.call("dry", [*self.commands["train"], "--dry-run"])

    def expect_room(self):
        """bench_gpu_step plans, but leaves it to CUDA to refuse."""
        self.call("dry", [*self.commands["train"], "--plan"])
        planned, most = headline_tables.memory_of_bench(self.log("dry").read_text()), gpu_bytes(self.setup.gpu_memory)
        if planned and planned > most:
            raise RowFailed("refused", too_large(planned, most))

    def slow(self):
        busy = None
        try:
            if "busy" in self.commands:
                busy = self.start("busy", self.commands["busy"])
                self.until(lambda: "\nbusy" in self.log("busy").read_text() or busy.poll() is not None, 30, "the busy kernel did not begin")
                if busy.poll() is not None:
                    raise RowFailed("failed", f"busy: code {busy.poll()}: {last_line(self.log('busy'))}")
            self.call("train")
            if busy and busy.poll() is not None:
                raise RowFailed("failed", "the busy process ended before the run that it was to disturb")
        finally:
            if busy:
                self.session.processes.kill(busy)
        self.call_for_json("report")

    def killed(self):
        latest = self.folder / "checkpoints" / "latest"
        started, pids = self.start_ranks()
        victim = self.row.gpus() - 1
        try:
            self.until(lambda: latest.exists() or any(p.poll() is not None for p in started), self.seconds, "no checkpoint was written")
            ids = pids()
            if victim not in ids:
                raise RowFailed("failed", f"rank {victim} had ended by itself: {last_line(self.log('processes'))}")
            os.kill(ids[victim], signal.SIGKILL)
            begin = time.monotonic()
            patience = 3 * headline_rows.DEADLINE + 10
            while time.monotonic() - begin < patience and (any(p.poll() is None for p in started) or pids()):
                time.sleep(0.02)
            ended = time.monotonic() - begin
            codes = [p.poll() for p in started]
        finally:
            for process in started:
                self.session.processes.kill(process)
        (self.folder / "killed.json").write_text(json.dumps(
            {"killed_rank": victim, "ended_after_s": ended, "deadline_s": headline_rows.DEADLINE, "codes": " ".join(map(str, codes))}))
        steps = int(re.sub(r"\D", "", latest.read_text())) + 4
        for purpose in ("resumed", "whole"):
            self.call(purpose, [word.replace(headline_rows.STEPS, str(steps)) for word in self.commands[purpose]])

    def start_ranks(self):
        """(what was started, function that gives the process of each living rank)"""
        if self.setup.backend == "host":
            launcher = self.start("processes", self.commands["processes"])
            return [launcher], lambda: ranks_below(launcher.pid)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        n = self.row.gpus()
        started = [self.start("processes", self.commands["processes"], {"RANK": str(r), "LOCAL_RANK": str(r), "WORLD_SIZE": str(n),
                                                                        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}) for r in range(n)]
        return started, lambda: {r: p.pid for r, p in enumerate(started) if p.poll() is None}


def children():
    """Processes by the one that has started them."""
    out = {}
    for folder in pathlib.Path("/proc").iterdir():
        try:
            if folder.name.isdigit():
                out.setdefault(int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1]), []).append(int(folder.name))
        except (OSError, IndexError, ValueError):
            pass  # it has ended
    return out


def processes_below(pid):
    tree, out, open_ = children(), [], [pid]
    while open_:
        found = tree.get(open_.pop(), [])
        out += found
        open_ += found
    return out


def ranks_below(launcher):
    """Process of each rank that mpirun has started and that has not ended."""
    out = {}
    for pid in children().get(launcher, []):
        try:
            variables = dict(word.split("=", 1) for word in pathlib.Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in word)
            if "OMPI_COMM_WORLD_RANK" in variables:
                out[int(variables["OMPI_COMM_WORLD_RANK"])] = pid
        except (OSError, ValueError):
            pass  # it has ended
    return out


# --- all rows ---
class Session:
    def __init__(self, options, setup, rows):
        self.out, self.setup, self.rows = options.out, setup, rows
        self.keeps_traces, self.row_limit = options.keep_traces, options.row_limit
        self.gpus = options.gpus
        self.beside = setup.backend == "cuda" and not options.one_at_a_time
        self.end = time.monotonic() + options.time_limit
        self.processes = Processes()
        self.free = list(range(self.gpus))
        self.changed = threading.Condition()
        self.status = {}
        self.heading = heading(options, setup)

    def left(self):
        return self.end - time.monotonic()

    def limit(self, row):
        return self.row_limit or 3 * row.usual * (2 if "peer" in headline_rows.commands(row, self.setup, self.out) else 1)

    def note(self, row, status, why="", **more):
        """Of a row that is through; tables anew."""
        with self.changed:
            self.status[row.name()] = {"status": status, "why": why, **more}
            write_whole(self.out / "status.json", json.dumps(self.status, indent=1))
            text, _ = headline_tables.tables(self.rows, self.out, self.setup.backend, self.heading)
            write_whole(self.out / "tables.md", text)
        print(f"{row.name()}: {status}{': ' + why if why else ''}", flush=True)

    def take(self, row):
        """GPUs for the row, once they are free; rows begin in their order."""
        with self.changed:
            wanted = row.gpus() if self.beside else self.gpus
            self.changed.wait_for(lambda: len(self.free) >= wanted or self.left() <= 0)
            if len(self.free) < wanted:
                return None
            taken, self.free = self.free[:wanted], self.free[wanted:]
            return taken

    def give(self, devices):
        with self.changed:
            self.free = sorted(self.free + devices)
            self.changed.notify_all()

    def run_row(self, row, devices):
        begin = time.monotonic()
        running = None
        try:
            running = Running(row, self, devices[:row.gpus()], min(self.limit(row), self.left()))
            running.go()
            more = {"peer": running.peer} if running.peer else {}
            self.note(row, "done", seconds=round(time.monotonic() - begin, 1), **more)
        except NotRun as error:
            self.note(row, "not run", str(error))
        except RowFailed as error:
            self.note(row, error.status, error.why, seconds=round(time.monotonic() - begin, 1))
        except Exception as error:  # a row must not take the others with it
            self.note(row, "failed", f"{type(error).__name__}: {error}", seconds=round(time.monotonic() - begin, 1))
        finally:
            self.give(devices)

    def run(self):
        threads = []
        for row in self.rows:
            if row.gpus() > self.gpus:
                self.note(row, "not run", f"needs {row.gpus()} GPUs, {self.gpus} are here" if self.setup.backend == "cuda"
                          else f"needs {row.gpus()} ranks, {self.gpus} are allowed")
                continue
            devices = self.take(row)
            usual = row.usual if self.setup.backend == "cuda" else 2
            if devices is None or self.left() < usual:
                self.note(row, "not run", f"{max(0, self.left()):.0f} s were left, it takes about {usual}")
                if devices:
                    self.give(devices)
                continue
            thread = threading.Thread(target=self.run_row, args=(row, devices), daemon=True)
            thread.start()
            threads.append(thread)
            if not self.beside:
                thread.join()
        for thread in threads:
            thread.join()

    def interrupted(self):
        self.processes.end()
        for row in self.rows:
            if row.name() not in self.status:
                self.note(row, "not run", "interrupted")


def write_whole(path, text):
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def said_by(*argv):
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False, cwd=ROOT)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def gpus_here():
    return sum(line.startswith("GPU ") for line in said_by("nvidia-smi", "-L").splitlines())


def heading(options, setup):
    """Date, machine, commit, command: what a table is worth nothing without."""
    if setup.backend == "cuda":
        said = said_by("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()
        machine = f"{options.gpus} x {said[0] if said else 'unknown GPU'}, `CUDA_MODULE_LOADING=EAGER NCCL_NVLS_ENABLE=0`"
    else:
        machine = f"{os.cpu_count()} processors, {platform.machine()}, thread ranks that share them"
    commit = said_by("git", "rev-parse", "--short", "HEAD")
    if commit and said_by("git", "status", "--porcelain", "-uno"):
        commit += " with changes"
    lines = ["# Headline tables", "", f"{datetime.date.today()}, {machine}, {'commit ' + commit if commit else 'no commit known'}. One run each.", "",
             "```sh", f"benchmarks/headline.py {shown(visible(sys.argv[1:]))}", "```", ""]
    if setup.tiny:
        lines += [f"A rehearsal: models of width {headline_rows.TINY['hidden']} under the names of the large ones. "
                  "No figure of time means anything.", ""]
    return "\n".join(lines)


def visible(arguments):
    """Without the folders of a machine."""
    return [re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "", word) for word in arguments]


# --- dry run ---
def dry_form(argv, setup):
    words = [word.replace(headline_rows.STEPS, "8") for word in argv]
    if pathlib.Path(words[0]).name == "bench_gpu_step":
        return [*words, "--plan"]
    return [*words, "--dry-run", *(["--gpu-memory", setup.gpu_memory] if setup.backend == "cuda" else [])]


def dry_row(row, setup, folder):
    """(the commands and what our programs say to them, whether they took them all or had no memory for them)"""
    lines = [f"{row.name()}: needs {row.gpus()} {'GPUs' if setup.backend == 'cuda' else 'ranks'}"]
    good = True
    for purpose, argv in headline_rows.commands(row, setup, folder).items():
        lines.append(f"  {purpose}: {shown(argv)}")
        taken, said = dry_command(purpose, argv, setup)
        good = good and taken
        if said:
            lines.append(f"    {said}")
    return "\n".join(lines), good


def dry_command(purpose, argv, setup):
    """(whether it is well, what is to be said)"""
    if not shutil.which(str(argv[0])):
        return False, f"! there is no program {argv[0]}"
    if purpose not in OURS and purpose != "plan":
        return True, ""
    done = subprocess.run(dry_form(argv, setup) if purpose in OURS else argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300,
                          check=False)
    planned, most = headline_tables.memory_of_bench(done.stdout), gpu_bytes(setup.gpu_memory)
    fits = re.search(r"^fits: .*", done.stdout, re.M)
    if done.returncode == 0 and planned and planned > most:
        return True, f"refused: {too_large(planned, most)}"
    if done.returncode == 0:
        return True, fits[0] if fits else f"fits: {planned / 2**30:.1f} GiB of {most / 2**30:.1f} GiB at most" if planned else "taken"
    if re.search(r"rank \d+ needs", done.stderr):
        return True, f"refused: {done.stderr.strip()}"
    return False, f"! code {done.returncode}: {done.stderr.strip()[-300:]}"


def too_large(planned, most):
    return f"rank 0 needs {planned / 2**30:.1f} GiB, of {most / 2**30:.1f} GiB at most"


def gpu_bytes(text):
    """What plans may take of a GPU: the trainers' part of it, which is 0.95."""
    found = re.fullmatch(r"([\d.]+)(GB|GiB)", text)
    return 0.95 * float(found[1]) * (1e9 if found[2] == "GB" else 2**30)


# --- command line ---
def make_text(path):
    """Words, the same each time; the models learn something from it."""
    rng = random.Random(7)
    words = ["".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, 9))) for _ in range(800)]
    write_whole(path, " ".join(words[min(799, int(rng.expovariate(0.01)))] for _ in range(400_000)))


def parsed(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--backend", choices=("cuda", "host"), default="cuda", help="GPUs, or threads and processes of the host with tiny models; default cuda")
    add("--tiny", action="store_true", help="tiny models; always so on the host")
    add("--bin", type=pathlib.Path, help="folder of the programs; default build-cuda/bin, on the host build/bin")
    add("--tools", type=pathlib.Path, help="folder of mega-plan and mega-scan; default that of --bin")
    add("--out", type=pathlib.Path, default=pathlib.Path("headline"), help="folder for logs and tables.md; default headline")
    add("--peer", default="", help="PyTorch program to measure beside ours; default none")
    add("--python", default=sys.executable, help="runs the peer")
    add("--gpus", type=int, help="GPUs to use; default all; ranks of the host, default 8")
    add("--gpu-memory", default="139GiB", help="of each GPU, in GB or GiB, for plans; default 139GiB")
    add("--pp", type=int, default=4, help="ranks of the pipelines of part 1; default 4")
    add("--most", type=int, default=8, help="GPUs of the largest layouts of part 2: 2, 4 or 8; default 8")
    add("--parts", default="1,2,3,4", help=f"which: {', '.join(f'{n} {what}' for n, what in PARTS.items())}; default all")
    add("--only", default="", help="rows whose name this regular expression finds; --list prints the names")
    add("--quick", action="store_true", help="a few rows of each part")
    add("--time-limit", type=float, default=3600, help="seconds for everything; default 3600")
    add("--row-limit", type=float, help="seconds after which a row is killed; default three times what it usually takes")
    add("--one-at-a-time", action="store_true", help="no row beside another")
    add("--keep-traces", action="store_true")
    add("--list", action="store_true", help="print the rows and end")
    add("--dry-run", action="store_true", help="print each command, and what our programs would refuse, and end")
    add("--tables", action="store_true", help="write the tables of an earlier run anew and end")
    options = parser.parse_args(arguments)
    if options.pp not in (2, 4):
        parser.error(f"--pp is {options.pp}; it takes 2 and 4, which all orders divide by")
    if options.most not in (2, 4, 8):
        parser.error(f"--most is {options.most}; it takes 2, 4 and 8")
    if options.gpus is not None and options.gpus < 1:
        parser.error(f"--gpus is {options.gpus}; it takes a whole number from 1 on")
    for name in ("time_limit", "row_limit"):
        seconds = getattr(options, name)
        if seconds is not None and not seconds > 0:
            parser.error(f"--{name.replace('_', '-')} is {seconds:g}; it takes seconds above 0")
    if not re.fullmatch(r"[1-9][\d.]*(GB|GiB)", options.gpu_memory):
        parser.error(f"--gpu-memory is {options.gpu_memory}; it takes a number of GB or GiB, as 139GiB")
    if not re.fullmatch(r"[1-4](,[1-4])*", options.parts):
        parser.error(f"--parts is {options.parts}; it takes numbers from 1 to 4 with commas between them")
    try:
        options.only = re.compile(options.only)
    except re.error as error:
        parser.error(f"--only is no regular expression: {error}")
    if options.peer and not pathlib.Path(options.peer).is_file():
        parser.error(f"--peer is {options.peer}, which is no file")
    return options


def chosen_rows(options):
    parts = {int(n) for n in options.parts.split(",")}
    return [row for row in headline_rows.rows(options.pp, options.most)
            if row.part in parts and (row.quick or not options.quick) and options.only.search(row.name())]


def main(arguments):
    options = parsed(arguments)
    host = options.backend == "host"
    out = options.out = options.out.resolve()
    setup = headline_rows.Setup(options.backend, host or options.tiny, (options.bin or ROOT / ("build/bin" if host else "build-cuda/bin")).resolve(),
                                options.tools and options.tools.resolve(), out / "text.txt", options.peer, options.python,
                                options.gpu_memory)
    rows = chosen_rows(options)
    if not rows:
        print("headline.py: no row is left by --parts, --only and --quick; --list prints all", file=sys.stderr)
        return 2
    if options.list:
        for row in rows:
            print(f"{row.name()}  part {row.part}, {row.gpus()} GPUs")
        return 0
    if options.dry_run:
        good = True
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            for said, taken in pool.map(lambda row: dry_row(row, setup, out / "rows" / row.name()), rows):
                print(said, flush=True)
                good = good and taken
        return 0 if good else 1
    if options.tables:
        text = headline_tables.text_of(out / "tables.md")
        text, wrong = headline_tables.tables(rows, out, options.backend, text.split("\n## ")[0].rstrip() + "\n")
        write_whole(out / "tables.md", text)
        return 1 if wrong else 0
    options.gpus = options.gpus or (8 if host else gpus_here())
    if options.gpus == 0:
        print("headline.py: nvidia-smi sees no GPU; --dry-run needs none, and --backend host runs on the processor", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    make_text(setup.text)
    session = Session(options, setup, rows)

    def stop(*_):
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    try:
        session.run()
    except KeyboardInterrupt:
        session.interrupted()
    _, wrong = headline_tables.tables(rows, out, options.backend)
    for sentence in wrong:
        print(f"! {sentence}")
    print(f"tables: {out / 'tables.md'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

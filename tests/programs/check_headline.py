#!/usr/bin/env python3
"""benchmarks/headline.py on thread ranks, and with stand-ins for GPUs and for the programs that need them.

usage: check_headline.py BIN_FOLDER [TEST...]
"""
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

BIN = pathlib.Path(sys.argv[1]).resolve()
BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
sys.dont_write_bytecode = True
sys.path.insert(0, str(BENCHMARKS))
import headline_rows  # noqa: E402
import headline_tables  # noqa: E402

ROWS = headline_rows.rows()
HAS_PROCESSES = (BIN / "mega-gpt3-mpi").exists() and shutil.which("mpirun")


def headline(*arguments, env=None, cwd=None, timeout=300):
    return subprocess.run([sys.executable, str(BENCHMARKS / "headline.py"), *map(str, arguments)], capture_output=True, text=True, timeout=timeout,
                          check=False, env=env, cwd=cwd)


def body(text, title):
    """Lines of a table, without its heading."""
    lines = text.split(f"## {title}\n")[1].split("\n## ")[0].splitlines()
    return [line for line in lines if line.startswith("| ")][1:]


class Rows(unittest.TestCase):
    """What is to be measured, before anything runs."""

    def test_every_order_of_every_model_is_there(self):
        got = {(r.model.name, r.order.chunks, r.micro_batches(), r.order.title) for r in ROWS if (r.part, r.kind) == (1, "windows")}
        for model in ("gpt3-1.3b", "gpt3-6.7b", "llama3-1b", "llama3-8b"):
            for m in (8, 16):
                for v, titles in ((1, ("1F1B", "ZB-H1", "1F1B, look-ahead 2")), (2, ("DFC", "BFC", "ZB-V")), (4, ("DFC", "BFC", "DFC, look-ahead 2"))):
                    for title in titles:
                        self.assertIn((model, v, m, title), got)
            self.assertIn((model, 4, 16, "interleaved, groups of 8"), got)

    def test_names_are_unique_and_fit_into_a_file_system(self):
        for p, most in ((4, 8), (2, 4), (2, 2)):
            names = [r.name() for r in headline_rows.rows(p, most)]
            self.assertEqual(len(names), len(set(names)))
            for name in names:
                self.assertRegex(name, r"^[a-z0-9.-]+$")

    def test_rows_of_a_group_have_the_same_samples(self):
        for r in headline_rows.rows(2, 2) + headline_rows.rows(2, 4) + ROWS:
            self.assertEqual(r.micro_batches() * r.micro_batch * r.layout.dp, r.samples, r.name())
            self.assertEqual(r.gpus(), r.layout.size())

    def test_layers_are_split_so_that_the_busiest_rank_has_least(self):
        models = headline_rows.MODELS
        self.assertEqual(headline_rows.split(models["gpt3-1.3b"], 2, 1), [13, 11])
        self.assertEqual(headline_rows.split(models["llama3-1b"], 2, 1), [10, 6])
        for model in models.values():
            for p in (2, 4):
                for v, placement in ((1, "loop"), (2, "loop"), (2, "v")):
                    if model.layers < p * v:
                        continue
                    layers = headline_rows.split(model, p, v, placement)
                    self.assertEqual((sum(layers), len(layers)), (model.layers, p * v))
                    self.assertGreaterEqual(min(layers), 1)
                    rank = [s % p if placement == "loop" or s < p else 2 * p - 1 - s for s in range(p * v)]
                    load = [sum(n for n, r in zip(layers, rank) if r == at) for at in range(p)]
                    load[rank[-1]] += model.head_in_layers()
                    # No rank lacks a layer that another one has too many, except where a stage needs its only one.
                    self.assertLess(max(load) - min(load), max(1, model.head_in_layers() + v - min(load)) + 1e-9, (model.name, p, v, placement))

    def test_two_gpus_have_rows_of_every_part(self):
        got = {(r.part, r.kind) for r in headline_rows.rows(2, 2) if r.gpus() <= 2}
        self.assertEqual(got, {(r.part, r.kind) for r in ROWS})
        self.assertEqual({r.gpus() for r in headline_rows.rows(2, 2) if r.part < 3}, {1, 2})

    def test_rows_worth_most_come_first(self):
        self.assertEqual([r.worth for r in ROWS], sorted(r.worth for r in ROWS))


class Usage(unittest.TestCase):
    def test_wrong_usage(self):
        for flags, word in ((["--pp", "3"], "--pp is 3"), (["--most", "6"], "--most is 6"), (["--gpus", "0"], "--gpus is 0"), (["--parts", "5"], "--parts is 5"),
                            (["--time-limit", "0"], "--time-limit is 0"), (["--only", "("], "--only"), (["--peer", "/nonexistent/peer.py"], "no file"),
                            (["--gpu-memory", "80"], "--gpu-memory is 80"), (["--only", "nothing-of-this-name"], "no row is left")):
            done = headline(*flags)
            self.assertEqual(done.returncode, 2, (flags, done.stderr))
            self.assertIn(word, done.stderr)

    @unittest.skipIf(shutil.which("nvidia-smi"), "a GPU may be here")
    def test_without_a_gpu_it_says_what_else_there_is(self):
        done = headline()
        self.assertEqual(done.returncode, 2)
        for word in ("no GPU", "--dry-run", "--backend host"):
            self.assertIn(word, done.stderr)


class Folder(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)

    def program(self, name, text):
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!{sys.executable}\n{text}")
        path.chmod(0o755)
        return path


@unittest.skipUnless(HAS_PROCESSES, "built without MPI")
class Rehearsal(Folder):
    """A few rows of each part with tiny models on threads and processes."""

    def test_our_programs_take_every_command(self):
        done = headline("--backend", "host", "--bin", BIN, "--quick", "--dry-run")
        self.assertEqual(done.returncode, 0, done.stdout)
        for row in ROWS:
            if row.quick:
                self.assertIn(f"{row.name()}: needs {row.gpus()} ranks\n", done.stdout)
        self.assertNotIn("!", done.stdout)
        # A program that does not know an option, and one that is not there.
        for name in ("mega-plan", "mega-scan", "mega-llama3", "mega-gpt3-mpi"):
            self.program(name, f"import os, sys; os.execv('{BIN / name}', sys.argv)")
        self.program("mega-gpt3", "import sys; sys.exit('there is no option --schedule')")
        flags = ["--backend", "host", "--bin", self.folder / "bin", "--quick", "--dry-run", "--parts", "1"]
        done = headline(*flags)
        self.assertEqual(done.returncode, 1)
        self.assertIn("! code 1: there is no option --schedule", done.stdout)
        (self.folder / "bin" / "mega-gpt3").unlink()
        done = headline(*flags)
        self.assertEqual(done.returncode, 1)
        self.assertIn("! there is no program", done.stdout)

    def test_every_part_passes_and_a_wrong_log_is_seen(self):
        out = self.folder / "out"
        done = headline("--backend", "host", "--bin", BIN, "--quick", "--out", out)
        text = (out / "tables.md").read_text()
        self.assertEqual(done.returncode, 0, done.stdout + text)
        self.assertNotIn("What is wrong", text)
        for title, kind, part in (("Pipelines: windows, bubble, memory", "windows", 1), ("Pipelines beside PyTorch", "speed", 1),
                                  ("Layouts: speed", "speed", 2), ("Layouts: losses in fp32", "losses", 2), ("A slow GPU", "slow", 3),
                                  ("A killed process", "killed", 4)):
            wanted = [r for r in ROWS if r.quick and (r.kind, r.part) == (kind, part)]
            self.assertEqual(len(body(text, title)), len(wanted), text)
        windows = body(text, "Pipelines: windows, bubble, memory")
        for line in windows:
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            self.assertEqual(cells[-1], "equal bits", line)
            self.assertGreater(float(cells[4]), 0, line)  # sending ratio
            measured, predicted = map(float, cells[8].split(", "))
            self.assertTrue(0 < measured < 100 and 0 < predicted < 30, line)
        self.assertIn("Rank 3 computes slowly", body(text, "A slow GPU")[1])
        self.assertIn("nothing stands out", body(text, "A slow GPU")[0])
        self.assertNotIn(str(self.folder), text)

        again = self.folder / "again"  # other logs, other tables
        flags = ["--backend", "host", "--quick", "--out", again, "--tables"]
        shutil.copytree(out, again)
        self.assertEqual(headline(*flags).returncode, 0)
        self.assertEqual((again / "tables.md").read_text(), text)
        name = {kind: [r.name() for r in ROWS if r.quick and r.kind == kind and r.part == part]
                for kind, part in (("windows", 1), ("losses", 2), ("killed", 4))}
        self.edit_step(again / "rows" / name["windows"][1] / "log.json", 1e-12)  # not one bit
        self.edit_step(again / "rows" / name["losses"][1] / "log.json", 1e-3)
        self.edit_step(again / "rows" / name["killed"][0] / "whole.json", float("nan"))
        (again / "rows" / name["windows"][2] / "metrics.json").write_text("")
        (again / "rows" / name["windows"][2] / "metrics.txt").write_text(f"mega-plan: {again}/rows/x/trace: torn\n")
        late = again / "rows" / name["killed"][0] / "killed.json"
        late.write_text(json.dumps({**json.loads(late.read_text()), "ended_after_s": 21}))
        report = again / "rows" / "slow-gpt3-125m-dp4-busy" / "report.json"
        got = json.loads(report.read_text())
        got["verdicts"][0]["ranks"] = [1]
        report.write_text(json.dumps(got))
        report = again / "rows" / "slow-gpt3-125m-dp4-healthy" / "report.json"
        report.write_text(json.dumps({**json.loads(report.read_text()), "healthy": False}))
        done = headline(*flags)
        self.assertEqual(done.returncode, 1)
        wrong = (again / "tables.md").read_text().split("## What is wrong\n")[1]
        for sentence in (rf"{name['windows'][1]}: losses differ by 1\S*e-12, more than 0", rf"{name['losses'][1]}: losses differ by 0.001, more than 0.0001",
                         rf"{name['windows'][2]}: its trace has no windows: mega-plan: rows/x/trace: torn", rf"{name['killed'][0]}: not all processes ended in the deadline",
                         rf"{name['killed'][0]}: losses differ by inf", "dp4-busy: mega-scan did not name rank 3", "dp4-healthy: mega-scan accuses"):
            self.assertRegex(wrong, sentence)
        self.assertEqual(len(wrong.strip().splitlines()), 7, wrong)

    @staticmethod
    def edit_step(path, more):
        steps = headline_tables.steps_of(path)
        steps[-1]["loss"] += more
        path.write_text("".join(json.dumps(step) + "\n" for step in steps))


PROCESS_STAND_IN = """
import os, pathlib, subprocess, sys, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
assert os.environ["LOCAL_RANK"] == str(rank) and os.environ["MASTER_ADDR"] == "127.0.0.1"
mine = pathlib.Path(sys.argv[0]).with_name("pid-" + os.environ["MASTER_PORT"] + "-" + str(rank))
last = mine.with_name(mine.name.rsplit("-", 1)[0] + "-" + str(size - 1))
mine.write_text(str(os.getpid()))
# The ranks are threads of rank 0's child; the others only wait for the last one to be lost.
child = subprocess.Popen([REAL, *[a for a in sys.argv[1:] if "--precision" not in a], "--slow-rank-interval=0"]) if rank == 0 else None
while not last.exists() or not last.read_text() or pathlib.Path("/proc/" + last.read_text() + "/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
    time.sleep(0.05)
if child: child.kill()
sys.exit(3)
"""


class StandIns(Folder):
    """GPUs that nvidia-smi only claims, and programs of the processor under the names of those for GPUs."""

    def setUp(self):
        super().setUp()
        self.smi(4)
        for family in ("gpt3", "llama3"):
            self.program(f"mega-{family}-cuda", "import os, sys, time\n"
                         "print('devices', os.environ['CUDA_VISIBLE_DEVICES'], os.environ['CUDA_MODULE_LOADING'], time.time(), flush=True)\n"
                         f"real = '{BIN / f'mega-{family}'}'\n"
                         "os.execv(real, [real, *[a for a in sys.argv[1:] if '--precision' not in a], '--slow-rank-interval=0'])\n")
        self.program("bench_headline_busy", "import sys, time; print('busy', flush=True); time.sleep(300)")
        self.program("bench_headline_processes", f"REAL = '{BIN / 'mega-gpt3'}'\n" + PROCESS_STAND_IN)

    def smi(self, gpus):
        self.program("nvidia-smi", f"import sys\nif '-L' in sys.argv: [print('GPU', i, ': stand-in') for i in range({gpus})]\nelse: print('stand-in, 1.0')")

    def run_on_gpus(self, *flags, timeout=300):
        out = self.folder / "out"
        done = headline("--tiny", "--bin", self.folder / "bin", "--tools", BIN, "--out", out, *flags, timeout=timeout,
                        env={**os.environ, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"})
        status = json.loads((out / "status.json").read_text())
        return done, status, (out / "tables.md").read_text()

    def test_rows_that_need_more_gpus_are_listed_and_others_run_beside_each_other(self):
        names = "^losses-gpt3-6.7b-(tp2|dp2-zero-1|tp8)$|^windows-gpt3-1.3b-pp4-v1-m8-1f1b$"
        done, status, text = self.run_on_gpus("--only", names)
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertEqual(status["losses-gpt3-6.7b-tp8"], {"status": "not run", "why": "needs 8 GPUs, 4 are here"})
        self.assertIn("- not run: needs 8 GPUs, 4 are here: losses-gpt3-6.7b-tp8\n", text)
        self.assertIn("4 x stand-in, 1.0", text)
        devices = {}
        for name, got in status.items():
            if got["status"] == "done":
                said = (self.folder / "out" / "rows" / name / "train.txt").read_text()
                devices[name] = re.search(r"^devices (\S+) EAGER", said, re.M)[1]
        self.assertEqual(devices["windows-gpt3-1.3b-pp4-v1-m8-1f1b"], "0,1,2,3")
        self.assertEqual({devices["losses-gpt3-6.7b-tp2"], devices["losses-gpt3-6.7b-dp2-zero-1"]}, {"0,1", "2,3"})

    def test_a_process_is_killed_and_a_busy_one_ends_with_its_row(self):
        done, status, text = self.run_on_gpus("--parts", "3,4", "--only", "killed-gpt3-125m-tp2|slow-gpt3-125m-dp2-busy")
        # Nobody was made slow here, and that is noticed, unless what else the machine does makes rank 1 slow.
        complaints = [line for line in done.stdout.splitlines() if line.startswith("!")]
        self.assertIn(complaints, ([], ["! slow-gpt3-125m-dp2-busy: mega-scan did not name rank 1"]))
        self.assertEqual(done.returncode, len(complaints), done.stdout)
        self.assertEqual({got["status"] for name, got in status.items() if "tp2-pp2-dp2" not in name}, {"done"})
        self.assertIn("| 3 3 3 -9 |", body(text, "A killed process")[0])
        left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        self.assertNotIn(str(self.folder / "bin"), left)

    def test_what_refuses_fails_or_hangs_takes_no_other_row_along(self):
        self.program("mega-llama3-cuda", "import sys; print('mega-llama3-cuda: rank 0 needs 999 GiB', file=sys.stderr); sys.exit(2)")
        self.program("mega-gpt3-cuda", "import sys, time\n"
                     "if '--tp=2' in sys.argv: sys.exit('broken')\n"
                     "if '--dp=2' in sys.argv: time.sleep(300)\n"
                     "sys.exit(0)\n")
        begin = time.monotonic()
        done, status, text = self.run_on_gpus("--parts", "2", "--only", "losses-.*-(tp2|dp2-zero-1)$", "--row-limit", "2")
        self.assertLess(time.monotonic() - begin, 60)
        self.assertEqual(done.returncode, 1)
        self.assertEqual(status["losses-llama3-8b-tp2"]["status"], "refused")
        self.assertEqual(status["losses-llama3-8b-tp2"]["why"], "mega-llama3-cuda: rank 0 needs 999 GiB")
        self.assertEqual((status["losses-gpt3-6.7b-tp2"]["status"], status["losses-gpt3-6.7b-tp2"]["why"]), ("failed", "train: code 1: broken"))
        self.assertEqual(status["losses-gpt3-6.7b-dp2-zero-1"]["status"], "killed")
        self.assertIn("- killed: train after 2 s", text)

    def test_no_row_begins_that_would_not_end_in_time(self):
        done, status, _ = self.run_on_gpus("--parts", "2", "--only", "losses-gpt3-6.7b-(tp2|dp2-zero-1)$", "--time-limit", "20")
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertEqual({got["status"] for got in status.values()}, {"not run"})
        for got in status.values():
            self.assertRegex(got["why"], r"^(19|20) s were left, it takes about 60$")

    def test_an_interrupted_session_leaves_its_tables_and_no_process(self):
        self.program("mega-gpt3-cuda", "import sys, time\nif '--tp=4' in sys.argv: time.sleep(300)\nsys.exit('broken')\n")
        out = self.folder / "out"
        process = subprocess.Popen([sys.executable, str(BENCHMARKS / "headline.py"), "--tiny", "--bin", str(self.folder / "bin"), "--tools", str(BIN), "--out",
                                    str(out), "--only", "^losses-gpt3-6.7b"], stdout=subprocess.DEVNULL,
                                   env={**os.environ, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"})
        hanging = out / "rows" / "losses-gpt3-6.7b-tp4" / "train.txt"
        end = time.monotonic() + 60
        while not hanging.exists():
            self.assertLess(time.monotonic(), end)
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        self.assertIn("interrupted", (out / "tables.md").read_text())
        left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        self.assertNotIn(str(self.folder / "bin" / "mega-gpt3-cuda"), left)

    def test_a_peer_runs_beside_ours_and_may_fail(self):
        peer = self.program("peer.py", "import sys\n"
                            "if 'ZBVZeroBubble' in sys.argv: sys.exit('no such schedule')\n"
                            "print('peer=torch model=m tokens_per_s=500 peak_gib=2.5')\n")
        done, _, text = self.run_on_gpus("--parts", "1", "--only", "^speed-gpt3-1.3b-pp4-v.-m8-(1f1b|zb-v)$", "--peer", peer, "--python",
                                         self.program("launcher", "import os, sys\n"
                                                      "assert sys.argv[1:6] == ['-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '4'], sys.argv\n"
                                                      "os.execv(sys.argv[6], sys.argv[6:])\n"))
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertIn("! speed-gpt3-1.3b-pp4-v2-m8-zb-v: peer: code 1: no such schedule", done.stdout)
        lines = body(text, "Pipelines beside PyTorch")
        self.assertEqual(len(lines), 2)
        cells = [cell.strip() for cell in lines[0].strip("|").split("|")]
        self.assertEqual((cells[6], cells[-1]), ("500", "2.5"))
        self.assertAlmostEqual(float(cells[8]), float(cells[7].replace(",", "")) / 500, delta=2e-3)

    def test_a_peer_that_does_not_end_is_ended_behind_its_line(self):
        peer = self.program("peer.py", "import subprocess, sys, time\n"
                            "subprocess.Popen(['sleep', '291'], start_new_session=True)\n"
                            "print('peer=torch model=m tokens_per_s=500 peak_gib=2.5', flush=True)\n"
                            "time.sleep(292)\n")
        begin = time.monotonic()
        done, _, text = self.run_on_gpus("--parts", "1", "--only", "^speed-gpt3-1.3b-pp4-v1-m8-1f1b$", "--peer", peer, "--python",
                                         self.program("launcher", "import os, sys\nos.execv(sys.argv[6], sys.argv[6:])\n"))
        self.assertLess(time.monotonic() - begin, 60)
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertEqual([cell.strip() for cell in body(text, "Pipelines beside PyTorch")[0].strip("|").split("|")][6], "500")
        left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()
        self.assertEqual([line for line in left if line in ("sleep 291", str(peer))], [])


class CompareGpu(Folder):
    """benchmarks/compare_gpu.sh, with stand-ins for both programs."""

    def compare(self, ours, peer, *flags):
        env = {**os.environ, "GPU_STEP": self.program("ours", ours), "PEER": self.program("peer", peer), "PYTHON": sys.executable, "OUT": str(self.folder)}
        return subprocess.run([BENCHMARKS / "compare_gpu.sh", *flags], capture_output=True, text=True, timeout=120, check=False, env=env)

    def test_ratio_of_medians(self):
        ours = ("import pathlib\nseen = pathlib.Path(__file__).with_name('seen')\nruns = len(seen.read_text()) if seen.exists() else 0\n"
                "seen.write_text('x' * (runs + 1))\nprint(f'peer=mega a=b tokens_per_s={[900, 300, 600][runs]} peak_gib=1.5')\n")
        done = self.compare(ours, "print('peer=torch a=b tokens_per_s=500 peak_gib=2.5')\n", "--repeats", "3", "gpt3-125m")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("| gpt3-125m | 500 | 600 | 1.200 |", done.stdout)

    def test_what_hangs_is_ended(self):
        says = "print('peer=who a=b tokens_per_s=500 peak_gib=2.5', flush=True)\n"
        hangs = "import subprocess, time\nsubprocess.Popen(['sleep', '293'], start_new_session=True)\ntime.sleep(294)\n"
        done = self.compare(says, says + hangs, "gpt3-125m")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("| gpt3-125m | 500 | 500 | 1.000 |", done.stdout)
        done = self.compare("import sys\nsys.exit('broken')\n", hangs, "--limit", "2", "gpt3-125m")
        self.assertEqual(done.returncode, 1)
        self.assertIn("peer of gpt3-125m was killed after 2 s", done.stderr)
        self.assertIn("ours of gpt3-125m failed with code 1: broken", done.stderr)
        left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        self.assertNotIn("sleep 293", left)


class Tables(unittest.TestCase):
    """The figures, against logs that say the numbers."""

    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)

    def test_windows_and_bubble(self):
        # Two ranks compute 60 and 40 ms of an iteration of 110 ms, whose last 10 ms come after all compute.
        ranks = [{"iteration_ms": 110, "compute_ratio": 60 / 110, "reduce_window_ms": 10, "gradient_ratio": 50 / 110, "peak_activations": 2},
                 {"iteration_ms": 110, "compute_ratio": 40 / 110, "reduce_window_ms": 32, "gradient_ratio": 70 / 110, "peak_activations": 1}]
        (self.folder / "metrics.json").write_text(json.dumps(
            {"iterations": [3, 4], "iteration_ms": 110, "per_rank": ranks, "transfers": {"total_ms": 8, "exposed_ms": 6, "coverage": 0.25},
             "send_windows": [{"ratio": 0.2}, {"ratio": 0.6}, {"ratio": None}]}))
        got = headline_tables.windows(self.folder)
        self.assertAlmostEqual(got["bubble"], 0.5)
        self.assertAlmostEqual(got["sending"], 0.4)
        self.assertAlmostEqual(got["gradients"], 60 / 110)
        self.assertAlmostEqual(got["exposed_ms"], 3)
        self.assertEqual((got["covered"], got["activations"]), (0.25, 2))

    def test_speed_of_a_trainer_leaves_out_its_first_steps(self):
        steps = [{"step": i + 1, "loss": 5.0 - i, "tokens_per_s": speed, "seconds": 0.1 * speed, "peak_bytes": 2**30} for i, speed in
                 enumerate((1, 2, 30, 10, 20))]
        (self.folder / "log.json").write_text("".join(json.dumps(s) + "\n" for s in steps) + '{"step": 6, "lo')
        (self.folder / "train.txt").write_text("memory of the fullest rank: 12.5 GiB measured, 512.0 MiB planned\n")
        got = headline_tables.speed(self.folder)
        self.assertEqual((got["tokens_per_s"], got["step_ms"], got["losses"]), (20, 2000, [5.0, 4.0, 3.0, 2.0, 1.0]))
        self.assertEqual((got["planned"], got["measured"]), (0.5 * 2**30, 12.5 * 2**30))

    def test_speed_of_the_benchmark(self):
        (self.folder / "train.txt").write_text("$ bench\npeer=mega model=gpt3-1.3b parallel=pp2 ms_per_step=277.51 tokens_per_s=118083 tflops_per_gpu=500.1 "
                                               "peak_gib=26.6 mfu=0.5 loss=10.9123\nmemory of rank 0, MiB: parameters 1.0, planned 2048.0; measured 2050.0\n")
        got = headline_tables.speed(self.folder)
        self.assertEqual((got["tokens_per_s"], got["step_ms"], got["tflops"], got["losses"]), (118083, 277.51, 500.1, [10.9123]))
        self.assertEqual((got["planned"], got["measured"]), (2 * 2**30, 26.6 * 2**30))
        (self.folder / "train.txt").write_text("memory of rank 0, MiB: parameters 1.0, planned 2048.0\n")
        self.assertEqual(headline_tables.memory_of_bench((self.folder / "train.txt").read_text()), 2 * 2**30)

    def test_differences(self):
        off = headline_tables.difference
        self.assertEqual(off([1, 2.5], [1, 2]), 0.5)
        self.assertEqual(off([float("nan")], [float("nan")]), float("inf"))
        for a, b in (([1], [1, 2]), ([], []), ([None], [1]), (None, [1])):
            self.assertIsNone(off(a, b))


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]])

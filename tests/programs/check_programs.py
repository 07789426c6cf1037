#!/usr/bin/env python3
"""The trainers as their users run them: exit codes, sentences, files, resumption, MPI.

usage: check_programs.py BIN_FOLDER [TEST...]
"""
import itertools
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

BIN = pathlib.Path(sys.argv[1]).resolve()
SMALL = ["--num-layers=4", "--hidden-size=32", "--num-attention-heads=4", "--seq-length=16", "--micro-batch-size=1",
         "--global-batch-size=8", "--lr=1e-3", "--lr-warmup-iters=2", "--eval-iters=1", "--train-iters=6"]


def run(program, *arguments, timeout=120, env=None, most_bytes=None):
    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))

    return subprocess.run([str(BIN / program), *map(str, arguments)], capture_output=True, text=True, errors="replace", timeout=timeout,
                          env=env, stdin=subprocess.DEVNULL, preexec_fn=limit if most_bytes else None)


def steps(path):
    return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]


class Programs(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)
        self.text = self.folder / "text.txt"
        self.text.write_text("".join(f"{i} bottles of water on the wall, {i} bottles of water. " for i in range(400)))

    def train(self, *arguments, program="mega-gpt3", log="log.json"):
        path = self.folder / log
        path.unlink(missing_ok=True)
        done = run(program, *SMALL, "--data", self.text, "--log-json", path, *arguments)
        self.assertEqual(done.returncode, 0, done.stderr)
        return steps(path), done

    def refused(self, *arguments, program="mega-gpt3", code=2, says=()):
        """One sentence on standard error, the exit code, and nothing written."""
        before = sorted(p for p in self.folder.rglob("*"))
        save = self.folder / "never"
        done = run(program, *SMALL, "--data", self.text, "--save", save, *arguments)
        self.assertEqual(done.returncode, code, done.stderr)
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        self.assertEqual(len(lines), 1, done.stderr)
        for word in says:
            self.assertIn(str(word), lines[0])
        self.assertEqual(before, sorted(p for p in self.folder.rglob("*")))

    # --- wrong usage and bad input ---
    def test_help_lists_every_section(self):
        done = run("mega-gpt3", "--help")
        self.assertEqual(done.returncode, 0)
        for word in ("Layout", "Model", "Training", "Optimizer", "Data", "Checkpoints", "Output", "--tensor-model-parallel-size",
                     "--tp", "cosine", "Exit codes: 0 done", "2 wrong usage or input", "3 a rank", "4 a checkpoint"):
            self.assertIn(word, done.stdout)

    def test_flags_that_are_not_there_or_not_numbers(self):
        self.refused("--no-such-flag", "1", says=["no-such-flag"])
        self.refused("--train-iters=many", says=["many"])
        self.refused("--schedule", "zigzag", says=["zigzag", "1f1b"])

    def options(self, program, kind):
        """The options that the help says take such a value."""
        found = re.findall(rf"^\s+(?:-\w,)?--([\w-]+)(?:,--[\w-]+)* {kind}\b", run(program, "--help").stdout, re.M)
        self.assertGreater(len(found), 5)
        return found

    def test_integers_at_their_ends(self):
        """Taken or refused in one sentence; never out of range, out of memory or silently another number."""
        names = self.options("mega-gpt3", "U?INT")
        for word in ("look-ahead", "num-layers", "hidden-size", "train-iters", "keep", "seed"):
            self.assertIn(word, names)
        for name in names:
            for value in (0, -1, 10**9, 2**31 - 1, 2**31, 2**63 - 1, -2**63, 2**63, 2**64):
                with self.subTest(option=name, value=value):
                    layout = ["--pp=2"] if name == "look-ahead" or name.startswith("decoder-") else []
                    done = run("mega-gpt3", *SMALL, *layout, "--data", self.text, "--dry-run", f"--{name}={value}", most_bytes=4 << 30)
                    self.assertIn(done.returncode, (0, 2), done.stderr)
                    self.assertNotIn("runtime error", done.stderr)  # of a program with -fsanitize=undefined
                    if value < 0 or value >= 2**64 or name != "seed" and value == 2**63:
                        self.assertEqual(done.returncode, 2, done.stdout)
                    if done.returncode == 2:
                        self.assertEqual(len(done.stderr.strip().splitlines()), 1, done.stderr)
                        self.assertRegex(done.stderr, rf"(?<!\d){value}(?!\d)|--{name}\b")

    def test_integers_that_only_a_choice_looks_at(self):
        wide = ["--pp=2", "--vpp=2"]
        for flags in ([*wide, "--schedule=adaptive", "--look-ahead=2147483647"],
                      [*wide, "--schedule=adaptive", "--look-ahead=2147483647", "--memory-cap=2147483647"],
                      [*wide, "--schedule=adaptive", "--memory-cap=2147483647"], [*wide, "--schedule=auto", "--memory-cap=2147483647"],
                      [*wide, "--schedule=auto", "--memory-cap=2147483647", "--stage-times=1,1,1", "--look-ahead=2147483647"],
                      ["--pp=2", "--look-ahead=1000000000"]):
            done = run("mega-gpt3", *SMALL, "--data", self.text, "--dry-run", *flags, timeout=60, most_bytes=4 << 30)
            self.assertEqual(done.returncode, 0, (flags, done.stderr))
            self.assertEqual(done.stderr, "", flags)
        # In refusals too the numbers are what they are.
        self.refused(*wide, "--schedule=adaptive", "--look-ahead=2147483647", "--memory-cap=2", says=["--memory-cap 2 ", "at least 23, look-ahead included"])
        self.refused(*wide, "--schedule=interleaved", "--group-size=1000000000", says=["1000000000", "2..8"])
        self.refused("--tp=65536", "--pp=65536", says=["65536", "at most 1048576"])
        self.refused("--micro-batch-size=65536", "--dp=65536", says=["8", "65536", "4294967296"])
        self.refused("--global-batch-size=1000000000", says=["1000000000 micro-batches", "4194304"])
        self.refused("--seq-length=1000000000", "--micro-batch-size=1000000000", "--global-batch-size=1000000000", says=["activations"])
        self.refused("--hidden-size=100000000", "--ffn-hidden-size=100000000", says=["parameters"])

    def test_an_empty_text_is_no_way_to_leave_an_option_out(self):
        names = self.options("mega-gpt3", "TEXT")
        for word in ("inject", "save", "trace", "data-path"):
            self.assertIn(word, names)
        for name in names:
            if name == "prompt":
                continue
            self.refused(f"--{name}", "", says=[f"--{name}", "empty", "leave it out"])
        self.train("--train-iters=1", "--sample-tokens=1", "--prompt", "")

    def test_faults_that_contradict_themselves(self):
        self.refused("--dp=2", "--inject=slow-rank=1,factor=2,factor=3", says=["slow-rank=1,factor=2,factor=3", "factor twice"])
        self.refused("--dp=2", "--inject=late-host=1,ms=2,from-step=1,from-step=1", says=["from-step twice"])
        self.refused("--dp=2", "--inject=slow-rank=2,factor=2", says=["rank 2", "0 to 1"])

    def test_contradictions(self):
        self.refused("--untie-embeddings-and-output-weights", "--tie-embeddings-and-output-weights", says=["contradict"])
        self.refused("--schedule=interleaved", says=["group-size"])
        self.refused("--group-size=4", says=["belong together"])
        self.refused("--schedule=1f1b", "--vpp=2", "--pp=2", says=["1F1B", "2"])
        self.refused("--lr-warmup-iters=10", "--lr-decay-iters=5", says=["10", "5"])
        self.refused("--lr-decay-style=WSD", says=["WSD"])
        self.refused("--lr-wsd-decay-iters=2", says=["WSD"])
        self.refused("--lr-decay-style=WSD", "--lr-wsd-decay-iters=50", says=["50", "6"])

    def test_two_runs_do_not_share_a_folder(self):
        save = self.folder / "ck"
        endless = [str(BIN / "mega-gpt3"), *SMALL, "--data", str(self.text), "--train-iters=1000000", "--save", str(save)]

        def started(*more):
            process = subprocess.Popen([*endless, *more], stderr=subprocess.PIPE, text=True)
            self.addCleanup(process.kill)
            return process

        def wait_for(holds):
            deadline = time.monotonic() + 60
            while not holds() and time.monotonic() < deadline:
                time.sleep(0.02)
            self.assertTrue(holds())

        def is_refused(*more, says):
            log = self.folder / "second.json"
            log.write_text("kept\n")
            for program in ("mega-gpt3", "mega-llama3"):
                done = run(program, *SMALL, "--data", self.text, "--save", save, "--log-json", log, *more)
                self.assertEqual(done.returncode, 2, done.stderr)
                self.assertEqual(len(done.stderr.strip().splitlines()), 1, done.stderr)
                for word in says:
                    self.assertIn(str(word), done.stderr)
            self.assertEqual(log.read_text(), "kept\n")

        first = started()
        wait_for((save / ".lock").exists)
        for layout in ([], ["--dp=2"]):
            is_refused(*layout, says=[save, "in use", f"process {first.pid} on host", "saved none yet", "save elsewhere"])
        first.send_signal(signal.SIGTERM)
        self.assertEqual((first.communicate(timeout=60), first.returncode)[1], 0)
        self.assertFalse((save / ".lock").exists())
        steps_done = int((save / "latest").read_text().split("-")[1])
        # What has ended is refused as such, and gone on with by one run at a time.
        self.refused("--save", save, says=["another run", f"step {steps_done}", "--load"])
        second = started("--load", str(save))
        wait_for((save / ".lock").exists)
        is_refused("--load", str(save), says=["in use", f"process {second.pid} ", f"of step {steps_done}"])
        second.kill()
        second.communicate(timeout=60)
        # One that was killed holds nothing.
        done = run("mega-gpt3", *SMALL, "--data", self.text, "--save", save, "--load", save, "--train-iters", steps_done + 1)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual([p for p in save.iterdir() if p.name.startswith(".")], [])

    @unittest.skipUnless((BIN / "mega-gpt3-mpi").exists() and shutil.which("mpirun"), "built without MPI")
    def test_two_runs_of_processes_do_not_share_a_folder(self):
        save = self.folder / "ck"
        command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", str(BIN / "mega-gpt3-mpi"), *SMALL, "--data",
                   str(self.text), "--save", str(save)]
        first = subprocess.Popen([*command, "--train-iters=1000000"], stderr=subprocess.PIPE, text=True)
        self.addCleanup(first.kill)
        deadline = time.monotonic() + 60
        while not (save / ".lock").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, 2, done.stderr)
        said = rf"(?m)^rank 0: --save: {save} is in use by another run, process (\d+) on host .*; save elsewhere, or wait"
        self.assertRegex(done.stderr, said)
        # The rank, since mpirun itself does not wait for what it was told to end.
        os.kill(int(re.search(said, done.stderr).group(1)), signal.SIGTERM)
        _, said = first.communicate(timeout=60)
        self.assertEqual(first.returncode, 0, said[-500:])
        self.assertIn("is durable", said)

    def test_two_runs_do_not_write_one_log(self):
        log, save = self.folder / "log.json", self.folder / "ck"
        endless = [str(BIN / "mega-gpt3"), *SMALL, "--data", str(self.text), "--train-iters=1000000", "--log-json", str(log)]
        first = subprocess.Popen([*endless, "--save", str(save)], stderr=subprocess.DEVNULL)
        self.addCleanup(first.kill)
        deadline = time.monotonic() + 60
        while (not log.exists() or log.stat().st_size == 0) and time.monotonic() < deadline:
            time.sleep(0.02)
        # Neither a new run nor one that would go on with it touches the file; by whatever name it is reached.
        link = self.folder / "link.json"
        link.symlink_to(log)
        for name, program, more in ((log, "mega-gpt3", []), (link, "mega-gpt3", ["--dp=2"])):
            said = run(program, *SMALL, "--data", self.text, "--log-json", name, "--save", self.folder / "never", *more)
            self.assertEqual(said.returncode, 2, said.stderr)
            self.assertEqual(said.stderr, f"{program}: --log-json: '{name}' is being written by another run; log elsewhere, or wait until "
                             "that has ended\n" if not more else said.stderr)
            self.assertIn("is being written by another run; log elsewhere", said.stderr)
            self.assertFalse((self.folder / "never").exists())
        first.send_signal(signal.SIGTERM)
        self.assertEqual(first.wait(60), 0)
        counted = [s["step"] for s in steps(log)]
        self.assertEqual(counted, list(range(1, len(counted) + 1)))
        # One that was killed holds nothing.
        second = subprocess.Popen([*endless, "--load", str(save)], stderr=subprocess.DEVNULL)
        self.addCleanup(second.kill)
        size = log.stat().st_size
        while log.stat().st_size == size and time.monotonic() < deadline + 60:
            time.sleep(0.02)
        said = run("mega-gpt3", *SMALL, "--data", self.text, "--log-json", log, "--load", save, "--train-iters", len(counted) + 1)
        self.assertEqual(said.returncode, 2, said.stderr)
        second.kill()
        second.wait(60)
        log2, _ = self.train("--train-iters=2")
        self.assertEqual([s["step"] for s in log2], [1, 2])
        # What is no file has no owner, and a run that is refused leaves no log.
        for device in ("/dev/null", "/dev/stdout"):
            done = run("mega-gpt3", *SMALL, "--data", self.text, "--log-json", device, "--train-iters=1")
            self.assertEqual((done.returncode, done.stdout.count('{"step": 1,')), (0, int("stdout" in device)), done.stderr)
        self.refused("--log-json", self.folder / "new.json", "--save", self.text, says=[self.text])
        inside = self.folder / "made" / "log.json"  # in the folder that the run makes
        done = run("mega-gpt3", *SMALL, "--data", self.text, "--log-json", inside, "--save", inside.parent, "--train-iters=1")
        self.assertEqual((done.returncode, len(steps(inside))), (0, 1), done.stderr)
        done = run("mega-gpt3", *SMALL, "--data", self.text, "--log-json", "/dev/full", "--train-iters=1")
        self.assertEqual(done.returncode, 4, done.stderr)
        self.assertIn("--log-json: step 1 could not be written: No space left on device", done.stderr)

    def test_a_full_standard_output_is_no_success(self):
        for program in [p for p in ("mega-gpt3", "mega-llama3", "mega-gpt3-cuda") if (BIN / p).exists()]:
            for flags in (["--dry-run"] + ["--gpu-memory=80GB"] * program.endswith("cuda"), ["--help"]):
                with open("/dev/full", "w") as full:
                    done = subprocess.run([str(BIN / program), *SMALL, "--data", str(self.text), *flags], stdout=full, stderr=subprocess.PIPE,
                                          text=True, timeout=60)
                self.assertEqual((done.returncode, done.stderr),
                                 (2, f"{program}: standard output takes no more; what was printed is not whole\n"))

    def test_outputs_that_cannot_be_kept_are_refused_first(self):
        self.refused("--save", self.text, says=[self.text])
        self.refused("--save", self.text / "below", says=[self.text])
        save, export = self.folder / "ck", self.folder / "hf"
        self.train("--save", save, "--export-hf", export)
        self.refused("--save", save, says=["another run", "--load"])
        self.refused("--export-hf", export, says=["exists already"])

    def test_a_resumed_log_is_continued(self):
        save, log = self.folder / "ck", self.folder / "log.json"
        self.train("--save", save, "--train-iters=2", "--lr-decay-iters=6")
        done = run("mega-gpt3", *SMALL, "--data", self.text, "--load", save, "--train-iters=4", "--lr-decay-iters=6", "--log-json", log)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual([s["step"] for s in steps(log)], [1, 2, 3, 4])

    def test_a_log_that_was_cut_is_mended_before_it_is_continued(self):
        save, log = self.folder / "ck", self.folder / "log.json"
        self.train("--save", save, "--train-iters=2", "--lr-decay-iters=6")
        whole = log.read_text()
        two = whole.splitlines(keepends=True)

        def resumed(content):
            log.write_text(content)
            return run("mega-gpt3", *SMALL, "--data", self.text, "--load", save, "--train-iters=3", "--lr-decay-iters=6", "--log-json", log)

        cut = '{"step": 3, "loss": 5.4, "lr"'
        for content, begun, bytes_cut in ((whole + cut, [1, 2], len(cut)), (whole + "{", [1, 2], 1), (cut, [], len(cut)),
                                          (two[0] + two[1][:-5], [1], len(two[1]) - 5), (whole[:-1], [1, 2], 0), ("", [], 0),
                                          (whole * 300 + cut, [1, 2] * 300, len(cut))):
            with self.subTest(content=content[-40:]):
                done = resumed(content)
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertEqual([s["step"] for s in steps(log)], begun + [3])
                self.assertEqual("was not finished" in done.stderr, bytes_cut > 0, done.stderr)
                if bytes_cut > 0:
                    self.assertIn(f"the last line of {log} was not finished", done.stderr)
                    self.assertRegex(done.stderr, rf"its {bytes_cut} bytes? (is|are) cut off")
        # What is no log is not touched.
        for content in ("a letter without an end", whole + '{"name": "x"', whole + "x" * (3 << 20)):
            done = resumed(content)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertEqual(len(done.stderr.strip().splitlines()), 1, done.stderr)
            self.assertIn("does not end as a log does", done.stderr)
            self.assertEqual(log.read_text(), content)

    def test_metrics_say_what_is_missing_of_a_recording(self):
        folder = self.folder / "traces"
        self.train("--pp=2", "--train-iters=3", "--trace", folder)

        def metrics(*more):
            done = run("mega-plan", "metrics", folder, *more)
            self.assertEqual(done.returncode, 0, done.stderr)
            return done

        clean = metrics("--json")
        self.assertEqual((clean.stderr, json.loads(clean.stdout)["warnings"]), ("", []))
        (folder / "letter.txt").write_text("dear all\n")
        for done in (metrics(), metrics("--json")):
            self.assertRegex(done.stderr, r"^mega-plan: warning: letter.txt in .* is no trace and was passed over\n$")
        self.assertIn("letter.txt", json.loads(done.stdout)["warnings"][0])
        self.assertEqual(run("mega-scan", "report", folder).stderr.replace("mega-scan", "mega-plan"), done.stderr)

    def test_metrics_of_orders_whose_losses_come_late(self):
        # On a V, a rank may run another forward between a micro-batch's last one and its loss.
        folder = self.folder / "traces"
        self.train("--pp=2", "--vpp=2", "--schedule=zb-v", "--micro-batch-size=1", "--train-iters=3", "--trace", folder)
        done = run("mega-plan", "metrics", folder, "--json")
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_layouts_that_do_not_divide_name_the_numbers(self):
        self.refused("--tp=3", says=["heads", "4", "3"])
        self.refused("--tp=8", says=["heads", "4", "8"])
        self.refused("--pp=5", says=["4 layers", "5"])
        self.refused("--dp=3", says=["8", "3"])
        self.refused("--tp=0", says=["0", "at least 1"])
        self.refused("--global-batch-size=7", "--dp=2", says=["7", "6", "8"])
        self.refused("--num-attention-heads=5", says=["32", "5"])
        self.refused("--kv-heads=2", "--tp=4", program="mega-llama3", says=["kv_heads", "2", "4"])
        self.refused("--seq-length=64", "--max-position-embeddings=32", says=["64", "32"])
        for option in ("clip-grad", "adam-eps", "norm-epsilon", "init-method-std", "weight-decay", "temperature", "rotary-base"):
            for value in ("-1", "nan", "inf"):
                self.refused(f"--{option}={value}", says=[f"--{option} is {value}", "must be finite"])
        self.refused("--rotary-base=0", says=["--rotary-base is 0", "above 0"])
        self.refused("--lr=nan", says=["learning rate"])

    def test_wrong_layers_of_stages_name_the_numbers(self):
        layout = "--pipeline-model-parallel-layout"
        self.refused("--pp=2", layout, "E t2|x L", says=["'x'", "character 6", "E, t, L"])
        self.refused("--pp=2", layout, "Et*2|m,ttL", says=["'m'", "character 6", "multi-token prediction"])
        self.refused("--pp=2", layout, "E t2|t3 L", says=["5 layers", "4", "take away 1 t"])
        for flags, text, words in ((["--pp=2"], "E t|t|t2 L", ["has 3 stages, which --pp 2 does not divide", "give --pp 1, or a layout of 2 or 4 stages"]),
                                   (["--pp=3"], "E t|t|t|t L", ["has 4 stages, which --pp 3", "give --pp 2, or a layout of 3 or 6 stages"]),
                                   (["--pp=4"], "E t4 L", ["has 1 stage, which --pp 4", "give --pp 1, or a layout of 4 stages"]),
                                   (["--pp=2", "--vpp=2"], "E t2|t2 L", ["has 2 stages, but --pp 2 times --vpp 2 is 4", "give --vpp 1, or a layout of 4 stages"]),
                                   (["--pp=2", "--vpp=3"], "E t|t|t|t L", ["has 4 stages, but --pp 2 times --vpp 3 is 6", "give --vpp 2, or a layout of 6 stages"]),
                                   (["--pp=3", "--vpp=2"], "E t|t|t|t L", ["has 4 stages, but --pp 3 times --vpp 2 is 6", "give --pp 2 --vpp 2, or a layout of 6"])):
            self.refused(*flags, layout, text, says=words)
        self.refused("--pp=2", "--schedule=zb-v", layout, "E t2|t2 L", says=["--schedule zb-v", "the layout's 2 stages", "2 chunks a rank"])
        self.refused("--pp=2", "--schedule=zb-v", "--vpp=1", says=["--schedule zb-v", "--vpp 1", "2 chunks a rank"])
        self.refused("--pp=4", layout, "Et|t*2||tL", says=["stage 2", "without a layer"])
        self.refused("--pp=2", "--decoder-first-pipeline-num-layers=3", "--decoder-last-pipeline-num-layers=2", says=["3 and 2", "4"])
        self.refused("--pp=3", "--decoder-first-pipeline-num-layers=4", says=["leave 0 for 2 stages", "at most 2"])
        self.refused("--pp=2", "--vpp=2", "--decoder-last-pipeline-num-layers=1", says=["last rank", "1 layers in 2 chunks", "2"])
        self.refused("--decoder-first-pipeline-num-layers=1", says=["at least 2 ranks"])
        self.refused("--pp=2", "--decoder-first-pipeline-num-layers=-1", says=["-1", "at least 0"])
        self.refused("--pp=2", "--decoder-last-pipeline-num-layers=9", says=["--decoder-last-pipeline-num-layers is 9", "0 to the 4 layers"])
        self.refused("--pp=7", "--balance-layers", says=["4 layers", "7 stages"])
        for flags in ([layout, "E t2|t2 L", "--balance-layers"], [layout, "E t2|t2 L", "--decoder-last-pipeline-num-layers=2"],
                      ["--balance-layers", "--decoder-first-pipeline-num-layers=2"]):
            self.refused("--pp=2", *flags, says=["give one", layout, "--balance-layers", "--decoder-first-pipeline-num-layers"])

    def test_data_that_cannot_be_read(self):
        empty = self.folder / "empty.txt"
        empty.write_text("")
        short = self.folder / "short.txt"
        short.write_text("few")
        bare = self.folder / "bare"
        bare.mkdir()
        self.refused("--data", self.folder / "nowhere", says=["nowhere"])
        self.refused("--data", empty)
        self.refused("--data", bare)
        self.refused("--data", short, says=["16"])

    def test_json_lines_say_the_line(self):
        path = self.folder / "x.jsonl"
        for bad, word in ((b'{"text": "a"}\n{"txt": "b"}\n', "2"), (b'{"text": "a"}\n\n{"text": 3}\n', "3"), (b'{"text": "a"\n', "1"),
                          (b'{"text": "\xff\xfe"}\n', "1"), (b'{"text": ""}\n', "x.jsonl")):
            path.write_bytes(bad)
            self.refused("--data", path, says=[word, "x.jsonl"])
        path.write_bytes(b'\xef\xbb\xbf{"text": ""}\n\n{"text": "' + b"round and round " * 200 + b'"}\r\n')
        self.assertEqual(run("mega-gpt3", *SMALL, "--data", path).returncode, 0)

    def test_checkpoint_that_is_not_there(self):
        done = run("mega-gpt3", *SMALL, "--data", self.text, "--load", self.folder / "none")
        self.assertEqual(done.returncode, 2)
        self.assertIn("none", done.stderr)

    # --- what a run writes ---
    def test_log_has_every_field_and_counts_up(self):
        log, _ = self.train()
        self.assertEqual([s["step"] for s in log], [1, 2, 3, 4, 5, 6])
        self.assertEqual(set(log[0]), {"step", "loss", "lr", "grad_norm", "tokens", "tokens_per_s", "seconds", "peak_bytes", "skipped"})
        self.assertEqual(log[0]["tokens"], 8 * 16)
        self.assertLess(log[-1]["loss"], log[0]["loss"])
        self.assertAlmostEqual(log[1]["lr"], 1e-3)

    def test_underscores_are_dashes_and_samples_are_steps(self):
        log, _ = self.train()
        path = self.folder / "other.json"
        spelled = [a.replace("-", "_").replace("__", "--", 1).replace("1e_3", "1e-3") for a in SMALL]
        done = run("mega-gpt3", *spelled, "--data_path", self.text, "--log_json", path)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual([s["loss"] for s in steps(path)], [s["loss"] for s in log])
        log, _ = self.train("--num-samples=17")
        self.assertEqual(len(log), 3)

    def test_dry_run_plans_what_is_allocated(self):
        done = run("mega-llama3", *SMALL, "--dry-run", "--tp=2", "--pp=2", "--dp=2", "--zero1", "--data", self.text)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(sum(line.startswith("rank ") for line in done.stdout.splitlines()), 8)
        self.assertIn("--tensor-model-parallel-size=2", done.stdout)

    def test_dry_run_shows_the_layers_of_the_stages(self):
        def plan(*flags, program="mega-gpt3"):
            done = run(program, *SMALL, "--dry-run", "--data", self.text, *flags)
            self.assertEqual(done.returncode, 0, done.stderr)
            return done.stdout

        big = ["--pp=2", "--num-layers=24", "--hidden-size=2048", "--num-attention-heads=16", "--seq-length=2048"]
        self.assertIn("stages E t12|t12 L; ", plan(*big))
        self.assertIn("stages E t13|t11 L; ", plan(*big, "--decoder-last-pipeline-num-layers=11"))
        self.assertIn("stages E t11|t13 L; ", plan(*big, "--decoder-first-pipeline-num-layers=11"))
        # The head of 257 tokens is small beside layers of width 2048, and more than one of width 16.
        self.assertIn("stages E t12|t12 L; ", plan(*big, "--balance-layers"))
        self.assertIn("stages E t3|t L; ", plan("--pp=2", "--num-layers=4", "--hidden-size=16", "--balance-layers"))
        said = plan("--pp=2", "--pipeline-model-parallel-layout", "Et|(t|)*2,t,L")
        self.assertIn("stages E t|t|t|t L; ", said)
        self.assertIn("--num-virtual-stages-per-pipeline-rank=2", said)
        self.assertIn("--pipeline-model-parallel-layout='Et|(t|)*2,t,L'", said)
        # What is said is what is built: a layer moves from rank 1 to rank 0, and no other number of parameters.
        def held(*flags):
            lines = [line for line in plan("--pp=2", *flags).splitlines() if line.startswith("rank ")]
            return [int(line.split(" parameters")[0].rsplit(" ", 1)[1]) for line in lines]

        even, uneven = held(), held("--pipeline-model-parallel-layout", "E t3|t L")
        self.assertEqual(uneven[0] - even[0], even[1] - uneven[1])
        self.assertGreater(uneven[0] - even[0], 12 * 32 * 32)
        sizes = {next(line for line in plan("--pp=2", *flags).splitlines() if line.endswith("parameters in the model"))
                 for flags in ([], ["--balance-layers"], ["--vpp=2"], ["--pipeline-model-parallel-layout", "E|t4 L"])}
        self.assertEqual(len(sizes), 1)

    def test_uneven_stages_train_the_same_model_bit_for_bit(self):
        layout = "--pipeline-model-parallel-layout"
        for program in ("mega-gpt3", "mega-llama3"):
            one, _ = self.train(program=program)
            for flags in (["--pp=2", layout, "E t3|t L"], ["--pp=2", layout, "E|t4 L"], ["--pp=2", layout, "E t4|L"],
                          ["--pp=3", layout, "E|t4|L", "--recompute=full"], ["--pp=2", layout, "E|t3|t|L", "--schedule=bfc"],
                          ["--pp=2", "--balance-layers"], ["--pp=3", "--decoder-first-pipeline-num-layers=2"]):
                log, _ = self.train(*flags, program=program)
                for key in ("loss", "grad_norm"):
                    self.assertEqual([s[key] for s in log], [s[key] for s in one], (program, flags, key))

    def test_schedules_that_split_the_backward_train_the_same_model_bit_for_bit(self):
        for program in ("mega-gpt3", "mega-llama3"):
            one, _ = self.train(program=program)
            for flags in (["--pp=4", "--schedule=zb-h1"], ["--pp=2", "--schedule=zb-h2"], ["--pp=2", "--schedule=zb-v"],
                          ["--pp=2", "--schedule=v-half", "--pipeline-model-parallel-layout", "E t|t|t|t L"],
                          ["--pp=2", "--schedule=v-min"], ["--pp=1", "--schedule=dualpipev"]):
                log, _ = self.train(*flags, program=program)
                for key in ("loss", "grad_norm"):
                    self.assertEqual([s[key] for s in log], [s[key] for s in one], (program, flags, key))
        self.refused("--schedule=zb-v", "--pp=2", "--vpp=3", "--num-layers=6", says=["2 chunks", "3"])
        self.refused("--schedule=zb-h1", "--pp=2", "--vpp=2", says=["2"])
        self.refused("--schedule=zb-h1", "--pp=2", "--recompute=full", says=["recompute"])
        self.refused("--schedule=dualpipev", "--pp=4", "--num-layers=8", "--global-batch-size=4", says=["micro-batch", "8"])

    def test_every_schedule_of_mega_plan_trains_the_same_model_bit_for_bit(self):
        """What mega-plan names is what follows --schedule; none changes a bit of what 1f1b gives."""
        one, _ = self.train("--pp=2", "--schedule=1f1b")
        numbers = {"interleaved": ["--group-size=3"], "split-interleaved": ["--group-size=3"], "v": ["--memory-cap=3"],
                   "auto": ["--stage-times=1,1,1,.1"]}
        listed = [line.split()[0] for line in run("mega-plan", "schedule", "--list").stdout.splitlines()]
        self.assertIn("split-<base>", listed)
        names = [name for name in listed if name != "split-<base>"]
        bases = ("gpipe", "looped-bfs", "1f1b", "eager-1f1b", "dfc", "bfc", "interleaved")
        for name in names + ["split-" + base for base in bases]:
            chunks = [] if name.endswith("1f1b") or name.startswith("zb-h") else ["--vpp=2"]
            log, _ = self.train("--pp=2", f"--schedule={name}", *chunks, *numbers.get(name, []))
            self.same_bits(log, one, name)
        for flags in (["--schedule=split-dfc", "--vpp=2", "--weight-gradients=at-end"], ["--schedule=split-1f1b", "--weights=1"],
                      ["--schedule=split-gpipe", "--weights=at-once", "--look-ahead=2"], ["--schedule=looped-bfs"],
                      ["--schedule=auto", "--placement=v", "--stage-times=2,1,3,.1"],
                      ["--schedule=auto", "--placement=v", "--look-ahead=1", "--memory-cap=6"]):
            log, _ = self.train("--pp=2", *flags)
            self.same_bits(log, one, flags)
        # An order that was found for one placement is not repeated on the other.
        path = self.folder / "on_v.json"
        log, _ = self.train("--pp=2", "--schedule=auto", "--placement=v", "--stage-times=1,1,1", log=path.name)
        again, _ = self.train("--pp=2", "--schedule=auto", "--placement=v", "--replay-decisions", path)
        self.assertEqual(self.decisions(again), self.decisions(log))
        self.refused("--pp=2", "--vpp=2", "--schedule=auto", "--replay-decisions", path, says=['"placement": "v"', "--placement loop"])
        # Weight gradients wait as they are told to.
        order = self.executed("--pp=2", "--schedule=split-1f1b", "--weights=at-end", "--train-iters=1")
        self.assertEqual([name for name, _, _ in order[1][0]], ["forward", "backward_input"] * 8 + ["backward_weight"] * 8)

    def test_the_flags_that_mega_plan_recommends_are_taken(self):
        done = run("mega-plan", "compare", "--pp", 2, "--micro-batches", 8, "--times", "2,2,2", "--comm", ".1", "--memory-cap", 1.5,
                   "--vpp", "1,2", "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        rows = json.loads(done.stdout)["schedules"]
        self.assertIn("v --memory-cap 3", [row["schedule"] for row in rows])
        self.assertIn("auto --placement v", [row["schedule"] for row in rows])
        for row in rows:
            done = run("mega-gpt3", *SMALL, "--dry-run", "--data", self.text, *row["trainer_flags"].split())
            self.assertEqual(done.returncode, 0, (row, done.stderr))
            self.assertRegex(done.stdout, rf"x pp2, {row['vpp']} chunks? a rank")

    def test_schedules_that_lack_something_say_what(self):
        self.refused("--pp=2", "--schedule=v", says=["--schedule v needs --memory-cap"])
        self.refused("--pp=2", "--schedule=v", "--memory-cap=1", says=["cap of 1", "2"])
        self.refused("--pp=2", "--schedule=split-interleaved", "--vpp=2", says=["group-size"])
        self.refused("--pp=2", "--weights=at-end", says=["--weight-gradients", "split-<base>"])
        self.refused("--pp=2", "--schedule=split-1f1b", "--weights=soon", says=["soon", "at-end"])
        self.refused("--pp=2", "--schedule=split-1f1b", "--recompute=full", says=["recompute"])
        self.refused("--pp=2", "--schedule=eager-1f1b", "--vpp=2", says=["1 chunk", "v 2"])
        self.refused("--pp=2", "--schedule=dfc", "--placement=v", says=["--placement", "auto"])
        self.refused("--pp=2", "--schedule=auto", "--placement=any", says=["before it times them", "loop or v"])
        self.refused("--pp=2", "--schedule=auto", "--placement=ring", says=["ring", "loop or v"])
        self.refused("--pp=2", "--schedule=auto", "--placement=v", "--vpp=4", "--num-layers=8", says=["2 chunks", "4"])

    def test_every_layout_flag_trains_the_same_model(self):
        one, _ = self.train()
        for flags in (["--pp=4"], ["--pp=2", "--vpp=2", "--schedule=bfc"], ["--pp=2", "--schedule=gpipe", "--recompute=full"],
                      ["--pp=2", "--vpp=2", "--schedule=interleaved", "--group-size=3"]):
            log, _ = self.train(*flags)
            self.assertEqual([s["loss"] for s in log], [s["loss"] for s in one], flags)
        for flags in (["--tp=2", "--sp"], ["--dp=4", "--zero1"], ["--tp=2", "--dp=2", "--pp=2", "--use-distributed-optimizer"]):
            log, _ = self.train(*flags)
            for got, want in zip(log, one):
                self.assertAlmostEqual(got["loss"], want["loss"], delta=1e-4, msg=flags)

    # --- orders decided at run time ---
    def same_bits(self, got, want, about):
        for key in ("loss", "grad_norm"):
            self.assertEqual([s[key] for s in got], [s[key] for s in want], (about, key))

    def test_look_ahead_changes_no_bit(self):
        for program in ("mega-gpt3", "mega-llama3"):
            one, _ = self.train("--schedule=1f1b", program=program)
            for flags in (["--pp=4", "--schedule=1f1b", "--look-ahead=2"], ["--pp=2", "--vpp=2", "--look-ahead=1"],
                          ["--pp=2", "--schedule=zb-v", "--look-ahead=3"], ["--pp=2", "--schedule=zb-h1", "--look-ahead=50"]):
                log, _ = self.train(*flags, program=program)
                self.same_bits(log, one, (program, flags))
        layout = ["--tp=2", "--dp=2", "--pp=2", "--vpp=2", "--sp", "--zero1"]
        still, _ = self.train(*layout)
        log, _ = self.train(*layout, "--look-ahead=2", "--inject=slow-link=0-4,factor=20")
        self.same_bits(log, still, layout)

    def test_look_ahead_is_planned_for(self):
        def activations(*flags):
            done = run("mega-gpt3", *SMALL, "--dry-run", "--data", self.text, "--pp=2", "--schedule=1f1b", *flags)
            self.assertEqual(done.returncode, 0, done.stderr)
            line = next(line for line in done.stdout.splitlines() if line.startswith("rank 1: "))
            return done.stdout, float(line.split("activations ")[1].split(" KiB")[0])

        static, two, all_of_them = (activations(*flags)[1] for flags in ([], ["--look-ahead=2"], ["--look-ahead=100"]))
        self.assertLess(static, two)
        self.assertLess(two, all_of_them)
        # The last of two ranks has 2 slots in 1F1B, and 8 micro-batches: buffers apart, each slot adds as much.
        self.assertAlmostEqual((all_of_them - static) / (two - static), 3, delta=0.01)
        self.assertIn("look-ahead of 2 forwards", activations("--look-ahead=2")[0])

    def test_orders_to_be_decided_are_planned_for(self):
        def plan(*flags):
            done = run("mega-gpt3", *SMALL, "--dry-run", "--data", self.text, "--pp=2", *flags)
            self.assertEqual(done.returncode, 0, done.stderr)
            line = next(line for line in done.stdout.splitlines() if line.startswith("rank 1: "))
            return done.stdout, float(line.split("activations ")[1].split(" KiB")[0])

        searched, least = plan("--schedule=auto")
        self.assertIn("order searched once stages are timed", searched)
        # With one chunk a rank nothing is planned beyond ZB-H1, and what is found takes what was planned.
        self.assertEqual(least, plan("--schedule=zb-h1")[1])
        found, bytes_found = plan("--schedule=auto", "--stage-times=1,1,1")
        self.assertIn("order zb_h1: predicted bubble", found)
        self.assertEqual(bytes_found, least)
        more = plan("--schedule=auto", "--memory-cap=4")[1]
        self.assertGreater(more, least)
        self.assertLessEqual(plan("--schedule=auto", "--memory-cap=4", "--stage-times=1,1,1,1")[1], more)
        dial, widest = plan("--vpp=2", "--schedule=adaptive")
        self.assertIn("order with groups of 2, 4, 8 micro-batches", dial)
        self.assertEqual(widest, plan("--vpp=2", "--schedule=bfc")[1])
        dial, narrower = plan("--vpp=2", "--schedule=adaptive", "--memory-cap=7")
        self.assertIn("order with groups of 2, 4 micro-batches", dial)
        self.assertEqual(narrower, plan("--vpp=2", "--schedule=interleaved", "--group-size=4")[1])

    def executed(self, *flags):
        """Of each rank and step, the order of the calls of stages, as a trace shows it."""
        folder = pathlib.Path(tempfile.mkdtemp(dir=self.folder))
        self.train(*flags, "--trace", folder, log="traced.json")
        ranks = []
        for path in sorted(folder.glob("rank-*")):
            spans = [r for r in steps(path) if r.get("n") in ("forward", "backward", "backward_input", "backward_weight") and "s" in r]
            spans.sort(key=lambda r: r["b"])
            ranks.append([[(r["n"], r["c"], r["m"]) for r in spans if r["s"] == step] for step in range(1 + max(r["s"] for r in spans))])
        return ranks

    @staticmethod
    def decisions(log):
        return {s["step"]: s["decision"] for s in log if "decision" in s}

    def test_a_trace_says_where_it_was_recorded(self):
        folder = self.folder / "traces"
        self.train("--dp=2", "--train-iters=1", "--trace", folder)
        allowed = os.sched_getaffinity(0)
        for path in sorted(folder.glob("rank-*")):
            header = steps(path)[0]
            self.assertEqual(header["host"], os.uname().nodename)
            listed = [part.split("-") for part in header["processors"].split(",")]
            self.assertEqual({p for part in listed for p in range(int(part[0]), int(part[-1]) + 1)}, allowed)

    def test_the_dial_turns_and_its_decisions_are_repeated(self):
        for layout in (["--pp=2", "--vpp=2"], ["--tp=2", "--dp=2", "--pp=2", "--vpp=2", "--global-batch-size=16"]):
            far = "--inject=" + ";".join(f"slow-link={rank}-{rank + (4 if '--tp=2' in layout else 1)},factor=150"
                                         for rank in range(4 if "--tp=2" in layout else 1))
            still, _ = self.train(*layout, "--train-iters=12")
            path = self.folder / "adaptive.json"
            turned, done = self.train(*layout, "--train-iters=12", "--schedule=adaptive", far, log=path.name)
            self.same_bits(turned, still, layout)
            made = self.decisions(turned)
            self.assertEqual(min(made), 4, made)  # as soon as the dial's patience allows
            first = made[4]
            self.assertEqual((first["from"], first["to"], first["reason"]), (2, 4, "links"))
            self.assertGreater(first["exposed_seconds"], 0.05 * first["step_seconds"])
            self.assertIn("decision: after step 4: group size 2 -> 4, since transfers were exposed for", done.stderr)
            self.assertEqual(done.stderr.count("decision: "), len(made))
            # Without what made it turn, under look-ahead too, and never without the log that says so.
            for more in ([], ["--look-ahead=2"]):
                again, done = self.train(*layout, "--train-iters=12", "--schedule=adaptive", "--replay-decisions", path, *more)
                self.same_bits(again, still, (layout, more))
                self.assertEqual(self.decisions(again), made)
                self.assertEqual(done.stderr.count("decision: "), len(made))
        self.assertEqual(turned[0]["dial"], {"schedule": "adaptive", "pp": 2, "vpp": 2, "micro_batches": 8, "group_size": 2})
        self.assertEqual([s["step"] for s in turned if "dial" in s], [1])
        # What is said is what is done.
        moves = [(step, d["to"]) for step, d in made.items()]
        orders = {2: self.executed(*layout), **{g: self.executed(*layout, "--schedule=interleaved", f"--group-size={g}")
                                                for g in {to for _, to in moves} - {2}}}
        self.assertNotEqual(orders[2][0][0], orders[4][0][0])
        turned = self.executed(*layout, "--train-iters=12", "--schedule=adaptive", "--replay-decisions", path)
        for step in range(12):
            group = ([2] + [to for after, to in moves if after <= step])[-1]
            for rank, order in enumerate(turned):
                self.assertEqual(order[step], orders[group][rank][0], (rank, step, group))

    def test_a_resumed_dial_stands_where_it_was_left(self):
        layout = ["--pp=2", "--vpp=2", "--schedule=adaptive", "--lr-decay-iters=9"]
        save, log = self.folder / "ck", self.folder / "log.json"

        def resumed(until, *more, log=log):
            done = run("mega-gpt3", *SMALL, "--data", self.text, *layout, "--train-iters", until, "--load", save, "--log-json", log, *more)
            self.assertEqual(done.returncode, 0, done.stderr)
            return steps(log)
        self.train(*layout, "--train-iters=5", "--inject=slow-link=0-1,factor=150", "--save", save, "--save-interval=3")
        self.assertEqual((save / "latest").read_text().strip()[-1], "5")
        whole = resumed(9)
        self.assertEqual([s["step"] for s in whole], list(range(1, 10)))
        self.assertEqual({s["step"]: s["dial"]["group_size"] for s in whole if "dial" in s}, {1: 2, 6: 4})
        self.same_bits(whole, self.train("--train-iters=9", "--lr-decay-iters=9", log="still.json")[0], "resumed")
        # A new log of the resumed run, and the old one, each tell a run that goes on from there the same.
        fresh = self.folder / "fresh.json"
        self.assertEqual([s["dial"]["group_size"] for s in resumed(6, log=fresh)], [4])
        for path in (fresh, log):
            again = resumed(7, "--replay-decisions", path, log=self.folder / "again.json")
            self.assertEqual(again[0]["dial"]["group_size"], 4, path)
            (self.folder / "again.json").unlink()
        self.refused(*layout, "--replay-decisions", fresh, says=["begins with step 6", "step 1", "--load"])
        # Steps that were done again after a run was killed: what was decided behind the checkpoint counts once.
        lines = log.read_text().splitlines(keepends=True)
        log.write_text("".join(lines[:8] + lines[5:]))
        again, _ = self.train(*layout, "--train-iters=9", "--replay-decisions", log, log="again.json")
        self.assertEqual(self.decisions(again), self.decisions(whole))
        # In another pipeline there is nothing to remember.
        other = resumed(6, "--micro-batch-size=2", log=self.folder / "other.json")
        self.assertEqual((other[0]["dial"]["micro_batches"], other[0]["dial"]["group_size"]), (4, 2))

    def test_an_order_is_searched_from_given_times(self):
        for program in ("mega-gpt3", "mega-llama3"):
            one, _ = self.train(program=program)
            log, done = self.train("--pp=4", "--schedule=auto", "--stage-times=1,1,1", program=program)
            self.same_bits(log, one, program)
            self.assertEqual(list(self.decisions(log)), [1])
            decision = log[0]["decision"]
            self.assertEqual(decision["stage_times"], [[1, 1, 1, 0]])
            # 1F1B takes 33, of which 9 idle; with the memory of ZB-H1 27 is what ZB-H1 needs.
            self.assertLessEqual(decision["predicted_makespan"], 27)
            self.assertAlmostEqual(decision["predicted_bubble"], 1 - 24 / decision["predicted_makespan"], places=12)
            self.assertLessEqual(decision["peak_activations"], 4)
            self.assertIn(f"decision: order {decision['order']}: predicted bubble ", done.stderr)
        # What is said is what is done.
        begun_with = self.executed("--pp=4", "--schedule=zb-h1")
        self.assertEqual(decision["order"], "zb_h1")
        self.assertEqual(self.executed("--pp=4", "--schedule=auto", "--stage-times=1,1,1"), begun_with)
        found = self.executed("--pp=4", "--schedule=auto", "--stage-times=1,1,1,0.5", "--memory-cap=8")
        self.assertNotEqual(found, begun_with)
        # More memory hides more of the transfers; a slow last stage, another answer.
        bubbles = []
        for cap in ([], ["--memory-cap=8"]):
            log, _ = self.train("--pp=4", "--schedule=auto", "--stage-times=1,1,1,0.5", *cap)
            bubbles.append(log[0]["decision"]["predicted_bubble"])
            peak = log[0]["decision"]["peak_activations"]
            self.assertLessEqual(peak, 8 if cap else 4)
            self.same_bits(log, self.train()[0], cap)
        self.assertLess(bubbles[1], bubbles[0])
        step = {"forward": 1, "backward_input": 0, "backward_weight": -1}
        self.assertEqual(max(max(itertools.accumulate(step[name] for name, _, _ in rank[0])) for rank in found), peak)
        uneven, _ = self.train("--pp=2", "--vpp=2", "--schedule=auto", "--look-ahead=1",
                               "--stage-times=1,1,1,.1;1,1,1,.1;1,1,1,.1;2,2,2,.1")
        self.assertEqual(len(uneven[0]["decision"]["stage_times"]), 4)
        self.assertGreaterEqual(uneven[0]["decision"]["predicted_makespan"], 8 * 9)
        self.same_bits(uneven, self.train()[0], "uneven")

    def test_an_order_is_searched_from_measured_times_and_repeated(self):
        for layout in (["--pp=2"], ["--tp=2", "--dp=2", "--pp=2", "--vpp=2", "--look-ahead=1"]):
            still, _ = self.train(*[flag for flag in layout if "look" not in flag])
            path = self.folder / "auto.json"
            log, _ = self.train(*layout, "--schedule=auto", "--inject=slow-rank=0,factor=20", log=path.name)
            self.same_bits(log, still, layout)
            decision = log[0]["decision"]
            times = decision["stage_times"]
            self.assertEqual(len(times), 4 if "--vpp=2" in layout else 2)
            self.assertTrue(all(t > 0 for stage in times for t in stage[:3]), times)
            # Rank 0 has the stages of even numbers.
            self.assertGreater(sum(map(sum, times[0::2])), 1.5 * sum(map(sum, times[1::2])), times)
            again, _ = self.train(*layout, "--schedule=auto", "--replay-decisions", path)
            self.assertEqual(self.decisions(again), {1: decision})
            self.same_bits(again, still, layout)
        # What was found is what runs, after measuring as from the log.
        roomy = ["--pp=4", "--schedule=auto", "--memory-cap=8"]
        measured = self.executed(*roomy)
        (self.folder / "traced.json").rename(path)
        self.assertEqual(measured, self.executed(*roomy, "--replay-decisions", path))

    def test_orders_that_cannot_be_decided_say_why(self):
        self.refused("--look-ahead=2", says=["--look-ahead 2", "--pp of at least 2"])
        self.refused("--pp=2", "--look-ahead=-1", says=["look-ahead", "-1"])
        self.refused("--pp=2", "--look-ahead=1", "--schedule=dualpipev", says=["dualpipev", "pairs"])
        self.refused("--pp=2", "--schedule=adaptive", says=["adaptive", "1 chunk a rank", "--vpp of at least 2"])
        self.refused("--vpp=2", "--schedule=adaptive", says=["adaptive", "pp 1", "--pp"])
        self.refused("--pp=2", "--vpp=2", "--global-batch-size=2", "--schedule=adaptive",
                     says=["2 micro-batches", "more micro-batches than"])
        self.refused("--pp=2", "--vpp=2", "--schedule=adaptive", "--memory-cap=5",
                     says=["--memory-cap 5", "dfc, hold 5 activations", "at least 7", "--memory-cap 7 or more, or --schedule dfc"])
        self.refused("--pp=2", "--vpp=2", "--schedule=adaptive", "--memory-cap=4", says=["--memory-cap 4", "hold 5", "at least 7", "7 or more"])
        self.refused("--pp=2", "--vpp=2", "--schedule=adaptive", "--memory-cap=6", "--look-ahead=2",
                     says=["hold 7 activations", "at least 9, look-ahead included", "--memory-cap 9"])
        for cap, flags in ((7, []), (9, ["--look-ahead=2"])):  # what was advised
            done = run("mega-gpt3", *SMALL, "--data", self.text, "--dry-run", "--pp=2", "--vpp=2", "--schedule=adaptive", f"--memory-cap={cap}", *flags)
            self.assertEqual(done.returncode, 0, done.stderr)
        self.refused("--pp=2", "--memory-cap=5", says=["--memory-cap", "auto and adaptive"])
        self.refused("--pp=2", "--stage-times=1,1,1", says=["--stage-times", "auto"])
        for text, word in (("1,1", "2 numbers"), ("1,x,1", "'x'"), ("1,1,1,", "''"), ("1,1,1;1,1,1;1,1,1", "3 stages"), ("1,-1,1", "-1"),
                           ("0,0,0", "take no time"), ("0,0,0,5", "take no time"), ("nan,1,1", "nan"), ("1,1,inf", "inf"), ("1,1,1,-1", "-1"),
                           ("1e300,1,1", "1e+300"), ("1", "1 number "), ("1,1,1,1,1", "5 numbers"), ("1,1,1;nan,1,1", "nan"), (";", "''"),
                           ("nan", "1 number ")):
            self.refused("--pp=2", "--schedule=auto", f"--stage-times={text}", says=[f"--stage-times '{text}'", word, "as 2,2,1,0.1", "2 stages"])
        self.refused("--pp=2", "--vpp=2", "--schedule=auto", "--memory-cap=1", says=["--memory-cap 1", "2 chunks"])
        self.refused("--pp=2", "--schedule=auto", "--recompute=full", says=["recompute"])

    def test_decisions_that_cannot_be_repeated_say_why(self):
        path = self.folder / "decisions.json"
        dial = ["--pp=2", "--vpp=2", "--schedule=adaptive", "--replay-decisions", path]
        auto = ["--pp=2", "--vpp=2", "--schedule=auto", "--replay-decisions", path]
        self.refused(*dial, says=["decisions.json", "cannot read"])
        self.refused(*dial[:-1], self.folder, says=["cannot read", "directory"])
        for flags in (dial, auto):
            self.refused(*flags[:-1], "/dev/zero", says=["/dev/zero", "line 1", "longer than 1048576 bytes"])
        head = {"pp": 2, "vpp": 2, "micro_batches": 8}
        stands = {"schedule": "adaptive", **head, "group_size": 2}
        move = {"schedule": "adaptive", **head, "from": 2, "to": 4, "reason": "links", "step_seconds": 1, "exposed_seconds": 1,
                "memory_share": 0}
        log, _ = self.train("--pp=2", "--vpp=2", "--schedule=auto", "--stage-times=1,1,1")
        order = log[0]["decision"]
        self.assertEqual((order["memory_cap"], order["placement"]), (0, "loop"))

        def text(*records):
            return "\n".join(record if isinstance(record, str) else json.dumps(record) for record in records)

        def begun(**changes):
            return {"step": 1, "dial": {**stands, **changes}}

        def moved(step=3, **changes):
            """A log whose dial moves once."""
            return text(begun(), {"step": 2}, {"step": step, "decision": {**move, **changes}})

        def found(**changes):
            return text({"step": 1, "decision": {**order, **changes}})

        def without(decision, key):
            return {k: v for k, v in decision.items() if k != key}
        for flags, content, words in (
                (dial, "", ["no step"]), (dial, "[1]", ["line 1", "no step of a log"]), (dial, '{"loss": 3}', ["line 1", 'no "step"']),
                (dial, "\0\1binary", ["line 1", "no step of a log"]),
                (dial, moved(to=3), ["line 3", "groups of 3", "2, 4, 8"]), (dial, moved(**{"from": 5}), ["line 3", "groups of 5", "2, 4, 8"]),
                (dial, moved(reason="whim"), ["line 3", '"whim"', "links, memory and no gain"]),
                (dial, moved(step_seconds="long"), ["line 3", '"step_seconds": "long"', "not a number"]),
                (dial, text(begun(), {"step": 2, "decision": without(move, "memory_share")}), ["line 2", 'no "memory_share"']),
                (dial, moved(to=2**70), ["line 3", '"to"']), (dial, moved(to=-2), ["line 3", '"to": -2']),
                (dial, text(begun(), '{"step": 2, "decision": 7}'), ["line 2", '"decision" that is no object']),
                (dial, '{"step": 1, "dial": 7}', ["line 1", '"dial" that is no object']),
                # of another run, whether it decided anything or not
                (dial, moved(pp=4), ["line 3", '"pp": 4', "--pp 2"]), (dial, moved(vpp=3), ["line 3", '"vpp": 3', "--vpp 2"]),
                (dial, moved(micro_batches=16), ["line 3", '"micro_batches": 16', "8 micro-batches"]),
                (dial, text(begun(pp=4)), ["line 1", '"pp": 4', "--pp 2"]), (dial, text(begun(micro_batches=4)), ["line 1", '"micro_batches": 4', "8 micro-batches"]),
                (dial, text({"step": 1, "dial": without(stands, "vpp")}), ["line 1", 'no "vpp"']),
                (dial, text({"step": 1}, {"step": 2}), ["line 1", 'no "dial"', "adaptive"]),
                (dial, found(), ["line 1", "--schedule auto", "--schedule adaptive"]),
                (auto, text({"step": 1, "decision": move}), ["line 1", "--schedule adaptive", "--schedule auto"]), (auto, found(schedule="zb-h1"), ["line 1", "zb-h1"]),
                # moves that do not follow each other
                (dial, moved(step=5), ["line 3", "step 5 behind step 2"]), (dial, moved(step=2), ["line 3", "step 2 behind step 2"]),
                (dial, text(begun(), {"step": 2, "decision": move}, {"step": 3, "decision": move}), ["line 3", "from groups of 2", "stood at 4"]),
                (dial, text(begun(), {"step": 2, "decision": {**move, "from": 4, "to": 8}}, {"step": 3, "decision": move}), ["line 2", "from groups of 4", "stood at 2"]),
                (dial, text(begun(group_size=4)), ["line 1", "groups of 4", "stood at 2"]),
                (dial, text(begun(), {"step": 2}, {"step": 3, "dial": {**stands, "group_size": 8}}), ["line 3", "groups of 8", "stood at 2"]),
                (dial, text({"step": 4, "dial": stands}), ["begins with step 4", "step 1", "--load"]),
                # orders
                (auto, found(pp=4, vpp=1), ["line 1", '"pp": 4', "--pp 2"]), (auto, found(micro_batches=2), ["line 1", '"micro_batches": 2', "8"]),
                (auto, text({"step": 1, "decision": without(order, "pp")}), ["line 1", 'no "pp"']),
                (auto, found(stage_times=[[1, 1, 1, 0]] * 2), ["line 1", "2 stages", "--pp 2 times --vpp 2", "4"]),
                (auto, found(stage_times=[[1, 1, 1]]), ["line 1", "stage_times", "four numbers"]), (auto, found(stage_times=[]), ["line 1", "[]"]),
                (auto, found(stage_times=[[1, "x", 1, 0]]), ["line 1", "stage_times"]), (auto, found(stage_times=[[-1, 1, 1, 0]]), ["line 1", "-1"]),
                (auto, found(stage_times=[[1e300, 1, 1, 0]]), ["line 1", "1e+300"]), (auto, found(stage_times=[[0, 0, 0, 0]]), ["line 1", "no time"]),
                (auto, found(memory_cap=9), ["line 1", '"memory_cap": 9', "no --memory-cap"]), (auto, found(placement="v"), ["line 1", '"placement": "v"', "--placement loop"]),
                ([*auto, "--memory-cap=9"], found(), ["line 1", '"memory_cap": 0', "--memory-cap 9"]),
                (auto, found(order="zb_h9"), ["its order is zb_h9 with a step of", f"the search finds {order['order']} with a step of"]),
                (auto, found(peak_activations=99), ["at most 99 activations", f"at most {order['peak_activations']} activations"]),
                (auto, found(stage_times=[[2, 1, 1, 0]]), [f"a step of {order['predicted_makespan']:g} ", "the search finds"]),
                (auto, text({"step": 1, "decision": order}, {"step": 2, "decision": {**order, "stage_times": [[2, 1, 1, 0]]}}), ["line 2", "another order than the first line"]),
                (auto, text({"step": 1, "decision": order}, {"step": 3}), ["line 2", "step 3 behind step 1"]),
                (auto, '{"step": 1}', ["line 1", 'no "decision"', "--schedule auto"])):
            path.write_text(content + "\n" if content else "")
            self.refused(*flags, says=["--replay-decisions", path, *words])
        for flags, content in ((dial, text({**begun(), "loss": 1})), (auto, found())):  # cut anywhere in its last line
            second = json.dumps({"step": 2, "loss": 1, "lr": 0.5})
            for count in (1, 5, len(second) - 1):
                path.write_text(content + "\n" + second[:count])
                self.refused(*flags, says=["line 2", f"cut off after {count} byte", "take the line away"])
            path.write_text(content + "\n" + second)  # all but its line break
            done = run("mega-gpt3", *SMALL, "--data", self.text, "--dry-run", *flags)
            self.assertEqual(done.returncode, 0, done.stderr)
        self.refused("--pp=2", "--replay-decisions", path, says=["--replay-decisions", "auto and adaptive"])
        self.refused("--pp=2", "--schedule=auto", "--stage-times=1,1,1", "--replay-decisions", path, says=["give one"])

    # --- checkpoints ---
    def test_six_steps_are_three_and_three_bit_for_bit(self):
        for layout in ([], ["--dp=2", "--zero1"], ["--tp=2", "--pp=2"], ["--hidden-dropout=0.1", "--attention-dropout=0.1"]):
            whole, _ = self.train(*layout)
            save = self.folder / ("ck" + "".join(layout).replace("-", "").replace("=", ""))
            flags = [*layout, "--lr-decay-iters=6", "--save", save]
            first, _ = self.train(*flags, "--train-iters=3")
            second, _ = self.train(*flags, "--load", save)
            self.assertEqual([s["step"] for s in second], [4, 5, 6])
            for key in ("loss", "grad_norm", "lr"):
                self.assertEqual([s[key] for s in first + second], [s[key] for s in whole], (layout, key))

    def test_resumes_at_another_layout(self):
        save = self.folder / "ck"
        whole, _ = self.train()
        self.train("--lr-decay-iters=6", "--train-iters=3", "--dp=4", "--tp=2", "--zero1", "--save", save)
        for layout in ([], ["--pp=2", "--vpp=2"], ["--dp=2", "--pp=4"]):
            log, _ = self.train("--lr-decay-iters=6", "--load", save, *layout)
            for got, want in zip(log, whole[3:]):
                self.assertAlmostEqual(got["loss"], want["loss"], delta=1e-4)

    def test_a_checkpoint_goes_on_with_other_layers_on_the_stages(self):
        whole, _ = self.train("--pp=2")
        layout = "--pipeline-model-parallel-layout"
        for number, (before, after) in enumerate([(["--pp=2", layout, "E t3|t L"], ["--pp=2", layout, "E t|t3 L"]),
                                                  (["--pp=2", layout, "E|t*4,L"], ["--pp=2", layout, "Et|tt|t|L"]),
                                                  (["--pp=2", "--balance-layers"], ["--pp=3", "--decoder-last-pipeline-num-layers=2"]),
                                                  (["--pp=2", layout, "E t4|L"], [])]):
            save = self.folder / f"ck{number}"
            first, _ = self.train(*before, "--lr-decay-iters=6", "--train-iters=3", "--save", save)
            second, _ = self.train(*after, "--lr-decay-iters=6", "--load", save)
            for key in ("loss", "grad_norm", "lr"):
                self.assertEqual([s[key] for s in first + second], [s[key] for s in whole], (before, after, key))

    def test_another_model_or_seed_is_refused(self):
        save = self.folder / "ck"
        self.train("--save", save)
        done = run("mega-gpt3", *SMALL, "--data", self.text, "--load", save, "--num-layers=2")
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("layers", done.stderr)
        done = run("mega-gpt3", *SMALL, "--data", self.text, "--load", save, "--num-attention-heads=2")
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("head_dim", done.stderr)
        done = run("mega-gpt3", *SMALL, "--data", self.text, "--load", save, "--seed=5")
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("seed", done.stderr)

    def test_a_signal_saves_and_ends_well(self):
        save = self.folder / "ck"
        log = self.folder / "log.json"
        process = subprocess.Popen([str(BIN / "mega-gpt3"), *SMALL, "--data", str(self.text), "--train-iters=100000", "--dp=2",
                                    "--save", str(save), "--log-json", str(log)], stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and (not log.exists() or len(log.read_text().splitlines()) < 3):
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 0, said)
        self.assertIn("durable", said)
        done = len(steps(log))
        resumed, _ = self.train("--train-iters", done + 2, "--load", save, "--lr-decay-iters=100000", log="resumed.json")
        self.assertEqual([s["step"] for s in resumed], [done + 1, done + 2])

    def test_a_signal_ends_the_long_wait_of_a_fault(self):
        for number, (fault, stop) in enumerate((("late-host=1,ms=60000,from-step=2", signal.SIGINT), ("slow-rank=0,factor=1000,from-step=2", signal.SIGTERM))):
            save, log = self.folder / f"ck{number}", self.folder / f"log{number}.json"
            process = subprocess.Popen([str(BIN / "mega-gpt3"), *SMALL, "--data", str(self.text), "--train-iters=1000", "--dp=2",
                                        "--seq-length=128", "--num-layers=8", "--inject", fault, "--save", str(save), "--log-json", str(log)],
                                       stderr=subprocess.PIPE, text=True)
            self.addCleanup(process.kill)
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and (not log.exists() or len(log.read_text().splitlines()) < 2):
                time.sleep(0.02)
            time.sleep(0.5)  # into the fault, which begins with the third step
            before = time.monotonic()
            process.send_signal(stop)
            _, said = process.communicate(timeout=60)
            self.assertEqual(process.returncode, 0, said)
            # A second is enough on an idle machine; the fault would take a minute and more.
            self.assertLess(time.monotonic() - before, 20, said)
            self.assertIn("durable", said)
            self.assertEqual(len(steps(log)), 3, said)

    def test_keeps_the_newest_checkpoints(self):
        save = self.folder / "ck"
        self.train("--save", save, "--save-interval=2", "--keep=2")
        self.assertEqual(sorted(p.name for p in save.glob("step-*")), ["step-00000004", "step-00000006"])

    # --- interchange ---
    def test_export_is_read_back_bit_equal(self):
        for program in ("mega-gpt3", "mega-llama3"):
            first, again = self.folder / f"{program}-1", self.folder / f"{program}-2"
            self.train("--export-hf", first, "--tp=2", "--pp=2", program=program)
            self.train("--import-hf", first, "--export-hf", again, "--train-iters=0", "--dp=2", program=program)
            self.assertEqual((first / "model.safetensors").read_bytes(), (again / "model.safetensors").read_bytes())
            self.assertEqual(json.loads((first / "config.json").read_text()), json.loads((again / "config.json").read_text()))

    def test_samples_a_continuation(self):
        _, done = self.train("--sample-tokens=12", "--prompt=9 bottles", "--pp=2", "--tp=2")
        self.assertIn("sampled continuation:\n9 bottles", done.stderr)

    # --- MPI ---
    @unittest.skipUnless((BIN / "mega-gpt3-mpi").exists() and shutil.which("mpirun"), "built without MPI")
    def test_processes_give_the_bits_of_threads(self):
        for program in ("mega-gpt3", "mega-llama3"):
            flags = ["--tp=2", "--pp=2", "--sp"]
            threads, _ = self.train(*flags, program=program)
            path = self.folder / "mpi.json"
            done = subprocess.run(["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "4", str(BIN / (program + "-mpi")), *SMALL,
                                   *flags, "--data", str(self.text), "--log-json", str(path)], capture_output=True, text=True, timeout=300)
            self.assertEqual(done.returncode, 0, done.stderr)
            for key in ("loss", "grad_norm"):
                self.assertEqual([s[key] for s in steps(path)], [s[key] for s in threads])

    @unittest.skipUnless((BIN / "mega-gpt3-mpi").exists() and shutil.which("mpirun"), "built without MPI")
    def test_processes_decide_one_order(self):
        layout = ["--tp=2", "--pp=2", "--vpp=2"]
        threads, _ = self.train(*layout)
        path = self.folder / "mpi.json"
        for flags in (["--look-ahead=2"], ["--schedule=adaptive", "--look-ahead=1"], ["--schedule=auto"]):
            done = subprocess.run(["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "4", str(BIN / "mega-gpt3-mpi"), *SMALL,
                                   *layout, *flags, "--data", str(self.text), "--log-json", str(path)], capture_output=True, text=True,
                                  timeout=300)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.same_bits(steps(path), threads, flags)


@unittest.skipUnless((BIN / "mega-gpt3-cuda").exists(), "built without nvcc")
class GpuPrograms(unittest.TestCase):
    """What they say before they touch a GPU; so this needs none."""
    BIG = ["--num-layers=32", "--hidden-size=4096", "--num-attention-heads=32", "--seq-length=4096", "--micro-batch-size=8",
           "--global-batch-size=64"]

    def plan(self, *arguments, program="mega-gpt3-cuda", code=0):
        done = run(program, "--dry-run", *arguments)
        self.assertEqual(done.returncode, code, done.stderr)
        return done

    @staticmethod
    def line_of(text, rank):
        return next(line for line in text.splitlines() if line.startswith(f"rank {rank}: "))

    def test_help_has_the_options_of_gpus_and_none_of_the_processor(self):
        for program in ("mega-gpt3-cuda", "mega-llama3-cuda"):
            done = run(program, "--help")
            self.assertEqual(done.returncode, 0, done.stderr)
            for word in ("--tensor-model-parallel-size", "--precision", "bf16|fp16|fp32", "--initial-loss-scale", "--gpu-memory-utilization", "--tune",
                         "--gemm-algorithms"):
                self.assertIn(word, done.stdout)
            self.assertNotIn("blas-threads", done.stdout)

    def test_wrong_usage_is_one_sentence(self):
        for flags, words in ((["--precision=fp8"], ["fp8", "bf16|fp16|fp32"]), (["--initial-loss-scale=0.5"], ["--min-loss-scale", "0.5"]),
                             (["--loss-scale-window=0"], ["--loss-scale-window", "0"]), (["--gpu-memory-utilization=1.5"], ["1.5", "at most 1"]),
                             (["--gpu-memory-utilization=0"], ["above 0"]), (["--dry-run", "--gpu-memory=many"], ["many", "80GB"]),
                             (["--dry-run", "--gpu-memory=-3GB"], ["-3GB"]), (["--dry-run", "--gpu-memory=3 parsecs"], ["parsecs"]),
                             (["--dry-run", "--gpu-memory=80GX"], ["80GX", "80GB"]), (["--dry-run", "--gpu-memory=80"], ["'80'", "80GB"]),
                             (["--dry-run", "--gpu-memory=80B"], ["80B", "1MB"]), (["--dry-run", "--gpu-memory=nanGB"], ["nanGB"]),
                             (["--dry-run", "--gpu-memory=1e30TB"], ["1e30TB"]), (["--gpu-memory=80GX"], ["80GX"]),
                             (["--initial-loss-scale=1024"], ["--initial-loss-scale", "fp16", "bf16"]),
                             (["--precision=fp32", "--loss-scale-window=5"], ["--loss-scale-window", "fp16", "fp32"]),
                             (["--precision=fp32", "--min-loss-scale=2"], ["--min-loss-scale", "fp16", "fp32"]),
                             (["--precision=fp16", "--min-loss-scale=1e-40", "--initial-loss-scale=1e-39"], ["--min-loss-scale", "1e-40", "1e-37"]),
                             (["--precision=fp16", "--initial-loss-scale=1e38"], ["--initial-loss-scale", "1e37"]),
                             (["--cuda-graphs", "--pp=2", "--vpp=2", "--schedule=adaptive"], ["--cuda-graphs", "adaptive"]),
                             (["--cuda-graphs", "--tp=2"], ["--cuda-graphs", "--tp"]), (["--cuda-graphs", "--trace=t"], ["--cuda-graphs", "--trace"]),
                             (["--cuda-graphs", "--inject=slow-rank=0,factor=2"], ["--cuda-graphs", "--inject"]),
                             (["--cuda-graphs", "--dp=2", "--slow-rank-interval=4"], ["--cuda-graphs", "--slow-rank-interval"]),
                             (["--gpu-memory=141GB"], ["--dry-run"]), (["--tp=3"], ["heads", "4", "3"]), (["--blas-threads=2"], ["blas"])):
            done = run("mega-gpt3-cuda", *flags)
            self.assertEqual(done.returncode, 2, (flags, done.stderr))
            self.assertEqual(len(done.stderr.strip().splitlines()), 1, done.stderr)
            for word in words:
                self.assertIn(word, done.stderr, flags)
            self.assertEqual(done.stdout, "", flags)

    def test_options_that_go_together(self):
        for flags in (["--precision=fp16", "--initial-loss-scale=1024", "--loss-scale-window=5", "--min-loss-scale=0.5"],
                      ["--cuda-graphs", "--pp=2", "--dp=2"], ["--cuda-graphs", "--slow-rank-interval=4"],
                      # What a script gives as it is by default changes nothing.
                      ["--precision=bf16", "--initial-loss-scale=65536"]):
            self.assertIn("fits: ", self.plan("--gpu-memory=141GB", *flags).stdout)

    def test_sizes_that_no_kernel_takes(self):
        one = ["--seq-length=1", "--hidden-size=8"]
        for flags, words in ((["--kv-channels=129"], ["129 wide", "--kv-channels", "up to 128"]), (["--kv-channels=4096"], ["4096 wide"]),
                             (["--kv-channels=12"], ["12 wide", "multiples of 8", "bf16"]),
                             (["--hidden-size=1024"], ["256 wide", "--num-attention-heads"]),
                             (["--kv-channels=12", "--precision=fp16"], ["12 wide", "multiples of 8", "fp16"]),
                             (["--kv-channels=129", "--precision=fp32"], ["129 wide", "1 to 128"]),
                             ([*one, "--precision=fp32", "--micro-batch-size=65536", "--global-batch-size=65536"], ["--micro-batch-size", "65536", "65535"]),
                             ([*one, "--precision=fp32", "--num-attention-heads=65536", "--kv-channels=1"], ["--num-attention-heads", "65535"]),
                             (["--seq-length=1073741824", "--kv-channels=8"], ["--seq-length"]),
                             (["--seq-length=1000000000", "--micro-batch-size=4", "--global-batch-size=4", "--kv-channels=8"], ["4000000000 tokens"]),
                             ([*one, "--num-attention-heads=99999999", "--kv-channels=8"], ["2399999976 columns"])):
            for start in ([], ["--dry-run", "--gpu-memory=900000TB"]):
                done = run("mega-gpt3-cuda", *start, *flags)
                self.assertEqual(done.returncode, 2, (flags, done.stderr))
                self.assertEqual(len(done.stderr.strip().splitlines()), 1, done.stderr)
                for word in words:
                    self.assertIn(word, done.stderr, flags)
        for flags in (["--kv-channels=128"], ["--kv-channels=12", "--precision=fp32"], ["--kv-channels=8"],
                      [*one, "--kv-channels=8", "--micro-batch-size=65536", "--global-batch-size=65536"],
                      [*one, "--precision=fp32", "--micro-batch-size=65535", "--global-batch-size=65535"],
                      [*one, "--precision=fp32", "--num-attention-heads=65536", "--kv-channels=1", "--tp=2"]):
            self.plan("--gpu-memory=900000TB", *flags)

    def test_no_plan_is_too_large_to_add_up(self):
        """At the bounds of the options a plan is what its parameters say, and no small number that is left of an overflow."""
        for flags in (["--ffn-hidden-size=100000000"], ["--ffn-hidden-size=100000000", "--num-layers=100", "--hidden-size=4096", "--num-attention-heads=32"],
                      ["--hidden-size=12000000", "--num-attention-heads=93750", "--num-layers=2"],
                      ["--num-attention-heads=80000000", "--kv-channels=8", "--hidden-size=1000"],
                      ["--seq-length=1000000000", "--micro-batch-size=2", "--global-batch-size=2"],
                      ["--ffn-hidden-size=100000000", "--hidden-size=1000000", "--num-attention-heads=12500", "--sample-tokens=4", "--tp=2", "--dp=2"]):
            for precision, bytes_of_a_parameter in (("bf16", 18), ("fp32", 16)):
                if precision == "fp32" and {"--num-attention-heads=80000000", "--num-attention-heads=93750"} & set(flags):
                    continue  # more heads than fp32's attention takes
                done = self.plan("--gpu-memory=80GB", f"--precision={precision}", *flags, code=2)
                line = self.line_of(done.stdout, 0)
                parameters = int(line.split(" parameters, ")[0].rsplit(" ", 1)[1])
                tib = float(line.split(" parameters, ")[1].split(" TiB")[0])
                self.assertGreaterEqual(tib * 2**40 * 1.001, parameters * bytes_of_a_parameter, flags)
                self.assertIn("rank 0 needs", done.stderr)
        for name in ("ffn-hidden-size", "kv-channels", "hidden-size", "num-attention-heads"):
            for value in (100000001, 2**63 - 1):
                done = run("mega-gpt3-cuda", "--dry-run", "--gpu-memory=141GB", f"--{name}={value}")
                self.assertEqual(done.returncode, 2, done.stderr)
                self.assertIn(f"--{name} is {value}", done.stderr)

    def test_a_large_micro_batch_is_advised_on_at_once(self):
        def user_seconds():
            return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime

        before = user_seconds()
        done = self.plan("--gpu-memory=80GB", "--seq-length=1", "--micro-batch-size=1000000000", "--global-batch-size=1000000000", code=2)
        self.assertIn("--micro-batch-size", done.stderr)
        self.assertLess(user_seconds() - before, 8)  # trying every number below, not the divisors, takes 20

    def test_what_was_printed_comes_before_the_refusal(self):
        done = subprocess.run([str(BIN / "mega-gpt3-cuda"), "--dry-run", "--gpu-memory=1MB"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              timeout=120, check=False)
        self.assertEqual(done.returncode, 2, done.stdout)
        self.assertIn("rank 0 needs", done.stdout.splitlines()[-1])
        self.assertTrue(done.stdout.startswith("# Layout"), done.stdout[:100])

    def test_a_dry_run_looks_at_no_other_file(self):
        nowhere = pathlib.Path("/nonexistent/x")
        self.plan("--gpu-memory=80GB", "--data", nowhere, "--load", nowhere, "--log-json", nowhere, "--gemm-algorithms", nowhere, "--save", nowhere)
        self.assertIn("looks at no", " ".join(run("mega-gpt3-cuda", "--help").stdout.split()))

    def test_plan_of_a_run_that_fits(self):
        done = self.plan("--gpu-memory=141GB", "--tp=2", "--dp=2", "--zero1", "--precision=bf16")
        self.assertEqual(sum(line.startswith("rank ") for line in done.stdout.splitlines()), 4)
        self.assertIn("--precision=bf16", done.stdout)
        self.assertIn("fits: ", done.stdout)
        for word in ("parameters and optimizer", "activations", "workspace", "matrix products 64.0 MiB", "attention",
                     "communicators 3.5 GiB"):
            self.assertIn(word, self.line_of(done.stdout, 3))
        self.assertNotIn("sampling", done.stdout)
        self.assertIn("sampling", self.plan("--gpu-memory=141GB", "--sample-tokens=4").stdout)
        self.assertNotIn("communicators", self.plan("--gpu-memory=141GB").stdout)

    def test_16_bits_take_less_than_fp32(self):
        def gib(precision):
            done = self.plan(*self.BIG, "--micro-batch-size=1", "--gpu-memory=1TB", f"--precision={precision}", program="mega-llama3-cuda")
            text = self.line_of(done.stdout, 0).split(" activations ")[1]
            self.assertIn(" GiB", text)
            return float(text.split(" GiB")[0])

        self.assertAlmostEqual(gib("bf16") / gib("fp32"), 0.5, delta=0.05)
        self.assertEqual(gib("fp16"), gib("bf16"))

    def test_a_plan_that_does_not_fit_names_one_that_does(self):
        done = self.plan(*self.BIG, "--gpu-memory=141GB", code=2)
        self.assertEqual(len(done.stderr.strip().splitlines()), 1, done.stderr)
        for word in ("rank 0 needs", "activations", "0.95", "131.3 GiB", "would fit with"):
            self.assertIn(word, done.stderr)
        named = done.stderr.split("of its GPU; ")[1].split(" would fit")[0].split()
        self.assertTrue(named and named[0].startswith("--"), done.stderr)
        self.plan(*self.BIG, *named, "--gpu-memory=141GB")
        # With less of the GPU, what was advised does not fit either, and something else is.
        again = self.plan(*self.BIG, *named, "--gpu-memory=141GB", "--gpu-memory-utilization=0.5", code=2)
        self.assertIn("would fit with", again.stderr)
        hopeless = self.plan(*self.BIG, "--gpu-memory=100MB", code=2)
        self.assertIn("smaller model", hopeless.stderr)

    @unittest.skipIf(shutil.which("nvidia-smi"), "a GPU may be here")
    def test_without_a_gpu_it_says_so(self):
        self.assertIn("no GPU to compare with", self.plan().stdout)
        done = run("mega-gpt3-cuda")
        self.assertEqual(done.returncode, 3, done.stderr)
        self.assertEqual(len(done.stderr.strip().splitlines()), 1, done.stderr)
        for word in ("no GPU", "--dry-run", "processor"):
            self.assertIn(word, done.stderr)
        self.assertNotIn("version is insufficient", done.stderr)  # where there is no version


def gpus():
    if not shutil.which("nvidia-smi") or not (BIN / "mega-gpt3-cuda").exists():
        return 0
    said = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return sum(line.startswith("GPU ") for line in said.stdout.splitlines())


@unittest.skipUnless(gpus() >= 1, "no GPU here")
class GpuTraining(unittest.TestCase):
    MODEL = ["--num-layers=4", "--hidden-size=64", "--num-attention-heads=4", "--seq-length=64", "--micro-batch-size=1",
             "--global-batch-size=8", "--lr=1e-3", "--lr-warmup-iters=2", "--lr-decay-iters=6", "--eval-iters=1", "--train-iters=6"]
    PROGRAMS = ("mega-gpt3", "mega-llama3")

    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)
        self.text = self.folder / "text.txt"
        self.text.write_text("".join(f"{i} bottles of water on the wall, {i} bottles of water. " for i in range(400)))

    def train(self, program, *flags):
        path = self.folder / "log.json"
        path.unlink(missing_ok=True)
        done = run(program, *self.MODEL, "--data", self.text, "--log-json", path, *flags, timeout=300)
        self.assertEqual(done.returncode, 0, done.stderr)
        return steps(path), done

    def near(self, got, want, delta, about):
        self.assertEqual([s["step"] for s in got], [s["step"] for s in want], about)
        for a, b in zip(got, want):
            self.assertAlmostEqual(a["loss"], b["loss"], delta=delta, msg=about)

    def test_training_learns_within_its_plan(self):
        for program in self.PROGRAMS:
            for precision in ("bf16", "fp16", "fp32"):
                log, done = self.train(program + "-cuda", f"--precision={precision}", "--train-iters=30", "--lr-decay-iters=30")
                self.assertLess(log[-1]["loss"], log[0]["loss"] - 0.5, (program, precision))
                self.assertIn("measured", done.stderr)
                self.assertEqual("loss_scale" in log[0], precision == "fp16")
                self.assertGreater(log[-1]["peak_bytes"], 64 << 20)
                # Beside the plan: modules of kernels, and the granularity of CUDA's allocations.
                self.assertLess(log[-1]["peak_bytes"], log[-1]["planned_bytes"] + (512 << 20), (program, precision))
                self.assertEqual(log[-1]["peak_bytes"], log[5]["peak_bytes"], (program, precision))

    def test_precisions_agree(self):
        for program in self.PROGRAMS:
            fp32, _ = self.train(program + "-cuda", "--precision=fp32")
            bf16, _ = self.train(program + "-cuda")
            # Eight bits of mantissa: the losses, near log 257, keep about two digits behind the point.
            self.near(bf16, fp32, 3e-2, program)
            # Three bits more. With a low scale no step is skipped.
            fp16, _ = self.train(program + "-cuda", "--precision=fp16", "--initial-loss-scale=256")
            self.near(fp16, fp32, 5e-3, program)
            self.assertFalse(any(step["skipped"] for step in fp16))

    def test_an_overflow_of_fp16_is_skipped_and_the_scale_halved(self):
        for program in self.PROGRAMS:
            high = 2.0**40
            log, done = self.train(program + "-cuda", "--precision=fp16", f"--initial-loss-scale={high:.0f}",
                                   "--train-iters=40", "--lr-decay-iters=40")
            skipped = [step["skipped"] for step in log]
            self.assertGreaterEqual(sum(skipped), 12, done.stderr)  # more than ten in a row are no failure
            self.assertLess(sum(skipped), 36)
            # Skipped steps halve it, wherever they come; no other step of so few changes it.
            self.assertEqual([step["loss_scale"] for step in log], [high / 2**i for i in itertools.accumulate(skipped, initial=0)][:-1])
            self.assertIn("| loss scale ", done.stderr)
            self.assertLess(log[-1]["loss"], log[0]["loss"])

    def test_six_steps_are_three_and_three(self):
        for program in self.PROGRAMS:
            for precision, delta in (("fp32", 0), ("bf16", 1e-2), ("fp16", 1e-2)):
                flags = [f"--precision={precision}"]
                whole, _ = self.train(program + "-cuda", *flags)
                save = self.folder / f"{program}-{precision}"
                self.train(program + "-cuda", *flags, "--save", save, "--train-iters=3")
                second, _ = self.train(program + "-cuda", *flags, "--load", save)
                self.near(second, whole[3:], delta, (program, precision))

    def test_a_checkpoint_changes_precision(self):
        save = self.folder / "ck"
        whole, _ = self.train("mega-gpt3-cuda", "--precision=fp32")
        self.train("mega-gpt3-cuda", "--precision=bf16", "--save", save, "--train-iters=3")
        second, _ = self.train("mega-gpt3-cuda", "--precision=fp32", "--load", save)
        self.near(second, whole[3:], 3e-2, "from bf16 to fp32")

    @unittest.skipUnless((BIN / "mega-gpt3").exists() and (BIN / "mega-llama3").exists(), "no program of the processor beside it")
    def test_the_processor_and_the_gpu_are_one_run(self):
        for program in self.PROGRAMS:
            fp32 = "--precision=fp32"
            whole, _ = self.train(program)
            gpu, _ = self.train(program + "-cuda", fp32)
            self.near(gpu, whole, 1e-4, program)
            for number, (first, second) in enumerate((((program,), (program + "-cuda", fp32)), ((program + "-cuda", fp32), (program,)))):
                save = self.folder / f"{program}-{number}"
                self.train(*first, "--save", save, "--train-iters=3")
                log, _ = self.train(*second, "--load", save)
                self.near(log, whole[3:], 1e-4, (first, second))

    def test_export_is_read_back_bit_equal(self):
        for program in self.PROGRAMS:
            for precision in ("bf16", "fp16", "fp32"):
                first, again = self.folder / f"{program}-{precision}-1", self.folder / f"{program}-{precision}-2"
                self.train(program + "-cuda", f"--precision={precision}", "--export-hf", first)
                self.train(program + "-cuda", f"--precision={precision}", "--import-hf", first, "--export-hf", again, "--train-iters=0")
                self.assertEqual((first / "model.safetensors").read_bytes(), (again / "model.safetensors").read_bytes())

    def test_samples_a_continuation(self):
        for program in self.PROGRAMS:
            _, done = self.train(program + "-cuda", "--sample-tokens=12", "--prompt=9 bottles")
            self.assertIn("sampled continuation:\n9 bottles", done.stderr)

    def test_tuned_algorithms_are_kept(self):
        kept = self.folder / "algorithms"
        first, _ = self.train("mega-gpt3-cuda", "--precision=fp32", "--tune", "--gemm-algorithms", kept)
        chosen = kept.read_text()
        self.assertGreater(len(chosen.splitlines()), 5)
        second, _ = self.train("mega-gpt3-cuda", "--precision=fp32", "--gemm-algorithms", kept)
        self.near(second, first, 0, "with the same algorithms")
        self.assertEqual(chosen, kept.read_text())
        kept.write_text("torn")
        done = run("mega-gpt3-cuda", *self.MODEL, "--data", self.text, "--gemm-algorithms", kept)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("line 1", done.stderr)

    def test_more_ranks_than_gpus_are_refused(self):
        done = run("mega-gpt3-cuda", *self.MODEL, "--dp=8", "--tp=4", "--pp=2", "--data", self.text)
        self.assertEqual(done.returncode, 2, done.stderr)
        for word in ("64 ranks", str(gpus())):
            self.assertIn(word, done.stderr)

    @unittest.skipUnless(gpus() >= 2, "fewer than two GPUs")
    def test_layouts_of_two_gpus_train_the_same_model(self):
        for program in self.PROGRAMS:
            one, _ = self.train(program + "-cuda", "--precision=fp32")
            for flags in (["--tp=2"], ["--tp=2", "--sp"], ["--pp=2"], ["--pp=2", "--vpp=2", "--schedule=bfc"],
                          ["--pp=2", "--schedule=zb-h1"], ["--pp=2", "--schedule=zb-v"], ["--dp=2"], ["--dp=2", "--zero1"],
                          ["--pp=2", "--look-ahead=2"], ["--pp=2", "--vpp=2", "--schedule=adaptive"], ["--pp=2", "--schedule=auto"],
                          ["--pp=2", "--look-ahead=1", "--cuda-graphs"]):
                save, export = (self.folder / f"{what}-{program}{''.join(flags)}" for what in ("ck", "hf"))
                log, _ = self.train(program + "-cuda", "--precision=fp32", *flags, "--save", save, "--export-hf", export,
                                    "--sample-tokens=3")
                self.near(log, one, 1e-4, (program, flags))
                more, _ = self.train(program + "-cuda", "--precision=fp32", "--load", save, "--train-iters=8")
                self.assertEqual([s["step"] for s in more], [7, 8])
                bf16, _ = self.train(program + "-cuda", *flags)
                self.near(bf16, one, 3e-2, (program, flags, "bf16"))


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]])

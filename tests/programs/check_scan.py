#!/usr/bin/env python3
"""mega-scan as its users run it: a job with a known culprit in each dialect, files that do not belong together,
files that are cut, refusals, exit codes.

usage: check_scan.py BIN_FOLDER [TEST...]
Real traces are read where MEGA_SHARED names a directory with traces/.
"""
import gzip
import io
import json
import os
import pathlib
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
import unittest

BIN = pathlib.Path(sys.argv[1]).resolve()
COMMANDS = ("report", "align", "what-if", "convert", "diff")
MS = 1_000_000

# --- A data-parallel job: two micro-batches a step, then one all-reduce that all ranks leave together. ---
FORWARD, BACKWARD, REDUCE = 10 * MS, 20 * MS, 3 * MS


def job(ranks=4, steps=8, slow=2, factor=1.5, start=0, first_step=0):
    """Of each rank its spans (name, kind, step, micro-batch, begin, end), in ns of one clock."""
    spans = [[] for _ in range(ranks)]
    now = start
    for step in range(first_step, first_step + steps):
        arrivals = []
        for rank in range(ranks):
            at = now
            for micro_batch in range(2):
                for name, usual in (("forward", FORWARD), ("backward", BACKWARD)):
                    # Two ranks that take the very same time are copies to the program, and no real ones.
                    took = int(usual * (factor if rank == slow else 1)) + (step * 7919 + rank * 104729 + micro_batch * 31) % 90_000
                    spans[rank].append((name, name, step, micro_batch, at, at + took))
                    at += took
            arrivals.append(at)
        end = max(arrivals) + REDUCE
        for rank in range(ranks):
            spans[rank].append(("all_reduce", "communication", step, -1, arrivals[rank], end + rank * 500))
            spans[rank].append(("iteration", "iteration", step, -1, now, end + rank * 500))
        now = end + MS
    return spans


def own(spans, rank, world=None, clock="one", offset=0, rank_said=None):
    world = len(spans) if world is None else world
    lines = [{"mega_trace": 1, "rank": rank if rank_said is None else rank_said, "world": world, "data": rank, "pipeline": 0,
              "tensor": 0, "clock": clock, "interval": 1, "cost_ns": 20.5},
             {"lane": 0, "label": "compute"}, {"lane": 1, "label": "steps", "kind": "host"},
             {"group": 0, "name": "data", "ranks": list(range(world))}]
    for name, kind, step, micro_batch, begin, end in spans[rank]:
        line = {"b": begin + offset, "d": end - begin, "n": name, "k": kind, "l": 1 if kind == "iteration" else 0, "s": step}
        if micro_batch >= 0:
            line |= {"m": micro_batch, "c": 0}
        if kind == "communication":
            line |= {"g": 0, "q": step, "y": 1 << 20, "t": "fp32"}
        lines.append(line)
    lines.append({"recorded": len(spans[rank]), "dropped": 0})
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)


def kineto(spans, rank, says_rank=True, world=None, offset=0):
    events = []
    base = 1_700_000_000_000_000_000 + offset
    for number, (name, kind, step, _, begin, end) in enumerate(spans[rank]):
        at = {"ph": "X", "ts": (base + begin) // 1000, "dur": (end - begin) / 1000}
        if kind == "iteration":
            events.append({**at, "cat": "user_annotation", "name": f"ProfilerStep#{step}", "pid": 9, "tid": 9})
            continue
        # The host runs ahead of its device.
        launched = base + min(s[4] for s in spans[rank] if s[2] == step) + MS // 100 * (1 + number % 6)
        launch = {"ph": "X", "ts": launched // 1000, "dur": 1, "cat": "cuda_runtime", "name": "cudaLaunchKernel",
                  "pid": 9, "tid": 9, "args": {"correlation": number + 1}}
        args = {"correlation": number + 1, "stream": 7}
        if kind == "communication":
            args |= {"Collective name": "allreduce", "Process Group Name": "0", "In msg nelems": 1 << 18, "dtype": "Float",
                     "Process Group Ranks": str(list(range(len(spans)))), "Seq": step}
            name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
        else:
            name = f"{name}_gemm_kernel"
        events += [launch, {**at, "cat": "kernel", "name": name, "pid": 0, "tid": 7, "args": args}]
    out = {"schemaVersion": 1, "traceEvents": events}
    if says_rank:
        out["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": len(spans) if world is None else world}
    return json.dumps(out)


def device_last(text):
    """A Kineto file with the device's part behind the host's, as real ones have it."""
    given = json.loads(text)
    return json.dumps({"distributedInfo": given["distributedInfo"],
                       "traceEvents": sorted(given["traceEvents"], key=lambda event: event["cat"] == "kernel")})


def straggler(spans, stages=1):
    """Ranks of a stage follow one another; names of threads stand at the end."""
    events, labels = [], []
    replicas = len(spans) // stages
    names = {"forward": "forward-compute", "backward": "backward-compute", "all_reduce": "grads-sync"}
    for rank, of in enumerate(spans):
        for name, kind, step, micro_batch, begin, end in of:
            if kind == "iteration":
                continue
            thread = 5 * rank + (3 if kind == "communication" else 0)
            events.append({"name": names[name], "ph": "X", "ts": begin / 1000, "dur": (end - begin) / 1000, "pid": rank % replicas, "tid": thread,
                           "args": {"step": step, "mb_id": micro_batch, "seq_id": 0 if kind == "communication" else micro_batch,
                                    "model_chunk": 0}})
        for thread, what in enumerate(("compute", "pp-comm", "tp-comm", "dp-comm", "misc")):
            labels.append({"name": "thread_name", "ph": "M", "pid": rank % replicas, "tid": 5 * rank + thread,
                           "args": {"name": f"PP rank {rank // replicas}, TP rank 0, {what}"}})
    return json.dumps({"traceEvents": events + labels})


def megatronapp(spans):
    events = []
    for rank, of in enumerate(spans):
        for name, kind, step, micro_batch, begin, end in of:
            at = {"pid": rank, "tid": 0}
            more = {"iteration": step, "g_rk": rank, "dp_rk": rank, "pp_rk": 0, "tp_rk": 0, "microbatch": micro_batch}
            if kind == "iteration":
                events.append((begin - 1, {**at, "name": "iteration begin", "ph": "i", "ts": begin // 1000, "args": {"iteration": step}}))
                events.append((end, {**at, "name": "iteration end", "ph": "i", "ts": end // 1000, "args": {"iteration": step}}))
            elif kind != "communication":
                events.append((begin, {**at, "name": name, "ph": "B", "ts": begin // 1000, "args": more}))
                events.append((end, {**at, "name": name, "ph": "E", "ts": end // 1000, "args": more}))
    events.sort(key=lambda event: event[0])
    return json.dumps([event for _, event in events])


def inspector(spans, rank):
    lines = []
    for name, kind, step, _, begin, end in spans[rank]:
        if kind != "communication":
            continue
        lines.append(json.dumps({
            "header": {"id": "0x1234", "rank": rank, "n_ranks": len(spans), "nnodes": 1},
            "metadata": {"inspector_output_format_version": "v4.0", "dump_timestamp_us": end // 1000 + 100},
            "coll_perf": {"coll": "AllReduce", "coll_sn": step + 1, "coll_msg_size_bytes": 1 << 20,
                          "coll_exec_time_us": (end - begin) // 1000,
                          "event_trace_ts": {"coll_start_ts": begin // 1000 + 1, "coll_stop_ts": end // 1000 + 1}}}))
    return "\n".join(lines) + "\n"


def flight_recorder(ranks, rank, calls):
    """A dump of a rank that made so many calls, the last of which hangs."""
    entries = [{"record_id": i, "pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": i + 1, "p2p_seq_id": 0,
                "profiling_name": "nccl:all_reduce", "time_created_ns": 10**18 + i * 50 * MS + rank * 1000,
                "input_sizes": [[1024]], "input_dtypes": ["Float"], "output_sizes": [[1024]], "output_dtypes": ["Float"],
                "state": "scheduled" if i + 1 == calls else "completed",
                "time_discovered_started_ns": None,
                "time_discovered_completed_ns": None if i + 1 == calls else 10**18 + i * 50 * MS + 9 * MS,
                "retired": i + 1 != calls, "is_p2p": False} for i in range(calls)]
    return json.dumps({"version": "2.9", "rank": rank, "entries": entries,
                       "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(ranks)))}},
                       "pg_status": {"0": {"last_enqueued_collective": calls, "last_started_collective": calls,
                                           "last_completed_collective": calls - 1}}})


class Program(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)

    def run_scan(self, *arguments, **more):
        given = {"stdin": subprocess.DEVNULL} | more
        if "stdout" not in given:
            given |= {"capture_output": True, "errors": "surrogateescape"}
        return subprocess.run([str(BIN / "mega-scan"), *(os.fspath(a) if isinstance(a, pathlib.Path) else a if isinstance(a, bytes)
                                                         else str(a) for a in arguments)], timeout=60, cwd=self.folder, **given)

    def text(self, *arguments, warns=(), **more):
        """Exit code 0; on standard error one warning for each of `warns`, which names it."""
        done = self.run_scan(*arguments, **more)
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = done.stderr.splitlines()
        self.assertEqual(len(lines), len(warns), done.stderr)
        for line, word in zip(lines, warns):
            self.assertTrue(line.startswith("mega-scan: warning: "), line)
            self.assertIn(word, line)
        return done.stdout

    def json(self, *arguments, warns=(), **more):
        return json.loads(self.text(*arguments, "--json", warns=warns, **more))

    def refused(self, *arguments, says=(), **more):
        """Exit code 2, one sentence on standard error, nothing on standard output, nothing written."""
        before = sorted(self.folder.rglob("*"))
        done = self.run_scan(*arguments, **more)
        self.assertEqual(done.returncode, 2, done.stdout + done.stderr)
        self.assertEqual(done.stdout, "")
        self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
        for word in says:
            self.assertIn(str(word), done.stderr)
        self.assertEqual(before, sorted(self.folder.rglob("*")))
        return done.stderr

    def file(self, name, content):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".gz") and isinstance(content, str):
            content = gzip.compress(content.encode())
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def job_files(self, folder="job", spans=None, write=own, name="rank-{}.mega.jsonl", **more):
        spans = job() if spans is None else spans
        return [self.file(f"{folder}/{name.format(rank)}", write(spans, rank, **more)) for rank in range(len(spans))]

    def every_command(self, *paths, warns=()):
        """Runs all five on the paths; diff on the first one against itself."""
        self.text("report", *paths, warns=warns)
        self.json("align", *paths, warns=warns)
        self.json("what-if", *paths, warns=warns)
        self.text("convert", *paths, "-o", self.folder / "out", warns=warns)
        self.assertGreater((self.folder / "out").stat().st_size, 100)
        return self.json("diff", paths[0], paths[0], warns=warns * 2 if len(paths) == 1 else ())

    def all_refuse(self, *paths, says=()):
        for command in ("report", "align", "what-if"):
            self.refused(command, *paths, says=says)
            self.refused(command, *paths, "--json", says=says)
        self.refused("convert", *paths, "-o", self.folder / "never", says=says)
        self.refused("report", *paths, "--html", self.folder / "never.html", says=says)


class Scan(Program):
    # --- a culprit that is known, in every dialect ---
    def expect_culprit(self, got, rank=2):
        worst = got["verdicts"][0]
        self.assertEqual((worst["class"], worst["ranks"]), ("slow_gpu", [rank]), worst)
        self.assertAlmostEqual(worst["factor"], 1.5, delta=.03)
        self.assertFalse(got["healthy"])
        caused = {int(k): v for k, v in got["wait_caused_us"].items()}
        self.assertEqual(max(caused, key=caused.get), rank)
        # Each other rank waits for 30 ms of the 60 ms of excess work, in each of eight steps.
        for other in {0, 1, 3} - {rank}:
            self.assertAlmostEqual(got["wait_suffered_us"][str(other)], 8 * 30_000, delta=8 * 400)

    def test_own_format(self):
        self.job_files()
        got = self.json("report", self.folder / "job")
        self.expect_culprit(got)
        self.assertEqual((got["ranks"], got["events"], got["warnings"]), (4, 4 * 8 * 6, []))
        self.assertEqual(got["defects"]["truncated_files"], 0)
        self.assertIn("Rank 2 computes slowly", self.text("report", self.folder / "job"))
        w = self.json("what-if", self.folder / "job")
        self.assertGreater(w["S"], 1.3)
        self.assertEqual(w["worst_ranks"], [2])
        self.assertEqual(self.every_command(self.folder / "job")["equal"], True)

    def test_kineto(self):
        paths = self.job_files(write=kineto, name="rank{}.pt.trace.json.gz")
        got = self.json("report", *paths)
        self.expect_culprit(got)
        self.assertEqual([r["rank"] for r in got["rank_files"]], [0, 1, 2, 3])
        self.every_command(*paths)

    def test_kineto_on_clocks_that_disagree(self):
        spans = job()
        for rank in range(4):
            self.file(f"job/rank{rank}.json", kineto(spans, rank, offset=(0, 7, -3, 1)[rank] * MS * 1000))
        got = self.json("align", self.folder / "job")
        self.assertTrue(got["aligned"])
        offsets = [got["clocks"][str(rank)]["offset_ns"] for rank in range(4)]
        for rank, at in enumerate((0, 7, -3, 1)):
            self.assertAlmostEqual(offsets[0] - offsets[rank], at * MS * 1000, delta=5000)
        self.expect_culprit(self.json("report", self.folder / "job"))

    def test_straggler_timeline(self):
        path = self.file("timeline.json.gz", straggler(job()))
        got = self.json("report", path)
        self.assertEqual(got["verdicts"][0]["ranks"], [2])
        w = self.json("what-if", path)
        self.assertEqual(w["worst_ranks"], [2])
        self.assertAlmostEqual(w["M_W"], 1, delta=.05)
        self.every_command(path)

    def test_megatronapp(self):
        path = self.file("aggregated.json", megatronapp(job()))
        got = self.json("report", path)
        self.assertEqual(got["ranks"], 4)
        self.assertEqual(got["events"], 4 * 8 * 5)
        self.assertEqual(got["verdicts"][0]["ranks"], [2])

    def test_nccl_inspector(self):
        paths = self.job_files(write=inspector, name="host-pid{}.log")
        got = self.json("report", *paths)
        self.assertEqual(got["matched"]["by_sequence"], 8)
        self.assertEqual([c["last_arriver"] for c in got["collectives"]], [2] * 8)

    def test_flight_recorder(self):
        for rank in range(4):
            self.file(f"job/_dump_{rank}", flight_recorder(4, rank, 5 if rank == 1 else 6))
        got = self.json("report", self.folder / "job")
        self.assertEqual((got["verdicts"][0]["class"], got["verdicts"][0]["ranks"]), ("hang", [1]))
        self.assertEqual(got["verdicts"][0]["confidence"], 0.9)
        # Those of half the ranks: that the others are not there says nothing of them, and little is sure.
        got = self.json("report", "job/_dump_0", "job/_dump_1")
        self.assertEqual((got["verdicts"][0]["ranks"], got["verdicts"][0]["confidence"]), ([1], 0.5))
        # A dump that its rank never came to write is evidence, not an empty file.
        self.file("job/_dump_1", "")
        got = self.json("report", self.folder / "job")
        self.assertEqual((got["verdicts"][0]["class"], got["verdicts"][0]["ranks"]), ("hang", [1]))
        self.assertTrue([r for r in got["rank_files"] if r["rank"] == 1][0]["missing"])

    def test_what_convert_wrote_is_read(self):
        self.job_files()
        self.assertIn("192 events of 4 ranks", self.text("convert", "job", "--to", "chrome", "-o", "job.json"))
        events = json.loads((self.folder / "job.json").read_text())["traceEvents"]
        spans = [e for e in events if e["ph"] == "X" and e["name"] == "forward"]
        self.assertEqual(len(spans), 4 * 8 * 2)
        self.assertEqual({e["dur"] // 1000 for e in spans}, {10, 15})
        self.assertEqual(len({e["pid"] for e in spans}), 4)
        # Its ranks, steps and operations are those of the files that it was made of.
        got, files = self.json("report", "job.json"), self.json("report", "job")
        self.expect_culprit(got)
        for key in ("ranks", "events", "step_ms", "wait_caused_us", "wait_suffered_us", "what_if", "matched"):
            self.assertEqual(got[key], files[key], key)
        self.every_command("job.json")
        said = self.text("convert", "job", "-o", "job.pftrace")
        self.assertIn("192 events of 4 ranks", said)
        self.all_refuse("job.pftrace", says=["job.pftrace is Perfetto's protobuf", "--to chrome"])

    def test_output_to_standard_output(self):
        self.job_files()
        self.assertEqual(len(json.loads(self.text("convert", "job", "--to", "chrome", "-o", "-"))["traceEvents"]) > 192, True)
        self.assertIn("</html>", self.text("report", "job", "--html", "-"))
        self.assertEqual([p.name for p in self.folder.iterdir()], ["job"])

    def test_a_page_in_the_folder_that_is_read(self):
        self.job_files()
        self.text("report", "job", "--html", "job/page.html")
        self.text("report", "job", warns=["page.html in job is no trace"])

    def test_a_byte_order_mark(self):
        for rank, path in enumerate(self.job_files()):
            path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
        self.expect_culprit(self.json("report", "job"))

    def test_standard_input_and_archives(self):
        paths = self.job_files()
        with open(paths[2], "rb") as one:
            self.assertIn("1 rank, 48 events", self.text("report", "-", stdin=one))
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w:gz", format=tarfile.USTAR_FORMAT) as out:
            for path in paths:
                out.add(path, path.name)
        self.expect_culprit(self.json("report", self.file("job.tar.gz", archive.getvalue())))
        # An archive that is cut loses ranks, and says so.
        whole = gzip.decompress(archive.getvalue())
        second = (1 + -(-paths[0].stat().st_size // 512)) * 512
        self.text("report", self.file("boundary.tar", whole[:2 * second]), warns=["boundary.tar ends without an end mark"])
        self.text("report", self.file("within.tar", whole[:second + 2000]), warns=["middle of this member"])

    # --- files that do not belong together ---
    def test_a_copy_is_refused(self):
        paths = self.job_files()
        copy = self.folder / "again.jsonl"
        copy.write_bytes(paths[1].read_bytes())
        for twin in (copy, self.folder / "link", self.folder / "hard"):
            if twin.name == "link":
                twin.symlink_to(paths[1])
            elif twin.name == "hard":
                os.link(paths[1], twin)
            self.all_refuse(paths[0], paths[1], twin, says=[paths[1], twin, "rank 1", "the same events"])
        self.file("job/rank-1.copy.jsonl.gz", paths[1].read_text())
        self.all_refuse(self.folder / "job", says=["rank-1.mega.jsonl", "rank-1.copy.jsonl.gz", "rank 1"])
        self.refused("diff", "job", "job", says=["rank 1"])

    def test_the_same_path_twice_is_refused(self):
        paths = self.job_files()
        self.all_refuse(paths[0], paths[0], says=["given twice"])
        self.all_refuse("job", "job", says=["given twice"])
        self.all_refuse("job", "job/", says=["job/rank-0.mega.jsonl is given twice"])
        self.all_refuse("job", f"{self.folder}/job", says=["rank 0", "the same events"])
        self.all_refuse("job", "job/rank-3.mega.jsonl", says=["job/rank-3.mega.jsonl is given twice"])

    def test_a_copy_whose_rank_nobody_said_is_refused(self):
        spans = job()
        text = kineto(spans, 0, says_rank=False)
        one, two = self.file("a.json", text), self.file("b.json.gz", text)
        self.all_refuse(one, two, says=["a.json", "b.json.gz", "the same events"])
        self.all_refuse(self.file("rank0.json", text), self.file("rank0 (1).json", text), says=["rank 0", "the same events"])
        # Nor does --ranks make ranks of copies.
        self.refused("report", one, two, "--ranks", "0,1", says=["the same events"])

    def test_one_number_for_all_files_is_refused(self):
        paths = self.job_files()
        self.refused("report", *paths, "--ranks", "0,0,0,0", says=["rank-0.mega.jsonl", "rank-1.mega.jsonl", "rank 0", "steps 0 to 7"])
        self.refused("align", "job", "--ranks", 0, says=["rank 0"])
        self.refused("report", *paths, "--ranks", "0,1", says=["2 numbers for 4 files"])
        self.refused("report", paths[0], "--ranks", "0,1", says=["2 numbers for 1 file;"])
        self.refused("report", *paths, "--ranks", "0,1,2,-3", says=["-3"])
        self.refused("report", *paths, "--ranks", "0,1,two,3", says=["--ranks has two", "whole numbers from 0 on"])
        got = self.json("report", *paths, "--ranks", "3,2,1,0")
        self.expect_culprit(got, rank=1)

    def test_two_runs_in_one_folder_are_refused(self):
        self.job_files("both")
        later = job(start=10**12)
        self.job_files("both", later, name="later-{}.jsonl")
        self.all_refuse("both", says=["are both of rank 0", "steps 0 to 7"])

    def test_jobs_of_two_sizes_are_refused(self):
        small = self.job_files("small", job(ranks=2, slow=1))
        large = self.job_files("large")
        self.all_refuse(small[0], large[3], says=[small[0], large[3], "2 ranks", "4"])
        spans = job()
        self.all_refuse(self.file("k0.json", kineto(spans, 0)), self.file("k1.json", kineto(spans, 1, world=128)), says=["128"])

    def test_two_timelines_are_refused(self):
        self.all_refuse(self.file("a.json", straggler(job())), self.file("b.json", straggler(job(ranks=3, slow=1, start=10**13))),
                        says=["a.json", "b.json", "rank 0"])
        self.all_refuse(self.file("c.json", megatronapp(job())), self.file("d.json", megatronapp(job(factor=1.2))), says=["rank 0"])

    def test_two_dumps_of_a_rank_are_refused(self):
        self.file("job/_dump_0", flight_recorder(2, 0, 3))
        self.file("job/_dump_1", flight_recorder(2, 1, 3))
        self.file("job/old_dump_1", flight_recorder(2, 1, 2))
        self.refused("report", "job", says=["_dump_1", "old_dump_1", "rank 1", "one dump"])

    def test_runs_of_different_days_are_doubted(self):
        spans = job()
        # Minutes may be two clocks or two runs: a note.
        paths = [self.file(f"near/rank{rank}.json", kineto(spans, rank, offset=rank * 60 * 10**9)) for rank in range(2)]
        self.assertIn("rank1.json and near/rank0.json hold the same steps, but 59", " ".join(self.json("report", "near")["notes"]))
        # One clock leaves nothing to explain.
        self.job_files("run")
        self.file("run/rank-1.mega.jsonl", own(spans, 1, offset=3600 * 10**9))
        got = self.json("report", "run")
        self.assertFalse(got["aligned"])
        self.assertIn("the ranks read one clock", got["refusal"])
        self.assertEqual(got["collectives"], [])
        day = 86400 * 10**9
        self.text("report", self.file("rank0.json", kineto(spans, 0)), self.file("rank1.json", kineto(spans, 1, offset=day)),
                  warns=["different runs"])

    def test_files_of_which_nothing_says_that_they_are_one_job_are_not_compared(self):
        alone = [[s for s in spans if s[1] != "communication"] for spans in job()]
        files = [self.file(f"{name}.json", kineto(alone, rank, says_rank=False)) for rank, name in enumerate("wxyz")]
        got = self.json("report", *files)
        self.assertEqual((got["verdicts"], got["what_if"]), ([], None))
        self.assertIn("nothing says that the 4 files are of one job", " ".join(got["notes"]))
        self.assertTrue(self.text("report", *files).startswith("Nothing says that the files are of one job"))
        self.refused("what-if", *files, says=["4 files", "of one job"])
        # Numbers in their names, from the user, or an operation of all, say it.
        named = [self.file(f"rank{rank}.json", kineto(alone, rank, says_rank=False)) for rank in range(4)]
        shared = [self.file(f"{name}.json", kineto(job(), rank, says_rank=False)) for rank, name in enumerate("abcd")]
        for paths in (named, [*files, "--ranks", "0,1,2,3"], shared):
            got = self.json("report", *paths)
            self.assertEqual([(v["class"], v["ranks"]) for v in got["verdicts"]], [("slow_gpu", [2])], paths)
            self.assertGreater(got["what_if"]["S"], 1.2)

    def test_windows_of_one_rank_are_one_recording(self):
        """A profiler writes a file for each window of steps: the ranks and findings are those of one file each."""
        spans = job()
        for writer, name in ((own, "{}.jsonl"), (kineto, "{}.json")):
            folder = writer.__name__
            for window, (low, high) in enumerate(((0, 3), (3, 8))):
                part = [[s for s in of if low <= s[2] < high] for of in spans]
                self.job_files(folder, part, write=writer, name=f"rank{{}}.window{window}." + name.split(".")[-1])
            got = self.json("report", folder)
            self.assertEqual((got["ranks"], len(got["collectives"])), (4, 8))
            self.expect_culprit(got)
            self.assertEqual(len([n for n in got["notes"] if "part of the recording" in n]), 4)
            whole = self.job_files(folder + "-whole", spans, write=writer, name=name)
            one = self.json("report", *whole)
            for key in ("verdicts", "wait_caused_us", "wait_suffered_us", "step_ms", "collectives"):
                self.assertEqual(got[key], one[key], key)
            self.every_command(folder)
        # Windows that share a step are two runs.
        part = [[s for s in of if 2 <= s[2]] for of in job(factor=1.4)]
        self.job_files("own", part, name="rank{}.window1.jsonl")
        self.all_refuse("own", says=["rank 0", "step 2"])

    def test_ranks_that_are_missing_are_noted(self):
        paths = self.job_files()
        got = self.json("report", *paths[:3])
        self.assertIn("the job has 4 ranks, of which there are files of 3", got["notes"])

    # --- input that is not whole ---
    def test_cut_files_are_said_by_every_command(self):
        spans = job()
        paths = self.job_files(spans=spans)
        text = paths[1].read_bytes()
        paths[1].write_bytes(text[:len(text) * 3 // 4])  # within a line
        self.every_command("job", warns=["rank-1.mega.jsonl is cut off"])
        self.text("diff", "job", "job", warns=["is cut off"] * 2)
        self.assertEqual(len(self.json("what-if", "job", warns=["cut off"])["warnings"]), 1)
        self.assertEqual(len(self.json("align", "job", warns=["cut off"])["warnings"]), 1)
        self.assertEqual(len(self.json("diff", "job", "job", warns=["cut off"] * 2)["after"]["warnings"]), 1)
        got = self.json("report", "job", warns=["cut off"])
        self.assertEqual((len(got["warnings"]), got["defects"]["truncated_files"]), (1, 1))
        self.assertIn("  1 file is cut off.", self.text("report", "job", "--html", "page.html", warns=["cut off"]).splitlines())
        self.assertIn("rank-1.mega.jsonl is cut off", (self.folder / "page.html").read_text())

    def test_cuts_of_each_dialect(self):
        spans = job()
        for name, content in (("k.json", kineto(spans, 0)), ("s.json", straggler(spans)), ("m.json", megatronapp(spans)),
                              ("i.log", inspector(spans, 0)), ("o.jsonl", own(spans, 0))):
            with self.subTest(name=name):
                self.json("align", self.file(name, content))
                cut = content[:len(content) * 2 // 3].rstrip("\n")
                if name == "i.log":
                    cut = cut[:-5]
                self.json("align", self.file("cut-" + name, cut), warns=[f"cut-{name} is cut off"])
                packed = gzip.compress(content.encode())
                self.json("align", self.file(name + ".gz", packed[:len(packed) * 2 // 3]), warns=["the gzip stream ends in the middle"])
                spoilt = bytearray(packed)
                spoilt[len(packed) * 2 // 3] ^= 0xFF
                self.json("align", self.file("spoilt-" + name + ".gz", bytes(spoilt)), warns=["the gzip stream is damaged"])

    def test_a_timeline_cut_before_its_names_accuses_no_gpu(self):
        text = straggler(job(ranks=8, slow=7), stages=4)
        whole = self.json("report", self.file("whole.json", text))
        self.assertEqual([r["pipeline"] for r in whole["rank_files"]], [0, 0, 1, 1, 2, 2, 3, 3])
        path = self.file("cut.json", text[:text.index('"thread_name"') - 20])
        got = self.json("report", path, warns=["cut off"])
        self.assertEqual([(v["class"], v["ranks"], v["confidence"]) for v in got["verdicts"]], [("ambiguous", [7], .3)])
        self.assertIsNone(got["what_if"])
        self.assertIn("does not say which stages 8 of its 8 ranks are of", " ".join(got["notes"]))
        said = self.text("report", path, warns=["cut off"])
        self.assertTrue(said.startswith("Rank 7 differs, and the trace cannot say why"), said)
        done = self.run_scan("what-if", path)
        self.assertEqual((done.returncode, done.stdout), (2, ""))
        self.assertIn("which stages 8 of 8 ranks are of", done.stderr)

    def test_clocks_that_cannot_be_aligned(self):
        """Files whose operations do not fit together: nothing that needs common time is said."""
        spans = job()
        for rank, of in enumerate(spans):
            for i, (name, kind, step, micro_batch, begin, end) in enumerate(of):
                apart = (step * step * (rank + 1) * 7919) % 90 * MS + step * 200 * MS
                of[i] = (name, kind, step, micro_batch, begin + apart, end + apart)
        paths = self.job_files(spans=spans, write=kineto, name="rank{}.json")
        got = self.json("report", *paths)
        self.assertEqual((got["aligned"], got["what_if"], got["collectives"]), (False, None, []))
        for key in ("wait_caused_us", "wait_suffered_us", "delay_cost_us"):
            self.assertIsNone(got[key], key)
        self.assertEqual((got["verdicts"][0]["class"], got["verdicts"][0]["ranks"]), ("slow_gpu", [2]))
        self.assertEqual({(v["confidence"], tuple(v["path"])) for v in got["verdicts"]}, {(.5, ())})
        said = self.text("report", *paths)
        self.assertIn("Who waited for whom is not known.", said)
        for word in ("Waiting in matched", "S = ", "critical path"):
            self.assertNotIn(word, said)
        self.refused("what-if", *paths, says=["who waited for whom is not known", "scatter"])

    def test_one_rank_has_no_peers(self):
        spans = job(ranks=1, slow=0, factor=1)
        for i, (name, kind, step, micro_batch, begin, end) in enumerate(spans[0]):
            first = i - i % 6
            spans[0][i] = (name, kind, step, micro_batch, begin + (first if kind == "iteration" else i) * 5 * MS, end + i * 5 * MS)
        given = json.loads(kineto(spans, 0))
        kernels = {e["args"]["correlation"]: e["ts"] for e in given["traceEvents"] if e["cat"] == "kernel"}
        for event in given["traceEvents"]:
            if event["cat"] == "cuda_runtime":  # each launch comes when the device has been ready for long
                event["ts"] = kernels[event["args"]["correlation"]] - 2
        said = self.text("report", self.file("rank0.json", json.dumps(given)))
        self.assertRegex(said, r"^Rank 0 launches its work late, 1\.\d\d times its steps without that \(host_delay, confidence 0\.50\)")
        self.assertIn("there is no other rank to say whether that is usual", said)
        self.assertNotIn("peers", said)

    def test_a_profile_without_its_devices_part(self):
        spans = job()
        for lost in (1, 2):
            for rank in range(4):
                text = device_last(kineto(spans, rank))
                self.file(f"lost{lost}/rank{rank}.json", text[:text.index('"kernel"') - 80] if rank == lost else text)
            got = self.json("report", f"lost{lost}", warns=["cut off"])
            self.assertEqual((got["aligned"], got["unjudged_ranks"]), (True, [lost]))
            culprits = [(v["class"], v["ranks"]) for v in got["verdicts"]]
            self.assertEqual(culprits, [] if lost == 2 else [("slow_gpu", [2])])
        said = self.text("report", "lost2", warns=["cut off"])
        self.assertIn("rank 2 did not, and may be the one", said)

    def test_what_is_passed_over_is_said(self):
        self.job_files("job")
        self.file("job/README.md", "not a trace\n")
        self.every_command("job", warns=["README.md in job is no trace and was passed over"])
        self.file("job/empty.json", "")
        self.file("job/et.json", '{"schema": "1.0.2", "nodes": []}')
        self.file("job/node1/rank-4.mega.jsonl", own(job(ranks=5), 4))
        self.file("job/node2/rank-5.mega.jsonl", "")
        self.file("job/.hidden/rank-6.mega.jsonl", "")
        os.mkfifo(self.folder / "job/pipe")
        (self.folder / "job/dangling").symlink_to("nowhere")
        got = self.json("report", "job", warns=["README.md and empty.json in job are no traces", "et.json is an execution trace",
                                                "the folders node1 and node2 in job were not searched",
                                                "pipe and dangling in job are no files"])
        self.expect_culprit(got)
        self.assertEqual(len(got["warnings"]), 4)
        self.file("nested/node0/rank-0.mega.jsonl", "")
        self.all_refuse("nested", says=["nested holds no file", "node0"])
        self.file("nested/README", "words")
        self.all_refuse("nested", says=["README is of no known kind", "node0"])
        os.mkdir(self.folder / "none")
        self.all_refuse("none", says=["none holds no file"])

    # --- results that are nothing ---
    def test_traces_without_events(self):
        empty = self.file("empty.mega.jsonl", own([[]], 0))
        self.assertIn("1 rank, 0 events", self.text("report", empty))
        self.assertIn("hold no events", self.text("report", empty))
        self.refused("convert", empty, "-o", "never", says=["no events"])
        self.refused("what-if", empty, says=["no training steps"])
        self.refused("diff", empty, empty, says=["empty.mega.jsonl holds neither steps nor device work"])
        self.json("align", empty)
        for name in ("0.json", "rank0.json.gz", "zero"):
            self.all_refuse(self.file(name, ""), says=[f"{name} is empty"])
        self.all_refuse(self.file("words.txt", "hello\n"), says=["words.txt is of no known kind", "Kineto"])
        for name, content in (("rank0.et", b"\x0a\x07\x0a\x050.0.4"), ("chakra.json", '[{"id": "1", "type": "COMP_NODE"}]')):
            self.all_refuse(self.file(name, content), says=[f"{name} is an execution trace (PyTorch's or Chakra's)", "give the profiler's traces"])
        self.all_refuse(self.folder / "absent", says=["absent", "No such file"])

    def test_differences(self):
        self.job_files("monday", job(factor=1))
        self.job_files("tuesday", job(factor=1.5))
        self.assertIn("No difference", self.text("diff", "monday", "monday"))
        self.assertEqual(self.json("diff", "monday", "monday")["equal"], True)
        got = self.json("diff", "monday", "tuesday")
        self.assertEqual(got["equal"], False)
        rows = {row["name"]: row for row in got["changes"]}
        # One of four ranks works half as long again, and the others wait for it.
        self.assertAlmostEqual(rows["backward"]["after_ms"] - rows["backward"]["before_ms"], 2 * 20 * .5 / 4, delta=.01)
        self.assertEqual(rows["backward"]["before_calls"], 2)
        self.assertAlmostEqual(got["after"]["step_ms"] - got["before"]["step_ms"], 30, delta=.5)
        self.assertEqual(got["after"]["step_ms"], self.json("report", "tuesday")["step_ms"])
        self.assertEqual(got["ranks"][0]["rank"], 2)
        self.assertAlmostEqual(got["ranks"][0]["after_compute_ms"] - got["ranks"][0]["before_compute_ms"], 30, delta=.01)
        self.assertEqual([r["after_compute_ms"] - r["before_compute_ms"] for r in got["ranks"][1:]], [0, 0, 0])
        said = self.text("diff", "monday", "tuesday")
        self.assertIn("A step took", said)
        self.assertRegex(said, r"Computing in a step: rank 2 60\.\d ms -> 90\.\d ms, ")

    def test_what_a_step_is(self):
        """Each length says what it is of, and nothing is shared out that is none."""
        self.job_files("sick")
        said = self.text("report", "sick")
        self.assertRegex(said, r"steps of 9\d\.\d ms \(median, from a rank's first operation to its last\)")
        self.assertRegex(said, r"A mean step of the job takes 9\d\.\d ms, without gaps between operations 9\d\.\d ms, "
                               r"and without stragglers too 7\d\.\d ms: S = 1\.\d{4}")
        self.assertIn("M_W", said)
        self.assertNotIn("M_S", said)  # one stage
        self.assertIsNone(self.json("what-if", "sick")["M_S"])
        self.job_files("well", job(factor=1))
        well = self.text("report", "well")
        self.assertTrue(well.startswith("No rank, link, stage or host stands out."), well)
        self.assertNotIn("M_", well)

    def test_one_of_a_thing_is_singular(self):
        self.file("one.json", kineto([[("forward", "forward", 0, 0, 0, 1000)]], 0))
        for command in (("report",), ("convert", "-o", "one.pftrace")):
            said = self.text(command[0], "one.json", *command[1:])
            self.assertNotRegex(said, r"\b1 (ranks|files|events|steps|records)\b")

    # --- outputs ---
    def test_outputs_are_whole_or_absent(self):
        self.job_files()
        for command, option in (("report", "--html"), ("convert", "-o")):
            said = self.refused(command, "job", option, "no/such/folder/out", says=["no/such/folder/out could not be created"])
            self.assertNotIn(".tmp", said)
            self.refused(command, "job", option, "/dev/full", says=["/dev/full"])
            self.refused(command, "job", option, "", says=[option[1:]])
            self.refused(command, "job/rank-0.mega.jsonl", option, "job", says=["job is there and is not a regular file"])
        self.refused("convert", "job/rank-0.mega.jsonl", "-o", "job/rank-0.mega.jsonl", says=["is the input"])
        self.refused("convert", "job", "--to", "pdf", "-o", "out", says=["pdf"])
        old = self.file("page.html", "old")
        self.text("report", "job", "--html", "page.html")
        self.assertIn("<html", old.read_text()[:200])
        self.assertEqual(sorted(p.name for p in self.folder.iterdir()), ["job", "page.html"])

    def test_outputs_replace_no_input(self):
        paths = self.job_files()
        before = self.folder.joinpath(paths[1]).read_bytes()
        for inputs in (paths, ["job"], [str(self.folder)]):
            for command, option in (("report", "--html"), ("convert", "-o")):
                self.refused(command, *inputs, option, paths[1], says=["rank-1.mega.jsonl is the input", "name another file"])
        self.assertEqual(self.folder.joinpath(paths[1]).read_bytes(), before)

    def test_a_full_device_and_a_closed_pipe(self):
        self.job_files()
        for arguments in (["report", "job"], ["report", "job", "--json"], ["align", "job"], ["what-if", "job"],
                          ["diff", "job", "job"], ["convert", "job", "-o", "out"]):
            with self.subTest(arguments=arguments), open("/dev/full", "w") as full:
                done = self.run_scan(*arguments, stdout=full, stderr=subprocess.PIPE, text=True)
                self.assertEqual(done.returncode, 2)
                self.assertIn("takes no more", done.stderr)
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "w") as closed:
            done = self.run_scan("report", "job", "--json", stdout=closed, stderr=subprocess.PIPE, text=True)
        self.assertIn(done.returncode, (2, -13))

    def test_names_that_are_no_text(self):
        folder = os.fsencode(self.folder) + b"/job\xff\xfe"
        os.mkdir(folder)
        spans = job()
        for rank in range(4):
            with open(folder + b"/rank \xe9-%d \n.jsonl" % rank, "w") as out:
                out.write(own(spans, rank))
        self.expect_culprit(self.json("report", folder))
        self.text("convert", folder, "-o", os.fsencode(self.folder) + b"/out\xff")
        self.assertTrue(os.path.exists(os.fsencode(self.folder) + b"/out\xff"))

    def test_folders_that_cannot_be_read(self):
        self.job_files()
        closed = self.folder / "job"
        closed.chmod(0)
        self.addCleanup(closed.chmod, stat.S_IRWXU)
        other = {}
        if os.geteuid() == 0:  # whom no mode keeps out
            other = {"user": 65534, "group": 65534, "extra_groups": []}
            self.folder.chmod(0o755)
        try:
            subprocess.run([str(BIN / "mega-scan"), "--help"], capture_output=True, timeout=60, **other)
        except PermissionError:
            self.skipTest("no other user can run the program")
        self.refused("report", self.folder / "job", says=["job cannot be read: Permission denied"], **other)

    # --- usage ---
    def test_wrong_usage(self):
        self.refused(says=["report", "align", "what-if", "convert", "diff"])
        self.refused("explain", says=["explain"])
        self.assertRegex(self.text("--version"), r"^mega-scan \d+\.\d+\.\d+\n$")
        for command in COMMANDS:
            self.refused(command)
            self.refused(command, "--no-such-option", says=["--help"])
            done = self.run_scan(command, "--help")
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertIn("Example: mega-scan " + command, done.stdout)
        self.refused("diff", "one", says=["after"])
        self.refused("convert", "one", says=["--output"])


@unittest.skipUnless(os.environ.get("MEGA_SHARED") and (pathlib.Path(os.environ["MEGA_SHARED"]) / "traces").is_dir(),
                     "MEGA_SHARED names no directory with traces/")
class RealTraces(Program):
    def real(self, name):
        path = pathlib.Path(os.environ["MEGA_SHARED"]).resolve() / "traces" / name
        if not path.exists():
            self.skipTest(f"{name} is not there")
        return path

    def test_dlrm(self):
        got = self.json("report", self.real("param/dlrm_kineto.tar.gz"))
        self.assertEqual((got["ranks"], len(got["collectives"]), got["aligned"]), (8, 8, True))
        self.assertEqual([c["last_arriver"] for c in got["collectives"]], [7, 7, 7, 7, 7, 5, 5, 4])
        self.assertAlmostEqual(got["wait_caused_us"]["7"], 35552, delta=30)

    def test_straggler_analysis(self):
        got = self.json("what-if", self.real("straggler/timeline-ST.json.gz"))
        self.assertAlmostEqual(got["S"], 1.1787, delta=.012)
        self.assertAlmostEqual(got["M_S"], 1.2194, delta=.02)
        self.refused("report", self.real("straggler"), says=["timeline-ST.json.gz", "rank 0", "different ranks"])

    def test_megatronapp(self):
        folder = self.real("megatronapp")
        got = self.json("report", folder / "data-1-pipeline-4-tensor-1-pp-aggregated.json.gz")
        self.assertEqual([(v["class"], v["stages"]) for v in got["verdicts"]], [("stage_imbalance", [3])])
        self.assertEqual(self.json("report", folder / "merged_trace.json")["defects"]["overlapping_runs"], 1)
        self.refused("report", folder, says=["rank 0"])

    def test_flight_recorder(self):
        for folder, suspects in (("gpu_error_2nd", [9, 14]), ("lock_gil_1st", [9, 14])):
            got = self.json("report", self.real(f"nvrx_fr/{folder}"), warns=["fault_injection.log"])
            self.assertEqual((got["verdicts"][0]["class"], got["verdicts"][0]["ranks"]), ("hang", suspects))
        self.refused("report", self.real("nvrx_fr/gpu_error_2nd"), self.real("nvrx_fr/lock_gil_1st"), says=["rank 0", "one dump"])

    def test_ranks_whose_operations_differ_are_not_aligned(self):
        got = self.json("align", self.real("hta/trace_filter"))
        self.assertFalse(got["aligned"])
        self.assertTrue(got["refusal"])

    def test_single_files(self):
        for name in ("hta/cpu_only", "hta/rank_non_gpu", "hta/rank_unavailable", "hta/nccl_parser_config", "hta/ns_resolution_trace"):
            with self.subTest(name=name):
                self.assertEqual(self.json("align", self.real(name))["warnings"], [])


if __name__ == "__main__":
    os.environ["LC_ALL"] = "C"
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]])

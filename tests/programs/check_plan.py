#!/usr/bin/env python3
"""mega-plan as its users run it: known figures, files, refusals, exit codes.

usage: check_plan.py BIN_FOLDER [TEST...]
"""
import json
import os
import pathlib
import re
import resource
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import unittest
import xml.etree.ElementTree

BIN = pathlib.Path(sys.argv[1]).resolve()

POLICIES = pathlib.Path(__file__).resolve().parents[2] / "docs" / "policies"

# p, m, (F, I, W, hop) and the bubble over the longest span of a rank of 1F1B, ZB-H1 and ZB-H2, to four digits,
# as public schedulers and an independent simulator give them.
BUBBLES = [
    (8, 24, (18.522, 18.086, 9.337, .601), .2431, .1585, .1083),
    (8, 32, (18.513, 18.086, 9.331, .626), .1985, .1242, .0837),
    (8, 64, (18.546, 18.097, 9.321, .762), .1240, .0674, .0444),
    (8, 24, (29.718, 29.444, 19.927, .527), .2347, .1323, .0698),
    (8, 32, (29.802, 29.428, 19.530, .577), .1898, .1045, .0559),
    (8, 64, (29.935, 29.621, 19.388, .535), .1091, .0554, .0294),
    (16, 48, (11.347, 11.248, 8.132, .377), .2552, .1397, .0672),
    (32, 96, (10.419, 10.207, 7.715, .408), .2646, .1421, .0641),
]
ROUNDING = 5e-5


class Plan(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)

    def run_plan(self, *arguments, timeout=300, limit=None):
        """limit: of the address space in bytes."""
        bound = limit and (lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))
        return subprocess.run([str(BIN / "mega-plan"), *map(str, arguments)], capture_output=True, text=True,
                              timeout=timeout, cwd=self.folder, stdin=subprocess.DEVNULL, preexec_fn=bound)

    def json(self, *arguments, code=0):
        done = self.run_plan(*arguments, "--json")
        self.assertEqual(done.returncode, code, done.stderr + done.stdout)
        self.assertEqual(done.stderr, "")
        return json.loads(done.stdout)

    def schedule(self, name, p, m, *more, v=None):
        chunks = [] if v is None else ["--vpp", v]
        return self.json("schedule", "--name", name, "--pp", p, "--micro-batches", m, *chunks, *more)

    def refused(self, *arguments, says=()):
        """Exit code 2, one sentence on standard error, nothing on standard output, nothing written."""
        before = sorted(self.folder.rglob("*"))
        done = self.run_plan(*arguments)
        self.assertEqual(done.returncode, 2, done.stdout + done.stderr)
        self.assertEqual(done.stdout, "")
        self.assertEqual(len(done.stderr.strip().splitlines()), 1, done.stderr)
        for word in says:
            self.assertIn(str(word), done.stderr)
        self.assertEqual(before, sorted(self.folder.rglob("*")))

    def file(self, text, name="foreign.csv"):
        path = self.folder / name
        path.write_text(text)
        return path

    # --- schedule ---
    def test_unit_makespans(self):
        cases = [("gpipe", 4, 8, 1, 33, 33), ("1f1b", 4, 8, 1, 33, 33), ("zb-h1", 4, 8, 1, 27, 27), ("zb-h2", 4, 8, 1, 27, 24),
                 ("gpipe", 8, 16, 1, 69, 69), ("1f1b", 8, 24, 1, 93, 93), ("zb-h1", 8, 24, 1, 79, 79),
                 ("zb-h2", 8, 24, 1, 79, 72), ("looped-bfs", 4, 8, 2, 57, 57), ("dfc", 4, 8, 2, 57, 57),
                 ("bfc", 4, 8, 2, 57, 57), ("dfc", 4, 8, 4, 105, 105), ("dfc", 8, 16, 2, 117, 117),
                 ("zb-v", 4, 8, 2, 51, 48), ("zb-v", 8, 16, 2, 103, 96), ("1f1b", 1, 1, 1, 3, 3)]
        for name, p, m, v, makespan, span in cases:
            with self.subTest(name=name, p=p, m=m, v=v):
                got = self.schedule(name, p, m, v=v)
                busy = 3 * m * v
                self.assertEqual((got["makespan"], got["busy"]), (makespan, busy))
                self.assertAlmostEqual(got["bubble_wall"], 1 - busy / makespan, places=12)
                self.assertAlmostEqual(got["bubble_span"], 1 - busy / span, places=12)
                self.assertTrue(got["deadlock_free"])

    def test_peaks(self):
        self.assertEqual(self.schedule("gpipe", 4, 8)["peak_activations"], [8, 8, 8, 8])
        self.assertEqual(self.schedule("1f1b", 4, 8)["peak_activations"], [4, 3, 2, 1])
        self.assertEqual(self.schedule("dfc", 4, 8)["peak_activations"], [11, 9, 7, 5])
        self.assertEqual(self.schedule("interleaved", 4, 8, "--group-size", 8)["peak_activations"], [15, 13, 11, 9])
        self.assertEqual(self.schedule("dfc", 4, 8, v=4)["peak_activations"], [19, 17, 15, 13])
        self.assertEqual(self.schedule("zb-h1", 4, 8)["peak_activations"], [4, 4, 4, 4])
        self.assertEqual(max(self.schedule("zb-h2", 4, 8)["peak_activations"]), 7)
        self.assertEqual(max(self.schedule("zb-v", 4, 8)["peak_activations"]), 8)
        self.assertLessEqual(max(self.schedule("v", 4, 8, "--memory-cap", 5)["peak_activations"]), 5)

    def test_hops_on_the_critical_path(self):
        for v, depth_first, breadth_first in ((2, 64, 60), (4, 120, 108)):
            self.assertEqual(self.schedule("dfc", 4, 8, "--comm", .5, v=v)["makespan"], depth_first)
            self.assertEqual(self.schedule("looped-bfs", 4, 8, "--comm", .5, v=v)["makespan"], breadth_first)

    def test_zero_bubble_table(self):
        for p, m, (f, i, w, hop), plain, h1, h2 in BUBBLES:
            with self.subTest(p=p, m=m):
                more = ["--times", f"{f},{i},{w}", "--comm", hop]
                self.assertAlmostEqual(self.schedule("1f1b", p, m, *more)["bubble_span"], plain, delta=ROUNDING)
                self.assertLessEqual(self.schedule("zb-h1", p, m, *more)["bubble_span"], h1 + ROUNDING)
                self.assertLessEqual(self.schedule("zb-h2", p, m, *more)["bubble_span"], h2 + ROUNDING)

    def test_automatic_search_keeps_its_cap_and_beats_h1(self):
        p, m, (f, i, w, hop), _, h1, _ = BUBBLES[0]
        got = self.schedule("auto", p, m, "--times", f"{f},{i},{w}", "--comm", hop, "--memory-cap", p, "--goal", "span",
                            "--tries", 20)
        self.assertLessEqual(got["bubble_span"], h1 + ROUNDING)
        self.assertLessEqual(max(got["peak_activations"]), p)
        self.assertTrue(got["deadlock_free"])
        self.assertIn("found_as", got)

    def test_automatic_search_takes_the_better_placement(self):
        for cap in ([], ["--memory-cap", 6]):
            steps = {place: self.schedule("auto", 4, 8, "--placement", place, "--tries", 50, *cap, v=2)["makespan"]
                     for place in ("loop", "v", "any")}
            self.assertEqual(steps["any"], min(steps["loop"], steps["v"]))
            got = self.schedule("auto", 4, 8, "--tries", 50, *cap, v=2)
            self.assertEqual(got["makespan"], steps["any"])
            self.assertRegex(got["found_as"], ", on the (V|loop)$")
            if steps["v"] != steps["loop"]:
                self.assertEqual(got["found_as"].endswith(", on the V"), steps["v"] < steps["loop"])
        self.refused("schedule", "--name", "auto", "--placement", "ring", "--pp", 4, "--micro-batches", 8,
                     says=["ring", "loop, v and any"])

    def test_split_of_1f1b_by_rank_is_h1(self):
        split, h1 = self.schedule("split-1f1b", 4, 9), self.schedule("zb-h1", 4, 9)
        self.assertEqual([split[k] for k in ("makespan", "peak_activations")], [h1[k] for k in ("makespan", "peak_activations")])
        self.assertEqual(max(self.schedule("split-1f1b", 4, 9, "--weights", "at-end")["peak_activations"]), 9)

    def test_pairs_take_their_own_time(self):
        """The worst rank of DualPipeV idles (p-1)(pair + B - 3W)."""
        for pair, makespan in ((3, 66), (2.5, 59)):
            got = self.schedule("dualpipev", 4, 10, "--pair", pair)
            self.assertEqual(got["makespan"], makespan)

    def test_names_are_listed(self):
        done = self.run_plan("schedule", "--list")
        self.assertEqual(done.returncode, 0)
        names = [line.split()[0] for line in done.stdout.splitlines()]
        for name in ("gpipe", "looped-bfs", "1f1b", "interleaved", "dfc", "bfc", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min",
                     "v", "dualpipev", "auto"):
            self.assertIn(name, names)
            if name in ("interleaved", "v"):
                continue
            self.assertTrue(self.schedule(name, 3, 7)["deadlock_free"])

        self.assertNotIn("adaptive", names)
        self.refused("schedule", "--name", "adaptive", "--pp", 2, "--micro-batches", 4, says=["as a run measures", "dfc and bfc"])

    def test_the_labels_of_a_comparison_are_names_with_their_options(self):
        common = ["--pp", 4, "--micro-batches", 12, "--times", "2,2,2", "--memory-cap", 3]
        got = self.json("compare", *common, "--vpp", "1,2")
        labels = [row["schedule"] for row in got["schedules"] + got["left_out"]]
        for label in ("interleaved --group-size 8", "v --memory-cap 6", "auto --placement v", "auto --placement loop", "split-dfc"):
            self.assertIn(label, labels)
        for row in got["schedules"]:
            if not row["schedule"].startswith("auto"):
                made = self.schedule(*row["schedule"].split()[:1], 4, 12, *row["schedule"].split()[1:], "--times",
                                     ",".join([str(2 / row["vpp"])] * 3), v=row["vpp"])
                self.assertAlmostEqual(made["makespan"], row["step"], places=9)
        text = self.run_plan("compare", *common, "--vpp", 2).stdout
        self.assertRegex(text.splitlines()[-1], r"^in the trainers: --pp 4 --vpp 2 --schedule [a-z0-9-]+")

    def test_text_says_what_json_says(self):
        done = self.run_plan("schedule", "--name", "zb-h1", "--pp", 8, "--micro-batches", 24)
        self.assertEqual(done.returncode, 0)
        self.assertRegex(done.stdout, r"makespan +79\b")
        self.assertIn("8.86 %", done.stdout)
        self.assertIn("8 (8 times)", done.stdout)

    # --- what the documentation says of the schedules ---
    def test_pages_of_the_policies_state_what_is_printed(self):
        def states(page, text):
            self.assertIn(text, " ".join((POLICIES / page).read_text().split()))

        def step(name, *more, m=8, v=None):
            return f"{self.schedule(name, 4, m, *more, v=v)['makespan']:g}"
        states("gpipe.md", f"| p 4, m 8, v 1 | makespan {step('gpipe')} |")
        peaks = " ".join(map(str, self.schedule("1f1b", 4, 8)["peak_activations"]))
        states("one-forward-one-backward.md", f"| p 4, m 8 | makespan {step('1f1b')}, peaks {peaks} |")
        h2 = self.schedule("zb-h2", 4, 8)
        states("zero-bubble.md", f"p 4, m 8: 1F1B {step('1f1b')}, H1 {step('zb-h1')}, H2 {step('zb-h2')} with a span of "
                                 f"{h2['busy'] / (1 - h2['bubble_span']):g}")
        hops = [step(name, "--comm", .5, v=4) for name in ("dfc", "looped-bfs")]
        states("interleaved.md", f"At p 4, m 8, v 4, F = I = W = 1 and 0.5 a hop the steps take {hops[0]} (DFC) and {hops[1]} "
                                 f"(looped breadth-first), against {self.schedule('dfc', 4, 8, v=4)['busy']:g} of work")
        pairs = (3, 2.5, 2.2)
        states("dual-pipe-v.md", f"| p 4, m 10, pair {' / '.join(map(str, pairs))} | makespan "
                                 f"{' / '.join(step('dualpipev', '--pair', pair, m=10) for pair in pairs)} |")

    def test_formulas_of_the_policies(self):
        for p, m, v in ((4, 8, 2), (3, 7, 3), (5, 20, 4), (4, 3, 2)):
            groups = {"dfc": max(p, 1), "bfc": max(p, m)}
            for name, group in groups.items():
                got = self.schedule(name, p, m, v=v)
                peaks = [min(m * v, 2 * (p - 1 - r) + (v - 1) * group + 1) for r in range(p)]
                self.assertTrue(all(have <= most for have, most in zip(got["peak_activations"], peaks)))
                if m % group == 0 or m % group >= p:  # no turns are skipped
                    self.assertEqual(got["peak_activations"], peaks)
                    self.assertAlmostEqual(got["bubble_wall"], (p - 1) / (m * v + p - 1), places=12)
            self.assertEqual(self.schedule("looped-bfs", p, m, v=v)["peak_activations"], [m * v] * p)
        for p, m, (f, i, w) in ((4, 8, (1, 1, 1)), (5, 12, (2, 2, 1)), (3, 9, (1.5, 2, 1))):
            more = ["--times", f"{f},{i},{w}"]
            got = self.schedule("1f1b", p, m, *more)
            self.assertEqual(got["peak_activations"], [min(m, p - r) for r in range(p)])
            self.assertAlmostEqual(got["bubble_wall"], (p - 1) / (m + p - 1), places=12)
            h1, h2 = self.schedule("zb-h1", p, m, *more), self.schedule("zb-h2", p, m, *more)
            self.assertAlmostEqual(h1["makespan"] - h1["busy"], (p - 1) * (f + i - w), places=9)
            self.assertAlmostEqual(h2["busy"] / (1 - h2["bubble_span"]) - h2["busy"], (p - 1) * (f + i - 2 * w), places=9)
            self.assertEqual((max(h1["peak_activations"]), max(h2["peak_activations"])), (min(m, p), min(m, 2 * p - 1)))
        for p in (4, 8):
            for name, cap in (("zb-v", 2 * p), ("v-half", 2 * ((p + 2) // 2)), ("v-min", 2 * ((p + 4) // 3))):
                got = self.schedule(name, p, 2 * p)
                self.assertLessEqual(max(got["peak_activations"]), cap)
                idle = got["busy"] / (1 - got["bubble_span"]) - got["busy"]
                self.assertAlmostEqual(idle, 0 if name == "zb-v" else 6 * p - 1 - 3 * cap, places=9)
        for pair in (2.25, 3):
            got = self.schedule("dualpipev", 5, 11, "--pair", pair)
            self.assertLessEqual(max(got["peak_activations"]), 2 * 5 + 1)

    def test_pictures_of_the_policies_are_drawn_by_the_program(self):
        pictures = sorted((POLICIES / "pictures").glob("*.svg"))
        self.assertGreaterEqual(len(pictures), 10)
        for picture in pictures:
            with self.subTest(picture=picture.name):
                more = ["--pair", 2.5] if picture.stem == "dualpipev" else []
                drawn = self.folder / picture.name
                self.schedule(picture.stem, 4, 10 if more else 8, *more, "--svg", drawn)
                self.assertEqual(drawn.read_bytes(), picture.read_bytes())

    # --- files ---
    def test_csv_comes_back_through_check(self):
        cases = [("gpipe", 3, 5, []), ("1f1b", 4, 8, []), ("dfc", 4, 10, ["--vpp", 3]), ("bfc", 2, 7, []),
                 ("zb-h1", 4, 8, []), ("zb-h2", 3, 9, []), ("zb-v", 4, 8, []), ("dualpipev", 4, 10, []),
                 ("split-dfc", 3, 6, ["--weights", "2"]), ("1f1b", 1, 2, [])]
        for name, p, m, more in cases:
            for transfers in ([], ["--transfers"]):
                with self.subTest(name=name, transfers=transfers):
                    path = self.folder / "out.csv"
                    made = self.schedule(name, p, m, "--csv", path, "--comm", .25, *transfers, *more)
                    links = ["--links", "blocking"] if transfers else []
                    read = self.json("check", path, "--comm", .25, *links)
                    self.assertTrue(read["valid"])
                    for key in ("ranks", "micro_batches", "chunks", "makespan", "busy", "peak_activations"):
                        self.assertEqual(made[key], read[key], key)

    def test_pictures_and_traces_are_well_formed(self):
        svg, trace = self.folder / "a.svg", self.folder / "a.json"
        self.schedule("zb-v", 3, 6, "--svg", svg, "--perfetto", trace, "--comm", .5)
        root = xml.etree.ElementTree.fromstring(svg.read_text())
        tips = [t.text for t in root.iter("{http://www.w3.org/2000/svg}title")]
        self.assertEqual(sum("micro-batch" in tip and "chunk" in tip and " to " in tip for tip in tips), 3 * 2 * 3 * 6)
        events = json.loads(trace.read_text())["traceEvents"]
        self.assertEqual(sum(e["ph"] == "X" and e["pid"] == 0 for e in events), 3 * 2 * 3 * 6)

    def test_files_replace_and_leave_nothing_behind(self):
        path = self.file("old", "a.svg")
        self.schedule("gpipe", 2, 2, "--svg", path)
        self.assertIn("<svg", path.read_text())
        self.assertEqual([path], sorted(self.folder.iterdir()))

    def test_what_is_no_file_is_not_replaced(self):
        one = ["schedule", "--name", "gpipe", "--pp", 2, "--micro-batches", 2]
        self.refused(*one, "--csv", self.folder, says=[self.folder, "not a regular file"])
        table = "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"
        pipe = self.folder / "pipe"
        os.mkfifo(pipe)
        reader = subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE, text=True)
        self.addCleanup(reader.wait)
        self.addCleanup(reader.kill)
        self.addCleanup(reader.stdout.close)
        done = self.run_plan(*one, "--csv", pipe)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(reader.stdout.read(), table)
        self.assertIn("makespan", done.stdout)
        self.assertTrue(stat.S_ISFIFO(pipe.stat().st_mode))
        self.assertEqual(self.run_plan(*one, "--svg", "/dev/null", "--csv", "a.csv").returncode, 0)
        self.assertTrue(stat.S_ISCHR(os.stat("/dev/null").st_mode))
        (self.folder / "a.csv").unlink()
        # Nothing appears beside a device that is full.
        for option, other in (("--svg", "--csv"), ("--csv", "--svg"), ("--perfetto", "--csv")):
            self.refused(*one, other, "beside", option, "/dev/full", says=["/dev/full", "No space left on device"])
        self.assertTrue(stat.S_ISCHR(os.stat("/dev/full").st_mode))
        target = self.file("old", "target.svg")
        link = self.folder / "link.svg"
        link.symlink_to(target)
        self.assertEqual(self.run_plan(*one, "--svg", link).returncode, 0)
        self.assertTrue(link.is_symlink())
        self.assertIn("<svg", target.read_text())

    def test_standard_output_gets_one_thing(self):
        one = ["schedule", "--name", "gpipe", "--pp", 2, "--micro-batches", 2]
        table = "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"
        done = self.run_plan(*one, "--csv", "/dev/stdout")
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, table, ""))
        read = subprocess.run([str(BIN / "mega-plan"), "check", "/dev/stdin"], input=done.stdout, capture_output=True, text=True,
                              timeout=60)
        self.assertEqual(read.returncode, 0, read.stdout)
        # Behind > it is a file, which is not replaced under the shell's hands.
        log = self.file("before\n", "log.csv")
        with open(log, "a") as out:
            subprocess.run([str(BIN / "mega-plan"), *map(str, one), "--csv", "/dev/stdout"], stdout=out, timeout=60, check=True)
        self.assertEqual(log.read_text(), "before\n" + table)
        self.assertEqual([log], sorted(self.folder.iterdir()))
        drawn = self.run_plan("check", self.file(table), "--svg", "/dev/stdout")
        self.assertEqual(drawn.returncode, 0)
        xml.etree.ElementTree.fromstring(drawn.stdout)
        self.refused(*one, "--json", "--csv", "/dev/stdout", says=["--json", "/dev/stdout"])
        self.refused(*one, "--svg", "/dev/stdout", "--csv", "/dev/stdout", says=["two outputs"])
        with open("/dev/full", "w") as full:
            done = subprocess.run([str(BIN / "mega-plan"), *map(str, one)], stdout=full, stderr=subprocess.PIPE, text=True,
                                  timeout=60)
        self.assertEqual(done.returncode, 2)
        self.assertIn("takes no more", done.stderr)
        self.assertIn("could not be written", self.run_plan("--help").stdout)

    def test_no_file_appears_unless_all_can(self):
        one = ["schedule", "--name", "gpipe", "--pp", 2, "--micro-batches", 2]
        self.refused(*one, "--svg", "a.svg", "--csv", "no/such/folder/a.csv", says=["no/such/folder"])
        self.refused(*one, "--svg", "a", "--csv", "a", says=["two outputs"])

    # --- check ---
    def test_byte_order_marks_and_pipes_are_read(self):
        text = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
        marked = self.file("\ufeff" + text)
        plain = self.json("check", self.file(text, "plain.csv"))
        self.assertTrue(plain["valid"])
        self.assertEqual(self.json("check", marked), plain)
        done = subprocess.run([str(BIN / "mega-plan"), "check", "/dev/stdin", "--json"], input=text, capture_output=True,
                              text=True, timeout=60)
        self.assertEqual((done.returncode, json.loads(done.stdout)), (0, plain))
        pipe = self.folder / "pipe"
        os.mkfifo(pipe)
        writer = subprocess.Popen(["sh", "-c", f"cat '{self.folder}/plain.csv' > '{pipe}'"])
        self.assertEqual(self.json("check", pipe), plain)
        self.assertEqual(writer.wait(60), 0)
        self.refused("check", "/dev/null", says=["empty"])
        self.refused("check", self.folder, says=["not a regular file"])

    def test_faults_stand_where_the_file_has_them(self):
        # The second backward is the fourth cell of rank 1's row, behind an idle one.
        got = self.json("check", self.file("0F0,0F1,0B0,0B1\n1F0,,1F1,1B1,1B0\n"), code=1)
        self.assertEqual((got["fault"]["rank"], got["fault"]["position"]), (1, 4))
        self.assertIn("at position 4 of rank 1", got["fault"]["sentence"])
        # What waits is a receive that the file leaves unsaid, before 0B0, the second, and 1F1, the second.
        got = self.json("check", self.file("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n"), code=1)
        self.assertEqual([(c["rank"], c["position"]) for c in got["fault"]["cycle"]], [(0, 2), (1, 2)])
        # Transfers that stand there have their own cells.
        path = self.file("0F0,0SEND_F0,0F1,0SEND_F1,0F2,0SEND_F2,0RECV_B0,0B0,0RECV_B1,0B1,0RECV_B2,0B2\n"
                         "1RECV_F0,1F0,1I0,1SEND_B0,1W0,1RECV_F1,1F1,1I1,1SEND_B1,1W1,1RECV_F2,1F2,1I2,1SEND_B2,1W2\n")
        got = self.json("check", path, "--links", "blocking", code=1)
        for blocked in got["fault"]["cycle"]:
            row = path.read_text().splitlines()[blocked["rank"]].split(",")
            word = {"send_forward": "SEND_F", "send_backward": "SEND_B", "recv_forward": "RECV_F",
                    "recv_backward": "RECV_B"}[blocked["action"]]
            self.assertIn(f"{word}{blocked['micro_batch']}", row[blocked["position"] - 1])

    def test_deadlock_shows_its_cycle(self):
        path = self.file("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
        got = self.json("check", path, code=1)
        self.assertFalse(got["valid"])
        self.assertEqual(got["fault"]["kind"], "deadlock")
        cycle = got["fault"]["cycle"]
        self.assertEqual([(c["rank"], c["waits_for_rank"]) for c in cycle], [(0, 1), (1, 0)])
        self.assertEqual([(c["action"], c["micro_batch"]) for c in cycle], [("recv_backward", 0), ("recv_forward", 1)])
        self.assertNotIn("makespan", got)
        done = self.run_plan("check", path)
        self.assertEqual(done.returncode, 1)
        self.assertIn("rank 0 at position", done.stdout)
        self.assertIn("waits for rank 1", done.stdout)

    def test_deadlock_of_one_kind_of_link_only(self):
        # Rank 0 sends its second activation, rank 1 its first gradient, and neither receives before it has sent.
        path = self.file("0F0,0SEND_F0,0F1,0SEND_F1,0F2,0SEND_F2,0RECV_B0,0B0,0RECV_B1,0B1,0RECV_B2,0B2\n"
                         "1RECV_F0,1F0,1I0,1SEND_B0,1W0,1RECV_F1,1F1,1I1,1SEND_B1,1W1,1RECV_F2,1F2,1I2,1SEND_B2,1W2\n")
        self.assertTrue(self.json("check", path)["valid"])
        got = self.json("check", path, "--links", "blocking", code=1)
        self.assertEqual(got["fault"]["kind"], "deadlock")
        self.assertFalse(self.json("check", path)["runs_on"]["blocking"])

    def test_faults_have_names(self):
        for text, kind in (("0F0,0F1,0B1,0B0\n", "out of order"), ("0B0,0F0\n", "dependency"), ("0F0,0F1,0B0\n", "missing"),
                           ("0F0,0F0,0B0\n", "duplicate"), ("0F0,0B0,0B0\n", "duplicate"), ("0B0\n", "missing"),
                           ("0F0,0B0\n2F0,2B0\n", "missing"), ("0F0,0B0\n1F0,1B1\n", "missing"),
                           ("0F0,0B0\n0F1,0B1\n", "out of place"), ("0F0,2B0\n1F0,1B0\n", "out of place")):
            with self.subTest(text=text):
                path = self.file(text)
                got = self.json("check", path, code=1)
                self.assertFalse(got["valid"])
                self.assertEqual(got["fault"]["kind"], kind)
                done = self.run_plan("check", path)
                self.assertEqual((done.returncode, done.stderr), (1, ""))
                judged = "not supported" if kind == "out of order" else "invalid"
                self.assertIn(f"{judged}: {got['fault']['sentence']}", done.stdout)
                self.assertEqual(got.get("supported", True), kind != "out of order")

    def test_orders_that_only_others_run_are_not_called_wrong(self):
        # PyTorch runs both: rank 1 sends the second gradient first, and rank 0 waits for it first.
        for text in ("0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n", "0F1,0F0,0B1,0B0\n1F1,1F0,1B1,1B0\n"):
            done = self.run_plan("check", self.file(text))
            self.assertEqual(done.returncode, 1)
            self.assertNotIn("invalid", done.stdout)
            self.assertRegex(done.stdout, r"(?m)^not supported: .* breaks the ascending order of its chunk's micro-batches; here the "
                                          r"micro-batches of each kind and chunk ascend")
        self.assertIn("must ascend", self.run_plan("check", "--help").stdout)

    def test_only_what_stands_in_the_file_is_blamed(self):
        # All of these leave the loss and the transfers unsaid.
        for text, rank, position, cell in (("0B0,0F0\n", 0, 1, "backward of chunk 0, micro-batch 0"),
                                           ("0F0,0B0,0B0\n", 0, 3, "backward of chunk 0, micro-batch 0"),
                                           ("0F0,0F1,0B0,0B1\n1F0,1B1,1F1,1B0\n", 1, 2, "backward of chunk 0, micro-batch 1"),
                                           ("0F0,0F1,0B0,0B1\n1F0,1B0,1B0,1F1,1B1\n", 1, 3, "backward of chunk 0, micro-batch 0"),
                                           ("0F0,0B0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n", 0, 3, "backward of chunk 0, micro-batch 0"),
                                           ("0F0,0I0,0W0,0W0\n1F0,1I0,1W0\n", 0, 4, "backward_weight of chunk 0, micro-batch 0")):
            with self.subTest(text=text):
                fault = self.json("check", self.file(text), code=1)["fault"]
                self.assertEqual((fault["rank"], fault["position"]), (rank, position))
                self.assertTrue(fault["sentence"].startswith(f"{cell} at position {position} of rank {rank} "), fault["sentence"])
                self.assertEqual(fault["action"], cell.split()[0])
        # A loss that the file does say is blamed by its name.
        fault = self.json("check", self.file("0LOSS0,0F0,0B0,0REDUCE_GRAD\n"), code=1)["fault"]
        self.assertTrue(fault["sentence"].startswith("loss of chunk 0"), fault["sentence"])

    def test_unreadable_files(self):
        self.refused("check", self.folder / "absent.csv", says=["absent.csv"])
        self.refused("check", self.file("0F0,hello\n"), says=["hello"])
        self.refused("check", self.file(""))
        self.refused("check", self.file("0F0,0B0\n"), "--links", "wet-string", says=["slots", "rendezvous", "blocking"])

    # --- compare ---
    def test_table_of_measured_times(self):
        got = self.json("compare", "--pp", 4, "--micro-batches", 8, "--vpp", "1,2", "--times", "2,2,2")
        rows = {(r["schedule"], r["vpp"]): r for r in got["schedules"]}
        self.assertEqual(rows["1f1b", 1]["step"], 66)
        self.assertEqual(rows["1f1b", 1]["peak_activations"], 4)
        self.assertEqual(rows["zb-h1", 1]["step"], 54)
        self.assertEqual(rows["dfc", 2]["step"], 57)
        self.assertEqual(rows["dfc", 2]["peak_activations"], 5.5)
        self.assertEqual(rows["zb-v", 2]["step"], 51)
        steps = [r["step"] for r in got["schedules"]]
        self.assertEqual(steps, sorted(steps))
        self.assertEqual((got["fastest"], got["fastest_vpp"]), (got["schedules"][0]["schedule"], got["schedules"][0]["vpp"]))
        self.assertIn(got["best"], got["why"])

    def test_of_equally_fast_schedules_the_one_with_least_memory_is_best(self):
        common = ["compare", "--pp", 4, "--micro-batches", 16, "--model", "llama3-8b", "--flops", 4e14, "--vpp", "1,2"]
        for tolerance in (None, 0, .5, 3, 12, 100):
            more = [] if tolerance is None else ["--tolerance", tolerance]
            within = .005 if tolerance is None else tolerance / 100
            got = self.json(*common, *more)
            rows = got["schedules"]
            near = [row for row in rows if row["step"] <= rows[0]["step"] * (1 + within + 1e-9)]
            best = next(row for row in rows if (row["schedule"], row["vpp"]) == (got["best"], got["vpp"]))
            self.assertIn(best, near)
            self.assertLessEqual(best["peak_bytes"], min(row["peak_bytes"] for row in near) * (1 + 1e-9))
            self.assertEqual((got["tolerance"], got["trainer_flags"]), (within, best["trainer_flags"]))
            self.assertEqual((got["fastest"], got["fastest_vpp"]), (rows[0]["schedule"], rows[0]["vpp"]))
            text = self.run_plan(*common, *more).stdout
            self.assertIn(f"\nbest: {best['schedule']} with {best['vpp']} chunk", text)
            self.assertEqual(f"\nfastest: {rows[0]['schedule']} with {rows[0]['vpp']} chunk" in text, best != rows[0])
            self.assertTrue(text.endswith(f"in the trainers: {best['trainer_flags']}\n"))
        self.assertEqual((got["best"], got["vpp"]), ("v-min", 2))  # whatever it takes, the least memory
        self.assertIn("% longer than that of 1f1b", got["why"])
        # 1f1b holds what one micro-batch needs, gpipe all of them: no rounding may prefer it.
        for m in (1, 3, 8):
            for cost in (["--times", ".1,.1,.1"], ["--model", "gpt3-125m", "--flops", 1e12]):
                got = self.json("compare", "--pp", 1, "--micro-batches", m, *cost, "--tolerance", 0)
                self.assertEqual(got["best"], "1f1b")
        self.refused(*common, "--tolerance", -1, says=["--tolerance", "0 to 100"])

    def test_a_cap_in_bytes_counts_bytes(self):
        """The last stages have fewer layers, so as many activations of theirs take less."""
        common = ["compare", "--pp", 4, "--micro-batches", 16, "--model", "llama3-8b", "--flops", 4e14, "--vpp", 2]
        for cap in (8, 9, 9.6, 10, 12):
            rows = {row["schedule"]: row for row in self.json(*common, "--memory-cap", f"{cap}GB")["schedules"]}
            self.assertLessEqual(max(row["peak_bytes"] for row in rows.values()), cap * 1e9 * (1 + 1e-9))
            for place, names in (("loop", ("looped-bfs", "dfc", "split-dfc", "bfc")), ("v", ("zb-v", "v-half", "v-min", "v --memory-cap 7"))):
                named = [rows[name]["step"] for name in names if name in rows]
                self.assertLessEqual(rows[f"auto --placement {place}"]["step"], min(named, default=9) * (1 + 1e-12), (cap, place))
        v = [name for name in self.json(*common, "--memory-cap", "9.6GB")["schedules"] if name["schedule"].startswith("v --")]
        self.assertEqual([row["schedule"] for row in v], ["v --memory-cap 7"])

    def test_memory_cap_leaves_out(self):
        common = ["compare", "--pp", 4, "--micro-batches", 8, "--vpp", "1,2", "--times", "2,2,2"]
        got = self.json(*common, "--memory-cap", 4)
        self.assertTrue(all(r["peak_activations"] <= 4 for r in got["schedules"]))
        self.assertIn("gpipe", [r["schedule"] for r in got["left_out"]])
        self.assertIn("zb-h1", [r["schedule"] for r in got["schedules"]])
        self.refused(*common, "--memory-cap", .5, says=["no schedule fits", "the least is 1.00 activations"])
        self.assertEqual(self.json(*common, "--memory-cap", 1)["schedules"][0]["peak_activations"], 1)

    def test_the_least_of_a_refusal_is_enough_and_no_less_is(self):
        timed = ["compare", "--pp", 4, "--micro-batches", 8, "--times", "2,2,2"]
        counted = ["compare", "--pp", 4, "--micro-batches", 4, "--model", "gpt3-125m", "--flops", 1e14]
        large = ["compare", "--pp", 64, "--micro-batches", 1024, "--vpp", "2", "--times", "2,2,2"]  # beyond the search
        for command, unit, step in ((timed, "activations", .01), (counted, "GB", .001), ([*counted, "--vpp", 2], "GB", .001),
                                    (large, "activations", .01)):
            with self.subTest(command=command):
                done = self.run_plan(*command, "--memory-cap", .001 if unit == "activations" else "1KB")
                self.assertEqual(done.returncode, 2, done.stdout)
                least = float(re.search(rf"the least is ([\d.]+) {unit}, by ", done.stderr)[1])
                suffix = "" if unit == "activations" else "GB"
                got = self.json(*command, "--memory-cap", f"{least}{suffix}")
                self.assertGreaterEqual(len(got["schedules"]), 1)
                self.refused(*command, "--memory-cap", f"{least - step:.3f}{suffix}", says=["the least is"])

    def test_links_serialise_and_are_exposed(self):
        got = self.json("compare", "--pp", 2, "--micro-batches", 1, "--vpp", 1, "--times", "1,1,1", "--link-latency", 2,
                        "--link-bandwidth", 10, "--message-bytes", 5)
        row = [r for r in got["schedules"] if r["schedule"] == "1f1b"][0]
        self.assertEqual(row["step"], 6 + 2 * 2.5)
        self.assertEqual(row["transfer_coverage"], 0)
        self.assertEqual(row["exposed_transfer"], 2.5)

    def test_model_is_counted(self):
        s, h, layers, vocab, flops = 512, 768, 12, 50257, 1e12
        layer = 3 * (2 * h * h * 4 + 4 * h * 4 * h + 2 * h * (s + 1))
        step = s * (layers * layer + 3 * 2 * h * vocab) / flops
        got = self.json("compare", "--model", "gpt3-125m", "--pp", 1, "--micro-batches", 2, "--seq-length", s, "--flops", flops)
        row = [r for r in got["schedules"] if r["schedule"] == "1f1b"][0]
        self.assertAlmostEqual(row["step"] / (2 * step), 1, places=12)
        self.assertEqual(row["layers"], [12])
        self.assertAlmostEqual(row["peak_bytes"] / (layers * 32 * s * h), 1, places=12)

    def test_layers_are_balanced_with_the_head(self):
        got = self.json("compare", "--model", "llama3-8b", "--pp", 8, "--micro-batches", 16, "--vpp", "1,2", "--flops", 4e14,
                        "--seq-length", 8192, "--link-latency", 1e-5, "--link-bandwidth", "50GB", "--memory-cap", "60GB")
        for row in got["schedules"]:
            self.assertEqual(sum(row["layers"]), 32)
            self.assertLess(row["layers"][-1], 32 // (8 * row["vpp"]))
            self.assertLessEqual(row["peak_bytes"], 60e9)

    def test_models_from_files(self):
        config = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
        path = self.file(json.dumps(config), "config.json")
        more = ["--pp", 2, "--micro-batches", 4, "--flops", 1e14, "--vpp", 1]
        from_file, bundled = (self.json("compare", "--model", m, *more) for m in (path, "gpt3-125m"))
        self.assertEqual(from_file["schedules"], bundled["schedules"])

    def test_a_thousand_stages(self):
        start = time.monotonic()
        got = self.json("compare", "--pp", 512, "--micro-batches", 1024, "--vpp", 2, "--times", "2,2,2", "--comm", .01)
        print(f"1024 stages: {time.monotonic() - start:.1f} s", file=sys.stderr)
        self.assertGreaterEqual(len(got["schedules"]), 6)

    def test_a_thousand_ranks(self):
        start = time.monotonic()
        got = self.json("compare", "--pp", 1024, "--micro-batches", 2048, "--vpp", 1, "--times", "2,2,2",
                        "--comm", .01)
        print(f"1024 ranks, 2048 micro-batches: {time.monotonic() - start:.1f} s", file=sys.stderr)
        rows = {(r["schedule"], r["vpp"]): r for r in got["schedules"]}
        self.assertAlmostEqual(rows["gpipe", 1]["step"], 6 * (2048 + 1023) + 2 * 1023 * .01, places=6)
        self.assertEqual(len(rows), 5)

    def test_one_schedule_of_a_thousand_stages(self):
        # In bfc all ranks wait for one slot in one cycle, in v-half each neighbours' pair for its own.
        for name, slots in (("bfc", 1024), ("v-half", 1024), ("zb-h2", 512)):
            start = time.monotonic()
            got = self.schedule(name, 512, 1024, "--comm", .01)
            print(f"{name} of {slots} stages: {time.monotonic() - start:.1f} s", file=sys.stderr)
            self.assertEqual(sum(map(len, got["slots"])), slots)
            self.assertTrue(got["deadlock_free"])

    def test_nothing_has_a_sign(self):
        done = self.run_plan("compare", "--pp", 4, "--micro-batches", 12, "--times", "0.1,0.1,0.1", "--comm", .3)
        self.assertEqual(done.returncode, 0)
        self.assertNotRegex(done.stdout, r"-0\.0+\b")

    def test_ties_go_to_less_memory(self):
        """For equal times on ideal links 1f1b is as short as gpipe, and no order without splits is shorter."""
        got = self.schedule("auto", 4, 8, "--tries", 0, "--memory-cap", 8)
        h1 = self.schedule("zb-h1", 4, 8)
        self.assertLessEqual(got["makespan"], h1["makespan"])
        if got["makespan"] == h1["makespan"]:
            self.assertLessEqual(max(got["peak_activations"]), max(h1["peak_activations"]))

    # --- wrong usage ---
    def test_empty_values_are_refused(self):
        one = ["schedule", "--name", "1f1b", "--pp", 4, "--micro-batches", 8]
        for option in ("--comm", "--svg", "--csv", "--perfetto", "--times", "--vpp", "--name"):
            self.refused(*one, option, "", says=[option])
            self.refused(*one, f"{option}=", says=[option])
        self.refused("compare", "--pp", 4, "--micro-batches", 8, "--times", "1,1,1", "--memory-cap", "", says=["--memory-cap"])
        self.refused("check", self.file("0F0,0B0\n"), "--svg", "", says=["--svg"])
        self.refused("check", "")

    def test_numbers_that_make_no_sense(self):
        one = ["schedule", "--name", "1f1b", "--svg", "never.svg"]
        for p, m in ((0, 8), (-1, 8), (4, 0), (4, -3), (2000000000, 2000000000), (4.5, 8), ("many", 8)):
            self.refused(*one, "--pp", p, "--micro-batches", m)
        sized = [*one, "--pp", 4, "--micro-batches", 8]
        for times in ("0,1,1", "1,-1,1", "nan,1,1", "1,inf,1", "1,1", "1,1,1,1", "1,1,x", "", "1e300,1,1"):
            self.refused(*sized, f"--times={times}", says=["--times"])
        for comm in ("-1", "nan", "inf"):
            self.refused(*sized, f"--comm={comm}", says=["--comm"])
        self.refused(*sized, "--vpp", 2, says=["1F1B", "2", "or dfc for"])
        self.refused(*sized, "--vpp", 0, says=["--vpp"])

    def test_every_number_at_its_ends(self):
        """A result or one sentence that names the option and what is valid; within seconds and 4 GB."""
        schedule = ["schedule", "--pp", 2, "--micro-batches", 4]
        timed = ["compare", "--pp", 2, "--micro-batches", 4, "--times", "1,1,1"]
        counted = ["compare", "--pp", 2, "--micro-batches", 4, "--model", "gpt3-125m", "--flops", 1e14]
        linked = [*timed, "--message-bytes", 5, "--link-bandwidth", 10]
        whole = [([*schedule, "--name", "1f1b"], "--pp"), ([*schedule, "--name", "1f1b"], "--micro-batches"),
                 ([*schedule, "--name", "gpipe"], "--vpp"), ([*schedule, "--name", "interleaved"], "--group-size"),
                 ([*schedule, "--name", "auto"], "--tries"), ([*schedule, "--name", "split-1f1b"], "--weights"), (timed, "--pp"),
                 (timed, "--micro-batches"), (timed, "--vpp"), (counted, "--tp"), (counted, "--seq-length"),
                 (counted, "--micro-batch-size"), (counted, "--pp")]
        real = [([*schedule, "--name", "v"], "--memory-cap"), ([*schedule, "--name", "auto", "--tries", 5], "--memory-cap"),
                ([*schedule, "--name", "zb-h1"], "--comm"), ([*schedule, "--name", "dualpipev"], "--pair"), (timed, "--comm"),
                (timed, "--link-latency"), (linked, "--message-bytes"), (linked, "--link-bandwidth"), (timed, "--memory-cap"),
                (timed, "--tolerance"), (counted, "--memory-cap"), (counted, "--flops"), (counted, "--link-bandwidth")]
        numbers = ["0", "-1", "2147483647", "2147483648", "1e9", "1000000000", "99999999999999999999", "1e400"]
        never = ["nan", "inf", "-inf", "", "x", "1,", "0x10 "]
        for is_whole, options in ((True, whole), (False, real)):
            for command, option in options:
                at = command.index(option) if option in command else None
                command = command if at is None else command[:at] + command[at + 2:]
                for number in numbers + never + (["1.5"] if is_whole else []):
                    with self.subTest(command=command, option=option, number=number):
                        start = time.monotonic()
                        done = self.run_plan(*command, f"{option}={number}" if number else option, *([] if number else [""]),
                                             timeout=60, limit=4 << 30)
                        self.assertLess(time.monotonic() - start, 30)
                        out_of_form = number in never or is_whole and number in ("2147483648", "1e9", "1.5")
                        self.assertIn(done.returncode, [2] if out_of_form else [0, 2], done.stderr)
                        if done.returncode == 0:
                            continue
                        self.assertEqual(done.stdout, "")
                        self.assertEqual(len(done.stderr.strip().splitlines()), 1, done.stderr)
                        self.assertIn(option.strip("-").replace("-", " "), done.stderr.replace("-", " "))
                        self.assertRegex(done.stderr, "valid|least|most|such as|empty|divide|between|smallest")

    def test_one_is_singular(self):
        """Nothing that is printed says '1 ranks'."""
        one = ["--pp", 1, "--micro-batches", 1]
        runs = [["schedule", "--name", "auto", *one], ["schedule", "--name", "interleaved", "--group-size", 5, *one],
                ["schedule", "--name", "auto", "--memory-cap", .5, *one], ["schedule", "--name", "v", "--memory-cap", 1, *one],
                ["schedule", "--name", "dualpipev", *one], ["schedule", "--name", "1f1b", "--times", "1", *one],
                ["compare", "--times", "1,1,1", *one], ["compare", "--times", "1,1,1", "--memory-cap", .1, *one],
                ["check", self.file("0F0,0B0\n")], ["check", self.file("0F0\n", "short.csv")]]
        for run in runs:
            done = self.run_plan(*run)
            self.assertNotRegex(done.stdout + done.stderr,
                                r"(?<![.\d])1 (ranks|chunks|micro-batches|stages|actions|numbers|layers|live activations)\b")

    def test_names_and_options_that_do_not_fit(self):
        sized = ["--pp", 4, "--micro-batches", 8, "--svg", "never.svg"]
        self.refused("schedule", "--name", "zigzag", *sized, says=["zigzag", "1f1b", "dualpipev", "split-<base>"])
        self.refused("schedule", "--name", "split-zb-h1", *sized, says=["split-zb-h1"])
        self.refused("schedule", "--name", "interleaved", *sized, says=["--group-size", "4 to 8"])
        self.refused("schedule", "--name", "interleaved", "--group-size", 3, *sized, says=["3", "4..8"])
        self.refused("schedule", "--name", "dfc", "--group-size", 4, *sized, says=["--group-size", "dfc"])
        self.refused("schedule", "--name", "v", *sized, says=["--memory-cap"])
        self.refused("schedule", "--name", "v", "--memory-cap", 1, *sized, says=["2"])
        self.refused("schedule", "--name", "auto", "--memory-cap", "nan", *sized, says=["--memory-cap"])
        self.refused("schedule", "--name", "zb-v", "--vpp", 3, *sized, says=["3"])
        self.refused("schedule", "--name", "dualpipev", "--pp", 4, "--micro-batches", 7, says=["7"])
        self.refused("schedule", "--name", "dualpipev", "--pair", 9, "--pp", 4, "--micro-batches", 8, says=["9"])
        self.refused("schedule", "--name", "split-1f1b", "--weights=-1", *sized, says=["-1", "at-end"])
        self.refused("schedule", "--name", "gpipe", "--pp", 4, says=["--micro-batches"])
        self.refused("schedule", "--name", "gpipe", "--transfers", "--pp", 4, "--micro-batches", 7, says=["--csv"])
        self.refused("plan-it", says=["plan-it"])
        self.refused(says=["schedule", "check", "compare", "metrics"])

    def test_comparisons_that_do_not_fit(self):
        sized = ["compare", "--pp", 4, "--micro-batches", 8]
        self.refused(*sized, says=["--times", "--model"])
        self.refused(*sized, "--times", "1,1,1", "--model", "gpt3-125m", "--flops", 1e14, says=["both"])
        self.refused(*sized, "--model", "gpt3-125m", says=["--flops"])
        self.refused(*sized, "--model", "/dev/null", "--flops", 1e14, says=["/dev/null", "not a regular file"])
        self.assertNotIn("1,1,1", self.run_plan("compare", "--help").stdout)
        self.refused(*sized, "--model", "gpt5", "--flops", 1e14, says=["gpt5", "llama3-8b", "config.json"])
        self.refused(*sized, "--model", "gpt3-125m", "--flops", 1e14, "--vpp", 4, says=["12", "3"])
        self.refused("compare", "--pp", 13, "--micro-batches", 8, "--model", "gpt3-125m", "--flops", 1e14, says=["13", "12"])
        self.refused(*sized, "--model", "gpt3-125m", "--flops", "nan", says=["--flops"])
        self.refused(*sized, "--model", "gpt3-125m", "--flops", 1e14, "--tp", 5, says=["5", "12"])
        self.refused(*sized, "--times", "1,1,1", "--vpp", "1,0", says=["1,0"])
        self.refused(*sized, "--times", "1,1,1", "--comm", 1, "--link-latency", 1, says=["one of them"])
        self.refused(*sized, "--times", "1,1,1", "--link-bandwidth", 1, says=["--message-bytes"])
        self.refused(*sized, "--times", "1,1,1", "--memory-cap", "lots", says=["lots"])

    # --- help ---
    def test_every_example_of_the_help_runs(self):
        for command in ([], ["schedule"], ["check"], ["compare"], ["metrics"]):
            done = self.run_plan(*command, "--help")
            self.assertEqual(done.returncode, 0)
            self.assertIn("Example: mega-plan", done.stdout)
            example = re.sub(r"\n\s+", " ", done.stdout.split("Example: ")[1]).split("\n")[0]
            words = shlex.split(example.split(" Exit codes:")[0])
            if words[1] == "metrics":
                continue  # wants traces, which the tests of the metrics have
            self.file("0F0,0B0\n", "schedule.csv")
            done = self.run_plan(*words[1:])
            self.assertEqual(done.returncode, 0, done.stderr)


if __name__ == "__main__":
    os.environ["LC_ALL"] = "C"
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]])

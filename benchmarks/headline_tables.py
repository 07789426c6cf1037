"""The headline tables from the logs of the runs: figures(row, folder) reads one row's folder, tables(rows, out) all of them.

Nothing here runs a program or looks at a clock: the same logs give the same tables.
"""
import collections
import json
import re
import statistics

import headline_rows

WARM_UP = 2  # steps that no figure counts
# Largest difference of two losses of one step. Where the layouts share every sum's order they have the same bits.
EXACT, FP32, BF16 = 0.0, 1e-4, 3e-2
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


# --- reading ---
def text_of(path):
    return path.read_text(errors="replace") if path.exists() else ""


def json_of(path):
    try:
        return json.loads(text_of(path))
    except ValueError:
        return None


def steps_of(path):
    """The steps of a --log-json, but for a line that was cut."""
    out = []
    for line in text_of(path).splitlines():
        try:
            out.append(json.loads(line))
        except ValueError:
            break
    return out


def byte_count(number, unit):
    return float(number) * UNITS[unit]


def memory_of_trainer(folder):
    """(planned, measured) bytes of the fullest rank; on the host of all ranks, which are threads of one process."""
    found = re.search(r"memory of the fullest rank: ([\d.]+) (\w+) measured, ([\d.]+) (\w+) planned", text_of(folder / "train.txt"))
    if found:
        return byte_count(*found.group(3, 4)), byte_count(*found.group(1, 2))
    planned = sum(byte_count(*each) for each in re.findall(r"^rank \d+: .* parameters, ([\d.]+) (\w+) \(", text_of(folder / "dry.txt"), re.M))
    measured = max((s["peak_bytes"] for s in steps_of(folder / "log.json")), default=0)
    return planned or None, measured or None


def memory_of_bench(text):
    """Planned is rank 0, measured the fullest."""
    planned = re.search(r"^memory of rank 0, MiB:.* planned ([\d.]+)", text, re.M)
    return float(planned[1]) * 2**20 if planned else None


def peer_line(text):
    """KEY=VALUE of the line that a measured program prints."""
    found = re.search(r"^peer=.*", text, re.M)
    return dict(word.split("=", 1) for word in found[0].split() if "=" in word) if found else {}


def number(values, key):
    try:
        return float(values[key])
    except (KeyError, TypeError, ValueError):
        return None


def speed(folder):
    """tokens_per_s, bytes and the losses that can be compared."""
    line = peer_line(text_of(folder / "train.txt"))
    if line:
        gib = number(line, "peak_gib")
        return {"tokens_per_s": number(line, "tokens_per_s"), "step_ms": number(line, "ms_per_step"), "tflops": number(line, "tflops_per_gpu"),
                "planned": memory_of_bench(text_of(folder / "train.txt")), "measured": gib and gib * 2**30, "losses": [number(line, "loss")]}
    steps = steps_of(folder / "log.json")
    timed = steps[WARM_UP:] or steps
    if not timed:
        return {}
    planned, measured = memory_of_trainer(folder)
    return {"tokens_per_s": statistics.median(s["tokens_per_s"] for s in timed), "step_ms": 1e3 * statistics.median(s["seconds"] for s in timed),
            "tflops": None, "planned": planned, "measured": measured, "losses": [s["loss"] for s in steps]}


def peer(folder):
    line = peer_line(text_of(folder / "peer.txt"))
    gib = number(line, "peak_gib")
    return {"peer_tokens_per_s": number(line, "tokens_per_s"), "peer_bytes": gib and gib * 2**30}


def gradients(ranks):
    """mega-plan writes null for a ratio that is not known."""
    known = [r["gradient_ratio"] for r in ranks if r["gradient_ratio"] is not None]
    return statistics.fmean(known) if known else None


def windows(folder):
    """From mega-plan metrics. The bubble leaves out what comes after the last rank's last compute, which is the optimizer."""
    got = json_of(folder / "metrics.json")
    if not got:
        return {"no_windows": (text_of(folder / "metrics.txt").strip().splitlines() or ["mega-plan metrics said nothing"])[-1]}
    ranks = got["per_rank"]
    mean = statistics.fmean
    # mega-plan writes null for a ratio that is not known.
    sends = [s["ratio"] for s in got["send_windows"] if s["ratio"] is not None]
    compute = mean(r["compute_ratio"] * r["iteration_ms"] for r in ranks)
    until_last = got["iteration_ms"] - min(r["reduce_window_ms"] for r in ranks)
    transfers = got["transfers"] or {}
    steps = len(got["iterations"])
    return {"sending": mean(sends) if sends else None, "gradients": gradients(ranks), "covered": transfers.get("coverage"),
            "exposed_ms": transfers["exposed_ms"] / steps if transfers else None, "bubble": 1 - compute / until_last,
            "activations": max(r["peak_activations"] for r in ranks)}


def verdict(folder):
    got = json_of(folder / "report.json")
    if got is None:
        return {}
    return {"healthy": got["healthy"], "verdicts": [(v["class"], v["ranks"], v["confidence"], v["headline"]) for v in got["verdicts"]]}


def figures(row, folder):
    """What the logs of a row say; nothing for what they do not."""
    if row.kind == "windows":
        plan = json_of(folder / "plan.json") or {}
        return {**speed(folder), **windows(folder), "predicted": plan.get("bubble_wall")}
    if row.kind == "speed":
        return {**speed(folder), **peer(folder)}
    if row.kind == "losses":
        return speed(folder)
    if row.kind == "slow":
        return {**speed(folder), **verdict(folder)}
    resumed, whole = steps_of(folder / "resumed.json"), steps_of(folder / "whole.json")
    first = resumed[0]["step"] if resumed else 0
    return {**(json_of(folder / "killed.json") or {}), "resumed": [s["loss"] for s in resumed],
            "whole": [s["loss"] for s in whole if s["step"] >= first], "first_step": first}


# --- judging ---
def difference(a, b):
    """Largest, of losses in pairs; None where there is none to compare, infinite for what is no number."""
    if not a or not b or len(a) != len(b) or None in (*a, *b):
        return None
    return max(abs(x - y) if x == x and y == y else float("inf") for x, y in zip(a, b))


def tolerance(row, backend):
    if row.kind in ("windows", "speed"):
        if backend == "cuda":
            return BF16
        return EXACT if row.part == 1 else FP32  # of pipelines alone every sum has one order
    return FP32


def complaints(row, got, reference, backend):
    """Sentences on what a finished row should have shown and did not."""
    out = []
    if row.kind in ("windows", "speed", "losses"):
        off = difference(got.get("losses"), reference.get("losses"))
        if got.get("tokens_per_s") is None:
            out.append("it printed no speed")
        if off is None:
            out.append("its losses cannot be compared")
        elif not off <= tolerance(row, backend):
            out.append(f"losses differ by {off:.2g}, more than {tolerance(row, backend):g}")
        if row.kind == "windows" and got.get("sending") is None:
            out.append(f"its trace has no windows: {got.get('no_windows', 'no message was sent')}")
    if row.kind == "slow":
        named = [ranks for kind, ranks, *_ in got.get("verdicts", []) if kind == "slow_gpu"]
        if row.fault and named[:1] != [[row.gpus() - 1]]:
            out.append(f"mega-scan did not name rank {row.gpus() - 1}")
        if not row.fault and not got.get("healthy"):
            out.append("mega-scan accuses somebody in a run without a fault")
    if row.kind == "killed":
        off = difference(got.get("resumed"), got.get("whole"))
        if not got.get("ended_after_s", float("inf")) <= got.get("deadline_s", 0):
            out.append("not all processes ended in the deadline")
        if off is None:
            out.append("its losses cannot be compared")
        elif not off <= FP32:
            out.append(f"losses differ by {off:.2g}, more than {FP32:g}")
    return out


# --- writing ---
def shown(value, digits=0, scale=1.0):
    return "-" if value is None or value != value else f"{value * scale:,.{digits}f}"


def pair(a, b, digits, scale=1.0):
    return f"{shown(a, digits, scale)}, {shown(b, digits, scale)}"


def off_by(got, reference):
    off = difference(got.get("losses"), reference.get("losses"))
    return "-" if off is None else "equal bits" if off == 0 else f"{off:.1e}"


GIB = 1 / 2**30


def line_of_windows(row, got, context):
    return [row.model.name, row.order.chunks, row.micro_batches(), row.order.title, shown(got.get("sending"), 3), shown(got.get("gradients"), 3),
            shown(got.get("covered"), 0, 100), shown(got.get("exposed_ms"), 2), pair(got.get("bubble"), got.get("predicted"), 1, 100),
            shown(got.get("step_ms"), 1), shown(got.get("tokens_per_s")), got.get("activations", "-"),
            pair(got.get("planned"), got.get("measured"), 2, GIB), off_by(got, context.reference(row))]


def line_of_pipeline_speed(row, got, context):
    ours, theirs = got.get("tokens_per_s"), got.get("peer_tokens_per_s")
    ratio = ours / theirs if ours and theirs else None
    return [row.model.name, row.order.chunks, row.micro_batches(), row.micro_batch, row.order.title, row.order.peer or "-", shown(theirs),
            shown(ours), shown(ratio, 3), shown(got.get("tflops")), pair(got.get("planned"), got.get("measured"), 2, GIB), shown(got.get("peer_bytes"), 1, GIB)]


def line_of_layout_speed(row, got, context):
    ours, theirs = got.get("tokens_per_s"), got.get("peer_tokens_per_s")
    each = ours / row.gpus() if ours else None
    cells = [row.model.name, row.gpus(), row.layout.title(), shown(ours), shown(each)]
    for fewer in (1, 2, 4):
        best = context.best_each(row, fewer)
        cells.append(shown(each / best, 3) if each and best and fewer < row.gpus() else "-")
    return cells + [shown(theirs), shown(ours / theirs if ours and theirs else None, 3), pair(got.get("planned"), got.get("measured"), 2, GIB),
                    ", ".join(shown(loss, 4) for loss in got.get("losses", [])[-1:]) or "-", off_by(got, context.reference(row))]


def line_of_losses(row, got, context):
    return [row.model.name, row.gpus(), row.layout.title(), ", ".join(shown(loss, 6) for loss in got.get("losses", [])),
            context.reference_title(row), off_by(got, context.reference(row)), f"{tolerance(row, context.backend):g}"]


def line_of_slow(row, got, context):
    said = "; ".join(v[3] for v in got.get("verdicts", [])) or ("nothing stands out" if got.get("healthy") else "-")
    last = row.gpus() - 1
    fault = f"busy kernel on GPU {last}" if context.backend == "cuda" else f"rank {last} computes {headline_rows.SLOWED} times as long"
    fault = fault if row.fault else "none"
    return [row.gpus(), row.layout.title(), fault, shown(got.get("step_ms"), 1), said]


def line_of_killed(row, got, context):
    off = difference(got.get("resumed"), got.get("whole"))
    return [row.gpus(), row.layout.title(), got.get("killed_rank", "-"), pair(got.get("ended_after_s"), got.get("deadline_s"), 1),
            got.get("codes", "-"), row.again.title(), f"{got['first_step']} on" if got.get("first_step") else "-", "-" if off is None else f"{off:.1e}", f"{FP32:g}"]


Table = collections.namedtuple("Table", "part kind title columns line")
TABLES = [
    Table(1, "windows", "Pipelines: windows, bubble, memory", ["model", "v", "m", "order", "sending ratio", "all-reduce window", "covered, %",
          "exposed, ms a step", "bubble measured, predicted, %", "step, ms", "tokens/s", "peak activations", "GiB planned, measured", "losses off by"],
          line_of_windows),
    Table(1, "speed", "Pipelines beside PyTorch", ["model", "v", "m", "micro-batch", "ours", "PyTorch's", "PyTorch tokens/s", "ours tokens/s", "ratio",
          "TFLOP/s a GPU", "GiB planned, measured", "GiB, PyTorch"], line_of_pipeline_speed),
    Table(2, "speed", "Layouts: speed", ["model", "GPUs", "layout", "tokens/s", "tokens/s a GPU", "over 1 GPU", "over 2", "over 4", "PyTorch FSDP tokens/s",
          "ratio", "GiB planned, measured", "last loss", "off by"], line_of_layout_speed),
    Table(2, "losses", "Layouts: losses in fp32", ["model", "GPUs", "layout", "losses", "compared with", "off by at most", "tolerance"], line_of_losses),
    Table(3, "slow", "A slow GPU", ["GPUs", "layout", "fault", "step, ms", "mega-scan says"], line_of_slow),
    Table(4, "killed", "A killed process", ["GPUs", "layout", "killed rank", "all ended after, deadline, s", "exit codes", "resumed at", "steps",
          "losses off by at most", "tolerance"], line_of_killed),
]
NOTES = {
    (1, "windows"): "`mega-plan metrics` over the steps from the third on. Sending ratio as MegatronApp defines it, mean over pairs of ranks. "
                    "All-reduce window: (step end - first chunk's gradients complete) / step, mean over ranks. "
                    "Covered: of the time in which messages were under way, the part in which their receiver computed. "
                    "Bubble measured: 1 - mean compute / time until the last rank's last compute; predicted: of the same order where forward, input and "
                    "weight gradient take equally long and messages no time. Peak activations are of a chunk, on the fullest rank. The vocabulary is "
                    "that of bytes, 257.",
    (1, "speed"): "The published vocabularies, random tokens, layers split so that the busiest rank has least. Planned "
                    "is rank 0, measured the fullest GPU.",
    (2, "speed"): "The same samples a step at every layout. Over n GPUs: tokens/s a GPU over the best of n GPUs. FSDP where ours is data parallel.",
    (2, "losses"): "Bytes as tokens, layouts compared with the first that ran.",
    (3, "slow"): "24 traced steps, `mega-scan report`.",
    (4, "killed"): "A process of the run gets SIGKILL after a checkpoint; the run goes on at the other layout, and is compared with one that was never "
                   "killed.",
}


class Context:
    """What a line needs to know of other rows."""

    def __init__(self, rows, status, found, backend):
        self.backend = backend
        self.done = [(row, found[row.name()]) for row in rows if status.get(row.name(), {}).get("status") == "done"]

    def first(self, row):
        return next(((r, got) for r, got in self.done if r.group() == row.group() and got.get("losses")), (None, {}))

    def reference(self, row):
        return self.first(row)[1]

    def reference_title(self, row):
        r = self.first(row)[0]
        return "-" if r is None else r.layout.title()

    def best_each(self, row, gpus):
        return max((got["tokens_per_s"] / gpus for r, got in self.done if r.group() == row.group() and r.gpus() == gpus and got.get("tokens_per_s")),
                   default=None)


def table_rows(cells):
    return "| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |"


def in_reading_order(rows):
    """As one looks them up, not as they ran."""
    names = {}
    for row in rows:
        names.setdefault(row.model.name, len(names))
    return sorted(rows, key=lambda r: (names[r.model.name], r.gpus(), r.micro_batches() if r.part == 1 else 0, r.order.chunks, r.order.title,
                                       r.layout.title(), r.fault))


def tables(rows, out, backend, heading=""):
    """(Markdown, complaints). @param out  folder with status.json and rows/NAME/ @param rows  all that were wanted"""
    status = json_of(out / "status.json") or {}
    found = {row.name(): figures(row, out / "rows" / row.name()) for row in rows if row.name() in status}
    context = Context(rows, status, found, backend)
    lines, wrong = [heading], []
    for table in TABLES:
        mine = in_reading_order([row for row in rows if (row.part, row.kind) == (table.part, table.kind)])
        if not mine:
            continue
        lines += [f"## {table.title}", "", NOTES[table.part, table.kind], ""]
        done = [row for row in mine if status.get(row.name(), {}).get("status") == "done"]
        if done:
            lines += [table_rows(table.columns), "|" + "---|" * len(table.columns)]
            lines += [table_rows(table.line(row, found[row.name()], context)) for row in done] + [""]
        missing = collections.defaultdict(list)
        for row in mine:
            said = status.get(row.name(), {"status": "not run", "why": "the command ended before"})
            if said["status"] != "done":
                missing[f"{said['status']}: {said['why']}"].append(row.name())
            if said.get("peer"):
                missing[said["peer"]].append(row.name())
        lines += [f"- {why}: {', '.join(names)}" for why, names in missing.items()] + ([""] if missing else [])
        for row in done:
            wrong += [f"{row.name()}: {sentence}" for sentence in complaints(row, found[row.name()], context.reference(row), backend)]
        wrong += [f"{row.name()}: {status[row.name()]['status']}: {status[row.name()]['why']}" for row in mine
                  if status.get(row.name(), {}).get("status") in ("failed", "killed")]
        wrong += [f"{row.name()}: {status[row.name()]['peer']}" for row in mine if status.get(row.name(), {}).get("peer")]
    if wrong:
        lines += ["## What is wrong", ""] + [f"- {sentence}" for sentence in wrong] + [""]
    # Programs name their files; where OUT lies on this machine is nobody else's matter.
    return "\n".join(lines).replace(f"{out}/", ""), wrong

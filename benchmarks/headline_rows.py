"""What the headline tables measure: the runs, how many GPUs each needs, and the commands that make it.

A Row says what is trained and how; commands(row, setup, folder) says by which programs. Neither starts anything.
"""
import dataclasses
import pathlib
import sys


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes of a published model. The trainers read bytes, so they have 257 rows where it has `vocab`."""
    name: str
    program: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    seq: int
    vocab: int

    def flags(self):
        sizes = [f"--num-layers={self.layers}", f"--hidden-size={self.hidden}", f"--num-attention-heads={self.heads}",
                 f"--ffn-hidden-size={self.ffn}", f"--seq-length={self.seq}"]
        return sizes + ([f"--kv-heads={self.kv_heads}"] if self.kv_heads != self.heads else [])

    def head_in_layers(self):
        """Weights of the head's product over those of a layer."""
        head = self.hidden // self.heads
        mlp = (3 if self.program == "llama3" else 2) * self.ffn
        return self.vocab / ((self.heads + 2 * self.kv_heads) * head + self.heads * head + mlp)


MODELS = {m.name: m for m in (Model("gpt3-125m", "gpt3", 12, 768, 12, 12, 3072, 1024, 50304),
                              Model("gpt3-1.3b", "gpt3", 24, 2048, 16, 16, 8192, 2048, 50304),
                              Model("gpt3-6.7b", "gpt3", 32, 4096, 32, 32, 16384, 2048, 50304),
                              Model("llama3-1b", "llama3", 16, 2048, 32, 8, 8192, 4096, 128256),
                              Model("llama3-8b", "llama3", 32, 4096, 32, 8, 14336, 4096, 128256))}
# A model of the same kind for rehearsals, with heads for eight tensor ranks.
TINY = {"hidden": 128, "heads": 16, "ffn": 256, "seq": 16}


@dataclasses.dataclass(frozen=True)
class Order:
    title: str
    schedule: str  # as --schedule of ours and --name of mega-plan
    chunks: int = 1
    group: int = 0
    look_ahead: int = 0
    peer: str = ""  # PyTorch's schedule of this kind

    def flags(self):
        return ([f"--schedule={self.schedule}", f"--vpp={self.chunks}"] + ([f"--group-size={self.group}"] if self.group else [])
                + ([f"--look-ahead={self.look_ahead}"] if self.look_ahead else []))


@dataclasses.dataclass(frozen=True)
class Layout:
    tp: int = 1
    pp: int = 1
    dp: int = 1
    zero1: bool = False

    def size(self):
        return self.tp * self.pp * self.dp

    def title(self):
        axes = [f"{axis}{degree}" for axis, degree in (("tp", self.tp), ("pp", self.pp), ("dp", self.dp)) if degree > 1]
        return " x ".join(axes or ["1 GPU"]) + (" ZeRO-1" if self.zero1 else "")

    def flags(self):
        return [f"--tp={self.tp}", f"--pp={self.pp}", f"--dp={self.dp}"] + (["--zero1"] if self.zero1 else [])


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a table."""
    part: int
    kind: str  # windows, speed, losses, slow, killed
    model: Model
    layout: Layout
    samples: int  # of a step, over all ranks
    micro_batch: int = 1
    order: Order = Order("1F1B", "1f1b")
    again: Layout = None  # killed: where the run goes on
    fault: bool = False  # slow: something slows the last rank
    balanced: bool = False  # layers by counted operations
    steps: int = 6
    worth: int = 2  # rows of 1 run first
    usual: int = 30  # seconds on GPUs; it is killed after three times as many
    quick: bool = False  # of the rehearsal that takes a minute

    def gpus(self):
        return self.layout.size()

    def micro_batches(self):
        return self.samples // self.micro_batch // self.layout.dp

    def name(self):
        words = [self.kind, self.model.name, self.layout.title().replace(" x ", "-").replace(" ", "-").lower()]
        if self.layout.pp > 1:
            words += [f"v{self.order.chunks}", f"m{self.micro_batches()}", self.order.title.lower().replace(" ", "-").replace(",", "")]
        if self.kind == "slow":
            words.append("busy" if self.fault else "healthy")
        return "-".join(words)

    def group(self):
        """Rows of one group train the same model on the same samples."""
        return (self.part, self.kind, self.model.name, self.samples, self.steps)


def orders(p, m):
    found = [Order("1F1B", "1f1b", peer="1F1B"), Order("1F1B, look-ahead 2", "1f1b", look_ahead=2), Order("ZB-H1", "zb-h1"),
             Order("ZB-V", "zb-v", 2, peer="ZBVZeroBubble")]
    for v in (2, 4):
        found += [Order("DFC", "dfc", v, peer="Interleaved1F1B"), Order("BFC", "bfc", v, peer="LoopedBFS"),
                  Order("DFC, look-ahead 2", "dfc", v, look_ahead=2)]
        if 2 * p < m:  # else it is BFC
            found.append(Order(f"interleaved, groups of {2 * p}", "interleaved", v, group=2 * p))
    return found


def rows(p=4, most=8):
    """All runs, those worth most first. @param p  ranks of the pipelines of part 1 @param most  GPUs of part 2"""
    one, deep = Layout(), Layout(pp=p)
    out = []

    # 1. Pipelines: windows, bubble and memory of every order, then throughput beside PyTorch's.
    for name in ("gpt3-6.7b", "llama3-8b", "gpt3-1.3b", "llama3-1b"):
        for m in (8, 16):
            for order in orders(p, m):
                chief = (order.chunks, m, order.title) in ((4, 16, "DFC"), (4, 16, "BFC"), (1, 16, "1F1B"), (1, 16, "ZB-H1"))
                out.append(Row(1, "windows", MODELS[name], deep, m, 1, order, balanced=True, worth=1 if chief else 3,
                               quick=name in ("gpt3-1.3b", "llama3-1b") and m == 8 and (chief or order.chunks != 2)))
                if order.look_ahead or order.group or order.chunks == 4:
                    continue  # PyTorch has none of these, and the last is slower than two chunks
                micro_batch = 2 if name == "gpt3-1.3b" else 1  # as in docs/results/gpu_step.md
                out.append(Row(1, "speed", MODELS[name], deep, m * micro_batch, micro_batch, order, steps=8, usual=45,
                               worth=2 if m == 8 and order.chunks == 1 else 4,
                               quick=name == "gpt3-1.3b" and m == 8 and order.peer == "1F1B"))

    # 2. The same samples at every layout, on as many GPUs as there are and on fewer.
    half = most // 2
    wide = [Layout(2, 2, most // 4) if most >= 4 else Layout(pp=2), Layout(tp=most), Layout(dp=most, zero1=True)]
    plain = Order("1F1B", "1f1b")
    for name in ("llama3-8b", "gpt3-6.7b"):
        fewer = [one] + [layout for n in {2, max(2, half)} for layout in (Layout(tp=n), Layout(dp=n, zero1=True))]
        for layout in dict.fromkeys(wide + fewer):
            at_most = layout in wide
            out.append(Row(2, "speed", MODELS[name], layout, 2 * most, 1, plain, steps=5, worth=1 if at_most else 3, usual=60,
                           quick=name == "llama3-8b" and at_most))
            if layout.size() > 1:
                short = dataclasses.replace(MODELS[name], seq=1024)  # fp32 has no tensor cores
                out.append(Row(2, "losses", short, layout, most, 1, plain, steps=3, worth=2 if at_most else 4, usual=60,
                               quick=name == "gpt3-6.7b" and at_most))

    # 3. A GPU that something else keeps busy, and the same run without.
    # 4. A process that is killed, and the run that goes on without it at another layout.
    small = MODELS["gpt3-125m"]
    for n in (2, 4, 8):
        for fault in (True, False):
            out.append(Row(3, "slow", small, Layout(dp=n), 8 * n, 8, fault=fault, steps=24, worth=0 if fault else 1, usual=25, quick=n == 4))
    for first, again in ((Layout(dp=2), Layout(pp=2)), (Layout(tp=2, pp=2), Layout(dp=4, zero1=True)), (Layout(2, 2, 2), Layout(pp=4, dp=2))):
        out.append(Row(4, "killed", small, first, 8, 1, again=again, worth=0, usual=50, quick=first.size() == 4))
    return sorted(out, key=lambda row: (row.worth, -row.gpus()))


@dataclasses.dataclass
class Setup:
    """Where the programs are and what they run on."""
    backend: str = "cuda"  # or host
    tiny: bool = False
    bin: pathlib.Path = pathlib.Path("build-cuda/bin")
    tools: pathlib.Path = None
    text: pathlib.Path = pathlib.Path("text.txt")
    peer: str = ""
    python: str = sys.executable
    gpu_memory: str = "139GiB"

    def program(self, name):
        return str(self.bin / name)

    def tool(self, name):
        return str((self.tools or self.bin) / name)

    def measures_by_bench(self, row):
        """bench_gpu_step has the published vocabularies, and no tiny model."""
        return row.kind == "speed" and self.backend == "cuda" and not self.tiny


TUNED = "tuned.txt"
STEPS = "{steps}"  # of a run that goes on: known once it was killed
SLOWED = 4  # times as long the slow rank of a rehearsal computes
LEARNING_RATE = "3e-5"  # at 1e-3 models of billions diverge in their second step, and blow up what bf16 rounds
DEADLINE = 20  # seconds that a rank waits for another, of part 4


def split(model, p, v, placement="loop"):
    """Layers of each stage: one after the other goes to the rank that has least, where the head counts as its weights do."""
    stages = p * v
    rank_of = [s % p if placement == "loop" or s < p else 2 * p - 1 - s for s in range(stages)]
    layers = [1] * stages
    for _ in range(model.layers - stages):
        load = [0.0] * p
        for s in range(stages):
            load[rank_of[s]] += layers[s] + (model.head_in_layers() if s + 1 == stages else 0)
        layers[min(range(stages), key=lambda s: (load[rank_of[s]], layers[s], s))] += 1
    return layers


def sized(row, setup):
    if not setup.tiny:
        return row.model
    layers = 16 if row.part == 1 else 4  # as many as there are stages
    return dataclasses.replace(row.model, **TINY, layers=layers, kv_heads=8 if row.model.program == "llama3" else TINY["heads"])


def trainer(row, setup, layout, *flags, program=None):
    program = program or f"mega-{row.model.program}{'-cuda' if setup.backend == 'cuda' else ''}"
    precision = ["--precision=fp32"] if setup.backend == "cuda" and row.kind in ("losses", "killed") else []
    order = row.order.flags() if layout.pp > 1 else []
    look = ["--slow-rank-interval=0"] if setup.backend == "host" else []
    return [setup.program(program), *sized(row, setup).flags(), *layout.flags(), *order, *precision, *look,
            *(["--balance-layers"] if row.balanced else []), f"--micro-batch-size={row.micro_batch}",
            f"--global-batch-size={row.samples}", f"--lr={'1e-3' if setup.tiny else LEARNING_RATE}", "--lr-warmup-iters=1", "--lr-decay-iters=100000", "--eval-iters=0",
            f"--data={setup.text}", *flags]


def bench_split(row):
    if row.layout.pp == 1:
        return []
    return ["--split", ",".join(map(str, split(row.model, row.layout.pp, row.order.chunks, "v" if row.order.schedule == "zb-v" else "loop")))]


def shared_by_peer(row):
    return ["--model", row.model.name, "--seq", str(row.model.seq), "--micro-batch", str(row.micro_batch), "--num-micro", str(row.micro_batches()),
            "--steps", str(row.steps), *bench_split(row)]


def peer_command(row, setup):
    """None where PyTorch has nothing of the kind."""
    layout, order = row.layout, row.order
    if not setup.peer or layout.tp > 1:
        return None
    if layout.pp > 1:
        if layout.dp > 1 or not order.peer:
            return None
        how = ["--parallel", "pp", "--schedule", order.peer, "--chunks", str(order.chunks)]
    else:
        how = ["--parallel", "fsdp"] if layout.dp > 1 else []
        how += ["--sdpa", "cudnn"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(layout.size())]
    return [setup.python, *(launcher if setup.backend == "cuda" and layout.size() > 1 else []), setup.peer, *shared_by_peer(row), *how]


def speed_commands(row, setup, folder):
    if setup.measures_by_bench(row):
        # Without it the activations of 4,096 tokens and of all layers do not fit beside the parameters.
        recompute = ["--recompute", "selective"] if row.part == 2 else []
        layout = row.layout
        ours = [setup.program("bench_gpu_step"), *shared_by_peer(row), "--tp", str(layout.tp), "--pp", str(layout.pp), "--dp", str(layout.dp),
                *(["--zero1"] if layout.zero1 else []), "--result-every", "1", "--tune", "--tuned", f"{folder}/{TUNED}", *recompute]
        if row.layout.pp > 1:
            ours += ["--schedule", row.order.schedule, "--chunks", str(row.order.chunks)]
    else:
        ours = trainer(row, setup, row.layout, f"--train-iters={row.steps}", f"--log-json={folder}/log.json")
    out = {"train": ours}
    if peer := peer_command(row, setup):
        out["peer"] = peer
    return out


def windows_commands(row, setup, folder):
    order = row.order
    return {"train": trainer(row, setup, row.layout, f"--train-iters={row.steps}", f"--log-json={folder}/log.json", f"--trace={folder}/trace",
                             "--trace-interval=1"),
            "metrics": [setup.tool("mega-plan"), "metrics", f"{folder}/trace", "--json", "--skip", "2"],
            "plan": [setup.tool("mega-plan"), "schedule", "--name", order.schedule, "--pp", str(row.layout.pp), "--micro-batches",
                     str(row.micro_batches()), "--json", *(["--vpp", str(order.chunks)] if order.chunks > 1 else []),
                     *(["--group-size", str(order.group)] if order.group else [])]}


def slow_commands(row, setup, folder):
    last = row.gpus() - 1
    out = {}
    flags = []
    if row.fault and setup.backend == "cuda":
        out["busy"] = [setup.program("bench_headline_busy"), str(last)]
    elif row.fault:
        flags = [f"--inject=slow-rank={last},factor={SLOWED}"]
    out["train"] = trainer(row, setup, row.layout, f"--train-iters={row.steps}", f"--log-json={folder}/log.json", f"--trace={folder}/trace",
                           "--trace-interval=1", *flags)
    out["report"] = [setup.tool("mega-scan"), "report", f"{folder}/trace", "--json"]
    return out


def killed_commands(row, setup, folder):
    """`processes` is what each rank's process runs, or what starts them all."""
    saved = [f"--save={folder}/checkpoints", "--save-interval=4", f"--timeout={DEADLINE}"]
    if setup.backend == "cuda":
        processes = trainer(row, setup, row.layout, "--train-iters=100000", *saved, program="bench_headline_processes")
    else:
        processes = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", str(row.gpus()),
                     *trainer(row, setup, row.layout, "--train-iters=100000", *saved, program=f"mega-{row.model.program}-mpi")]
    return {"processes": processes,
            "resumed": trainer(row, setup, row.again, f"--train-iters={STEPS}", f"--load={folder}/checkpoints", f"--log-json={folder}/resumed.json"),
            "whole": trainer(row, setup, row.layout, f"--train-iters={STEPS}", f"--log-json={folder}/whole.json")}


def losses_commands(row, setup, folder):
    return {"train": trainer(row, setup, row.layout, f"--train-iters={row.steps}", f"--log-json={folder}/log.json")}


def commands(row, setup, folder):
    """What is run for a row, by purpose, in order."""
    return {"windows": windows_commands, "speed": speed_commands, "losses": losses_commands, "slow": slow_commands,
            "killed": killed_commands}[row.kind](row, setup, folder)

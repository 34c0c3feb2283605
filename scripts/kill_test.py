#!/usr/bin/env python3
"""kill_test.py [RUNS] [--tool PATH] [--seed N] [--jobs N]: a run is never lost.

Starts RUNS (12) small training runs, of graphs and of images in turn, kills each one to four times at random moments with SIGKILL, SIGTERM or
SIGINT, calls it again with --resume until it ends, and compares every tensor of its last checkpoint, its curve and its result bit for bit with
those of a run that nobody disturbed. A run killed by SIGKILL may lose --checkpoint-every; one that was asked to stop loses nothing."""
import argparse, concurrent.futures, json, os, random, signal, struct, subprocess, sys, tempfile, time

EVERY = 0.12  # seconds between checkpoints
SLACK = 3.0   # more that a step, writing the file and a busy machine may take
GRAPH = ["--data", "synthetic:arxiv,scale=0.01", "--hidden", "64", "--epochs", "60", "--eval-every", "3"]
IMAGES = ["--data", "synthetic-images:classes=4,size=16,count=480,test=48", "--model", "resnet18", "--width", "8", "--batch", "16",
          "--epochs", "3", "--lr", "0.05"]
KINDS = [("graph", GRAPH, m) for m in ("satchel", "exact", "blockwise", "fp32")], \
        [("images", IMAGES, m) for m in ("satchel", "actnn", "satchel,mean_bits=2.5", "division", "fp32")]
SIGNALS = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT]
COMPARED = ("test", "valid", "train", "best_test", "best_epoch", "loss", "epochs", "steps", "curve", "data_digest")


def tensors_of(path):
    """Name to (header, bytes), and the metadata."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        values = file.read()
    about = header.pop("__metadata__")
    return {n: (t["dtype"], t["shape"], values[slice(*t["data_offsets"])]) for n, t in header.items()}, about


class Runs:
    def __init__(self, tool, folder):
        self.tool, self.folder, self.whole = tool, folder, {}

    def command(self, kind, name):
        _, options, method = kind
        return [self.tool, "train", *options, "--method", method, "--threads", "1", "--checkpoint", f"{name}.st", "--json", f"{name}.json",
                "--checkpoint-every", str(EVERY / 60), "--resume"]

    def start(self, kind, name):
        return subprocess.Popen(self.command(kind, name), cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def result(self, name):
        with open(f"{self.folder}/{name}.json") as file:
            run = json.load(file)["runs"][0]
        return {key: run.get(key) for key in COMPARED}, tensors_of(f"{self.folder}/{name}.st")[0]

    def reference(self, kind):
        """The run that nobody disturbs: its result, and how long it took."""
        name, began = f"whole-{kind[0]}-{kind[2]}", time.monotonic()
        process = self.start(kind, name)
        error = process.communicate()[1]
        assert process.returncode == 0, error.decode()
        return self.result(name), time.monotonic() - began

    def disturbed(self, number, kind, dice):
        """Kills a run and lets it end. Returns what was done to it and, of each SIGKILL, the seconds since its last
        checkpoint, or since its start where that is later."""
        name, (expected, seconds) = f"run{number}", self.whole[kind]
        story, lost = [], []
        kills = dice.randint(1, 4)
        while len(story) < kills:
            how, began, process = dice.choice(SIGNALS), time.time(), self.start(kind, name)
            try:
                process.wait(dice.uniform(0.1, 0.8) * seconds)
            except subprocess.TimeoutExpired:
                pass
            if process.poll() is not None:  # it ended first
                process.communicate()
                if story:
                    break
                os.remove(f"{self.folder}/{name}.st")
                continue
            before = time.time()
            process.send_signal(how)
            error = process.communicate()[1].decode()
            story.append(f"-{int(how)}")
            path = f"{self.folder}/{name}.st"
            if how == signal.SIGKILL:
                if os.path.exists(path):
                    lost.append(before - max(began, min(before, os.path.getmtime(path))))
                    assert lost[-1] <= EVERY + SLACK, f"{name}: {lost[-1]:.2f} s since the last checkpoint"
            elif process.returncode == 128 + how:  # else it came before training began, or after its end
                self.check_stopped(name, error)
            else:
                assert process.returncode in (0, -how), f"{name}: exit code {process.returncode}: {error}"
        process = self.start(kind, name)
        error = process.communicate()[1].decode()
        assert process.returncode == 0, f"{name}: exit code {process.returncode}: {error}"
        result, tensors = self.result(name)
        for key in COMPARED:
            assert result[key] == expected[0][key], f"{name}, {kind[2]}: {key} is {result[key]}, undisturbed {expected[0][key]}"
        assert tensors.keys() == expected[1].keys(), f"{name}: other tensors"
        for key, value in tensors.items():
            assert value == expected[1][key], f"{name}, {kind[2]}: {key} differs"
        left = [f for f in os.listdir(self.folder) if f.startswith(f"{name}.") and ".tmp." in f]
        assert not left, f"{name} left {left}"
        return kind, story, lost

    def check_stopped(self, name, error):
        """A run that was asked to stop said so at once, and its checkpoint stands where its JSON does."""
        assert "stopping after this" in error, f"{name}: {error}"
        with open(f"{self.folder}/{name}.json") as file:
            all_runs = json.load(file)
        state = json.loads(tensors_of(f"{self.folder}/{name}.st")[1]["state"])
        run = all_runs["runs"][0]
        assert all_runs["interrupted"], name
        assert (run["epochs"], run["steps"]) == (state["epoch"], state["step"]), f"{name}: {run['epochs']} {run['steps']}, {state}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="?", type=int, default=12)
    parser.add_argument("--tool", default="build/bin/satchel")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the moments and signals")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count()), help="runs at once")
    o = parser.parse_args()
    dice, began = random.Random(o.seed), time.monotonic()
    kinds = [KINDS[i % 2][i // 2 % len(KINDS[i % 2])] for i in range(o.runs)]
    with tempfile.TemporaryDirectory(prefix="satchel-kill-") as folder, concurrent.futures.ThreadPoolExecutor(o.jobs) as pool:
        runs = Runs(os.path.abspath(o.tool), folder)
        wanted = list(dict.fromkeys((k, tuple(opts), m) for k, opts, m in kinds))
        runs.whole = dict(zip(wanted, pool.map(runs.reference, wanted)))
        jobs = [pool.submit(runs.disturbed, i, (k, tuple(opts), m), random.Random(dice.random())) for i, (k, opts, m) in enumerate(kinds)]
        done, failed = [], 0
        for i, job in enumerate(jobs):
            try:
                kind, story, lost = job.result()
                done.append((story, lost))
                print(f"run {i:>2}  {kind[0]:<6} {kind[2]:<16} kill {' '.join(story) or 'none'}", flush=True)
            except AssertionError as error:
                failed += 1
                print(f"run {i:>2}  FAILED {error}", flush=True)
    kills = [s for story, _ in done for s in story]
    lost = [x for _, all_lost in done for x in all_lost]
    print(f"{len(done)} of {o.runs} runs resumed bit for bit after {len(kills)} kills "
          f"({', '.join(f'{kills.count(s)} {s}' for s in sorted(set(kills)))}); longest since a checkpoint at -9: "
          f"{max(lost, default=0):.2f} s of {EVERY} s asked for; {time.monotonic() - began:.0f} s, seed {o.seed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

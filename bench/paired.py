#!/usr/bin/env python3
"""Is a method as accurate as fp32? Runs of equal seeds are compared with one another.

  bench/paired.py [--limit 0.5] [--base fp32] FILE.json …

The files are what `satchel train --json` writes; runs may lie in any number of them, one file a method or a seed. Of each method: the
mean score, the mean loss against the base over seeds that both have, its standard error, and mean − 1.65 standard errors, which must be at
most the limit (docs/theory.md, section 12). "Within errors": the mean itself is above it, and more seeds may tell. Exits with 1 where a
method is above the limit. Standard library only.
"""
import json
import math
import sys


def read(paths):
    """{(setting, method): {seed: test}}; setting is model, data and metric."""
    scores = {}
    for path in paths:
        with open(path, encoding="utf-8") as file:
            for run in json.load(file)["runs"]:
                if run.get("test") is None:
                    sys.exit(f"paired: {path}: {run['method']}, seed {run['seed']} has no test score")
                seeds = scores.setdefault(((run["model"], run["data"], run["metric"]), run["method"]), {})
                if seeds.setdefault(run["seed"], run["test"]) != run["test"]:
                    sys.exit(f"paired: {path}: {run['method']}, seed {run['seed']} is there twice, with {seeds[run['seed']]} and {run['test']}")
    return scores


def spread(values):
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1)) if len(values) > 1 else float("nan")


def compared(scores, base, limit):
    """Rows of the table, and whether every method is within the limit."""
    rows, good = [], True
    for (setting, method), seeds in scores.items():
        truth = scores.get((setting, base), {})
        both = sorted(seeds.keys() & truth.keys())
        mean, deviation = spread(list(seeds.values()))
        row = [" ".join(setting[::2]), method, f"{mean:.2f} ± {deviation:.2f}", str(len(seeds)), "", "", ""]
        if method != base:
            if len(both) < 2:
                sys.exit(f"paired: {method} must have at least 2 seeds that {base} has, got {len(both)}")
            loss, error = spread([truth[s] - seeds[s] for s in both])
            error /= math.sqrt(len(both))
            bound = loss - 1.65 * error
            good = good and bound <= limit
            row[4:] = [f"{-loss:+.2f} ± {error:.2f}", f"{bound:.2f}", "NO" if bound > limit else "yes" if loss <= limit else "within errors"]
        rows.append(row)
    return rows, good


def main(arguments):
    options = {"--limit": "0.5", "--base": "fp32"}
    paths = []
    words = iter(arguments)
    for word in words:
        if word in options:
            options[word] = next(words, "")
        else:
            paths.append(word)
    if not paths:
        sys.exit(__doc__)
    limit = float(options["--limit"])
    rows, good = compared(read(paths), options["--base"], limit)
    head = ["model", "method", "score ± deviation", "seeds", f"− {options['--base']} ± standard error", "loss − 1.65 errors", f"≤ {limit:g}"]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

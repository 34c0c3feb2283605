"""bench/tables.py on a small made-up run: every table, its figures, and what happens where a measurement is missing."""
import json
import pathlib
import re
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import tables  # noqa: E402

MIB, GIB = 2**20, 2**30


def graph(method, ms, peak, **more):
    return {"method": method, "fits": True, "epoch_seconds": ms / 1e3, "saved_bytes": 10 * MIB, "loss_bytes": 0, "peak_bytes": peak * MIB, **more}


def image(method, ms, gib):
    return {"method": method, "fits": True, "error": None, "step_seconds": ms / 1e3, "saved_bytes": gib * GIB, "peak_bytes": 2 * gib * GIB}


def trained(tests):
    """Runs of {method: [test of seed 0, of seed 1]}."""
    saved = {"fp32": 785.5 * MIB}
    return {"runs": [{"method": m, "seed": s, "test": t, "saved_bytes": saved.get(m, 11.75 * MIB)} for m, all_ in tests.items() for s, t in enumerate(all_)]}


def codec_result(op, seconds):
    return {"op": op, "seconds": seconds, "share": 1.5, "rmse": 0.7173, "kernel": "avx2"}


def sample():
    """The JSON of a whole run: file name to content."""
    plan_row = {"name": "EXACT", "published_mib": 30.47, "model_bytes": 30.46 * MIB, "own_bytes": 29.72 * MIB, "method": "exact",
                "parts": dict.fromkeys(["features", "norms", "activations", "masks", "metadata", "labels", "projections"], MIB)}
    plan = {"rows": [plan_row], "methods": [{"method": "satchel", "own_bytes": 11.63 * MIB}]}
    accuracy = trained({"fp32": [64.0, 65.0], "satchel": [64.2, 65.0]})
    measured = {"seeds": 10, "t": -2.3, "z": 0.4, "bias": 0.0019, "noise": 0.0571}
    tensors = [{"name": "first", "first": {**measured, "t": 0.1}}, {"name": "norm.gamma", "first": measured}]
    files = {"train_arxiv": accuracy, "train_fashion": accuracy, "train_cifar10": accuracy,
             **{f"train_{data}_{model}": accuracy for data in tables.SMALL for model in ("gcn", "sage")},
             "graph_cpu": {"results": [graph("torch", 145.4, 109.8), graph("satchel", 78.0, 33.9)]},
             "codec_cpu": {"results": [codec_result("encode", 0.0289)]}, "gpu/codec": {"results": [codec_result("encode", 0.0000584)]},
             "bias": {"biased": 0, "results": [{"net": "batch", "loss": "squares", "rows": 4096, "tensors": tensors}]},
             "bias_pairs": {"biased": 0, "results": [{"net": net, "tensors": tensors[:n]} for net, n in (
                 ("batch_leaky_relu_rows", 1), ("batch_leaky_relu_images_dropout", 2), ("rms_leaky_relu_rows", 1))]},
             "plan_arxiv": plan, "plan_products": plan, "plan_division": {"columns": [{"model": "resnet50", "batch": 512, "rows": [
                 {"name": "FP32", "published_gib": None, "model_bytes": 40.96 * GIB, "own_bytes": 40.97 * GIB},
                 {"name": "ActNN", "published_gib": 3.89, "model_bytes": 3.71 * GIB, "own_bytes": 3.18 * GIB}],
                 "methods": [{"method": "satchel", "own_bytes": 2.23 * GIB}]}]},
             "gpu/satchel_products": {"results": [{"method": "torch", "fits": False}, graph("satchel", 90.7, 3267)]},
             "gpu/spmm": {"results": [{"graph": "power", "type": "f32", "columns": 16, "forward": {"seconds": 7e-5, "ratio": 0.42},
                                       "transpose": {"seconds": 9e-5, "ratio": 0.54}}]},
             "gpu/product": {"results": [{"hidden": 128, "product": "forward 1", "split": True, "seconds": 0.000127, "ratio": 0.36,
                                          "error": 1.1e-7, "torch_seconds": 0.000358, "torch_error": 1.1e-7}]},
             "gpu/batch": {"results": [{"method": m, "batch": b, "planned_batch": b, "images_per_second": 2561.4, "error": None}
                                       for m, b in (("fp32", 176), ("satchel", 864))]}}
    for hidden, tf32 in tables.SETTINGS:
        name = f"h{hidden}_tf32_{tf32}"
        files[f"gpu/satchel_{name}"] = {"results": [graph("torch", 4.3, 977), graph("satchel", 1.79, 173)]}
        files[f"gpu/satchel_{name}_graph"] = {"results": [graph("satchel", 1.63, 173)]}
        files[f"gpu/torch_{name}"] = {"results": [graph("fp32", 5.51, 951)]}
    for types in ("tf32", "bf16"):
        files[f"gpu/satchel_images_{types}"] = {"results": [image("fp32", 81.4, 20.34), image("satchel", 75.5, 1.12)]}
        files[f"gpu/torch_images_{types}"] = {"results": [image("compile-1", 67.9, 19.95)]}
    for model, step in (("gpt", 28.9), ("resnet50", 54.3)):
        files[f"python/{model}"] = {"results": [image("eager", step, 5.32), image("satchel", 27.2, 1.1), {"method": "convert", "error": "no"}]}
    return files


class TablesTest(unittest.TestCase):
    def setUp(self):
        self.said = []

    def run_of(self, files):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        root = pathlib.Path(folder.name)
        for inner in ("gpu", "python"):
            (root / inner).mkdir()
        commands = {"train_arxiv": "satchel train --device cuda", "graph_cpu": "satchel bench graph", "gpu/run_cuda": "bench/run_cuda.sh"}
        about = {"commit": "abc1234", "date": "2026-11-16", "cpu": "a CPU, 2 cores", "gpu": "a GPU", "commands": commands}
        for name, content in {**files, "run": about}.items():
            (root / f"{name}.json").write_text(json.dumps(content))
        return tables.Run(root)

    def made(self, name, files=None):
        return tables.rewritten(f"before\n<!-- table: {name} -->\nold\n<!-- end -->\nafter", self.run_of(files or sample()), self.said.append)

    def test_every_table(self):
        for name in tables.TABLES:
            with self.subTest(name):
                page = self.made(name)
                self.assertNotIn("old", page)
                self.assertTrue(page.startswith("before\n<!-- table:") and page.endswith("<!-- end -->\nafter"))
                self.assertIn("abc1234", page)
                rows = [line for line in page.split("\n") if line.startswith("|")]
                self.assertGreaterEqual(len(rows), 3)
                self.assertEqual(len({line.count("|") for line in rows}), 1, "rows of one table have as many cells")
        self.assertEqual(self.said, [])

    def test_python_models(self):
        page = self.made("python-models")
        self.assertIn("| PyTorch, eager | 28.9 ms | 5.32 GiB | 10.64 GiB | 54.3 ms |", page)
        self.assertIn("| `satchel.compile()` | 27.2 ms | 1.10 GiB |", page)
        self.assertNotIn("convert", page)  # it failed

    def test_figures(self):
        self.assertIn("| `satchel` | 64.60 ± 0.57 | +0.10 ± 0.10 | 11.75 MiB | 66.9× |", self.made("graph-accuracy"))
        self.assertIn("`satchel train --device cuda` · a GPU · 2026-11-16 · abc1234", self.made("graph-accuracy"))
        self.assertIn("| `satchel` | 78.0 ms | 0.54 | 10.00 MiB | 33.90 MiB |", self.made("graph-step-cpu"))
        self.assertIn("`satchel bench graph` · a CPU, 2 cores", self.made("graph-step-cpu"))
        self.assertIn("| **`satchel`, CUDA graph** | 1.63 (0.38) · 173 (0.18) |", self.made("graph-step-gpu"))
        self.assertIn("| torch | does not fit |", self.made("graph-products"))
        self.assertIn("| torch.compile, memory budget 1 | 67.9 ms (0.83) |", self.made("images-step"))
        self.assertIn("| `satchel` | 864 | 4.9× | 864 | 2,561 |", self.made("images-batch"))
        self.assertIn("| batch | squares | 4,096 | norm.gamma | −2.3 | +0.4 | 0.19 % | 5.71 % |", self.made("bias"))
        self.assertIn("| leaky_relu | −2.3, +0.4 | +0.1, +0.4 |", self.made("bias-pairs"))

    def test_summary_has_ten_rows(self):
        self.assertEqual(sum(line.startswith("|") for line in self.made("summary").split("\n")), 12)

    def test_missing_measurements_leave_tables_alone(self):
        files = sample()
        del files["train_arxiv"]
        self.assertIn("old", self.made("graph-accuracy", files))
        self.assertIn("old", self.made("summary", files))
        self.assertEqual(self.said, ["graph-accuracy: not measured (train_arxiv.json), left as it is",
                                     "summary: not measured (train_arxiv.json), left as it is"])

    def test_a_part_of_a_table_is_not_enough(self):
        for name, file in (("codec", "gpu/codec"), ("graph-small", "train_tolokers_sage"), ("images-accuracy", "train_fashion"),
                           ("graph-step-gpu", "gpu/satchel_h256_tf32_off")):
            files = sample()
            del files[file]
            with self.subTest(name):
                self.assertIn("old", self.made(name, files))

    def test_published_figures_keep_their_digits(self):
        self.assertIn("| EXACT | 30.47 |", self.made("plan-arxiv"))
        files = sample()
        files["plan_products"]["rows"][0]["published_mib"] = 16480.0
        self.assertIn("| EXACT | 16,480 |", self.made("plan-products", files))

    def test_divisions_table_says_by_how_much_the_model_misses(self):
        made = self.made("plan-division")
        self.assertIn("| ResNet-50, batch 512 | FP32 | did not fit | 40.96 | 40.97 |", made)
        self.assertIn("| | ActNN | 3.89 | 3.71 (−4.6 %) | 3.18 |", made)
        self.assertIn("| | `satchel` | | | 2.23 |", made)

    def test_docs_name_tables_that_exist(self):
        names = [n for page in (ROOT / "docs").glob("*.md") for n in re.findall(r"<!-- table: ([\w-]+) -->", page.read_text(encoding="utf-8"))]
        self.assertEqual(sorted(names), sorted(tables.TABLES))


if __name__ == "__main__":
    unittest.main()

"""bench/paired.py compares runs of equal seeds, from any number of files."""
import contextlib
import importlib.util
import io
import json
import pathlib
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("paired", ROOT / "bench" / "paired.py")
paired = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(paired)


def runs(method, tests):
    return {"runs": [{"method": method, "seed": s, "test": t, "model": "fcn", "data": "d", "metric": "mIoU"} for s, t in tests.items()]}


class PairedTest(unittest.TestCase):
    def said(self, *files):
        with tempfile.TemporaryDirectory() as folder:
            paths = []
            for i, file in enumerate(files):
                paths.append(f"{folder}/{i}.json")
                pathlib.Path(paths[-1]).write_text(json.dumps(file), encoding="utf-8")
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                code = paired.main(paths)
            return code, out.getvalue()

    def test_loss_and_bound_by_hand(self):
        # Losses 1, 2, 3: mean 2, error 1/√3; 2 − 1.65·.577 = 1.05.
        code, text = self.said(runs("fp32", {0: 50, 1: 60, 2: 70}), runs("satchel", {0: 49, 1: 58}), runs("satchel", {2: 67}))
        self.assertEqual(code, 1)
        self.assertIn("| fcn mIoU | satchel | 58.00 ± 9.00 | 3 | -2.00 ± 0.58 | 1.05 | NO |", text)

    def test_a_method_that_is_as_good(self):
        code, text = self.said(runs("fp32", {0: 50, 1: 60}), runs("actnn", {0: 50.2, 1: 60.4}))
        self.assertEqual(code, 0)
        self.assertIn("| yes |", text)

    def test_a_mean_above_the_limit_may_be_chance(self):
        code, text = self.said(runs("fp32", {0: 50, 1: 60}), runs("actnn", {0: 47, 1: 61}))
        self.assertEqual(code, 0)
        self.assertIn("| within errors |", text)

    def test_what_cannot_be_compared_is_said(self):
        with self.assertRaisesRegex(SystemExit, "at least 2 seeds that fp32 has, got 0"):
            self.said(runs("fp32", {0: 50, 1: 60}), runs("actnn", {2: 50, 3: 60}))
        with self.assertRaisesRegex(SystemExit, "is there twice"):
            self.said(runs("fp32", {0: 50}), runs("fp32", {0: 51}))


if __name__ == "__main__":
    unittest.main()

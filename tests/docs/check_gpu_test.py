#!/usr/bin/env python3
"""scripts/check_gpu.py without a GPU: how parts are chosen, run, ended and summed up."""
import pathlib
import subprocess
import sys
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import check_gpu  # noqa: E402


class CheckGpu(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.out = pathlib.Path(self.folder.name)

    def tearDown(self):
        self.folder.cleanup()

    def run_part(self, *command, limit=20, left=60.0):
        return check_gpu.run(check_gpu.Part("part", "tests", command, limit), self.out, time.monotonic() + left)

    def test_states(self):
        self.assertEqual(self.run_part("true")["state"], "passed")
        self.assertEqual(self.run_part("false")["state"], "FAILED")
        self.assertEqual(self.run_part("sh", "-c", "exit 77")["state"], "skipped")
        self.assertEqual(self.run_part("/no/such/program")["state"], "FAILED")
        self.assertEqual(self.run_part("true", left=1.0)["state"], "not run")

    def test_a_limit_ends_a_part_with_its_children(self):
        mark = self.out / "child"
        row = self.run_part("sh", "-c", f"(sleep 3; touch {mark}) & echo begun; wait", limit=1)
        self.assertEqual((row["state"], row["result"]), ("TIMEOUT", "begun"))
        time.sleep(3.5)
        self.assertFalse(mark.exists())

    def test_the_closing_line_is_shown(self):
        self.assertEqual(check_gpu.result_of("[  PASSED  ] 7 tests.\n\n  YOU HAVE 2 DISABLED TESTS\n"), "[  PASSED  ] 7 tests.")
        self.assertEqual(check_gpu.result_of("x\n3 failed, 5 passed in 2s\n"), "3 failed, 5 passed in 2s")
        self.assertEqual(check_gpu.result_of("a\nlast\n"), "last")
        self.assertEqual(check_gpu.result_of(""), "")

    def test_parts_are_chosen_by_name_pattern_and_group(self):
        every = check_gpu.parts(self.out)
        self.assertEqual(len({p.name for p in every}), len(every))
        self.assertEqual([p.name for p in check_gpu.chosen(every, "codec")], ["codec"])
        self.assertTrue(all(p.name.startswith("cuda_") for p in check_gpu.chosen(every, "cuda_*")))
        self.assertEqual({p.group for p in check_gpu.chosen(every, "tests,sanitize")}, {"tests", "sanitize"})
        with self.assertRaisesRegex(SystemExit, "got 'nothing'"):
            check_gpu.chosen(every, "nothing")

    def test_every_family_and_file_is_there(self):
        cmake = (ROOT / "cmake/SatchelTests.cmake").read_text()
        families = {line.split("(")[1].split()[0] for line in cmake.splitlines() if line.strip().startswith("satchel_cuda_test(") and "family" not in line}
        self.assertEqual(set(check_gpu.FAMILIES), families)
        self.assertLessEqual(set(check_gpu.SHARDS), families)
        for name in check_gpu.PYTHON_TESTS:
            self.assertTrue((ROOT / f"python/tests/{name}.py").exists(), name)

    def test_errors_name_what_was_given(self):
        for given in (["--only", "nothing"], ["--seconds", "0"], ["--jobs", "0"]):
            made = subprocess.run([sys.executable, str(ROOT / "scripts/check_gpu.py"), *given], capture_output=True, text=True)
            self.assertNotEqual(made.returncode, 0)
            self.assertIn("[check_gpu]", made.stderr)


if __name__ == "__main__":
    unittest.main()

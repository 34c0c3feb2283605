"""scripts/reproduce.py reads figures from tables, and says which one is gone."""
import importlib.util
import pathlib
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("reproduce", ROOT / "scripts" / "reproduce.py")
reproduce = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(reproduce)


class ReproduceTest(unittest.TestCase):
    def setUp(self):
        self.tables = reproduce.Tables("results.md")
        self.tables.text = "# A\n\n<!-- table: t -->\n\n| method | b |\n|---|---|\n| `x` | 1 |\n| **y** | 2 |\n\n<!-- end -->\n"

    def test_cells_are_found_by_row_and_head(self):
        self.assertEqual(self.tables.cell("t", "x", "b"), "1")
        self.assertEqual(self.tables.cell("t", "y", 1), "2")

    def test_what_is_gone_is_named(self):
        for call, part in ((("u", "x", "b"), "no table u"), (("t", "z", "b"), "no row"), (("t", "x", "c"), "no column c")):
            with self.assertRaisesRegex(reproduce.Missing, part):
                self.tables.cell(*call)

    def test_a_figure_that_changes_makes_the_page_old(self):
        before = reproduce.page()
        old = reproduce.RESULTS.text
        try:
            reproduce.RESULTS.text = old.replace(reproduce.accuracy("exact"), "0.01 ± 0.02")
            self.assertNotEqual(reproduce.RESULTS.text, old)
            self.assertNotEqual(reproduce.page(), before)
        finally:
            reproduce.RESULTS.text = old

    def test_every_paper_has_rows_with_all_five_cells(self):
        for name, _, entries in reproduce.PAPERS:
            rows = list(entries())
            self.assertGreater(len(rows), 5, name)
            for row in rows:
                self.assertEqual(len(row), 5, row)
                self.assertTrue(all(cell and "|" not in cell for cell in row), row)


if __name__ == "__main__":
    unittest.main()

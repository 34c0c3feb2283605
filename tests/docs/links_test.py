"""scripts/check_links.py: each kind of mistake is found, with file and line."""
import pathlib
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import check_links  # noqa: E402


class LinksTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name).resolve()
        (self.root / "docs").mkdir()
        self.write("mkdocs.yml", "nav:\n  - Home: index.md\n  - A: a.md\n")
        self.write("README.md", "# Readme\n")
        self.write("CONTRIBUTING.md", "# Contributing\n")
        self.write("CHANGELOG.md", "# Changelog\n")
        self.write("docs/a.md", "# A page\n\n## Exit codes\n\ntext\n")

    def write(self, name, text):
        (self.root / name).write_text(text, encoding="utf-8")

    def errors(self):
        return check_links.Checker(self.root).check()

    def test_right_links(self):
        self.write("README.md", "# R\n\n[a](docs/a.md), [codes](docs/a.md#exit-codes), [here](#r), [web](https://example.org/x), `[no](link)`\n\n```\n[x](y)\n```\n")
        self.assertEqual(self.errors(), [])

    def test_missing_file(self):
        self.write("README.md", "# R\n\n[b](docs/b.md) ![p](docs/p.svg)\n")
        self.assertEqual(self.errors(), ["README.md:3: docs/b.md leads to no file", "README.md:3: docs/p.svg leads to no file"])

    def test_missing_anchor(self):
        self.write("README.md", "# R\n\n[x](docs/a.md#exit-code)\n")
        self.assertEqual(self.errors(), ["README.md:3: docs/a.md#exit-code leads to no heading; there is exit-codes"])

    def test_anchor_that_differs_in_mkdocs(self):
        self.write("docs/a.md", "# A\n\n## Graphs: `--data`\n\n[x](#graphs---data)\n")
        self.assertEqual(self.errors(), ["docs/a.md:5: #graphs---data has another anchor in MkDocs: use plain words in that heading"])

    def test_list_without_an_empty_line(self):
        self.write("docs/a.md", "# A\n\nWhy:\n- one\n\n- two\n  more\n- three\n")
        self.assertEqual(self.errors(), ["docs/a.md:4: an empty line is missing before the list or table"])

    def test_page_that_is_not_in_the_navigation(self):
        self.write("docs/b.md", "# B\n")
        self.assertEqual(self.errors(), ["docs/b.md:1: is not in mkdocs.yml"])

    def test_copied_program(self):
        self.write("main.cpp", "int main() {}\n")
        self.write("docs/a.md", "# A\n\n<!-- file: main.cpp -->\n```cpp\nint main() {}\n```\n")
        self.assertEqual(self.errors(), [])
        self.write("docs/a.md", "# A\n\n<!-- file: main.cpp -->\n```cpp\nint main() { }\n```\n")
        self.assertEqual(self.errors(), ["docs/a.md:5: the code is not that of main.cpp"])

    def test_source_in_architecture(self):
        self.write("mkdocs.yml", "nav:\n  - A: a.md\n  - B: architecture.md\n")
        self.write("docs/architecture.md", "# B\n\n`satchel/core/none.h`\n")
        self.assertEqual(self.errors(), ["docs/architecture.md:3: satchel/core/none.h leads to no file"])

    def test_long_readme(self):
        self.write("README.md", "# R\n" + "\n" * 100)
        self.assertEqual(self.errors(), ["README.md:101: README.md must have at most 100 lines, got 101"])


if __name__ == "__main__":
    unittest.main()

#!/usr/bin/env python3
"""Checks README.md, CONTRIBUTING.md, CHANGELOG.md and docs/: prints FILE:LINE: what is wrong, and exits with 1 where anything is.

  scripts/check_links.py [ROOT]

- Every relative link and picture leads to a file that is there, and every anchor to a heading. A heading that is linked to has the same
  anchor on GitHub and in MkDocs, which make them by different rules.
- Every page of docs/ is in mkdocs.yml, and every page named there exists.
- A code block after a comment <!-- file: PATH --> holds that file.
- Every file that docs/architecture.md names in backticks (folder/name.ext) exists.
- A list or a table after text has an empty line before it: MkDocs would make it part of the paragraph.
- README.md has at most 100 lines.
Standard library only.
"""
import pathlib
import re
import sys
import unicodedata

README_LINES = 100
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
SOURCE = re.compile(r"`((?:satchel|tools|tests|bench|scripts|cmake|examples|docs)/[\w./{},-]+\.\w+)`")


def github_anchor(heading):
    """GitHub's: lower case, punctuation out, each space a dash."""
    kept = (c for c in heading.strip().lower() if c.isalnum() or c in " -_")
    return "".join(kept).replace(" ", "-")


def mkdocs_anchor(heading):
    """Python-Markdown's toc: ASCII only, punctuation out, runs of spaces and dashes one dash."""
    text = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    text = re.sub(r"[^\w\s-]", "", text).strip().lower()
    return re.sub(r"[-\s]+", "-", text)


class Page:
    """One Markdown file: its lines outside of code, its headings and its code blocks after <!-- file: … -->."""

    def __init__(self, path):
        self.path = path
        self.lines = path.read_text(encoding="utf-8").split("\n")
        self.text, self.copies = [], []  # (line number, line) outside of code; (line number, path, code)
        fence, copied, block = None, None, []
        for number, line in enumerate(self.lines, 1):
            opened = re.match(r" *(`{3,})", line)
            if fence is None and opened:
                fence, block = opened[1], []
            elif fence is not None:
                if line.strip() == fence:
                    if copied:
                        self.copies.append((number - len(block), copied, "\n".join(block) + "\n"))
                    fence, copied = None, None
                else:
                    block.append(line)
            else:
                self.text.append((number, line))
                comment = re.match(r"<!-- file: (\S+) -->", line)
                copied = comment[1] if comment else (copied if not line.strip() else None)
        headings = [re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", m[1]) for _, line in self.text if (m := re.match(r"#+ +(.*)", line))]
        self.github = numbered(map(github_anchor, headings), "-")
        self.mkdocs = numbered(map(mkdocs_anchor, headings), "_")


def numbered(anchors, mark):
    """Anchors in order; the second of a name gets a number, which is not to be linked to anyway."""
    seen, out = {}, []
    for anchor in anchors:
        out.append(anchor + (f"{mark}{seen[anchor]}" if anchor in seen else ""))
        seen[anchor] = seen.get(anchor, 0) + 1
    return out


class Checker:
    def __init__(self, root):
        self.root, self.pages, self.errors = root, {}, []

    def fail(self, path, line, what):
        self.errors.append(f"{path.relative_to(self.root)}:{line}: {what}")

    def page(self, path):
        if path not in self.pages:
            self.pages[path] = Page(path)
        return self.pages[path]

    def check_link(self, page, number, target):
        if re.match(r"[a-z]+:", target):
            return
        path, _, anchor = target.partition("#")
        file = (page.path.parent / path).resolve() if path else page.path
        if not file.exists():
            self.fail(page.path, number, f"{target} leads to no file")
        elif anchor and file.suffix == ".md":
            other = self.page(file)
            if anchor not in other.github:
                near = ", ".join(a for a in other.github if a[:4] == anchor[:4])
                self.fail(page.path, number, f"{target} leads to no heading" + (f"; there is {near}" if near else ""))
            elif anchor not in other.mkdocs:
                self.fail(page.path, number, f"{target} has another anchor in MkDocs: use plain words in that heading")

    def check_page(self, path):
        page = self.page(path)
        before = ""
        for number, line in page.text:
            bare = re.sub(r"`[^`]*`", "``", line)
            for match in LINK.finditer(bare):
                self.check_link(page, number, match[1])
            starts = re.match(r"(- |\* |\d+\. |\|)", line)
            if starts and before.strip() and not re.match(r"( |- |\* |\d+\. |\||#|<!--)", before):
                self.fail(path, number, "an empty line is missing before the list or table")
            before = line if page.lines[number - 2:number - 1] != ["```"] else ""
        for number, source, code in page.copies:
            file = self.root / source
            if not file.is_file():
                self.fail(path, number, f"{source} leads to no file")
            elif file.read_text(encoding="utf-8") != code:
                self.fail(path, number, f"the code is not that of {source}")

    def check_sources(self, path):
        for number, line in self.page(path).text:
            for match in SOURCE.finditer(line):
                if not any((self.root / name).exists() for name in [match[1]]):
                    self.fail(path, number, f"{match[1]} leads to no file")

    def check_nav(self, pages):
        file = self.root / "mkdocs.yml"
        lines = file.read_text(encoding="utf-8").split("\n")
        named = {m[1]: number for number, line in enumerate(lines, 1) if (m := re.search(r": ([\w-]+\.md)$", line))}
        at_root = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
        for name, number in named.items():
            if not (self.root / at_root.get(name, f"docs/{name}")).is_file():
                self.fail(file, number, f"{name} leads to no file")
        for page in pages:
            if page.name not in named:
                self.fail(page, 1, "is not in mkdocs.yml")

    def check(self):
        docs = sorted((self.root / "docs").glob("*.md"))
        for path in [self.root / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + docs:
            self.check_page(path)
        self.check_nav(docs)
        if (architecture := self.root / "docs" / "architecture.md").exists():
            self.check_sources(architecture)
        readme = self.root / "README.md"
        length = len(readme.read_text(encoding="utf-8").splitlines())
        if length > README_LINES:
            self.fail(readme, length, f"README.md must have at most {README_LINES} lines, got {length}")
        return self.errors


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parent.parent).resolve()
    errors = Checker(root).check()
    if errors:
        sys.exit("\n".join(errors))
    print("links, anchors and pages are right")


if __name__ == "__main__":
    main()

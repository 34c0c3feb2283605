"""MkDocs: README.md, CONTRIBUTING.md and CHANGELOG.md as pages, and links that leave docs/ as plain text.

On a code host such a link opens the file; the built pages have no such file.
"""
import pathlib
import posixpath
import re

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}  # file at the root: page
LINK = re.compile(r"(!?)\[((?:[^\[\]]|`[^`]*`)*)\]\(([^()\s]+)\)")


def page_of(path):
    """The page that a file of the repository becomes; None where it is no page."""
    if path in PAGES:
        return PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else None


def with_page_links(markdown, folder):
    """Links as the pages need them. `folder`: of the Markdown file, from the repository's root."""

    def link(match):
        image, text, target = match.groups()
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target) or not path:
            return match[0]
        page = page_of(posixpath.normpath(posixpath.join(folder, path)))
        return f"{image}[{text}]({page}{'#' + anchor if anchor else ''})" if page else text

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.M | re.S)  # code stays as it is
    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in parts)


def on_files(files, config):
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=with_page_links(text, "")))
    return files


def on_page_markdown(markdown, page, **_):
    return markdown if page.file.src_uri in PAGES.values() else with_page_links(markdown, "docs")

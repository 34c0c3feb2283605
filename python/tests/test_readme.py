"""The programs in README.md and docs/python.md, word for word."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_programs(page, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # one writes a page
    programs = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S)
    names: dict = {}
    for program in programs:
        if "satchel.compile(" not in program.split("#")[0]:  # Inductor takes a minute; test_compile.py has it
            exec(compile(program, page, "exec"), names)
    assert "in all" in capsys.readouterr().out

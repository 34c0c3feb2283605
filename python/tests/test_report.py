"""report(): one page, complete, safe and by itself; and the meter's timeline and tables."""

import html.parser
import io
import json
import re

import pytest
import torch
from torch import nn

import satchel


class Parser(html.parser.HTMLParser):
    """Checks that every element is closed, and collects text and what would be fetched."""

    VOID = {"meta", "line", "rect", "path"}

    def __init__(self):
        super().__init__()
        self.open, self.text, self.fetched = [], [], []

    def handle_starttag(self, tag, attributes):
        self.fetched += [value for name, value in attributes if name in ("src", "href", "srcset", "data")]
        if tag in ("script", "link", "img", "iframe", "object"):
            self.fetched.append(tag)
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, (tag, self.open)

    def handle_data(self, text):
        self.text.append(text)


def parsed(path):
    text = path.read_text(encoding="utf-8")
    parser = Parser()
    parser.feed(text)
    assert not parser.open and not parser.fetched, (parser.open, parser.fetched)
    assert not re.search(r"https?:|url\(|@import", text)
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text
    return " ".join(" ".join(parser.text).split())


def metered(**options):
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 10))
    with satchel.packing(meter=True, model=model, **options) as p:
        loss = torch.sin(model(torch.randn(512, 64))).sum()
    return p, loss


def test_a_page(tmp_path):
    p, _ = metered()
    path = satchel.report(p, tmp_path / "page.html")
    text = parsed(path)
    for wanted in ("memory over a step", "by module", "by op", "What stayed exact, and why", "SinBackward0.self the policy has no row"):
        assert wanted in text, wanted
    assert f"{p.meter.before / p.meter.after:.1f} times less" in text and f"All {len(p.meter.lines)} fields" in text
    assert "NativeLayerNormBackward0.input 512×128 float32 4 bits" in text
    assert parsed(satchel.report(p.meter, str(tmp_path / "b.html"))) == text


def test_several_meters_and_names_from_outside(tmp_path):
    (a, _), (b, _) = metered(), metered(bits="8/8/8")
    text = parsed(satchel.report({"two <b>bits": a, "8": b.meter}, tmp_path / "page.html", title="a & b"))
    assert "two <b>bits" in text and text.count("What stayed exact") == 2 and "a & b" in text
    assert "step 2" in parsed(satchel.report([a, b], tmp_path / "page.html"))
    a.meter.lines[0].module = "<script>alert(1)</script>"
    a.meter.hidden["<Hidden>"] = 3
    assert "<script>alert(1)</script>" in parsed(satchel.report(a, tmp_path / "page.html")), "as text"


def test_many_modules_are_grouped_and_nothing_is_lost(tmp_path):
    layers = [nn.Linear(64, 64) for _ in range(40)]
    model = nn.Sequential(*layers)
    with satchel.packing(meter=True, model=model) as p:
        model(torch.randn(256, 64))
    page = tmp_path / "page.html"
    text = parsed(satchel.report(p, page))
    assert "26 others" in text
    bars = page.read_text().split('aria-label="by module"')[1].split("</svg>")[0]
    assert bars.count("<rect") == 2 + 2 * 15


def test_what_cannot_be_reported(tmp_path):
    for wrong in (None, 3, [], {}, [1], satchel.packing()):
        with pytest.raises(ValueError, match=r"\[report\]"):
            satchel.report(wrong, tmp_path / "page.html")
    with pytest.raises(ValueError, match=r"\[report\] a meter must have seen a step"):
        satchel.report(satchel.packing(meter=True), tmp_path / "page.html")
    seen, _ = metered()
    with pytest.raises(ValueError, match=r"\[report\] a meter must have seen a step, got 'b' without lines"):
        satchel.report({"a": seen, "b": satchel.packing(meter=True)}, tmp_path / "page.html")
    for path in ("", b"page.html", None, "a\0b", "\ud800.html"):
        with pytest.raises(ValueError, match=r"\[report\] path must be a file's name"):
            satchel.report(seen, path)
    assert not (tmp_path / "page.html").exists()


def test_halves_of_characters(tmp_path):
    seen, _ = metered()
    assert "&#55296;" in satchel.report({"\ud800": seen, "b": seen}, tmp_path / "page.html", title="\ud800").read_text(encoding="utf-8")


def test_timeline():
    p, loss = metered()
    over = p.meter.timeline()
    assert len(over) == 2 * len(p.meter.lines) + 2
    assert over[0] == over[-1] == (0, 0) and max(over) == (p.meter.before, p.meter.after) == over[len(over) // 2]
    assert over == over[::-1] and all(a[0] <= b[0] and a[1] <= b[1] for a, b in zip(over[: len(over) // 2], over[1:]))


def test_backward_lets_go_in_the_order_of_the_timeline():
    """Codes die in backward in the reverse of the order in which they were made."""
    import weakref

    dead = []
    make = satchel.kept.Code.__init__

    def watched(self, *args):
        make(self, *args)
        weakref.finalize(self, dead.append, len(made))
        made.append(weakref.ref(self))

    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(satchel.kept.Code, "__init__", watched)
        _, loss = metered()
    loss.backward()
    assert len(made) >= 3 and dead == sorted(dead, reverse=True) and len(dead) == len(made)


def test_rich_table_frame_and_json():
    rich_console = pytest.importorskip("rich.console")
    p, _ = metered()
    p.meter.hidden["CopySlices"] = 2
    file = io.StringIO()
    rich_console.Console(file=file, width=140).print(p.meter)
    text = file.getvalue()
    assert "GeluBackward0.self: slope, 4 bits" in text and "in all" in text and "CopySlices: 2 nodes" in text
    pytest.importorskip("pandas")
    frame = p.meter.to_pandas()
    assert len(frame) == len(p.meter.lines) and int(frame.after.sum()) == p.meter.after
    assert json.loads(p.meter.to_json())["after"] == p.meter.after

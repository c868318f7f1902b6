"""The documents: links and anchors lead somewhere, the tutorial runs, addresses agree."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def without_code(text):
    return re.sub(r"^(```.*?^```|    [^\n]*$)", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(page):
    """As GitHub and MkDocs make them."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()) for title in titles)
    return {title.strip().replace(" ", "-") for title in words}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page):
    for target in LINK.findall(without_code(page.read_text())):
        if re.match(r"https?:|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(file), f"{page.name}: {target}, of {sorted(anchors(file))}"


def test_every_page_is_on_the_site():
    listed = set(re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    # The first page is made of the README.
    assert listed == {page.name for page in (ROOT / "docs").glob("*.md")} | {"index.md"}


def test_addresses_agree():
    """One address of the repository, and absolute links alone where an index shows the text."""
    address = re.search(r'^Repository = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    for name in ("mkdocs.yml", "CITATION.cff"):
        assert address in (ROOT / name).read_text(), name
    for target in LINK.findall(without_code((ROOT / "python" / "README.md").read_text())):
        assert target.startswith(f"{address}/blob/main/"), target
        assert (ROOT / target.removeprefix(f"{address}/blob/main/")).exists(), target


def test_versions_agree():
    version = re.search(r"^  VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text(), re.MULTILINE)[1]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_tutorial(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "tutorial.md").read_text()
    names = {"__name__": "tutorial"}
    for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        exec(compile(block, "tutorial.md", "exec"), names)
    assert names["right"] == 1
    assert names["loss"] < 0.1

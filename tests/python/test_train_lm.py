"""examples/train_lm.py on the CPU, and the page that bench/training.py makes of a comparison."""

import importlib.util
import json
import pathlib
import re
import xml.etree.ElementTree

import pytest
import torch

from fastweight import ops

ROOT = pathlib.Path(__file__).parents[2]


def load(path):
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def example():
    return load("examples/train_lm.py")


TINY = ["--device", "cpu", "--steps", "3", "--length", "64"]


def train(example, tmp_path, *arguments):
    example.main([*TINY, "--json", str(tmp_path / "one.json"), *arguments])
    (record,) = json.loads((tmp_path / "one.json").read_text())
    return record


def test_it_trains(example, tmp_path, capsys):
    record = train(example, tmp_path, "--steps", "40")
    assert len(record["losses"]) == 40
    assert record["losses"][-1] < 0.8 * record["losses"][0]
    assert record["tokens_per_second"] > 0
    assert record["answers_asked"] > 0
    assert "answers to questions of new stories" in capsys.readouterr().out
    first, second, other = (train(example, tmp_path, "--seed", seed)["losses"] for seed in "001")
    assert first == second != other


def test_a_file(example, tmp_path):
    (tmp_path / "text").write_text("to be or not to be, " * 100)
    record = train(example, tmp_path, "--text", str(tmp_path / "text"), "--steps", "20")
    assert record["losses"][-1] < record["losses"][0]
    assert "answers_right" not in record


def test_stories(example):
    """Every answer follows from what was told before, and a seed gives one text."""
    stories = example.Stories(3)
    told = stories.story()
    asked = [i for i, word in enumerate(told) if word == "?"]
    assert len(asked) > 5
    place, colour, owner = {}, {}, {}
    sentence = []
    for word in told[1:]:
        sentence.append(word)
        if word != ".":
            continue
        match sentence:
            case ["where", "is", person, "?", answer, "."]:
                assert answer == place[person]
            case ["who", "has", "the", thing, "?", answer, "."]:
                assert answer == owner.get(thing, "nobody")
            case ["what", "colour", "has", "the", thing, "?", answer, "."]:
                assert answer == colour[thing]
            case [person, "is", "in", where, "."] | [person, "walks", "to", where, "."]:
                place[person] = where
            case ["the", thing, "is", shade, "."]:
                colour[thing] = shade
            case [person, "takes", "the", shade, thing, "."]:
                assert shade == colour[thing]
                owner[thing] = person
            case [person, "puts", "down", "the", thing, "."]:
                assert owner.pop(thing) == person
            case _:
                pytest.fail(f"no such sentence: {sentence}")
        sentence = []
    a, b = (example.Stories(5).text(500) for _ in range(2))
    assert torch.equal(a.tokens, b.tokens)
    assert int(a.tokens.max()) < len(a.words) == len(set(a.words))


def test_other_operators_take_their_place(example, tmp_path, monkeypatch):
    """As flash-linear-attention's do: what the layers call is what was put there."""
    calls = []
    for name in ("chunk_gated_delta_rule", "chunk_kda"):
        original = getattr(ops, name)
        monkeypatch.setattr(ops, name, lambda *a, _f=original, _n=name, **o: calls.append(_n) or _f(*a, **o))
    monkeypatch.setattr(example, "use_fla", lambda folder, unchecked: "0")
    record = train(example, tmp_path, "--operators", "fla", "--fla-unchecked")
    assert record["unchecked"]
    assert calls.count("chunk_gated_delta_rule") == 2 * calls.count("chunk_kda") > 0


def test_a_refusal_is_explained(example, tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise RuntimeError("Triton >= 3.4.0 and < 3.7.1 on Hopper GPUs produces incorrect results for")

    monkeypatch.setattr(ops, "chunk_gated_delta_rule", refuse)
    monkeypatch.setattr(example, "use_fla", lambda folder, unchecked: "0")
    with pytest.raises(SystemExit, match="--fla-unchecked removes this check"):
        train(example, tmp_path, "--operators", "fla")


@pytest.mark.parametrize("unchecked", [False, True])
def test_the_page(example, tmp_path, monkeypatch, unchecked):
    report = load("bench/training.py")
    record = train(example, tmp_path) | {"tokens_per_second": 1234.0, "peak_memory_bytes": 2**31}
    other = record | {"library": "fla", "unchecked": unchecked, "losses": [x + 0.01 for x in record["losses"]]}
    other["warm_cache"] = unchecked
    source = tmp_path / "both.json"
    source.write_text(json.dumps([other, record]))
    monkeypatch.setattr("sys.argv", ["training.py", str(source), str(tmp_path / "training")])
    report.main()
    page = (tmp_path / "training.md").read_text()
    assert "| tokens per second | 1,234 | 1,234 |" in page
    assert "| peak memory, GiB | 2.00 | 2.00 |" in page
    assert ("check was removed" in page) == unchecked
    assert ("Triton's cache" in page) == unchecked
    assert max(map(len, page.splitlines())) <= 125
    root = xml.etree.ElementTree.parse(tmp_path / "training.svg").getroot()
    lines = root.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 3
    numbers = [[float(x) for x in re.split("[ ,]", line.get("points"))] for line in lines]
    assert all(len(points) == 6 for points in numbers)
    assert numbers[1][1] < numbers[0][1]  # a larger loss is higher up
    source.write_text(json.dumps([record]))
    with pytest.raises(SystemExit, match="expected records of fastweight and fla"):
        report.main()

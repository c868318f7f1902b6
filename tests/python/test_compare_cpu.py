"""bench/compare_cpu.py on a tiny shape: each peer computes what fastweight does, and every record is complete."""

import importlib.util
import json
import os
import pathlib

import pytest

PATH = pathlib.Path(__file__).parents[2] / "bench" / "compare_cpu.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("compare_cpu", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def records(bench, folder, *arguments):
    """{(op, mode, library): record}"""
    file = folder / "records.json"
    bench.main(
        ["--shape", "B=2,T=70,H=3,D=16", "--threads", "1", "--rounds", "2", "--seconds", "0.001", "--json", str(file)]
        + list(arguments)
    )
    return {(record["op"], record["mode"], record["library"]): record for record in json.loads(file.read_text())}


def assert_complete(found, libraries):
    for (op, mode, library), record in found.items():
        name = f"{op} {mode} {library}"
        assert (record["B"], record["T"], record["H"], record["D"]) == (2, 1 if mode == "decode" else 70, 3, 16), name
        assert 0 < record["min_ms"] <= record["p10_ms"] <= record["median_ms"] <= record["p90_ms"], name
        assert record["over_fastweight"] * found[op, mode, "fastweight"]["median_ms"] == pytest.approx(
            record["median_ms"]
        ), name
        assert record["calls"] >= 2, name
        assert {"threads", "cpu", "cores", "date", "load", "torch", "fastweight", *libraries} <= set(record), name
        if library == "fastweight":
            assert record["error"] is None
        else:
            assert record["error"] < 2e-6, name


def test_transformers(bench, tmp_path):
    pytest.importorskip("transformers")
    found = records(bench, tmp_path)
    assert set(found) == {
        (op, mode, library)
        for op in ("gdn", "kda")
        for mode in ("forward", "training", "decode")
        for library in ("fastweight", "transformers")
    }
    assert_complete(found, ["transformers"])


def test_llama_cpp(bench, tmp_path):
    pytest.importorskip("transformers")
    build = os.environ.get("FASTWEIGHT_LLAMA_CPP")
    if build is None:
        pytest.skip("FASTWEIGHT_LLAMA_CPP names no build of llama.cpp")
    found = records(bench, tmp_path, "--llama-cpp", build, "--modes", "forward,decode")
    assert {library for op, mode, library in found if mode == "forward"} == {"fastweight", "transformers", "llama.cpp"}
    assert {library for op, mode, library in found if mode == "decode"} == {
        "fastweight", "transformers", "llama.cpp", "llama.cpp, kept",
    }  # fmt: skip
    assert_complete(found, ["transformers", "ggml", "ggml_commit"])


def test_no_llama_cpp_there(bench, tmp_path):
    pytest.importorskip("transformers")
    with pytest.raises(SystemExit, match=r"expected libggml-base\.so"):
        records(bench, tmp_path, "--llama-cpp", str(tmp_path))


def test_a_wrong_answer_shows(bench):
    """The error column is no constant: a peer with another scale is off by that much."""
    case = bench.draw("gdn", "forward", {"B": 1, "T": 20, "H": 2, "D": 16})
    ours = bench.Fastweight(1)

    class Off:
        def runners(self, case):
            (runner,) = ours.runners(case).values()
            return {"off": bench.Runner(lambda: tuple(1.25 * tensor for tensor in runner.call()))}

    found = bench.compare(case, [ours, Off()], rounds=1, seconds=0.001)
    assert [record["library"] for record in found] == ["fastweight", "off"]
    assert found[1]["error"] == pytest.approx(0.25, rel=1e-5)


def test_calm_waits_and_tries_again(bench, monkeypatch):
    used = iter([0.9, 0.1, 0.8, 0.0, 0.05])  # waiting, waiting, during the first try, waiting, during the second
    monkeypatch.setattr(bench.Others, "cores", lambda self: next(used))
    ours = bench.Fastweight(1)
    case = bench.draw("gdn", "decode", {"B": 1, "T": 1, "H": 2, "D": 16})
    found = bench.compare_calmly(0.2, case, [ours], 1, 0.001)
    assert [record["others_cores"] for record in found] == [0.05]
    assert next(used, None) is None

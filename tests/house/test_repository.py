"""What the repository's text says: nothing about one machine, and documents that agree with the code."""

import ast
import re
from pathlib import Path

import pytest

from tests.house.source import ROOT, Source, source, tracked_files

# Written in pieces, so that this file does not contain what it looks for.
_MACHINE = re.compile(
    "|".join(
        (
            r"(?<![\w.$}-])/" + r"(?:work|root)/",
            r"/home/" + r"(?!user/|nonroot/|ray/|kvcomm/)\w+/",
            r"\bpypi\." + r"(?:org|python)",
            r"files\." + r"pythonhosted",
            r"registry\." + r"npmjs",
            r"download\." + r"pytorch\.org",
            r"deb\." + r"debian\.org",
            r"proxy\." + r"golang\.org",
        )
    )
)
_BINARY = {
    ".png",
    ".jpg",
    ".gif",
    ".ico",
    ".pdf",
    ".gz",
    ".xz",
    ".zst",
    ".npz",
    ".npy",
    ".safetensors",
    ".bin",
}


def _machine_facts(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if _MACHINE.search(line)]


def test_no_path_of_a_machine_and_no_registry_host() -> None:
    files = tracked_files()
    if files is None:
        pytest.skip("not a git checkout: there is no list of the repository's files")
    found = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in files
        if path.suffix not in _BINARY
        for line in _machine_facts(path.read_text(errors="replace"))
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "see /" + "work/main",
        "cd '/" + "root/x'",
        "HOME=/home/" + "alice/x",
        "--index-url https://pypi." + "org/simple",
        "https://download." + "pytorch.org/whl/cpu",
    ],
)
def test_such_text_is_seen(text: str) -> None:
    assert _machine_facts(text) == [text]


@pytest.mark.parametrize(
    "text", ["net" + "work/main", "$HOME/" + "work/x", "/tmp/kvcomm", "/dev/shm/kvcomm-1"]
)
def test_other_text_is_spared(text: str) -> None:
    assert _machine_facts(text) == []


# ------------------------------------------------------------------------------------------ the test command


def _make_targets(script: str) -> list[str]:
    return re.findall(r"^make ([\w-]+)\s*$", script, flags=re.MULTILINE)


@pytest.mark.parametrize("document", ["docs/testing.md", "CONTRIBUTING.md"])
def test_documents_name_the_command_that_ci_runs(document: str) -> None:
    ci = _make_targets((ROOT / ".ci/run").read_text())
    assert ci == ["test", "test-rdma"]
    assert {f"make {target}" for target in ci} <= _make_blocks((ROOT / document).read_text())


def _make_blocks(text: str) -> set[str]:
    """The `make` commands in the indented or fenced blocks of a document, without their comments."""
    return {
        match.strip()
        for match in re.findall(r"^(?: {4})?(make [\w -]+?)(?:\s+#.*)?$", text, flags=re.MULTILINE)
    }


def test_every_documented_make_target_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    documented = {
        command.split()[1]
        for document in ("docs/testing.md", "CONTRIBUTING.md")
        for command in _make_blocks((ROOT / document).read_text())
    }
    assert documented
    assert documented <= targets


def test_the_scripts_are_executable() -> None:
    scripts = [
        ROOT / ".ci/run",
        *(path for path in (ROOT / "scripts").iterdir() if path.read_bytes()[:2] == b"#!"),
    ]
    assert [str(path.relative_to(ROOT)) for path in scripts if not path.stat().st_mode & 0o111] == []


def test_torch_is_pinned_without_a_local_version() -> None:
    """A suffix like +cpu would bind every machine to one build."""
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert "torch==2.13.0" in pins
    assert [pin for pin in pins if "+" in pin and not pin.startswith("#")] == []


# ---------------------------------------------------------------------------------------- configuration keys


def _undocumented_keys(config: Source, reference: str | None) -> list[str]:
    """Keys of the dataclasses in `config` that say nothing of their consequence, or lack in the reference."""
    lines = config.lines
    missing = []
    for node in ast.walk(config.tree):
        if not isinstance(node, ast.ClassDef) or not any(
            "dataclass" in ast.dump(d) for d in node.decorator_list
        ):
            continue
        docstring = ast.get_docstring(node) or ""
        for field, following in zip(node.body, [*node.body[1:], None], strict=True):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            name = field.target.id
            if name.startswith("_"):
                continue
            own_lines = lines[field.lineno - 2 : field.end_lineno]
            said = (
                name in docstring
                or own_lines[0].lstrip().startswith("#")
                or any("  #" in line for line in own_lines[1:])
                or (isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant))
            )
            if not said:
                missing.append(f"{node.name}.{name}: no word on its consequence in {config.path}")
            key = re.sub(r"_(bytes|s)$", "", name)  # in the file the value names its unit, not the key
            if reference is not None and not re.search(rf"\b(?:{name}|{key})\b", reference):
                missing.append(f"{node.name}.{name}: not in the configuration reference")
    return missing


def test_every_configuration_key_is_documented() -> None:
    path = ROOT / "kvcomm/config.py"
    if not path.exists():
        pytest.skip("there is no kvcomm/config.py yet")
    reference = ROOT / "docs/configuration.md"
    text = reference.read_text() if reference.exists() else None
    config = source(str(Path("kvcomm/config.py")), path.read_text())
    assert not _undocumented_keys(config, text)


def test_an_undocumented_key_is_seen() -> None:
    config = source(
        "kvcomm/config.py",
        "@dataclass(frozen=True)\n"
        "class Cache:\n"
        "    l1_bytes: int = 1\n"
        '    """Larger: more hits, less memory for the engine."""\n'
        "    l1_ttl_s: float = 5.0  # staleness bound\n"
        "    silent: int = 0\n",
    )
    assert _undocumented_keys(config, None) == [
        "Cache.silent: no word on its consequence in kvcomm/config.py"
    ]
    assert _undocumented_keys(config, "l1_bytes, l1_ttl_s") == [
        "Cache.silent: no word on its consequence in kvcomm/config.py",
        "Cache.silent: not in the configuration reference",
    ]

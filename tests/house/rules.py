"""The rules of the house that no linter knows. Each takes one source and yields what breaks it.

A rule is in `RULES` together with snippets that it must report and snippets that it must spare.
`test_rules.py` runs them all, so a rule that went blind fails like a rule that is broken.
"""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.house.source import TIERS, Source

FUNCTION_LINES_MAX = 70
VAGUE_NAMES = {"utils", "util", "common", "base", "helpers", "helper", "manager"}
UNSAFE_LOADERS = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}
COMPOSITION_ROOTS = ("kvcomm.connect", "kvcomm.cli", "kvcomm.chaos")
# Heavy optional packages -> the only rooms that may name them.
ENGINE_ROOMS = {
    "torch": ("kvcomm.engines", "kvcomm.demo", "kvcomm.streams.replay", "kvcomm.streams.mismatch"),
    "transformers": ("kvcomm.engines", "kvcomm.demo"),
    "tokenizers": ("kvcomm.engines", "kvcomm.demo"),
    "safetensors": ("kvcomm.engines", "kvcomm.demo"),
    "accelerate": ("kvcomm.engines", "kvcomm.demo"),
    "gguf": ("kvcomm.engines", "kvcomm.demo"),
    "vllm": ("kvcomm.engines", "kvcomm.demo"),
    "triton": ("kvcomm.engines",),
    "cuda": ("l2_rdma.transports.cuda",),
    "ray": ("kvcomm.engines", "controller"),
}
# Calls that read the world; their modules are kept out of pure code by the import contract, these are not.
IMPURE_CALLS = {
    "open",
    "input",
    "print",
    "id",
    "datetime.now",
    "datetime.utcnow",
    "datetime.today",
    "date.today",
    "datetime.datetime.now",
    "datetime.datetime.utcnow",
    "datetime.date.today",
    "numpy.random.default_rng",
    "np.random.default_rng",
}

_LONG_MARKER = re.compile(r"#\s*long:\s*\S")
_FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Finding:
    line: int
    message: str


@dataclass(frozen=True, slots=True)
class Rule:
    """`bad` and `good` are snippets as (path, text). A `pure_only` rule judges the pure modules alone."""

    find: Callable[[Source], Iterator[Finding]]
    bad: tuple[tuple[str, str], ...]
    good: tuple[tuple[str, str], ...]
    pure_only: bool = False

    @property
    def name(self) -> str:
        return self.find.__name__


def says_what_it_holds(source: Source) -> Iterator[Finding]:
    """A file's name is a noun that means something."""
    for part in source.path.with_suffix("").parts:
        if part in VAGUE_NAMES:
            yield Finding(1, f"{part!r} says nothing: name the noun that the module holds")


def has_a_docstring(source: Source) -> Iterator[Finding]:
    if not (ast.get_docstring(source.tree) or "").strip():
        yield Finding(1, "the module has no docstring")


def imports_absolutely(source: Source) -> Iterator[Finding]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and node.level > 0:
            yield Finding(node.lineno, "relative import: write the full name")


def swallows_no_error(source: Source) -> Iterator[Finding]:
    """No bare `except`, and no `except Exception` (or wider) that does nothing with it."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        if node.type is None:
            yield Finding(node.lineno, "bare except: name the error")
        elif _is_broad(node.type) and all(_does_nothing(statement) for statement in node.body):
            yield Finding(node.lineno, "a broad except that swallows: name the error, or handle it")


def suppresses_narrowly(source: Source) -> Iterator[Finding]:
    for call in _calls(source.tree):
        if _dotted(call.func) in {"suppress", "contextlib.suppress"} and any(map(_is_broad, call.args)):
            yield Finding(call.lineno, "suppress(Exception) swallows our own bugs: name the error")


def loads_no_code(source: Source) -> Iterator[Finding]:
    """Bytes from outside never become objects by executing them."""
    for node, module in _imports(source.tree):
        if module.split(".")[0] in UNSAFE_LOADERS:
            yield Finding(node.lineno, f"{module} executes what it reads: use msgspec")
    for call in _calls(source.tree):
        name = _dotted(call.func)
        words = {word.arg: word.value for word in call.keywords}
        if name == "torch.load" and not _is_true(words.get("weights_only")):
            yield Finding(call.lineno, "torch.load without weights_only=True unpickles")
        if name in {"numpy.load", "np.load"} and _is_true(words.get("allow_pickle")):
            yield Finding(call.lineno, "numpy.load(allow_pickle=True) unpickles")
        if name in {"yaml.load", "yaml.unsafe_load", "yaml.full_load"}:
            yield Finding(call.lineno, f"{name} builds arbitrary objects: use yaml.safe_load")


def prints_only_for_people(source: Source) -> Iterator[Finding]:
    if _is_in(source.module, ("kvcomm.cli", "kvcomm.demo")):
        return
    for call in _calls(source.tree):
        if _dotted(call.func) == "print":
            yield Finding(call.lineno, "print outside of the command line: log, count or return it")


def keeps_functions_short(source: Source) -> Iterator[Finding]:
    """At most 70 lines without the docstring; a transition table says `# long: <reason>` at its `def`."""
    for node in ast.walk(source.tree):
        if not isinstance(node, _FunctionNode):
            continue
        lines = (node.end_lineno or node.lineno) - node.lineno + 1 - _docstring_lines(node)
        signature = source.lines[max(0, node.lineno - 2) : node.body[0].lineno - 1]
        if lines > FUNCTION_LINES_MAX and not any(map(_LONG_MARKER.search, signature)):
            yield Finding(
                node.lineno,
                f"{node.name} has {lines} lines (limit {FUNCTION_LINES_MAX}): look for the second idea",
            )


def hashes_stably(source: Source) -> Iterator[Finding]:
    """`hash()` differs between processes: it may serve a `__hash__`, never identity or placement."""
    inside = {
        id(call)
        for node in ast.walk(source.tree)
        if isinstance(node, _FunctionNode) and node.name == "__hash__"
        for call in _calls(node)
    }
    for call in _calls(source.tree):
        if _dotted(call.func) == "hash" and id(call) not in inside:
            yield Finding(call.lineno, "builtin hash() is salted per process: use sha256, xxh3 or mmh3")


def draws_no_hidden_randomness(source: Source) -> Iterator[Finding]:
    """No shared generator: a `random.Random` comes by constructor. `os.urandom` hides an input likewise."""
    for call in _calls(source.tree):
        name = _dotted(call.func)
        if name == "os.urandom":
            yield Finding(call.lineno, "os.urandom: take secrets.token_bytes at the edge, pass the bytes on")
        if re.fullmatch(r"random\.[a-z]\w*", name):
            yield Finding(call.lineno, f"{name} draws from the module's generator: pass a random.Random")


def names_engines_only_in_their_room(source: Source) -> Iterator[Finding]:
    for node, module in _imports(source.tree, skip_type_checking=True):
        rooms = ENGINE_ROOMS.get(module.split(".")[0])
        if rooms and not _is_in(source.module, rooms):
            yield Finding(node.lineno, f"{module} belongs to {' or '.join(rooms)}")


def composes_inside_functions(source: Source) -> Iterator[Finding]:
    """`import kvcomm` loads no tier: the composition roots name the tiers inside function bodies."""
    if not _is_in(source.module, ("kvcomm",)):
        return
    in_functions = {
        id(child)
        for node in ast.walk(source.tree)
        if isinstance(node, _FunctionNode)
        for child in ast.walk(node)
    }
    for node, module in _imports(source.tree, skip_type_checking=True):
        if module.split(".")[0] not in (*TIERS, "controller"):
            continue
        if not _is_in(source.module, COMPOSITION_ROOTS):
            yield Finding(node.lineno, f"the floor must not import {module}")
        elif id(node) not in in_functions:
            yield Finding(node.lineno, f"import {module} inside the function that needs it")


def iterates_in_order(source: Source) -> Iterator[Finding]:
    """The order of a set differs between runs: pure code sorts it first."""
    for node in ast.walk(source.tree):
        iterated: list[ast.expr] = []
        if isinstance(node, ast.For | ast.comprehension):
            iterated = [node.iter]
        elif isinstance(node, ast.Call) and _dotted(node.func) in {"list", "tuple", "enumerate", "iter"}:
            iterated = node.args[:1]
        for expression in iterated:
            if _is_set(expression):
                yield Finding(expression.lineno, "iteration over a set: sorted(...) gives it one order")


def asks_nothing_of_the_world(source: Source) -> Iterator[Finding]:
    for call in _calls(source.tree):
        name = _dotted(call.func)
        if name in IMPURE_CALLS:
            yield Finding(call.lineno, f"{name}() in a pure module: take the value as an argument")


def waits_for_nothing(source: Source) -> Iterator[Finding]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith):
            yield Finding(node.lineno, "a pure module is synchronous: the shell around it waits")


def _is_in(module: str, rooms: tuple[str, ...]) -> bool:
    return any(module == room or module.startswith(f"{room}.") for room in rooms)


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def _imports(tree: ast.AST, *, skip_type_checking: bool = False) -> Iterator[tuple[ast.stmt, str]]:
    """Each import with the dotted module it names; also what only runs for a type checker, unless skipped."""
    skipped: set[int] = set()
    if skip_type_checking:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and _dotted(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
                skipped |= {id(child) for statement in node.body for child in ast.walk(statement)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node, node.module


def _dotted(node: ast.expr) -> str:
    """`a.b.c` of a name or an attribute chain; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def _is_broad(node: ast.expr) -> bool:
    if isinstance(node, ast.Tuple):
        return any(map(_is_broad, node.elts))
    return _dotted(node) in {"Exception", "BaseException"}


def _does_nothing(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Pass | ast.Continue):
        return True
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def _is_set(node: ast.expr) -> bool:
    if isinstance(node, ast.Set | ast.SetComp):
        return True
    if isinstance(node, ast.BinOp):
        return _is_set(node.left) or _is_set(node.right)
    return isinstance(node, ast.Call) and _dotted(node.func) in {"set", "frozenset"}


def _docstring_lines(node: _FunctionNode) -> int:
    first = node.body[0]
    if ast.get_docstring(node, clean=False) is None:
        return 0
    return (first.end_lineno or first.lineno) - first.lineno + 1


def _function(lines: int, marker: str = "") -> str:
    return f"def step():{marker}\n" + "    x = 1\n" * (lines - 1)


_FLOOR = "kvcomm/thing.py"

RULES = (
    Rule(
        says_what_it_holds,
        bad=(("l1/utils.py", ""), ("kvcomm/common/frames.py", "")),
        good=(("l1/lru.py", ""), ("kvcomm/baseline.py", "")),
    ),
    Rule(
        has_a_docstring,
        bad=((_FLOOR, ""), (_FLOOR, "'''  '''"), (_FLOOR, "# only a comment\nx = 1")),
        good=((_FLOOR, "'''One noun.'''"),),
    ),
    Rule(
        imports_absolutely,
        bad=((_FLOOR, "from . import block"), (_FLOOR, "from ..l1 import lru")),
        good=((_FLOOR, "from kvcomm import block"),),
    ),
    Rule(
        swallows_no_error,
        bad=(
            (_FLOOR, "try:\n    f()\nexcept:\n    raise"),
            (_FLOOR, "try:\n    f()\nexcept Exception:\n    pass"),
            (_FLOOR, "try:\n    f()\nexcept (OSError, BaseException):\n    ..."),
            (_FLOOR, "for x in y:\n    try:\n        f()\n    except Exception as e:\n        continue"),
        ),
        good=(
            (_FLOOR, "try:\n    f()\nexcept FileNotFoundError:\n    pass"),
            (_FLOOR, "try:\n    f()\nexcept Exception:\n    log()\n    raise"),
        ),
    ),
    Rule(
        suppresses_narrowly,
        bad=((_FLOOR, "with contextlib.suppress(Exception):\n    f()"),),
        good=((_FLOOR, "with contextlib.suppress(FileNotFoundError):\n    f()"),),
    ),
    Rule(
        loads_no_code,
        bad=(
            (_FLOOR, "import pickle"),
            (_FLOOR, "def f():\n    from cloudpickle import loads"),
            ("kvcomm/engines/x.py", "torch.load(path)"),
            (_FLOOR, "np.load(path, allow_pickle=True)"),
            (_FLOOR, "yaml.load(text)"),
        ),
        good=(
            (_FLOOR, "import msgspec"),
            ("kvcomm/engines/x.py", "torch.load(path, weights_only=True)"),
            (_FLOOR, "np.load(path)\nyaml.safe_load(text)"),
        ),
    ),
    Rule(
        prints_only_for_people,
        bad=((_FLOOR, "def f():\n    print('x')"),),
        good=(("kvcomm/cli/status.py", "print('x')"), (_FLOOR, "console.print('x')")),
    ),
    Rule(
        keeps_functions_short,
        bad=((_FLOOR, _function(71)), (_FLOOR, "class A:\n    " + _function(80).replace("\n", "\n    "))),
        good=(
            (_FLOOR, _function(70)),
            (_FLOOR, _function(90, "  # long: a transition table")),
            (_FLOOR, 'def f():\n    """' + "Words.\n" * 90 + '"""\n    return 1'),
        ),
    ),
    Rule(
        hashes_stably,
        bad=((_FLOOR, "shard = hash(key) % n"),),
        good=((_FLOOR, "class A:\n    def __hash__(self):\n        return hash(self.key)"),),
    ),
    Rule(
        draws_no_hidden_randomness,
        bad=((_FLOOR, "import random\nrandom.shuffle(x)"), (_FLOOR, "os.urandom(16)")),
        good=((_FLOOR, "rng = random.Random(seed)\nrng.shuffle(x)"),),
    ),
    Rule(
        names_engines_only_in_their_room,
        bad=((_FLOOR, "def f():\n    import torch"), ("l2_rdma/tier.py", "from ray import remote")),
        good=(
            ("kvcomm/engines/hf.py", "import torch\nfrom transformers import AutoModel"),
            ("controller/launcher.py", "import ray"),
            (_FLOOR, "if TYPE_CHECKING:\n    import torch"),
        ),
    ),
    Rule(
        composes_inside_functions,
        bad=(
            ("kvcomm/connect.py", "from l1.tier import L1Tier"),
            ("kvcomm/client.py", "def f():\n    import l3_shard"),
            ("kvcomm/cli/shard.py", "import controller.server"),
        ),
        good=(
            ("kvcomm/connect.py", "def connect():\n    from l1.tier import L1Tier"),
            ("kvcomm/cli/shard.py", "async def run():\n    import l3_shard.server"),
            ("kvcomm/connect.py", "if TYPE_CHECKING:\n    from l1.tier import L1Tier"),
            ("controller/server.py", "import l3_shard"),
        ),
    ),
    Rule(
        iterates_in_order,
        bad=(
            (_FLOOR, "for x in {1, 2}:\n    f(x)"),
            (_FLOOR, "y = [f(x) for x in set(z)]"),
            (_FLOOR, "y = list(set(a) - set(b))"),
        ),
        good=((_FLOOR, "for x in sorted(set(z)):\n    f(x)"), (_FLOOR, "ok = x in {1, 2}")),
        pure_only=True,
    ),
    Rule(
        asks_nothing_of_the_world,
        bad=((_FLOOR, "open('x')"), (_FLOOR, "stamp = datetime.now()"), (_FLOOR, "print(1)")),
        good=((_FLOOR, "def f(now):\n    return now + 1"), (_FLOOR, "pool.open()")),
        pure_only=True,
    ),
    Rule(
        waits_for_nothing,
        bad=((_FLOOR, "async def f():\n    pass"),),
        good=((_FLOOR, "def f():\n    pass"),),
        pure_only=True,
    ),
)

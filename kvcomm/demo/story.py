"""The demonstration itself: what happens, in order.

1. The planner reads the shared text.  Nobody has it: it is computed and published.  The planner goes on
writing. 2. The coder reads the same text and a question.  The text comes from the host's pool (L2). 3. The
critic follows the planner's context, which it has never seen, and reads on from there. 4. The pool is
killed.  A new one comes up empty, and the coder, as a new client, gets the blocks from the shards (L3). 5.
The critic, as a new client, reads again: what the coder fetched is in the pool again (L2).

With ``corrupt``, one byte of every stored copy is flipped before 5: the critic has to notice and compute.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvcomm.demo.conversation import SharedText, shared_text
from kvcomm.demo.gguf import Progress
from kvcomm.demo.messages import Read, Ready, Row, Start
from kvcomm.demo.model import DemoModel, find_model
from kvcomm.demo.process import AgentProcess
from kvcomm.demo.report import Report
from kvcomm.demo.vandal import damage, regions_of
from kvcomm.embedded import Embedded
from kvcomm.errors import Unavailable
from kvcomm.instance import Instance, NodeRecord

Say = Callable[[str], None]

AGENTS = ("planner", "coder", "critic")
CLUSTER_DEADLINE_S = 60.0
RESTART_DEADLINE_S = 30.0
_POLL_S = 0.02
_SESSION = "demo"
_PLAN = "\n\nplanner: The next steps are"
_CODE = "\n\ncoder: The change that I will make first is"
_REVIEW = "\n\ncritic: What is still not proven is"

CONFIG = """
cache:
  l1_size: 512MB
  l2_size: 1GB
  l3_size: 1GB
"""
"""Three agents on one host; the defaults are shares of a server's memory."""


@dataclass(frozen=True, slots=True)
class Options:
    context_tokens: int = 1600
    new_tokens: int = 24
    corrupt: bool = False
    model_folder: Path | None = None
    config: Path | None = None
    """Instead of :data:`CONFIG`."""
    transport: str | None = None
    """The only way into the pool's memory for everybody; else as configured."""


def tell(options: Options, say: Say) -> Report:
    """Run the demonstration on a cluster of its own, which is gone afterwards, however this ends.

    Raises:
        KVCommError: a part of it did not start or did not answer in time.
    """
    text = shared_text()
    model = find_model(_in_quarters(say), folder=options.model_folder)
    say(f"model: {model.label}; text: {text.source}")
    with contextlib.ExitStack() as stack:
        threads = os.cpu_count() or 1
        agents = {name: stack.enter_context(AgentProcess(name, threads)) for name in AGENTS}
        say("starting a cluster")
        config = stack.enter_context(_configuration(options))
        instance = stack.enter_context(_cluster(config))
        _check_transport(instance, options.transport)
        say(f"starting {len(agents)} agents, each a process that loads the model")
        folder = None if model.folder is None else str(model.folder)
        for agent in agents.values():  # at once: loading a model is mostly waiting
            agent.send(Start(agent.name, instance.name, str(config), model.label, folder))
        ready = [agent.ready() for agent in agents.values()][-1]
        return _Story(options, say, text, model, ready, agents, instance).tell()


@dataclass(frozen=True, slots=True)
class _Story:
    options: Options
    say: Say
    text: SharedText
    model: DemoModel
    ready: Ready
    agents: dict[str, AgentProcess]
    instance: Instance

    def tell(self) -> Report:
        rows = [
            self._read("planner", "the shared text", question=_PLAN, keep=True),
            self._read("coder", "the shared text", question=_CODE),
            self._read("critic", "the planner's context", question=_REVIEW, follow="planner"),
        ]
        restart_s = self._restart_pool()
        rows.append(self._read("coder", "after the pool died", question=_CODE, fresh=True))
        damaged = self._damage() if self.options.corrupt else None
        step = "again" if damaged is None else "damaged copies"
        rows.append(self._read("critic", step, question=_REVIEW, follow="planner", fresh=True))
        return Report(
            model=self.model.label,
            text_source=self.text.source,
            context_tokens=rows[0].shared_tokens,
            block_tokens=self.ready.block_tokens,
            block_bytes=self.ready.block_bytes,
            rows=tuple(rows),
            pool_restart_s=restart_s,
            damaged_copies=damaged,
            transport=self.options.transport,
        )

    def _read(
        self,
        name: str,
        step: str,
        *,
        question: str,
        follow: str | None = None,
        keep: bool = False,
        fresh: bool = False,
    ) -> Row:
        agent = self.agents[name]
        if fresh:
            agent.reconnect()
        self.say(f"{name} reads {step}")
        row = agent.read(
            Read(
                step=step,
                session=_SESSION,
                text="" if follow else self.text.text,
                text_tokens=self.options.context_tokens,
                question=question,
                new_tokens=self.options.new_tokens,
                follow=follow,
                keep=keep,
            )
        )
        what = f"{row.fetched} of {row.token_count} tokens fetched"
        self.say(f"{name}: {what}, first token after {row.first_token_s:.2f} s")
        return row

    def _restart_pool(self) -> float:
        """Kill the pool, or all of a rack, as a crash would, and wait for what replaces it."""
        killed = {record.pid for record in self._nodes("pool")}
        self.say(f"killing the pool (process {', '.join(map(str, sorted(killed)))})")
        began = time.monotonic()
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        while len({record.pid for record in self._nodes("pool")} - killed) < len(killed):
            if time.monotonic() > began + RESTART_DEADLINE_S:
                raise Unavailable(f"no new pool within {RESTART_DEADLINE_S:.0f} s")
            time.sleep(_POLL_S)
        return time.monotonic() - began

    def _damage(self) -> int:
        self.say("flipping one byte of every stored copy")
        return sum(damage(region) for node in self.instance.nodes() for region in regions_of(node.pid))

    def _nodes(self, role: str) -> list[NodeRecord]:
        return [record for record in self.instance.nodes() if record.role == role]


@contextlib.contextmanager
def _configuration(options: Options) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvcomm-demo-") as folder:
        path = Path(folder) / "kvcomm.yaml"
        path.write_text(configuration(options))
        yield path


def configuration(options: Options) -> str:
    """Of the cluster and the agents."""
    import yaml

    from kvcomm.settings import load_config

    if options.config is not None:
        load_config(options.config)  # a mistake in it is told by its own name
    written = options.config.read_text() if options.config is not None else CONFIG
    if options.transport is None:
        return written
    document = yaml.safe_load(written) or {}
    network = (document.get("network") or {}) | {"transports": [options.transport]}
    return yaml.safe_dump(document | {"network": network})


def _check_transport(instance: Instance, transport: str | None) -> None:
    """Raises ``Unavailable`` where the pool cannot offer the only transport that it may."""
    for record in instance.nodes():
        if transport is not None and record.role == "pool" and transport not in record.transports:
            why = record.refused_transports.get(transport, "unknown reason")
            raise Unavailable(f"{record.node} cannot offer {transport}: {why}; see 'kvcomm doctor'")


@contextlib.contextmanager
def _cluster(config: Path) -> Iterator[Instance]:
    name = f"demo-{secrets.token_hex(4)}"
    embedded = Embedded.start(name, config, time.monotonic() + CLUSTER_DEADLINE_S)
    try:
        yield Instance.open(name)
    finally:
        embedded.stop()


def _in_quarters(say: Say) -> Progress:
    """Progress in words: each stage once, and how far it is at every quarter."""
    said: set[str] = set()

    def progress(what: str, done: int, total: int) -> None:
        quarters = 4 * done // total
        text = f"model: {what}" + (f", {25 * quarters} %" if 0 < quarters < 4 else "")
        if text not in said:
            said.add(text)
            say(text)

    return progress

"""KV-streams on a real GPU: rollouts of a batch under several ways to keep the context short, and how far a
trainer's replay lies from the generation.

    python -m bench.gpu_streams --out DIR [--budget-s 300] [--turns 24] [--streams 8] [--shape qwen3-1.7b]
    python -m bench.gpu_streams --out DIR --quick          # tiny, on a CPU: does it run at all?
    python -m bench.streams --no-run --merge DIR/streams.json        # as Markdown

Random weights in bf16.  All arms run in lockstep, turn by turn (``bench.arms``), on one model; the first one
draws the text and the others follow it.  Then the rollouts are replayed through FlexAttention, with the
events as they happened and, as negative controls, with wrong ones and with none; beside it stands the replay
of the arm that cut nothing, which is the noise of two kernels in bf16.

``DIR/streams.json`` and ``DIR/streams.md`` are written after every turn and every replay: a run that is
stopped leaves what it found.  It stops by itself within ``--budget-s``.
"""

from __future__ import annotations

import argparse
import gc
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from bench.arms import Arm, Runner, Script, Text, race
from bench.stream_sections import STREAMS_FILE, Gap, Recorded, tables, to_json
from bench.streams import (
    BLOCK_TOKENS,
    Decode,
    Drawing,
    blocks_for,
    engine_for,
    model_name,
    random_model,
    seating,
)
from kvcomm.streams.events import Event, SlotRange
from kvcomm.streams.rollout import Rollout, Sample, Sampling
from kvcomm.streams.view import View

if TYPE_CHECKING:
    import torch

    from kvcomm.engines.transformers.replaying import Replayed

SHAPES = {
    "qwen3-1.7b": (2_048, 6_144, 28, 16, 8, 128, 32_768),
    "qwen3-0.6b": (1_024, 3_072, 28, 16, 8, 128, 32_768),
    "tiny": (64, 128, 2, 4, 2, 16, 512),
}
"""Of Qwen3, the vocabulary cut: hidden, feed forward, layers, heads, K/V heads, head dim, vocabulary."""
SHAPE_NAMES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "vocab_size",
)  # fmt: skip
REPLAY_S = 90.0
"""Kept for the replays: FlexAttention is compiled first."""
CHECK_S = 90.0
SAME_KL = 1e-2
"""Between two kernels in bf16, of one token; another past gives tenths."""
LATE_S = 1.4
"""A turn may take so much longer than the one before it."""
WAY = Sampling()
"""Temperature 1."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    if options.check:
        return int(not pages_are_right(options))
    options.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(options)
    done = [bench.attempted(part) for part in (bench.check, bench.races, bench.replays)]
    bench.save()
    print(tables([bench.found]))
    return int(not all(done))


@dataclass(slots=True)
class Kept:
    """What the engine drew in some streams of one arm, for replays."""

    streams: int
    samples: list[list[Sample]] = field(default_factory=list)
    logits: list[list[torch.Tensor]] = field(default_factory=list)
    """Of each stream and sample, float32 ``[vocab]``."""

    def watch(self, runner: Runner) -> None:
        """Keep what ``runner`` draws from now on."""
        self.samples = [[] for _ in range(self.streams)]
        self.logits = [[] for _ in range(self.streams)]

        def keep(turn: int, step: int, logits: Sequence[torch.Tensor], tokens: list[int]) -> None:
            for at in range(self.streams):
                self.logits[at].append(logits[at])
                self.samples[at].append(Sample(runner.sessions[at].next_row - 1, tokens[at], 0.0, WAY))

        runner.watch = keep

    def rollouts(self, runner: Runner, from_row: int) -> list[tuple[Rollout, torch.Tensor]]:
        """By stream, with the samples whose row is ``from_row`` or later, and their logits."""
        return [self._rollout(runner, at, from_row) for at in range(self.streams)]

    def _rollout(self, runner: Runner, at: int, from_row: int) -> tuple[Rollout, torch.Tensor]:
        import torch

        session = runner.sessions[at]
        chosen = [n for n, sample in enumerate(self.samples[at]) if sample.query_row >= from_row]
        logits = torch.stack([self.logits[at][n] for n in chosen])
        tokens = torch.tensor([self.samples[at][n].token for n in chosen], device=logits.device)
        probable = torch.log_softmax(logits, -1).gather(1, tokens[:, None])[:, 0].tolist()
        samples = [replace(self.samples[at][n], logprob=p) for n, p in zip(chosen, probable, strict=True)]
        name = f"{runner.arm.name}, stream {at}"
        whole = Rollout.sealed(
            name, session.namespace.id, session.block_tokens, session.tokens, session.events, samples
        )
        return whole, logits


def pages_are_right(options: argparse.Namespace) -> bool:
    """Whether steps over pages and over lanes lead to the same distributions: two layers, a cut between."""
    import torch

    shape = dict(zip(SHAPE_NAMES, SHAPES[options.shape], strict=True)) | {"num_hidden_layers": 2}
    model = random_model(shape, device=options.device, dtype=options.dtype)
    text, vocab = Text(2, 512, 64, system=64), model.config.vocab_size
    script = Script(text, 3, vocab, forced=True)
    found: dict[str, list[torch.Tensor]] = {"pages": [], "lanes": []}
    for decode, kept in found.items():
        engine = engine_for(model, Arm("splice", 2, 1), text, 3, decode=cast("Decode", decode))

        def keep(
            turn: int, step: int, logits: Sequence[torch.Tensor], tokens: list[int], to: Any = kept
        ) -> None:
            to.append(torch.log_softmax(torch.stack(list(logits)).double(), -1))

        runner = Runner(Arm("splice", 1, 1), text, script, engine, Drawing(model), watch=keep)
        for _ in race([runner]):
            pass
        print(f"{decode}: {1e3 * runner.run.turns[-1].step_s:.2f} ms a step of two layers", file=sys.stderr)
    pages, lanes = (torch.stack(kept) for kept in found.values())
    worst = float((pages.exp() * (pages - lanes)).sum(-1).max())
    print(f"pages against lanes: worst KL {worst:.2g} of {pages.shape[0] * pages.shape[1]}", file=sys.stderr)
    return worst < SAME_KL


class Bench:
    """One run of this script."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch

        self.options, self.begun = options, time.monotonic()
        shape = dict(zip(SHAPE_NAMES, SHAPES[options.shape], strict=True))
        self.text = Text(options.turns, options.read, options.written, system=options.system)
        if options.device == "cuda":
            torch.backends.cuda.enable_cudnn_sdp(False)  # it would plan anew for every length
        else:
            torch.set_num_threads(1)
        self.model = random_model(shape, device=options.device, dtype=options.dtype)
        self.found = Recorded(
            options.machine or _machine(options.device), _described(options.device),
            model_name(self.model), options.device, options.dtype,
        )  # fmt: skip
        self.turns_done = 0
        self.runners: list[Runner] = []
        self.kept: dict[str, Kept] = {}
        self.say(f"{self.found.machine}: {self.found.model}")

    def attempted(self, part: Callable[[], None]) -> bool:
        """Whether ``part`` came to its end; what was found until it failed is kept, and the rest is tried."""
        try:
            part()
        except Exception as error:
            traceback.print_exc()
            self.found.notes.append(
                f"Ended early: {part.__name__}, by {type(error).__name__}: {error!s:.300}"
            )
            return False
        return True

    def check(self) -> None:
        """Decode over pages if that is right on this machine; in another process, for a faulty kernel takes
        its process along."""
        if self.options.decode != "auto":
            return
        arguments = ["--check", "--out", str(self.options.out), "--shape", self.options.shape]
        arguments += ["--device", self.options.device]
        command = [sys.executable, "-m", "bench.gpu_streams", *arguments, "--dtype", self.options.dtype]
        try:
            right = not subprocess.run(command, timeout=CHECK_S, check=False).returncode
        except subprocess.TimeoutExpired:
            right = False
        self.options.decode = "pages" if right else "lanes"
        how = "attends the paged memory where it lies" if right else "attends contiguous copies"
        self.found.notes.append(f"A decode step {how}.")
        self.say(f"checked: {self.options.decode}")

    def races(self) -> None:
        """Every arm through the text, or as far as time allows."""
        self._warm_up()
        self.runners = self._runners(self.text)
        for way, runner in (("splice", self.runners[0]), ("never", self.runners[-1])):
            self.kept[way] = Kept(min(self.options.replays, self.options.streams))
            self.kept[way].watch(runner)
        before, turn_s, at = time.monotonic(), 0.0, 0

        def go_on(turn: int) -> bool:
            left = self.options.budget_s - REPLAY_S * (not self.options.quick) - self.elapsed()
            if turn and turn_s * LATE_S > left:
                self.found.notes.append(f"Stopped after {turn} of {self.text.turns} turns: out of time.")
                return False
            return True

        for found in race(self.runners, leaders=1, go_on=go_on, close=False):
            self.found.races, self.turns_done = [found], found.turns_run
            now = time.monotonic()
            turn_s, before, at = now - before, now, at + 1
            steps = ", ".join(
                f"{run.arm.name} {1e3 * run.turns[-1].step_s:.1f} ms"
                + (f" (cut {1e3 * run.turns[-1].cut.seconds:.1f} ms)" if run.turns[-1].cut else "")
                for run in found.runs
            )
            self.say(f"turn {at} took {turn_s:.1f} s; steps: {steps}; {_memory(self.options.device)}")
            self.save()

    def replays(self) -> None:
        """Through FlexAttention, what was generated with cuts and without."""
        import torch

        events = self.runners[0].sessions[0].events if self.runners else []
        if not events:
            self.found.notes.append("Nothing was cut, so nothing was replayed.")
            return
        cut = self.kept["splice"].rollouts(self.runners[0], events[0].at_row)
        uncut = self.kept["never"].rollouts(self.runners[-1], events[0].at_row)
        self._free()
        self.model.set_attn_implementation(self.options.attention)
        rollouts, engine = [rollout for rollout, _ in cut], torch.cat([logits for _, logits in cut])
        whole_engine = torch.cat([logits for _, logits in uncut])
        stories = (
            ("with its events", rollouts, engine),
            ("nothing was cut (floor)", [rollout for rollout, _ in uncut], whole_engine),
            ("✘ every event one row late", [late(rollout) for rollout in rollouts], engine),
            ("✘ every cut one block off", [one_block_off(rollout) for rollout in rollouts], engine),
            ("✘ events lost", [_with_events(rollout, []) for rollout in rollouts], engine),
        )
        for what, told, logits in stories:
            begun = time.monotonic()
            self.found.gaps.append(self._gap(what, told, logits, events))
            self.say(f"replay {what}: {time.monotonic() - begun:.1f} s, {self.found.gaps[-1]}")
            self.save()
            if self.elapsed() > self.options.budget_s:
                self.found.notes.append("Not every replay was run: out of time.")
                return

    def _gap(
        self, what: str, rollouts: Sequence[Rollout], engine: torch.Tensor, events: Sequence[Event]
    ) -> Gap:
        """``engine``: logits, float32 ``[samples of all, vocab]``."""
        import torch

        with torch.no_grad():
            replayed = self._replayed(rollouts)
            kl = _kl(engine, torch.cat([each.logits for each in replayed])).cpu()
        told = [sample.logprob for rollout in rollouts for sample in rollout.samples]
        x = torch.cat([each.log_probs for each in replayed]).double().cpu() - torch.tensor(told).double()
        by_rollout = kl.split([len(rollout.samples) for rollout in rollouts])
        behind = torch.cat(
            [own[first_behind(each, events)] for each, own in zip(rollouts, by_rollout, strict=True)]
        )
        return Gap(
            what, len(kl), float((torch.expm1(x) - x).mean()), float(kl.mean()), float(kl.max()),
            float(behind.mean()), float(x.abs().max()),
        )  # fmt: skip

    def _replayed(self, rollouts: Sequence[Rollout]) -> list[Replayed]:
        from kvcomm.engines.transformers.replaying import FLEX, replay

        if self.options.attention == FLEX:
            try:
                return replay(self.model, rollouts)
            except RuntimeError as error:  # its compiler's are, too
                self.found.notes.append(f"FlexAttention did not run, dense masks did: {error!s:.300}")
                self.options.attention = "sdpa"
                self.model.set_attn_implementation("sdpa")
        return [replay(self.model, [rollout])[0] for rollout in rollouts]  # masks of [rows, rows]

    def _free(self) -> None:
        """What the arms held of the GPU's memory."""
        import torch

        for runner in self.runners:
            runner.close()
        self.runners.clear()
        self.kept.clear()
        gc.collect()
        if self.options.device == "cuda":
            torch.cuda.empty_cache()

    def _warm_up(self) -> None:
        """Kernels are chosen and loaded, memory is reserved: two short turns of every arm."""
        text = Text(2, self.options.read, 8, system=self.options.system)
        arms = [replace(arm, live=1, stride=1) if arm.live else arm for arm in self._arms()]
        begun = time.monotonic()
        for _ in race(self._runners(text, list(dict.fromkeys(arms))), leaders=1):
            pass
        self.say(f"warmed up in {time.monotonic() - begun:.1f} s")

    def _arms(self) -> list[Arm]:
        live = self.options.live
        cutting = [(live, stride) for stride in dict.fromkeys((live // 2, 1))]
        return (
            [Arm("splice", *cut) for cut in cutting]
            + [Arm("again", *cut) for cut in cutting]
            + [Arm("never")]
        )

    def _runners(self, text: Text, arms: Sequence[Arm] = ()) -> list[Runner]:
        script = Script(text, self.options.streams, self.model.config.vocab_size, forced=False)
        made = []
        for arm in arms or self._arms():
            engine = engine_for(self.model, arm, text, self.options.streams, decode=self.options.decode)
            self.say(f"{arm.name}: {blocks_for(arm, text, self.options.streams):,} blocks of 16 rows")
            # Copies that grew on the way would need half as much memory again for a moment.
            slots = blocks_for(arm, text, 1) * BLOCK_TOKENS
            runner = Runner(
                arm,
                text,
                script,
                engine,
                Drawing(self.model),
                settle=self._settle,
                reserve=seating(engine, slots),
            )
            if self.options.decode == "lanes":
                runner.refresh = seating(engine)
            made.append(runner)
        return made

    def _settle(self) -> None:
        import torch

        if self.options.device == "cuda":
            torch.cuda.synchronize()

    def elapsed(self) -> float:
        return time.monotonic() - self.begun

    def say(self, what: str) -> None:
        print(f"{self.elapsed():6.1f} s  {what}", file=sys.stderr, flush=True)

    def save(self) -> None:
        for run in (run for found in self.found.races for run in found.runs):
            del run.turns[self.turns_done + 1 :]  # what not every arm came through is compared with nothing
        (self.options.out / STREAMS_FILE).write_bytes(to_json([self.found]))
        (self.options.out / "streams.md").write_text(tables([self.found]) + "\n")


def late(rollout: Rollout) -> Rollout:
    """Every event one row later than it happened, and no digest that tells."""
    return _changed(rollout, lambda event: replace(event, at_row=event.at_row + 1))


def one_block_off(rollout: Rollout) -> Rollout:
    """Every cut takes the rows one block behind those that it took."""

    def moved(event: Event) -> Event:
        size = rollout.block_tokens
        return replace(event, ranges=tuple(SlotRange(a + size, b + size) for a, b in event.ranges))

    return _changed(rollout, moved)


def _changed(rollout: Rollout, change: Callable[[Event], Event]) -> Rollout:
    view, events = View(), []
    for before in rollout.events:
        event = change(before)
        view.feed(event.at_row - view.next_row)
        events.append(view.stamped(event))
        view.apply(events[-1])
    return _with_events(rollout, events)


def first_behind(rollout: Rollout, events: Sequence[Event], count: int = 3) -> list[int]:
    """Places of the first ``count`` samples behind each event."""
    rows = [sample.query_row for sample in rollout.samples]
    found = set()
    for event in events:
        found |= set([at for at, row in enumerate(rows) if row >= event.at_row][:count])
    return sorted(found)


def _with_events(rollout: Rollout, events: Sequence[Event]) -> Rollout:
    return Rollout.sealed(
        rollout.name, rollout.namespace, rollout.block_tokens, rollout.tokens, events, rollout.samples
    )


def _kl(engine: torch.Tensor, trainer: torch.Tensor) -> torch.Tensor:
    """KL(engine || trainer) of each row of logits, float64."""
    import torch

    found = []
    for mine, its in zip(engine.split(256), trainer.split(256), strict=True):  # in float64 they are large
        log_p, log_q = torch.log_softmax(mine.double(), -1), torch.log_softmax(its.double(), -1)
        found.append((log_p.exp() * (log_p - log_q)).sum(-1))
    return torch.cat(found)


def _machine(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else "a CPU, tiny"


def _described(device: str) -> str:
    import torch
    import transformers

    versions = f"CPython {platform.python_version()}, torch {torch.__version__}"
    cuda = f", CUDA {torch.version.cuda}" if device == "cuda" else ""
    return f"{versions}{cuda}, transformers {transformers.__version__}."


def _memory(device: str) -> str:
    import torch

    return f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB at most" if device == "cuda" else ""


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--quick", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--budget-s", type=float, default=300.0, metavar="S", help="be done within it")
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-1.7b")
    parser.add_argument("--streams", type=int, default=8, help="rollouts in a batch")
    parser.add_argument("--turns", type=int, default=24)
    parser.add_argument("--read", type=int, default=960, help="tokens of a message that is read")
    parser.add_argument("--written", type=int, default=64, help="tokens of a message that is written")
    parser.add_argument("--system", type=int, default=64, help="tokens of the system prompt")
    parser.add_argument(
        "--live", type=int, default=8, help="most turns in view; half of them, or 1, go at once"
    )
    parser.add_argument("--replays", type=int, default=4, help="streams that are replayed")
    parser.add_argument("--attention", default="flex_attention", help="of the replay")
    parser.add_argument("--machine", default="", help="its name in tables and pictures")
    parser.add_argument("--decode", choices=("auto", "lanes", "pages"), default="auto")
    parser.add_argument("--check", action="store_true", help="only: are steps over pages right here?")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    quick: dict[str, Any] = {
        "shape": "tiny", "streams": 2, "turns": 5, "read": 40, "written": 8, "system": 32, "live": 3,
        "replays": 2, "device": "cpu", "dtype": "float32", "decode": "pages",
    }  # fmt: skip
    if "--quick" in (sys.argv[1:] if arguments is None else arguments):
        parser.set_defaults(**quick)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

"""``python -m bench.streams [--smoke] [--rounds N] [--json FILE] [--merge FILE ...] [--write-docs]``: what
keeping a context short costs, by cutting blocks out and by reading again what is kept.

A small model with random weights on one thread, one stream; times are seconds of the processor.  The
schedules have a message read and one written in turn; see ``bench.arms`` for the ways and for how they are
timed.  Prefilled tokens are counted where the engine gets them.  What GPUs recorded (``bench.gpu_streams``)
is put beside it (``--merge``).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bench.arms import Arm, Race, Runner, Script, Text, race
from bench.document import DOCUMENT, RECORDS, begin, written_into
from bench.host import Host, wait_for_quiet
from bench.scale import FULL, SMOKE
from bench.stream_sections import STREAMS_FILE, Recorded, from_json, tables, to_json

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from kvcomm.engines.transformers.streaming import StreamEngine
    from kvcomm.streams.session import Session

Decode = Literal["auto", "lanes", "pages"]
ROUNDS = 3
SEED = 3
BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Schedule:
    """``stride`` turns go when ``live`` are in view and another one begins."""

    live: int
    stride: int
    text: Text

    def arms(self) -> list[Arm]:
        both = self.live, self.stride
        return [Arm("splice", *both), Arm("again", *both), Arm("again, prompt kept", *both), Arm("never")]


SCHEDULES = (
    Schedule(10, 5, Text(turns=32, read=96, written=32)),
    Schedule(10, 1, Text(turns=32, read=96, written=32)),
    Schedule(20, 10, Text(turns=32, read=96, written=32)),
    Schedule(10, 5, Text(turns=24, read=240, written=16)),
    Schedule(10, 5, Text(turns=14, read=32, written=96)),
)
"""The first is that of the KV-streams paper; then a cut every turn, few cuts, much read, much written."""
SMOKE_SCHEDULES = (
    Schedule(2, 1, Text(turns=4, read=16, written=16, system=16)),
    Schedule(3, 2, Text(turns=4, read=16, written=16, system=16)),
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    found = [] if options.no_run else [_recorded(options)]
    for recorded in options.merge:
        found += from_json(Path(recorded).read_bytes())
    text = tables(found)
    print(text)
    if options.json:
        Path(options.json).write_bytes(to_json(found))
    if options.write_docs:
        (RECORDS / STREAMS_FILE).write_bytes(to_json(found))
        DOCUMENT.write_text(written_into(DOCUMENT.read_text(), text, begin("bench.streams")))
    return 0


def _recorded(options: argparse.Namespace) -> Recorded:
    wait_for_quiet(options.patience)
    host = Host.measured(SMOKE if options.smoke else FULL)
    model = small_model(tiny=options.smoke)
    found = Recorded(options.machine, host.described(), model_name(model), device="cpu", dtype="float32")
    schedules = SMOKE_SCHEDULES if options.smoke else SCHEDULES
    for number in range(1 if options.smoke else options.rounds):
        for schedule in schedules:
            print(f"round {number}, {schedule} ...", file=sys.stderr, flush=True)
            found.races.append(run(model, schedule))
            if options.json:  # it takes minutes, and what there is may be all there will be
                Path(options.json).write_bytes(to_json([found]))
    return found


def run(model: PreTrainedModel, schedule: Schedule, *, streams: int = 1) -> Race:
    """All arms over one schedule, tokens forced."""
    import torch

    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    script = Script(schedule.text, streams, vocab_size, forced=True)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        runners = []
        for arm in schedule.arms():
            engine = engine_for(model, arm, schedule.text, streams)
            given = (arm, schedule.text, script, engine, Drawing(model))
            runners.append(Runner(*given, refresh=seating(engine), clock=time.process_time))
        *_, found = race(runners)
    finally:
        torch.set_num_threads(before)
    return found


def engine_for(
    model: PreTrainedModel, arm: Arm, text: Text, streams: int, *, decode: Decode = "auto"
) -> StreamEngine:
    """With just the memory that the arm needs."""
    from kvcomm.engines.transformers import namespace_of
    from kvcomm.engines.transformers.streaming import StreamEngine

    # Random weights share with nobody: a name for them saves hashing gigabytes.
    namespace = namespace_of(model, block_tokens=BLOCK_TOKENS, revision="random", name="random")
    blocks = blocks_for(arm, text, streams)
    return StreamEngine(model, blocks, namespace, rows_max=text.rows, lanes_max=streams, decode=decode)


def seating(engine: StreamEngine, slots: int = 0) -> Callable[[Sequence[Session]], None]:
    """Gathers contiguous copies that are behind the memory; they get room for ``slots`` each."""

    def seat(sessions: Sequence[Session]) -> None:
        import torch

        with torch.inference_mode():
            engine.lanes.seat(sessions, max(slots, *(session.slot_count for session in sessions)))

    return seat


def blocks_for(arm: Arm, text: Text, streams: int) -> int:
    """Of an arm's most turns in view, in blocks; one more a stream for good measure."""
    turns = text.turns if arm.way == "never" else min(arm.live, text.turns)
    slots = text.system + turns * text.turn_tokens
    return streams * (-(-slots // BLOCK_TOKENS) + 1)


class Drawing:
    """Draws from the model's distribution, seeded; what it took to draw is part of every step."""

    def __init__(self, model: PreTrainedModel) -> None:
        import torch

        self._generator = torch.Generator(device=model.device).manual_seed(SEED)

    def __call__(self, logits: Sequence[torch.Tensor]) -> list[int]:
        import torch

        probabilities = torch.softmax(torch.stack(list(logits)), -1)
        drawn: list[int] = torch.multinomial(probabilities, 1, generator=self._generator)[:, 0].tolist()
        return drawn


def small_model(*, tiny: bool = False) -> PreTrainedModel:
    """A Qwen3 of 5.6 million random weights on the CPU, or a tiny one."""
    shape = (64, 128, 2, 4, 2, 16, 256) if tiny else (256, 768, 6, 8, 2, 32, 2_048)
    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "vocab_size",
    )  # fmt: skip
    return random_model(dict(zip(names, shape, strict=True)))


def random_model(shape: dict[str, int], *, device: str = "cpu", dtype: str = "float32") -> PreTrainedModel:
    """A Qwen3 of this shape.  Weights are drawn wider than usual, so that a wrong K or V changes logits."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(SEED)
    config = Qwen3Config(
        **shape, max_position_embeddings=1 << 17, initializer_range=0.04, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=2, pad_token_id=3,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(device):
            model: Any = Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model.to(getattr(torch, dtype)).eval()


def model_name(model: PreTrainedModel) -> str:
    config, parameters = model.config, sum(each.numel() for each in model.parameters())
    size = f"{parameters / 1e9:.2g} billion" if parameters > 1e9 else f"{parameters / 1e6:.2g} million"
    return (
        f"{size} random weights in the shape of a Qwen3: {config.num_hidden_layers} layers, hidden "
        f"{config.hidden_size}, {config.num_attention_heads} heads, {config.num_key_value_heads} for K and V "
        f"of {config.head_dim}, vocabulary {config.vocab_size:,}"
    )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.streams", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run at all?")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--patience", type=float, default=0.0, metavar="S")
    parser.add_argument("--machine", default="this machine", metavar="NAME")
    parser.add_argument("--json", metavar="FILE", help="also write what was found there")
    parser.add_argument("--merge", nargs="*", default=[], metavar="FILE", help="recorded on other machines")
    parser.add_argument("--no-run", action="store_true", help="only what is merged")
    parser.add_argument("--write-docs", action="store_true", help=f"put the tables into {DOCUMENT.name}")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

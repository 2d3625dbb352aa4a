"""Gates: what a trainer computes from a rollout's record is what the engine computed, and where it would not
be, that is seen.

All rollouts come from ``StreamEngine`` on tiny random models; those of one model are written side by side in
one batch.  Limits are absolute and in nats, of fp32 unless a test says otherwise.
"""

from __future__ import annotations

import copy
import functools
import io
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from kvcomm.engines.transformers.replaying import Path, Replayed, pack_logits, pass_count, replay
from kvcomm.engines.transformers.streaming import StreamEngine
from kvcomm.errors import Corrupt, TokenError
from kvcomm.streams.events import NO_SPAN, Event, SlotRange
from kvcomm.streams.mismatch import EXACT, ROUNDED, Mismatch, exact_kl, mismatch
from kvcomm.streams.model_rules import NotCompactable
from kvcomm.streams.replay import BITS_MIN, Keeping, Unreplayable, pack, policy_loss, segments
from kvcomm.streams.rollout import Rollout, Sampling
from kvcomm.streams.rollout_file import read_rollouts, write_rollouts
from tests.kvcomm.streams import faults
from tests.kvcomm.streams.plain import PlainEngine
from tests.kvcomm.streams.scenarios import (
    SCENARIOS,
    Script,
    Steps,
    Writer,
    text,
    turned,
    windowed,
    with_settings,
    written,
)
from tests.models import STREAM_MODEL_KINDS, StreamModelKind, stream_model, tiny_model

pytestmark = pytest.mark.slow

PATHS: tuple[Path, ...] = ("mask", "segmented")
DETACHED: Path = "detached"
CONTROL_FACTOR = 1000.0
"""A fault shows in at least so many times the noise."""


@functools.cache
def model_of(kind: StreamModelKind, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return stream_model(kind, dtype=dtype)


@functools.cache
def told_of(kind: StreamModelKind, dtype: torch.dtype = torch.float32) -> dict[str, Writer]:
    """All scenarios on one model."""
    return written(StreamEngine(model_of(kind, dtype), 800), SCENARIOS)


@pytest.fixture(scope="module", autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    told_of.cache_clear()
    model_of.cache_clear()


def write(model: PreTrainedModel, script: Script, **settings: object) -> Writer:
    return written(StreamEngine(model, 400), {"one": script}, **settings)["one"]  # type: ignore[arg-type]


def replayed(model: PreTrainedModel, rollout: Rollout, path: Path = "mask") -> Replayed:
    with torch.no_grad():
        return replay(model, [rollout], path=path)[0]


def judged(writer: Writer, found: Replayed, **words: int) -> Mismatch:
    return mismatch([found], engine_logits=[writer.engine_logits], trainer_logits=[found.logits], **words)


def kl_behind(writer: Writer, logits: torch.Tensor, first_row: int | None = None) -> float:
    """Mean exact KL over the samples from a row on, by default that of the first event."""
    rollout = writer.rollout
    first = rollout.events[0].at_row if first_row is None else first_row
    behind = torch.tensor([sample.query_row >= first for sample in rollout.samples])
    return float(exact_kl(rollout, writer.engine_logits, logits)[behind].mean())


def assert_seen(writer: Writer, model: PreTrainedModel, wrong: torch.Tensor) -> None:
    """Those logits are far from the engine's, and the replay's are not."""
    floor = kl_behind(writer, replayed(model, writer.rollout).logits)
    assert kl_behind(writer, wrong) > CONTROL_FACTOR * max(floor, 1e-12)


def gradient(model: PreTrainedModel, rollouts: list[Rollout], path: Path = "mask") -> torch.Tensor:
    """Of a policy loss with advantages that differ by token, all weights in one row."""
    model.zero_grad(set_to_none=True)
    draw = torch.Generator().manual_seed(0)
    for each in replay(model, rollouts, path=path):
        advantage = torch.randn(len(each.log_probs), generator=draw)
        policy_loss(each.log_probs, each.rollout, advantage).backward(retain_graph=True)
    found = torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])
    model.zero_grad(set_to_none=True)
    return found


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


class TestReplayIsGeneration:
    @pytest.mark.parametrize("path", PATHS)
    @pytest.mark.parametrize("scenario", SCENARIOS)
    @pytest.mark.parametrize("kind", STREAM_MODEL_KINDS)
    def test_gate_g01_the_replay_is_the_generation(
        self, kind: StreamModelKind, scenario: str, path: Path
    ) -> None:
        writer = told_of(kind)[scenario]
        report = judged(writer, replayed(model_of(kind), writer.rollout, path))
        assert report.beyond(EXACT) == [], str(report)
        assert report.k3.count > 100
        assert report.after_events.count >= 9

    @pytest.mark.parametrize(
        ("block_tokens", "script"),
        [
            (1, with_settings(turned, turn_count=9, padded=False)),
            (
                32,
                with_settings(windowed, prompt=300, count=60, window=160, stride=64, protected=40, chunk=48),
            ),
            (128, with_settings(windowed, count=300, window=300, stride=128)),
        ],
    )
    def test_gate_g01_the_replay_is_the_generation_on_blocks_of(
        self, block_tokens: int, script: Script
    ) -> None:
        model = model_of("qwen3 sliding")
        engine = StreamEngine(model, 1 + 1024 // block_tokens, block_tokens=block_tokens)
        writer = written(engine, {"one": script})["one"]
        assert writer.rollout.events
        report = judged(writer, replayed(model, writer.rollout))
        assert report.beyond(EXACT) == [], str(report)

    def test_gate_g01_an_engine_without_blocks_computes_the_same(self) -> None:
        """The oracle shares no line of memory management with the engine."""
        model, writer = model_of("qwen3 sliding"), told_of("qwen3 sliding")["restored"]
        rollout = writer.rollout
        by_hand = written(
            PlainEngine(model, writer.session.namespace), {"one": with_settings(retold, rollout=rollout)}
        )["one"]
        assert by_hand.session.view.digest == rollout.view_digest
        assert torch.allclose(by_hand.engine_logits, writer.engine_logits, atol=1e-4)

    @settings(max_examples=8, deadline=None, derandomize=True)
    @given(st.integers(0, 10_000))
    def test_gate_g01_any_story_is_replayed(self, seed: int) -> None:
        """Chunks, steps, cuts anywhere behind the first block, archives and restores, several in a row."""
        model = model_of("qwen3 sliding")
        scripts = {f"{seed}.{at}": with_settings(any_story, seed=seed + at) for at in range(3)}
        engine = StreamEngine(model, 300, told_of("qwen3 sliding")["window"].session.namespace)
        for writer in written(engine, scripts).values():
            for path in PATHS:
                found = replayed(model, writer.rollout, path)
                assert float((found.logits - writer.engine_logits).abs().max()) < 1e-4
                assert judged(writer, found).beyond(EXACT) == []

    @pytest.mark.parametrize("control", faults.CONTROLS)
    @pytest.mark.parametrize("kind", STREAM_MODEL_KINDS)
    def test_gate_g02_a_fault_is_seen(self, kind: StreamModelKind, control: str) -> None:
        model = model_of(kind)
        for writer in told_of(kind).values():
            with torch.no_grad():
                wrong = faults.CONTROLS[control](model, writer.rollout)
            assert_seen(writer, model, wrong)

    @pytest.mark.parametrize("kind", ["llama gqa", "qwen3 sliding"])
    def test_gate_g06_in_bf16_the_difference_is_rounding(self, kind: StreamModelKind) -> None:
        model = model_of(kind, torch.bfloat16)
        writers = written(
            StreamEngine(model, 400), {name: SCENARIOS[name] for name in ("window", "restored")}
        )
        for writer in writers.values():
            for path in PATHS:
                report = judged(writer, replayed(model, writer.rollout, path))
                assert report.beyond(ROUNDED) == [], str(report)
            # on some processors all paths round alike; to round less than they do is seen on every one
            finer = judged(writer, replayed(copy.deepcopy(model).float(), writer.rollout))
            assert finer.k3.mean > EXACT.mean, "a limit that cannot fail"
            blind = mismatch([replayed(model, faults.lost(writer.rollout))])
            assert blind.beyond(ROUNDED), "the alarm sees that events were lost"

    @pytest.mark.parametrize("path", PATHS)
    def test_gate_g07_the_difference_does_not_grow_with_the_number_of_cuts(self, path: Path) -> None:
        model, writer = model_of("qwen3"), many_cuts()
        found = replayed(model, writer.rollout, path)
        by_view = kl_by_view(writer, found.logits)
        assert len(by_view) >= 15
        assert max(by_view[-5:]) < 1e-11
        assert sum(by_view[-5:]) < 3 * sum(by_view[:5])

    def test_edge_06_after_fourteen_cuts_every_row_is_still_right(self) -> None:
        writer = many_cuts()
        assert writer.rollout.event_count >= 14
        report = judged(writer, replayed(model_of("qwen3"), writer.rollout))
        assert report.beyond(EXACT) == [], str(report)
        assert report.after_events.count == 3 * writer.rollout.event_count


def retold(writer: Writer, *, rollout: Rollout) -> Steps:
    """Row by row what is on record."""
    session, events = writer.session, list(rollout.events)
    sampled = {sample.query_row: sample for sample in rollout.samples}
    for row, token in enumerate(rollout.tokens):
        while events and events[0].at_row == row:
            event = events.pop(0)
            if event.kind == "evict":
                session.evict(event.ranges, archive=bool(event.span))
            else:
                session.restore(event.span, event.insert_at)
        yield [token]
        if row in sampled:
            writer.record(sampled[row])


def any_story(writer: Writer, *, seed: int) -> Steps:
    session, draw = writer.session, random.Random(seed)
    session.protect(1)
    yield text(draw.randint(20, 60), seed)
    for _ in range(25):
        kind, full = draw.random(), session.full_slots // 16
        if kind < 0.35 and full > 1:
            first = draw.randrange(1, full)
            last = draw.randint(first + 1, min(full, first + 3))
            session.evict([(16 * first, 16 * last)], archive=draw.random() < 0.6)
        elif kind < 0.55 and session.archive:
            session.restore(draw.choice(sorted(session.archive)), 16 * draw.randint(1, full))
        elif kind < 0.7:
            yield [writer.sample(), *text(draw.randint(1, 40), seed)]
        else:
            yield [writer.sample()]
    writer.sample()


@functools.cache
def many_cuts() -> Writer:
    return write(model_of("qwen3"), with_settings(windowed, count=760))


def kl_by_view(writer: Writer, logits: torch.Tensor) -> list[float]:
    kl = exact_kl(writer.rollout, writer.engine_logits, logits)
    rows = torch.tensor([sample.query_row for sample in writer.rollout.samples])
    borders = [0, *[event.at_row for event in writer.rollout.events], writer.rollout.row_count]
    inside = [(rows >= a) & (rows < b) for a, b in pairwise(borders)]
    return [float(kl[which].mean()) for which in inside]


class TestPacked:
    def test_fault_b13_packed_and_alone_give_the_same_numbers_on_one_path(self) -> None:
        model = model_of("qwen3 sliding")
        rollouts = [writer.rollout for writer in told_of("qwen3 sliding").values()]
        with torch.no_grad():
            packed = replay(model, rollouts)
        assert [each.rollout for each in packed] == rollouts
        assert {each.path for each in packed} == {"mask"}
        for each, writer in zip(packed, told_of("qwen3 sliding").values(), strict=True):
            alone = replayed(model, each.rollout)
            assert torch.allclose(each.logits, alone.logits, atol=1e-4)
            assert judged(writer, each).beyond(EXACT) == []

    def test_fault_b13_a_pack_takes_one_pass_and_ranks_can_agree_on_more(self) -> None:
        model = model_of("qwen3")
        rollouts = [told_of("qwen3")[name].rollout for name in ("window", "turns")]
        passes: list[int] = []
        hook = model.register_forward_hook(lambda *_: passes.append(1))
        try:
            with torch.no_grad():
                for path in (*PATHS, DETACHED):
                    expected = 1 if path == "mask" else 10
                    assert pass_count(rollouts, path) == expected
                    plain = replay(model, rollouts, path=path)
                    assert len(passes) == expected
                    passes.clear()
                    idle = replay(model, rollouts, path=path, passes=12)
                    assert len(passes) == 12
                    passes.clear()
                    for one, other in zip(plain, idle, strict=True):
                        assert torch.equal(one.logits, other.logits)
        finally:
            hook.remove()

    def test_fault_b13_flex_attention_is_the_dense_mask(self) -> None:
        """Uncompiled; on a GPU the same masks are compiled."""
        model = model_of("qwen3 sliding")
        flex = stream_model("qwen3 sliding", attn_implementation="flex_attention")
        flex.load_state_dict(model.state_dict())
        writers = [told_of("qwen3 sliding")[name] for name in ("restored", "chunked")]
        with torch.no_grad():
            found = replay(flex, [writer.rollout for writer in writers], passes=2)
        for each, writer in zip(found, writers, strict=True):
            assert judged(writer, each).beyond(EXACT) == []

    def test_eager_attention_gives_the_same(self) -> None:
        model = model_of("qwen3 sliding")
        eager = stream_model("qwen3 sliding", attn_implementation="eager")
        eager.load_state_dict(model.state_dict())
        writer = told_of("qwen3 sliding")["restored"]
        for path in PATHS:
            assert judged(writer, replayed(eager, writer.rollout, path)).beyond(EXACT) == []


class TestGradients:
    @pytest.mark.parametrize("scenario", ["turns", "restored"])
    def test_gate_g05_the_segmented_gradient_is_that_of_the_mask_and_the_detached_one_is_not(
        self, scenario: str
    ) -> None:
        model, rollout = model_of("qwen3"), told_of("qwen3")[scenario].rollout
        full = gradient(model, [rollout])
        assert relative(gradient(model, [rollout], "segmented"), full) < 1e-4
        detached = gradient(model, [rollout], "detached")
        assert relative(detached, full) > 0.05
        assert float(torch.cosine_similarity(detached, full, 0)) > 0.3, "another gradient, not noise"

    def test_gate_g05_a_pack_has_the_sum_of_the_gradients(self) -> None:
        model = model_of("qwen3 sliding")
        rollouts = [told_of("qwen3 sliding")[name].rollout for name in ("window", "unpadded")]
        model.zero_grad(set_to_none=True)
        total = gradient(model, rollouts)
        draw, alone = torch.Generator().manual_seed(0), torch.zeros_like(total)
        for rollout in rollouts:
            advantage = torch.randn(len(rollout.samples), generator=draw)
            (each,) = replay(model, [rollout])
            loss = policy_loss(each.log_probs, rollout, advantage)
            parts = torch.autograd.grad(loss, list(model.parameters()))
            alone += torch.cat([part.flatten() for part in parts])
        assert relative(total, alone) < 1e-4

    def test_gate_g05_samples_without_loss_in_a_pack_are_as_if_they_were_not_there(self) -> None:
        model, told = model_of("qwen3 sliding"), told_of("qwen3 sliding")
        samplings = (Sampling(), Sampling(0.7, 20, 0.9), Sampling(0.0))
        marked, left = [], []
        for name in ("window", "unpadded"):
            rollout = told[name].rollout
            samples = [
                replace(each, loss=bool(at % 3), sampling=samplings[at % 2 + at % 3 // 2])
                for at, each in enumerate(rollout.samples)
            ]
            marked.append(replace(rollout, samples=tuple(samples)))
            left.append(replace(rollout, samples=tuple(each for each in samples if each.loss)))
        marked.append(
            replace(marked[0], samples=tuple(replace(each, loss=False) for each in marked[0].samples))
        )
        gradients = []
        for rollouts in (marked, left):
            loss = torch.stack(
                [policy_loss(each.log_probs, each.rollout, 1.0) for each in replay(model, rollouts)]
            )
            assert float(loss.detach()[:2].abs().min()) > 0
            parts = torch.autograd.grad(loss.sum(), list(model.parameters()))
            gradients.append(torch.cat([part.flatten() for part in parts]))
        assert relative(*gradients) < 1e-4

    def test_evicted_turns_carry_loss_and_gradient_flows_through_what_they_wrote(self) -> None:
        """Loss on the samples behind the last cut alone reaches embeddings of rows that were cut before."""
        model, rollout = model_of("qwen3"), told_of("qwen3")["window"].rollout
        last = rollout.events[-1].at_row
        spans = rollout.visibility().intervals
        gone = [row for row in range(rollout.row_count) if spans[row][-1][1] < last]
        learned = replace(
            rollout, samples=tuple(replace(each, loss=each.query_row >= last) for each in rollout.samples)
        )
        touched = {}
        for path in (*PATHS, DETACHED):
            model.zero_grad(set_to_none=True)
            (each,) = replay(model, [learned], path=path)
            policy_loss(each.log_probs, learned, 1.0).backward()
            weight = model.get_input_embeddings().weight.grad
            assert weight is not None
            kept = {rollout.tokens[row] for row in range(rollout.row_count)} - {
                rollout.tokens[row] for row in range(rollout.row_count) if row not in gone
            }
            touched[path] = float(weight[sorted(kept)].abs().sum())
        assert touched["mask"] == pytest.approx(touched["segmented"], rel=1e-3)
        assert touched["mask"] > 0 == touched["detached"]


class TestRecord:
    @pytest.mark.parametrize("scenario", ["window", "restored"])
    @pytest.mark.parametrize("tamper", ["dropped", "doubled", "shifted", "swapped", "moved", "reordered"])
    def test_gate_g08_a_changed_log_is_never_replayed(self, scenario: str, tamper: str) -> None:
        """The header is changed along, as a careless stage would; only a log that ends early could pass then,
        which the header that was written tells."""
        rollout, model = told_of("llama gqa")[scenario].rollout, model_of("llama gqa")
        tried = 0
        for at in range(rollout.event_count):
            for events in changed(list(rollout.events), at, tamper):
                tried += 1
                careless = replace(
                    rollout,
                    events=tuple(events),
                    event_count=len(events),
                    view_digest=events[-1].view_digest,
                )
                for path in PATHS:
                    with pytest.raises(Corrupt):
                        replay(model, [careless], path=path)
        assert tried >= 2

    def test_fault_b00_a_rollout_that_is_cut_short_is_replayed_as_its_beginning(self) -> None:
        """Its events are cut with it, so what is left is judged under the views that it had."""
        model, writer = model_of("llama gqa"), told_of("llama gqa")["restored"]
        whole = writer.rollout
        for row_count in (whole.events[2].at_row, whole.events[3].at_row + 1, 300):
            short = whole.truncated(row_count)
            assert 0 < short.event_count < whole.event_count
            logits = replayed(model, short).logits
            kl = exact_kl(short, writer.engine_logits[: len(short.samples)], logits)
            assert float(kl.mean()) < EXACT.mean
            with pytest.raises(Corrupt):
                replace(short, events=whole.events, event_count=whole.event_count)

    def test_fault_b01_a_record_that_travelled_as_json_or_in_a_file_has_the_same_mask(self) -> None:
        rollout = told_of("llama gqa")["restored"].rollout
        for as_json in (False, True):
            file = io.BytesIO()
            write_rollouts(file, [rollout], as_json=as_json)
            (back,) = read_rollouts(io.BytesIO(file.getvalue()))
            assert torch.equal(pack([back]).births, pack([rollout]).births)
            assert torch.equal(pack([back]).deaths, pack([rollout]).deaths)

    @pytest.mark.parametrize("count", [0, 1, 2])
    def test_fault_b01_events_that_are_lost_on_the_way_are_missed(self, count: int) -> None:
        rollout = told_of("llama gqa")["window"].rollout
        with pytest.raises(Corrupt, match=f"has {count} of 3 events"):
            replace(rollout, events=rollout.events[:count])

    def test_fault_b02_where_a_cut_begins_is_in_the_record_and_not_computed_from_offsets(self) -> None:
        """The prompt of 45 ends inside a block: who takes its length for the start is three rows off."""
        model, writer = model_of("llama gqa"), told_of("llama gqa")["window"]
        rollout = writer.rollout
        assert [event.ranges for event in rollout.events] == [(SlotRange(48, 96),)] * 3
        shifted = [replace(event, ranges=(SlotRange(45, 93),)) for event in rollout.events]
        assert_seen(writer, model, replayed(model, faults.rewritten(rollout, shifted)).logits)
        forged = replace(rollout, events=tuple(shifted), view_digest=shifted[-1].view_digest)
        with pytest.raises(Corrupt):
            replay(model, [forged])

    def test_fault_b05_no_two_rows_ever_share_a_position(self) -> None:
        """With slot plus what the last cut took, rows behind the second cut collide with survivors."""
        model, writer = model_of("llama gqa"), told_of("llama gqa")["window"]
        packed = pack([writer.rollout])
        assert len(set(packed.positions.tolist())) == writer.rollout.row_count
        naive = faults.slots_of_rows(writer.rollout).clone()
        for event in writer.rollout.events[1:]:
            naive[event.at_row :] = faults.slots_of_rows(writer.rollout)[event.at_row :] + 48
        view = writer.session.view.rows
        assert len(set(naive[list(view)].tolist())) < len(view)
        with torch.no_grad():
            assert_seen(writer, model, pack_logits(model, replace(packed, positions=naive)))

    def test_fault_b06_a_later_request_of_a_rollout_begins_where_the_last_one_ended(self) -> None:
        """Nothing is shipped a request: the last turn's rows are rows of the same stream."""
        model, writer = model_of("qwen3"), told_of("qwen3")["turns"]
        rollout = writer.rollout
        start = rollout.tokens.index(text(1, 7 + 13)[0], rollout.events[-1].at_row)
        assert kl_behind(writer, replayed(model, rollout).logits, start) < EXACT.mean
        packed = pack([rollout])
        restarted = packed.positions.clone()
        restarted[start:] = faults.slots_of_rows(rollout)[start:]
        with torch.no_grad():
            wrong = pack_logits(model, replace(packed, positions=restarted))
        assert kl_behind(writer, wrong, start) > CONTROL_FACTOR * 1e-11

    @pytest.mark.parametrize(
        "sampling", [Sampling(0.0), Sampling(0.7, 20, 0.9), Sampling(1.5, 0, 0.8)], ids=str
    )
    def test_edge_20_both_sides_score_the_distribution_that_was_drawn_from(self, sampling: Sampling) -> None:
        model = model_of("qwen3")
        writer = write(model, with_settings(windowed, count=130), sampling=sampling)
        found = replayed(model, writer.rollout)
        report = judged(writer, found)
        assert report.beyond(EXACT) == [], str(report)
        plain = [replace(each, sampling=Sampling()) for each in writer.rollout.samples]
        raw = replayed(model, replace(writer.rollout, samples=tuple(plain)))
        if sampling.temperature:
            assert mismatch([raw]).k3.mean > 1e-3

    def test_edge_17_rows_of_new_weights_over_old_ones_are_reported_apart(self) -> None:
        before, after = stream_model("qwen3"), stream_model("qwen3")
        engine = StreamEngine(before, 100)
        told = stream_model("qwen3", seed=1).state_dict()

        def updated(writer: Writer) -> Steps:
            yield from windowed(writer, count=120)
            for name, weight in engine.model.state_dict().items():
                weight.lerp_(told[name], 0.05)
            engine.set_weights(1, [writer.session])
            token = writer.session.pending
            assert token is not None
            for _ in range(20):
                yield [token]
                token = writer.sample()

        writer = written(engine, {"one": updated})["one"]
        rollout = writer.rollout
        old = replayed(after, rollout)
        with pytest.raises(ValueError, match="weights_version="):
            mismatch([old])
        report = judged(writer, old, weights_version=0)
        assert report.beyond(EXACT) == [], str(report)
        assert report.stale_count == 20
        new = judged(writer, replayed(engine.model, rollout), weights_version=1)
        assert new.stale_count == len(rollout.samples), "its rows read K/V of the old weights"

    def test_edge_15_a_fork_is_replayed_with_the_events_that_it_inherited(self) -> None:
        model = model_of("qwen3 sliding")
        engine = StreamEngine(model, 200)
        parent = written(engine, {"parent": with_settings(windowed, count=130)})["parent"]
        child = Writer(engine, "child", sampling=Sampling(1.2), seed=9)
        child.session.close()
        child.session = engine.fork(parent.session, bytes(32))
        child.recorder = parent.recorder.fork(child.session, "child", loss=False)
        (token,) = (each.token for each in parent.recorder.samples[-1:])
        for _ in range(60):
            (child.logits,) = engine.feed([(child.session, [token])])
            if child.session.slot_count > 144:
                child.session.evict([(48, 96)])
            token = child.sample()
        rollout = child.rollout
        assert [event.kind for event in rollout.events] == ["evict", "fork", "evict"]
        for path in PATHS:
            report = mismatch([replayed(model, rollout, path)])
            assert report.beyond(EXACT) == [], str(report)
            assert report.k3.count == 130 + 60

    def test_fault_b12_rows_of_adopted_blocks_are_rows_like_any_other(self) -> None:
        """A sibling takes blocks of before and behind an event that another session computed."""
        model = model_of("qwen3 sliding")
        engine = StreamEngine(model, 200)
        prompt, tail = text(96, 1), text(41, 2)
        writers = [Writer(engine, name, seed=seed) for seed, name in enumerate(("first", "sibling"))]
        for writer, adopted in zip(writers, (0, 32), strict=True):
            session = writer.session
            taken = session.adopt_prefix(prompt) if adopted else 0
            (writer.logits,) = engine.feed([(session, prompt[taken:])])
            session.evict([(16, 64)])
            behind = session.adopt_prefix(tail) if adopted else 0
            assert (taken, behind) == ((80, 32) if adopted else (0, 0))
            (writer.logits,) = engine.feed([(session, tail[behind:])])
            for _ in range(12):
                (writer.logits,) = engine.feed([(session, [writer.sample()])])
        for writer in writers:
            assert judged(writer, replayed(model, writer.rollout)).beyond(EXACT) == []

    def test_edge_22_a_lost_span_is_read_again_as_new_rows_and_replayed_as_such(self) -> None:
        def reread(writer: Writer) -> Steps:
            session = writer.session
            yield text(64, 3)
            span = session.evict([(16, 48)], archive=True).span
            yield text(9, 4)
            for _ in range(12):
                yield [writer.sample()]
            lost = [session.tokens[row] for row in session.archive[span].rows]
            session.drop_archived(span, moved=False)
            yield [writer.sample(), *lost]
            writer.recorder.repeated(len(lost))
            for _ in range(20):
                yield [writer.sample()]

        model = model_of("qwen3")
        writer = write(model, reread)
        rollout = writer.rollout
        assert len(rollout.repeated_rows) == 32
        assert [rollout.tokens[row] for row in rollout.repeated_rows] == list(rollout.tokens[16:48])
        assert judged(writer, replayed(model, rollout)).beyond(EXACT) == []
        again = replace(rollout.events[0], span=NO_SPAN)
        first = rollout.repeated_rows[0]
        restored = faults.rewritten(rollout, [again])
        assert pack([restored]).dense()[-1, 16:48].sum() == 0, "the rows that were lost stay lost"
        assert pack([restored]).dense()[-1, first : first + 32].all()


def changed(events: list[Event], at: int, tamper: str) -> list[list[Event]]:
    """Logs in which something happened to the event at a place; none that ends early."""
    event, last = events[at], at == len(events) - 1
    if tamper == "dropped":
        return [] if last else [events[:at] + events[at + 1 :]]
    if tamper == "doubled":
        return [events[: at + 1] + events[at:]]
    if tamper == "shifted":
        return [[*events[:at], replace(event, at_row=event.at_row + by), *events[at + 1 :]] for by in (-1, 1)]
    if tamper == "swapped":
        return [] if last else [[*events[:at], events[at + 1], event, *events[at + 2 :]]]
    if tamper == "reordered":
        return [] if last else [events[:at] + events[at:][::-1]]
    if event.kind == "restore":
        return [[*events[:at], replace(event, insert_at=event.insert_at + 16), *events[at + 1 :]]]
    moved = tuple(SlotRange(start + 16, end + 16) for start, end in event.ranges)
    return [[*events[:at], replace(event, ranges=moved), *events[at + 1 :]]]


class TestResidue:
    def test_gate_g09_what_was_cut_is_still_felt_and_after_a_re_prefill_it_is_not(self) -> None:
        model, rollout = model_of("qwen3"), told_of("qwen3")["turns"].rollout
        first = rollout.events[0]
        lives = rollout.visibility().intervals
        gone = [row for row in range(rollout.row_count) if lives[row][-1][1] == first.at_row]
        assert len(gone) >= 32
        other = list(rollout.tokens)
        for row, token in zip(gone, text(len(gone), 99), strict=True):
            other[row] = token
        behind = [each for each in rollout.samples if each.query_row >= first.at_row]
        one = replace(rollout, samples=tuple(behind))
        two = replace(one, tokens=tuple(other))
        kept, changed = replayed(model, one).logits, replayed(model, two).logits
        kl = exact_kl(one, kept, changed)
        rows = torch.tensor([each.query_row for each in behind])
        cuts = [event.at_row for event in rollout.events]
        views = [float(kl[(rows >= a) & (rows < b)].mean()) for a, b in pairwise(cuts)]
        assert views[0] > 1e-3
        assert views[-1] < views[0], "it fades as rows that saw it go themselves"
        with torch.no_grad():
            for old_positions in (False, True):
                same, again = (
                    faults.reprefilled_logits(model, each, old_positions=old_positions) for each in (one, two)
                )
                assert torch.equal(same, again)


class TestModels:
    @pytest.mark.parametrize("window", [8, 96])
    def test_edge_10_sliding_layers_count_rows_also_below_a_block(self, window: int) -> None:
        model = stream_model("qwen3 sliding", sliding_window=window)
        writer = write(model, with_settings(windowed, count=160))
        assert judged(writer, replayed(model, writer.rollout)).beyond(EXACT) == []
        if window == 96:
            with torch.no_grad():
                assert_seen(writer, model, faults.slot_distance_logits(model, writer.rollout))

    def test_edge_10_a_hybrid_model_with_rotations_by_layer_type_is_replayed(self) -> None:
        model = tiny_model("gemma3")
        writer = write(model, with_settings(windowed, count=160))
        for path in PATHS:
            assert judged(writer, replayed(model, writer.rollout, path)).beyond(EXACT) == []

    def test_edge_26_a_narrower_memory_is_rounded_alike(self) -> None:
        """fp32 weights over bf16 K/V: what the noise of fp32 rounds the other way is all that is left."""
        model = model_of("qwen3")
        engine = PlainEngine(model, kv_dtype=torch.bfloat16)
        writer = written(engine, {"one": with_settings(windowed, count=160)})["one"]
        floor = 0.0
        for path in PATHS:
            with torch.no_grad():
                (found,) = replay(model, [writer.rollout], path=path, kv_dtype=torch.bfloat16)
            floor = judged(writer, found).k3.mean
            assert floor < 1e-6
        careless = judged(writer, replayed(model, writer.rollout)).k3.mean
        assert careless > 10 * floor

    def test_a_replay_of_blocks_that_were_quantised_alive_is_as_far_off_as_the_limit_says(self) -> None:
        """Rows that were fed before a block filled saw it as computed, those after it as stored."""
        model, script = model_of("qwen3"), with_settings(windowed, count=120)
        gaps = {}
        for bits in (BITS_MIN, 4):
            writer = written(PlainEngine(model, bits=bits), {"one": script})["one"]
            gaps[bits] = kl_behind(writer, replayed(model, writer.rollout).logits, 0)
        assert 1e-7 < gaps[BITS_MIN] < ROUNDED.mean < 10 * ROUNDED.mean < gaps[4]

    def test_edge_27_no_row_is_without_anything_to_attend(self) -> None:
        for writer in told_of("qwen3 sliding").values():
            packed = pack([writer.rollout], multiple=128)
            for window in (0, 1, 48):
                assert packed.dense(window).any(-1).all()
            assert torch.isfinite(replayed(model_of("qwen3 sliding"), writer.rollout).logits).all()

    def test_edge_19_a_rollout_of_which_nothing_was_sampled_is_replayed_to_nothing(self) -> None:
        rollout = replace(told_of("qwen3")["window"].rollout, samples=())
        for path in PATHS:
            found = replayed(model_of("qwen3"), rollout, path)
            assert found.logits.shape == (0, 512)
            assert found.log_probs.shape == (0,)

    @pytest.mark.parametrize("path", [*PATHS, DETACHED])
    def test_edge_19_a_rollout_without_rows_is_replayed_to_nothing(self, path: Path) -> None:
        """Alone or beside others, and with a gradient for ranks that wait for each other."""
        model, other = model_of("qwen3"), told_of("qwen3")["window"].rollout.truncated(60)
        empty = Rollout.sealed("nothing", bytes(32), 16, (), (), ())
        for rollouts in ([empty], [other, empty]):
            found = replay(model, rollouts, path=path, passes=3)
            assert found[-1].logits.shape == (0, 512)
            torch.stack([policy_loss(each.log_probs, each.rollout, 1.0) for each in found]).sum().backward()
            assert all(weight.grad is not None for weight in model.parameters())
            model.zero_grad(set_to_none=True)

    def test_every_view_is_a_segment(self) -> None:
        rollout = told_of("qwen3")["restored"].rollout
        assert len(list(segments(rollout))) == 1 + len({event.at_row for event in rollout.events})


class TestRefusals:
    def test_what_a_mask_cannot_say_is_refused_before_anything_runs(self) -> None:
        rollout = told_of("qwen3")["window"].rollout
        for keeping in (Keeping(positions="slot"), Keeping(bits=4), Keeping(by_head=True)):
            with pytest.raises(Unreplayable):
                replay(model_of("qwen3"), [rollout], keeping=keeping)

    @pytest.mark.parametrize("path", PATHS)
    def test_tokens_that_the_model_has_not_are_refused_before_they_reach_a_gpu(self, path: Path) -> None:
        model, rollout = model_of("qwen3"), told_of("qwen3")["window"].rollout
        fed = replace(rollout, tokens=(512, *rollout.tokens[1:]))
        last = rollout.truncated(rollout.samples[-1].query_row + 1)
        drawn = replace(last, samples=(*last.samples[:-1], replace(last.samples[-1], token=512)))
        for other in (fed, drawn):
            with pytest.raises(TokenError, match="512"):
                replay(model, [rollout, other], path=path)

    def test_edge_11_rotations_that_change_with_the_length_are_refused(self) -> None:
        model = tiny_model(
            "llama", rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
        )
        with pytest.raises(NotCompactable, match="dynamic"):
            replay(model, [told_of("qwen3")["window"].rollout])

    def test_flex_attention_has_no_gradients_on_a_cpu(self) -> None:
        model = tiny_model("llama", attn_implementation="flex_attention")
        with pytest.raises(Unreplayable, match="no gradients on a CPU"):
            replay(model, [told_of("qwen3")["window"].rollout])

    def test_segments_are_not_run_through_flex_attention(self) -> None:
        model = tiny_model("llama", attn_implementation="flex_attention")
        with pytest.raises(Unreplayable, match="segmented"):
            replay(model, [told_of("qwen3")["window"].rollout], path="segmented")

    def test_attention_that_takes_no_mask_is_refused(self) -> None:
        model = tiny_model("llama")
        model.config._attn_implementation = "flash_attention_2"
        with pytest.raises(Unreplayable, match="flash_attention_2"):
            replay(model, [told_of("qwen3")["window"].rollout])

    def test_rounding_and_gradient_checkpointing_exclude_each_other(self) -> None:
        model = tiny_model("llama").train()
        new, old = "activation_checkpointing_enable", "gradient_checkpointing_enable"
        getattr(model, new if hasattr(model, new) else old)()
        with pytest.raises(Unreplayable, match="checkpointing"):
            replay(model, [told_of("qwen3")["window"].rollout], kv_dtype=torch.bfloat16)

    @pytest.mark.parametrize("path", ["segmented", DETACHED])
    def test_segments_and_gradient_checkpointing_exclude_each_other(self, path: Path) -> None:
        """It drops the cache in which K/V of earlier views are."""
        model = tiny_model("llama").train()
        new, old = "activation_checkpointing_enable", "gradient_checkpointing_enable"
        getattr(model, new if hasattr(model, new) else old)()
        with pytest.raises(Unreplayable, match="checkpointing"):
            replay(model, [told_of("qwen3")["window"].rollout], path=path)

"""Masks, packs and probabilities of rollouts, against dumb oracles; no model is run."""

import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from kvcomm.errors import Corrupt, TooLarge
from kvcomm.streams import replay as replay_module
from kvcomm.streams.pool import BlockPool
from kvcomm.streams.replay import (
    Keeping,
    Unreplayable,
    bins,
    log_probabilities,
    loss_mask,
    pack,
    policy_loss,
    require_maskable,
    sampled_log_probabilities,
    segments,
)
from kvcomm.streams.rollout import Rollout, Sample, Sampling
from kvcomm.streams.session import Session
from tests.namespaces import namespace


def story(seed: int, steps: int = 40) -> tuple[Rollout, list[set[int]]]:
    """A rollout of random feeds, cuts and restores on blocks of 4, and what each of its rows attended."""
    draw = random.Random(seed)
    session = Session(BlockPool(400), namespace(block_tokens=4, vocab_size=100), rows_max=10_000)
    seen: list[set[int]] = []
    for _ in range(steps):
        kind, full = draw.random(), session.full_slots // 4
        if kind < 0.6 or not session.next_row:
            count, before = draw.randint(1, 9), set(session.view.rows)
            first = session.next_row
            seen += [before | set(range(first, row + 1)) for row in range(first, first + count)]
            session.commit(session.plan([draw.randrange(100) for _ in range(count)]))
        elif kind < 0.85 and full:
            first = draw.randrange(full)
            session.evict([(4 * first, 4 * draw.randint(first + 1, full))], archive=draw.random() < 0.6)
        elif session.archive:
            session.restore(draw.choice(sorted(session.archive)))
    samples = [
        Sample(row, token, -1.0, Sampling(), loss=draw.random() < 0.7)
        for row, token in enumerate(session.tokens[1:])
        if draw.random() < 0.5
    ]
    return rolled(session, samples, f"story {seed}"), seen


def rolled(session: Session, samples: list[Sample], name: str = "rollout") -> Rollout:
    return Rollout.sealed(name, bytes(32), session.block_tokens, session.tokens, session.events, samples)


def attended(mask: torch.Tensor) -> list[set[int]]:
    return [set(row.nonzero()[:, 0].tolist()) for row in mask]


class TestMask:
    @pytest.mark.slow
    @settings(max_examples=25, deadline=None)
    @given(st.integers(0, 10_000))
    def test_a_row_attends_what_it_attended_in_the_engine(self, seed: int) -> None:
        rollout, seen = story(seed)
        assert attended(pack([rollout]).dense()) == seen

    @pytest.mark.slow
    @settings(max_examples=20, deadline=None)
    @given(st.integers(0, 10_000), st.integers(1, 40))
    def test_a_sliding_layer_counts_rows_and_not_slots(self, seed: int, window: int) -> None:
        rollout, seen = story(seed)
        near = [{key for key in keys if row - key < window} for row, keys in enumerate(seen)]
        assert attended(pack([rollout]).dense(window)) == near

    @pytest.mark.slow
    @settings(max_examples=8, deadline=None)
    @given(st.integers(0, 10_000), st.sampled_from([0, 7, 16]), st.sampled_from([8, 16, 128]))
    def test_the_block_mask_is_the_dense_one_in_squares(self, seed: int, window: int, tile: int) -> None:
        packed = pack([story(seed)[0], story(seed + 1)[0]])
        rows = packed.row_count
        ours = packed.block_mask(window, tile)
        by_hand = create_block_mask(
            packed.mask_mod(window), None, None, rows, rows, device="cpu", BLOCK_SIZE=tile
        )
        assert torch.equal(ours.to_dense(), by_hand.to_dense())
        for kind in ("kv", "full_kv"):
            counts, listed = getattr(ours, f"{kind}_num_blocks"), getattr(ours, f"{kind}_indices")
            assert torch.equal(counts, getattr(by_hand, f"{kind}_num_blocks"))
            for at, count in enumerate(counts[0, 0].tolist()):
                expected = getattr(by_hand, f"{kind}_indices")[0, 0, at, :count]
                assert torch.equal(listed[0, 0, at, :count], expected)
        queries, keys = (torch.arange(rows)[at] for at in ((slice(None), None), (None, slice(None))))
        zero = torch.zeros((), dtype=torch.int64)
        assert torch.equal(packed.mask_mod(window)(zero, zero, queries, keys), packed.dense(window))

    @pytest.mark.slow
    @settings(max_examples=20, deadline=None)
    @given(st.integers(0, 10_000))
    def test_edge_27_every_row_attends_itself_whatever_was_cut(self, seed: int) -> None:
        packed = pack([story(seed)[0], story(seed + 1)[0]], multiple=128)
        for window in (0, 1, 5):
            assert packed.dense(window).diagonal().all()

    def test_edge_05_cut_and_restored_at_the_same_row_was_never_out_of_view(self) -> None:
        session = Session(BlockPool(40), namespace(block_tokens=4), rows_max=1000)
        session.commit(session.plan(list(range(20))))
        span = session.evict([(4, 8)], archive=True).span
        session.restore(span, 4)
        session.evict([(8, 12)])
        session.evict([(8, 12)])
        session.commit(session.plan([1, 2]))
        packed = pack([rolled(session, [])])
        assert len(packed.births) == 1
        assert attended(packed.dense())[20] == {*range(8), *range(16, 21)}

    def test_a_row_that_comes_back_again_and_again_has_an_interval_each_time(self) -> None:
        session = Session(BlockPool(40), namespace(block_tokens=4), rows_max=1000)
        session.commit(session.plan(list(range(8))))
        for token in range(5):
            span = session.evict([(0, 4)], archive=True).span
            session.commit(session.plan([token]))
            session.restore(span, 0)
            session.commit(session.plan([token]))
        packed = pack([rolled(session, [])])
        assert packed.births.shape == (8, 18)
        assert [0 in keys for keys in attended(packed.dense())] == [True] * 8 + [False, True] * 5

    def test_rows_that_come_back_without_end_are_refused_before_memory_is_gone(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rollout = next(one for one, _ in map(story, range(50)) if pack([one]).births.shape[0] >= 4)
        monkeypatch.setattr(replay_module, "INTERVALS_MAX", 2 * rollout.row_count)
        with pytest.raises(Unreplayable, match="pack fewer rollouts, or replay them in segments"):
            pack([rollout])
        assert list(segments(rollout))


class TestPack:
    @pytest.mark.slow
    @settings(max_examples=20, deadline=None)
    @given(st.lists(st.integers(0, 10_000), min_size=1, max_size=4), st.sampled_from([1, 16]))
    def test_rollouts_in_one_row_see_themselves_alone(self, seeds: list[int], multiple: int) -> None:
        told = [story(seed, 20) for seed in seeds]
        packed = pack([rollout for rollout, _ in told], multiple=multiple)
        expected = [
            {start + key for key in keys}
            for (_, seen), start in zip(told, packed.starts, strict=True)
            for keys in seen
        ]
        assert packed.row_count % multiple == 0
        expected += [{row} for row in range(len(expected), packed.row_count)]
        assert attended(packed.dense()) == expected
        for (rollout, _), start in zip(told, packed.starts, strict=True):
            rows = slice(start, start + rollout.row_count)
            assert packed.tokens[rows].tolist() == list(rollout.tokens)
            assert packed.positions[rows].tolist() == list(range(rollout.row_count))

    def test_values_of_samples_come_back_by_rollout(self) -> None:
        rollouts = [story(seed)[0] for seed in (1, 2, 3)]
        packed = pack(rollouts)
        rows = packed.split(packed.query_rows)
        for rollout, start, found in zip(rollouts, packed.starts, rows, strict=True):
            assert found.tolist() == [start + sample.query_row for sample in rollout.samples]

    @pytest.mark.parametrize("multiple", [1, 16])
    def test_a_pack_has_a_row_for_a_model_to_run(self, multiple: int) -> None:
        empty = Rollout.sealed("nothing", bytes(32), 4, (), (), ())
        packed = pack([empty], multiple=multiple)
        assert packed.row_count == multiple
        assert packed.tokens.dtype == packed.positions.dtype == torch.int64
        assert list(segments(empty)) == []

    def test_a_pack_of_nothing_is_refused(self) -> None:
        with pytest.raises(ValueError, match="at least one"):
            pack([])

    @given(st.lists(st.integers(1, 50), max_size=30), st.integers(50, 120))
    def test_bins_hold_every_rollout_once_and_no_two_fit_into_one(self, counts: list[int], most: int) -> None:
        found = bins(counts, most)
        assert sorted(place for places in found for place in places) == list(range(len(counts)))
        sums = sorted(sum(counts[place] for place in places) for places in found)
        assert all(rows <= most for rows in sums)
        assert len(sums) < 2 or sums[0] + sums[1] > most

    def test_bins_refuse_a_rollout_that_is_too_long(self) -> None:
        with pytest.raises(ValueError, match="rollout 1 has 9 rows"):
            bins([3, 9], 8)


class TestSegments:
    @settings(max_examples=30, deadline=None)
    @given(st.integers(0, 10_000))
    def test_every_row_is_fed_once_under_the_view_that_it_had(self, seed: int) -> None:
        rollout, seen = story(seed)
        row = 0
        held: set[int] = set()
        for segment in segments(rollout):
            assert segment.first_row == row < segment.end_row
            assert held >= {*segment.view_rows, *segment.archived_rows}
            held = {*segment.view_rows, *segment.archived_rows, *range(row, segment.end_row)}
            for row in range(segment.first_row, segment.end_row):
                assert {*segment.view_rows, *range(segment.first_row, row + 1)} == seen[row]
            row = segment.end_row
        assert row == rollout.row_count

    def test_a_log_that_cuts_rows_without_end_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rollout = next(rollout for rollout, _ in map(story, range(20)) if rollout.event_count > 1)
        monkeypatch.setattr("kvcomm.streams.view.CUT_ROWS_MAX", 3)
        for compute in (lambda one: list(segments(one)), lambda one: pack([one])):
            with pytest.raises(TooLarge):
                compute(rollout)

    def test_events_in_another_order_are_corrupt(self) -> None:
        rollout = next(rollout for rollout, _ in map(story, range(20)) if rollout.event_count > 1)
        swapped = replace(rollout, events=rollout.events[::-1], view_digest=rollout.events[0].view_digest)
        for compute in (lambda one: list(segments(one)), lambda one: pack([one])):
            with pytest.raises(Corrupt):
                compute(swapped)


class TestProbabilities:
    SAMPLINGS = (
        Sampling(),
        Sampling(0.7),
        Sampling(0.0),
        Sampling(1.3, 5),
        Sampling(0.8, 0, 0.6),
        Sampling(1.1, 7, 0.9),
    )

    @pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
    def test_edge_20_tokens_are_drawn_from_what_is_left_by_temperature_top_k_and_top_p(
        self, sampling: Sampling
    ) -> None:
        torch.manual_seed(0)
        logits = 2 * torch.randn(6, 40, dtype=torch.float64)
        for row, found in zip(logits, log_probabilities(logits, sampling), strict=True):
            assert found.tolist() == pytest.approx(by_hand(row.tolist(), sampling))

    def test_edge_20_each_sample_has_the_probability_of_its_own_sampling(self) -> None:
        torch.manual_seed(1)
        logits = 2 * torch.randn(12, 40, dtype=torch.float64)
        samples = []
        for at, row in enumerate(logits):
            sampling = self.SAMPLINGS[at % len(self.SAMPLINGS)]
            token = int(log_probabilities(row, sampling).exp().multinomial(1))
            samples.append(Sample(at, token, 0.0, sampling))
        expected = [
            by_hand(row.tolist(), each.sampling)[each.token]
            for row, each in zip(logits, samples, strict=True)
        ]
        assert sampled_log_probabilities(logits, samples).tolist() == pytest.approx(expected)

    @pytest.mark.parametrize("sampling", [Sampling(1.0, 2), Sampling(1.0, 0, 0.5)], ids=str)
    def test_a_token_that_fell_out_of_the_set_by_noise_keeps_a_probability(self, sampling: Sampling) -> None:
        logits = torch.tensor([[2.0, 1.9, 1.8999, -3.0]])
        inside = sampled_log_probabilities(logits, [Sample(0, 1, 0.0, sampling)])
        outside = sampled_log_probabilities(logits, [Sample(0, 2, 0.0, sampling)])
        assert torch.isfinite(outside).all()
        assert abs(float(inside - outside)) < 0.5
        widened = torch.log_softmax(logits[0, [0, 1, 2]], -1)
        assert float(outside) == pytest.approx(float(widened[-1]))

    @pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
    def test_gradients_flow_and_are_finite(self, sampling: Sampling) -> None:
        torch.manual_seed(2)
        logits = torch.randn(3, 40, requires_grad=True)
        tokens = log_probabilities(logits.detach(), sampling).argmax(-1).tolist()
        samples = [Sample(at, token, 0.0, sampling) for at, token in enumerate(tokens)]
        sampled_log_probabilities(logits, samples).sum().backward()
        assert logits.grad is not None
        assert torch.isfinite(logits.grad).all()
        assert logits.grad.abs().sum() > 0

    def test_scores_in_parts_are_the_same_scores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(3)
        logits = torch.randn(11, 40)
        samples = [
            Sample(at, int(row.argmax()), 0.0, self.SAMPLINGS[at % 2 * 4]) for at, row in enumerate(logits)
        ]
        found = []
        for at_once in (1 << 20, 3 * 40):
            monkeypatch.setattr("kvcomm.streams.replay._SCORED_AT_ONCE", at_once)
            own = logits.clone().requires_grad_()
            scores = sampled_log_probabilities(own, samples)
            (slope,) = torch.autograd.grad(scores.sum(), own)
            found.append((scores.detach(), slope))
        (whole, slope), (parts, slope_of_parts) = found
        assert torch.equal(whole, parts)
        assert torch.equal(slope, slope_of_parts)

    def test_edge_19_no_samples_are_still_a_function_of_the_logits(self) -> None:
        logits = torch.zeros(0, 40, requires_grad=True)
        found = sampled_log_probabilities(logits, [])
        assert found.shape == (0,)
        found.sum().backward()
        assert logits.grad is not None

    def test_the_loss_is_over_samples_with_loss_alone(self) -> None:
        rollout = story(3)[0]
        learned = loss_mask(rollout)
        assert 0 < learned.sum() < len(learned)
        log_probs = torch.randn(len(learned), requires_grad=True)
        advantage = torch.randn(len(learned))
        loss = policy_loss(log_probs, rollout, advantage)
        loss.backward()
        assert float(loss.detach()) == pytest.approx(
            float(-(advantage * log_probs)[learned].mean().detach()), abs=1e-6
        )
        assert log_probs.grad is not None
        assert torch.equal(log_probs.grad != 0, learned)

    def test_edge_19_a_rollout_without_samples_has_no_loss(self) -> None:
        rollout = replace(story(3)[0], samples=())
        nothing = torch.zeros(0, requires_grad=True)
        loss = policy_loss(nothing, rollout, 1.0)
        loss.backward()
        assert loss.item() == 0


def by_hand(logits: list[float], sampling: Sampling) -> list[float]:
    """Log probabilities as the words of ``Sampling`` say."""
    scores = [each / (sampling.temperature or 1.0) for each in logits]
    order = sorted(range(len(scores)), key=lambda token: -scores[token])
    kept = order[: sampling.top_k or None]
    total = sum(math.exp(scores[token]) for token in kept)
    mass, nucleus = 0.0, []
    for token in kept:
        if mass >= sampling.top_p:
            break
        nucleus.append(token)
        mass += math.exp(scores[token]) / total
    total = sum(math.exp(scores[token]) for token in nucleus)
    return [
        scores[token] - math.log(total) if token in nucleus else -math.inf for token in range(len(scores))
    ]


class TestRefusals:
    @pytest.mark.parametrize(
        ("keeping", "words"),
        [
            (Keeping(positions="slot"), "rotated anew by slot"),
            (Keeping(bits=4), "4 bits"),
            (Keeping(by_head=True), "heads"),
        ],
    )
    def test_what_a_mask_over_rows_cannot_say_is_refused(self, keeping: Keeping, words: str) -> None:
        with pytest.raises(Unreplayable, match=words):
            require_maskable(keeping)

    def test_int8_blocks_are_within_the_noise(self) -> None:
        require_maskable(Keeping(bits=8))

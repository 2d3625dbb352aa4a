"""What is asked for most, in little memory: ``CountMin`` counts every key a little too high, ``HeavyHitters``
knows the names of the heaviest.

A sketch of counts can say how often a key came, not which keys came; a summary of the heaviest has names, and
forgets the rest.  :class:`Hotness` puts one beside the other: a name is taken in when the sketch says that
it has earned it, so the many keys that come once displace nobody.

**Decay.**  Every count halves in ``half_life_s``.  Nothing is touched for that: what comes later weighs more
("forward decay", Cormode, Shkapenyuk, Srivastava and Xu, ICDE 2009), ``2 ** ((now - landmark) /
half_life_s)`` at ``now``, and a count is divided by the weight of the moment in which somebody looks.  The
landmark moves on before the weights grow too large for the cells, once in some fifty half lives.

**Time** is an argument, seconds of any one clock; it should not run backwards by half lives.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, e, exp2, inf, log, log2

import mmh3

_SEED = 0x6B76
_DEPTH = 4
_AGE_MAX = 48.0
"""Half lives after which the landmark moves: single precision reaches ``2 ** 127``."""


@dataclass(frozen=True, slots=True)
class Counted:
    """One key of a summary."""

    key: bytes
    count: float
    """Never below what came, so far as this summary has heard."""
    error: float = 0.0
    """And at most so much above it."""


class _Age:
    """The weight of a moment, and when the landmark has to move."""

    __slots__ = ("half_life_s", "landmark", "rate")

    def __init__(self, half_life_s: float) -> None:
        if not half_life_s > 0:
            raise ValueError(f"a half life is above 0 seconds (or infinite), got {half_life_s}")
        self.half_life_s = half_life_s
        self.rate = 1.0 / half_life_s
        self.landmark: float | None = None
        """The first moment, from then on; ``None`` = nothing has come yet."""

    def weight(self, now: float) -> float:
        if self.landmark is None:
            self.landmark = now
        return exp2((now - self.landmark) * self.rate)

    def due(self, now: float) -> bool:
        return self.landmark is not None and (now - self.landmark) * self.rate > _AGE_MAX


class CountMin:
    """How often each key came, never less than it did (Cormode and Muthukrishnan, "An improved data stream
    summary: the count-min sketch and its applications", J. Algorithms 2005).

    With *conservative update* (Estan and Varghese, SIGCOMM 2002): an update raises only the cells that are
    below the new estimate, which leaves the heavy keys of skewed streams several times more exact.  It stays
    mergeable: in each sketch every cell of a key is at least that key's count, so their sums are at least its
    count in both.  What is given up is that a merged sketch is the one of both streams at once; it may count
    a little higher than that one would have.

    An estimate is above the truth by more than ``e / width`` of all that came with a probability of at most
    ``exp(-depth)``.  The columns of a key are drawn by double hashing (Kirsch and Mitzenmacher, "Less
    hashing, same performance", ESA 2006), one hash a key.

    Args:
        width: cells of a row.
        depth: rows.  An update costs so many steps.

    Counts are kept in single precision: one grows no further above ``2 ** 24`` times the weight of what is
    added (sixteen million within a half life), and rounding may take one part in ``2 ** 24`` off.
    """

    __slots__ = ("_age", "_cells", "_total", "depth", "width")

    def __init__(self, width: int, depth: int, half_life_s: float = inf) -> None:
        if width < 1 or depth < 1:
            raise ValueError(f"a sketch has at least one cell in one row, got {depth} x {width}")
        self.width, self.depth = width, depth
        self._cells = array("f", bytes(4 * width * depth))
        self._age = _Age(half_life_s)
        self._total = 0.0

    @staticmethod
    def for_error(epsilon: float, delta: float, half_life_s: float = inf) -> CountMin:
        """A sketch whose estimates are above the truth by more than ``epsilon`` of all that came with a
        probability of at most ``delta``."""
        if not (0 < epsilon < 1 and 0 < delta < 1):
            raise ValueError(f"epsilon and delta lie between 0 and 1, got {epsilon} and {delta}")
        return CountMin(ceil(e / epsilon), max(1, ceil(log(1 / delta))), half_life_s)

    @property
    def nbytes(self) -> int:
        """Of the cells."""
        return len(self._cells) * self._cells.itemsize

    def add(self, key: bytes, now: float, amount: float = 1.0) -> float:
        """Count ``key``; its estimate as of ``now``."""
        if self._age.due(now):
            self._advance(now)
        weight = self._age.weight(now)
        added = amount * weight
        self._total += added
        cells, width = self._cells, self.width
        first, step = mmh3.hash64(key, _SEED, signed=False)  # column of row i: first + i * step
        least, at, row = inf, first, 0
        for _ in range(self.depth):
            count = cells[row + at % width]
            if count < least:  # noqa: PLR1730 - a call of min() costs more than the rest of the step
                least = count
            at += step
            row += width
        estimate = least + added
        at, row = first, 0
        for _ in range(self.depth):
            place = row + at % width
            if cells[place] < estimate:  # noqa: PLR1730 - the same
                cells[place] = estimate
            at += step
            row += width
        return estimate / weight

    def estimate(self, key: bytes, now: float) -> float:
        """How often ``key`` came, decayed to ``now``: not below the truth."""
        cells, width = self._cells, self.width
        first, step = mmh3.hash64(key, _SEED, signed=False)
        least = min([cells[row * width + (first + row * step) % width] for row in range(self.depth)])
        return least / self._age.weight(now)

    def total(self, now: float) -> float:
        """All that came, decayed to ``now``."""
        return self._total / self._age.weight(now)

    def merge(self, other: CountMin, now: float) -> None:
        """Add what ``other`` has counted, by the same clock.

        Raises:
            ValueError: it has another shape or half life, so its cells mean something else.
        """
        mine, theirs = (self.width, self.depth), (other.width, other.depth)
        if mine != theirs or self._age.half_life_s != other._age.half_life_s:
            raise ValueError("only sketches of one shape and half life can be merged")
        if self._age.due(now):
            self._advance(now)
        factor = self._age.weight(now) / other._age.weight(now)
        cells = self._cells
        for place, count in enumerate(other._cells):
            if count:
                cells[place] += count * factor
        self._total += other._total * factor

    def _advance(self, now: float) -> None:
        factor = 1.0 / self._age.weight(now)
        self._cells = array("f", [count * factor for count in self._cells])
        self._total *= factor
        self._age.landmark = now


class HeavyHitters:
    """The heaviest keys, at most ``capacity`` of them: SpaceSaving (Metwally, Agrawal and El Abbadi,
    "Efficient computation of frequent and top-k elements in data streams", ICDT 2005).

    A new key takes the place of the lightest one *and its count*, as an error, so nothing is counted too low,
    and by at most the ``capacity``-th part of all that came too high: whatever is heavier than that is here.
    Below ``capacity`` different keys all counts are exact.  Merging as in Agarwal et al., "Mergeable
    summaries" (PODS 2012): the bounds of the sum are the sums of the bounds.

    A known key costs two look-ups, a new one beside that a step of a heap which is put right only as far as
    it is looked at.
    """

    __slots__ = ("_age", "_counts", "_errors", "_heap", "_total", "capacity")

    def __init__(self, capacity: int, half_life_s: float = inf) -> None:
        if capacity < 1:
            raise ValueError(f"a summary has room for one key at least, got {capacity}")
        self.capacity = capacity
        self._age = _Age(half_life_s)
        self._counts: dict[bytes, float] = {}
        self._errors: dict[bytes, float] = {}  # of those that took somebody's place
        self._heap: list[tuple[float, bytes]] = []  # one a key, with a count that may have grown since
        self._total = 0.0

    def __len__(self) -> int:
        return len(self._counts)

    def __contains__(self, key: bytes) -> bool:
        return key in self._counts

    def add(self, key: bytes, now: float, amount: float = 1.0) -> None:
        """Count ``key``."""
        if self._age.due(now):
            self._advance(now)
        added = amount * self._age.weight(now)
        self._total += added
        count = self._counts.get(key)
        if count is not None:
            self._counts[key] = count + added
        elif len(self._counts) < self.capacity:
            self._counts[key] = added
            heapq.heappush(self._heap, (added, key))
        else:
            least, lightest = self._lightest()
            del self._counts[lightest]
            self._errors.pop(lightest, None)
            self._counts[key] = least + added
            self._errors[key] = least
            heapq.heapreplace(self._heap, (least + added, key))

    def count(self, key: bytes, now: float) -> float:
        """Decayed to ``now``, not below the truth; what a key that is not here has at most."""
        return self._counts.get(key, self._floor()) / self._age.weight(now)

    def total(self, now: float) -> float:
        """All that came, decayed to ``now``."""
        return self._total / self._age.weight(now)

    def top(self, count: int, now: float) -> list[Counted]:
        """The heaviest, heaviest first, decayed to ``now``; equal ones by key."""
        weight = self._age.weight(now)
        heaviest = heapq.nsmallest(count, self._counts.items(), key=lambda item: (-item[1], item[0]))
        return [Counted(key, held / weight, self._errors.get(key, 0.0) / weight) for key, held in heaviest]

    def merge(self, other: HeavyHitters, now: float) -> None:
        """Add what ``other`` has counted, by the same clock."""
        self.take(other.top(len(other), now), now, other._floor() / other._age.weight(now))
        self._total += (other.total(now) - sum(other._counts.values()) / other._age.weight(now)) * (
            self._age.weight(now)
        )

    def take(self, counted: Iterable[Counted], now: float, floor: float = 0.0) -> None:
        """Add a summary.

        Args:
            floor: what each key that it does not name may have had; 0 = nothing, it names all.
        """
        if self._age.due(now):
            self._advance(now)
        weight = self._age.weight(now)
        mine, theirs = self._floor(), floor * weight
        counts = {key: count + theirs for key, count in self._counts.items()}
        errors = {key: self._errors.get(key, 0.0) + theirs for key in counts}
        for each in counted:
            count, error = each.count * weight, each.error * weight
            self._total += count
            if each.key in self._counts:
                counts[each.key] += count - theirs
                errors[each.key] += error - theirs
            else:
                counts[each.key] = counts.get(each.key, mine) + count
                errors[each.key] = errors.get(each.key, mine) + error
        kept = heapq.nsmallest(self.capacity, counts, key=lambda key: (-counts[key], key))
        self._counts = {key: counts[key] for key in kept}
        self._errors = {key: error for key in kept if (error := errors[key]) > 0}
        self._heap = [(self._counts[key], key) for key in kept]
        heapq.heapify(self._heap)

    def clear(self) -> None:
        """Begin anew."""
        self._counts.clear()
        self._errors.clear()
        self._heap.clear()
        self._total, self._age.landmark = 0.0, None

    def _floor(self) -> float:
        """What any key that is not here has had at most, in the weight of the landmark."""
        return self._lightest()[0] if len(self._counts) >= self.capacity else 0.0

    def _lightest(self) -> tuple[float, bytes]:
        heap, counts = self._heap, self._counts
        while (count := counts[heap[0][1]]) > heap[0][0]:
            heapq.heapreplace(heap, (count, heap[0][1]))
        return heap[0]

    def _advance(self, now: float) -> None:
        factor = 1.0 / self._age.weight(now)
        self._counts = {key: count * factor for key, count in self._counts.items()}
        self._errors = {key: error * factor for key, error in self._errors.items()}
        self._heap = [(count * factor, key) for count, key in self._heap]
        self._total *= factor
        self._age.landmark = now


class Hotness:
    """The keys with the highest estimates of a sketch, by name, at most ``names_max`` of them.

    What it holds is ``4 * width * depth`` bytes of cells and the names, whatever comes.  A name is displaced
    by one whose estimate is higher at that moment.
    """

    __slots__ = ("_heap", "_ranks", "_rate", "_sketch", "names_max")

    def __init__(self, width: int, depth: int, names_max: int, half_life_s: float = inf) -> None:
        if names_max < 1:
            raise ValueError(f"there is room for one name at least, got {names_max}")
        self.names_max = names_max
        self._sketch = CountMin(width, depth, half_life_s)
        self._rate = 1.0 / half_life_s
        self._ranks: dict[bytes, float] = {}
        self._heap: list[tuple[float, bytes]] = []  # one a name, with a rank that may have grown since

    @staticmethod
    def of_size(
        size_bytes: int, names_max: int, half_life_s: float = inf, *, name_bytes: int = 40
    ) -> Hotness:
        """As many cells as fit into ``size_bytes`` beside the names, ``name_bytes`` each.

        Raises:
            ValueError: the names alone do not fit.
        """
        width = (size_bytes - names_max * name_bytes) // (4 * _DEPTH)
        if width < 1:
            raise ValueError(f"{size_bytes} bytes hold no sketch beside {names_max} names")
        return Hotness(width, _DEPTH, names_max, half_life_s)

    def __len__(self) -> int:
        return len(self._ranks)

    @property
    def width(self) -> int:
        """Cells of a row; an average cell holds so great a part of all that came."""
        return self._sketch.width

    def add(self, key: bytes, now: float, amount: float = 1.0) -> float:
        """Count ``key``; its estimate as of ``now``."""
        estimate = self._sketch.add(key, now, amount)
        ranks, heap = self._ranks, self._heap
        # All estimates halve together, so their order at any one moment is that of these logarithms.
        rank = log2(estimate) + now * self._rate
        if key in ranks:
            ranks[key] = rank
        elif len(ranks) < self.names_max:
            ranks[key] = rank
            heapq.heappush(heap, (rank, key))
        elif rank > heap[0][0]:
            while (grown := ranks[heap[0][1]]) > heap[0][0]:
                heapq.heapreplace(heap, (grown, heap[0][1]))
            if rank > heap[0][0]:
                del ranks[heap[0][1]]
                ranks[key] = rank
                heapq.heapreplace(heap, (rank, key))
        return estimate

    def estimate(self, key: bytes, now: float) -> float:
        """Decayed to ``now``; of any key, named or not."""
        return self._sketch.estimate(key, now)

    def total(self, now: float) -> float:
        """All that came, decayed to ``now``."""
        return self._sketch.total(now)

    def top(self, count: int, now: float) -> list[Counted]:
        """The heaviest named ones, heaviest first; equal ones by key."""
        found = [Counted(key, self._sketch.estimate(key, now)) for key in self._ranks]
        return heapq.nsmallest(count, found, key=lambda each: (-each.count, each.key))

    def merge(self, other: Hotness, now: float) -> None:
        """Add what ``other`` has counted, by the same clock.  Raises as :meth:`CountMin.merge`."""
        self._sketch.merge(other._sketch, now)
        names = dict.fromkeys([*self._ranks, *other._ranks])
        ranked = [(log2(self._sketch.estimate(key, now)) + now * self._rate, key) for key in names]
        self._heap = heapq.nlargest(self.names_max, ranked)
        self._ranks = {key: rank for rank, key in self._heap}
        heapq.heapify(self._heap)

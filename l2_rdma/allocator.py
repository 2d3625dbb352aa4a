"""``SlabAllocator``: memory for copies, in size classes whose slabs are given on demand and taken back when
empty.

Theory of operation.  The slot area is ``slab_count`` slabs of equal size.  A slab serves one size class at a
time: it is cut into slots of that class.  Classes are eighths of a power of two (1, 1.125, 1.25, ... times
2**n), so a slot is at most 12.5 % larger than what was asked for, and below 2 KiB they are multiples of 256
bytes; a class that nobody asks for costs nothing.  An empty slab goes back to the common stock at once and
can serve any other class, so memory never stays tied to a size that went out of use ("calcification"); a slab
that is not empty is emptied by the owner, who alone knows what may go.

Of several slabs with free slots the one that was opened first serves, so that the later ones drain.
"""

from __future__ import annotations

from dataclasses import dataclass, field

SLOT_ALIGN_BYTES = 256


@dataclass(frozen=True, slots=True)
class Place:
    """A slot's memory: ``[offset, offset + slot_bytes)`` of the region."""

    offset: int
    slot_bytes: int


@dataclass(slots=True)
class _Slab:
    slot_bytes: int
    free: list[int]
    """Offsets, the next one to hand out last."""
    live: dict[int, None] = field(default_factory=dict)
    """Offsets handed out, oldest first."""


class SlabAllocator:
    """Hands out and takes back slots; keeps no record of what they hold.

    Args:
        first_offset: of slab 0 in the region.
        slab_bytes: a multiple of 256.
        slab_count: slabs usable now; :meth:`grow` adds more.
    """

    def __init__(self, first_offset: int, slab_bytes: int, slab_count: int) -> None:
        if slab_bytes < SLOT_ALIGN_BYTES or slab_bytes % SLOT_ALIGN_BYTES or first_offset % SLOT_ALIGN_BYTES:
            raise ValueError(f"slabs must be aligned to {SLOT_ALIGN_BYTES} bytes")
        self._first_offset = first_offset
        self.slab_bytes = slab_bytes
        self._slab_count = 0
        self._stock: list[int] = []
        self._slabs: dict[int, _Slab] = {}
        self._classes: dict[int, dict[int, None]] = {}  # slot_bytes -> its slabs, oldest first
        self._open: dict[int, dict[int, None]] = {}  # slot_bytes -> its slabs with a free slot
        self.used_bytes = 0
        self.grow(slab_count)

    @property
    def capacity_bytes(self) -> int:
        return self._slab_count * self.slab_bytes

    @property
    def stock_count(self) -> int:
        """Slabs that serve no class."""
        return len(self._stock)

    def grow(self, slab_count: int) -> None:
        """Make slabs ``[0, slab_count)`` usable; never shrinks."""
        self._stock[:0] = range(slab_count - 1, self._slab_count - 1, -1)
        self._slab_count = max(slab_count, self._slab_count)

    def slot_bytes_for(self, size_bytes: int) -> int | None:
        """Size of the class that serves ``size_bytes``; ``None`` = larger than a slab."""
        if size_bytes > self.slab_bytes:
            return None
        return min(class_bytes(size_bytes), self.slab_bytes)

    def allocate(self, slot_bytes: int) -> Place | None:
        """A slot of exactly this class (from :meth:`slot_bytes_for`), or ``None`` when its slabs are full and
        the stock is empty."""
        slabs = self._open.setdefault(slot_bytes, {})
        if not slabs and not self._assign(slot_bytes):
            return None
        number = next(iter(slabs))
        slab = self._slabs[number]
        offset = slab.free.pop()
        slab.live[offset] = None
        if not slab.free:
            del slabs[number]
        self.used_bytes += slot_bytes
        return Place(offset, slot_bytes)

    def free(self, place: Place) -> None:
        """Take a slot back.

        Raises:
            KeyError: it is not handed out.
        """
        number = self.slab_of(place.offset)
        slab = self._slabs[number]
        del slab.live[place.offset]
        self.used_bytes -= slab.slot_bytes
        if not slab.live:
            self._return(number, slab.slot_bytes)
            return
        slab.free.append(place.offset)
        self._open[slab.slot_bytes][number] = None

    def slab_of(self, offset: int) -> int:
        return (offset - self._first_offset) // self.slab_bytes

    def classes(self) -> list[int]:
        """Slot sizes that hold at least one slab, smallest first."""
        return sorted(self._classes)

    def slabs(self, slot_bytes: int) -> list[int]:
        """Slabs of one class, the oldest first."""
        return list(self._classes.get(slot_bytes, ()))

    def live(self, slab: int) -> list[int]:
        """Offsets handed out of one slab, the oldest first."""
        return list(self._slabs[slab].live)

    def free_slots(self, slot_bytes: int) -> int:
        """Slots of this class that :meth:`allocate` can give without anything being freed, whole stock slabs
        included."""
        mine = sum(len(self._slabs[number].free) for number in self._open.get(slot_bytes, ()))
        return mine + len(self._stock) * (self.slab_bytes // slot_bytes)

    def check(self) -> None:
        """Assert every invariant."""
        assert sorted([*self._stock, *self._slabs]) == list(range(self._slab_count)), (
            "a slab is lost or doubled"
        )
        used = 0
        for number, slab in self._slabs.items():
            begin = self._first_offset + number * self.slab_bytes
            offsets = sorted([*slab.free, *slab.live])
            expected = [
                begin + place * slab.slot_bytes for place in range(self.slab_bytes // slab.slot_bytes)
            ]
            assert offsets == expected, "a slot is lost or doubled"
            assert slab.live, "an empty slab stayed with its class"
            assert number in self._classes[slab.slot_bytes]
            assert (number in self._open[slab.slot_bytes]) == bool(slab.free)
            used += len(slab.live) * slab.slot_bytes
        assert used == self.used_bytes, "used_bytes is wrong"
        assert all(self._classes.values()), "a class without slabs is listed"

    def _assign(self, slot_bytes: int) -> bool:
        if not self._stock:
            return False
        number = self._stock.pop()
        begin = self._first_offset + number * self.slab_bytes
        count = self.slab_bytes // slot_bytes
        offsets = [begin + place * slot_bytes for place in range(count)]
        self._slabs[number] = _Slab(slot_bytes, offsets[::-1])
        self._classes.setdefault(slot_bytes, {})[number] = None
        self._open[slot_bytes][number] = None
        return True

    def _return(self, number: int, slot_bytes: int) -> None:
        del self._slabs[number]
        del self._classes[slot_bytes][number]
        self._open[slot_bytes].pop(number, None)
        if not self._classes[slot_bytes]:
            del self._classes[slot_bytes], self._open[slot_bytes]
        self._stock.append(number)


def class_bytes(size_bytes: int) -> int:
    """The smallest class size that holds ``size_bytes``: an eighth of a power of two, a multiple of 256."""
    step = max(SLOT_ALIGN_BYTES, 1 << max(size_bytes - 1, 1).bit_length() - 1 >> 3)
    return max(-(-size_bytes // step) * step, SLOT_ALIGN_BYTES)

"""The live sequences: found by id, and refused where they are not what a call needs."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf

from pagedkv.cache.sequence import Reservation, Sequence
from pagedkv.config import require
from pagedkv.errors import InvalidArgument, SequenceExists, SequenceNotFound, SequenceSwapped

MAX_ID_LENGTH = 256


class LiveSequences:
    """Sequences by id, the oldest first."""

    __slots__ = ("_by_id", "charge")

    def __init__(self) -> None:
        self._by_id: dict[str, Sequence] = {}
        self.charge = 0  # of all of them

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_id.values())

    def ids(self) -> list[str]:
        """Return all ids."""
        return list(self._by_id)

    def check_new(self, field: str, sequence_id: str) -> None:
        """Raise InvalidArgument for what is no id, SequenceExists for one in use."""
        valid = isinstance(sequence_id, str) and 0 < len(sequence_id) <= MAX_ID_LENGTH
        require(valid, field, f"must be a text of 1 to {MAX_ID_LENGTH} characters", sequence_id, MAX_ID_LENGTH)
        if sequence_id in self._by_id:
            raise SequenceExists(sequence_id)

    def add(self, sequence: Sequence) -> None:
        """Take in a sequence whose id is new."""
        self._by_id[sequence.sequence_id] = sequence
        self.charge += sequence.charge

    def remove(self, sequence: Sequence) -> None:
        """Forget a live sequence."""
        del self._by_id[sequence.sequence_id]
        self.charge -= sequence.charge

    def find(self, sequence_id: str) -> Sequence:
        """Return a sequence. Raises SequenceNotFound."""
        sequence = self._by_id.get(sequence_id)
        if sequence is None:
            raise SequenceNotFound(sequence_id)
        return sequence

    def find_resident(self, sequence_id: str) -> Sequence:
        """Return a sequence whose blocks are on the device. Raises SequenceNotFound, SequenceSwapped."""
        sequence = self.find(sequence_id)
        if sequence.host_table is not None:
            raise SequenceSwapped(sequence_id)
        return sequence

    def find_open(self, reservation: Reservation) -> Sequence:
        """Return the sequence whose open reservation this is. Raises InvalidArgument."""
        sequence = self._by_id.get(reservation[0])
        if sequence is None or sequence.open is not reservation:
            raise InvalidArgument("the reservation is not open", field="reservation", sequence_id=reservation[0])
        return sequence

    def find_idle(self, field: str, sequence_id: str) -> Sequence:
        """Return a sequence on the device without an open reservation.

        Raises SequenceNotFound, InvalidArgument naming `field`, SequenceSwapped.
        """
        _check_closed(field, self.find(sequence_id))
        return self.find_resident(sequence_id)

    def find_all(self, sequence_ids: SequenceOf[str]) -> list[Sequence]:
        """Return these sequences. Raises SequenceNotFound, InvalidArgument for one named twice."""
        check_unique("sequence_ids", sequence_ids)
        return [self.find(sequence_id) for sequence_id in sequence_ids]

    def find_all_closed(self, sequence_ids: SequenceOf[str]) -> list[Sequence]:
        """The same, and InvalidArgument for an open reservation."""
        check_unique("sequence_ids", sequence_ids)
        found = []
        for at, sequence_id in enumerate(sequence_ids):
            sequence = self.find(sequence_id)
            _check_closed(f"sequence_ids[{at}]", sequence)
            found.append(sequence)
        return found


def check_unique(field: str, sequence_ids: SequenceOf[str]) -> None:
    """Raise InvalidArgument naming the first sequence that is named twice."""
    seen: set[str] = set()
    for index, sequence_id in enumerate(sequence_ids):
        require(sequence_id not in seen, f"{field}[{index}]", "names a sequence twice", sequence_id)
        seen.add(sequence_id)


def _check_closed(field: str, sequence: Sequence) -> None:
    if sequence.open is not None:
        raise InvalidArgument("the sequence has an open reservation", field=field)

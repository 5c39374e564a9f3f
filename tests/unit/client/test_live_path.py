from __future__ import annotations

import pytest

from kvwire.client.binding import LivePath
from kvwire.errors import KvwireError
from kvwire.transfer.base import Mark, Ticket

TICKET = Ticket(1, "shm", (), arrival_word=9_999)


class BrokenEnd:
    """Whose shared memory is gone, or is not what the server says."""

    name = "shm"

    def mark(self):
        raise ValueError("operation forbidden on released memoryview object")

    def publish(self, ticket, mark):
        raise ValueError(f"word {ticket.arrival_word} is none for arrivals")

    def proves(self, ticket, mark):
        raise ValueError("operation forbidden on released memoryview object")


@pytest.mark.parametrize(
    "use",
    [
        lambda path: path.mark(),
        lambda path: path.publish(TICKET, Mark(0.0)),
        lambda path: path.proves(TICKET, Mark(0.0)),
    ],
    ids=["mark", "publish", "proves"],
)
def test_a_board_that_cannot_be_used_is_a_typed_failure_and_the_paths_end(use):
    told = []
    path = LivePath(BrokenEnd(), told.append)
    with pytest.raises(KvwireError) as failure:
        use(path)
    assert told == [failure.value]

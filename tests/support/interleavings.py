"""What a model of several clients knows of one real server, and the ways in which clients come and go."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from support.fake_source import FakeSource, content
from support.local_server import MIB, LocalServer
from support.raw_client import OBJECT_BYTES, Failure, RawClient
from support.waiting import eventually

TTL = 100.0
SETTINGS = {
    # Room for fifteen objects: prompts crowd each other out.
    "l1_size": MIB,
    "sweep_interval": 1e6,
    "watermark": 1.0,
    "lookup_lease": TTL,
    "read_lease": TTL,
    "write_lease": TTL,
    "session_ttl": 1e9,
    "registration_ttl": 1e9,
}


@dataclass(eq=False)
class Party:
    """A process that lives. `here`: it is registered and attached."""

    client: RawClient
    here: bool = True


@dataclass(eq=False)
class Write:
    """Kept for as long as its owner may still write, whatever has become of the lease."""

    party: Party
    ticket: object
    keys: list[bytes]
    data: list[bytes]
    deadline: float
    written: set[int] = field(default_factory=set)
    live: bool = True


@dataclass(eq=False)
class Read:
    party: Party
    ticket: object
    expected: list[bytes]
    deadline: float
    live: bool = True


class World:
    """The server's clock is `time`. `committed` has the bytes that were last published under each key."""

    def open(self):
        self.folder = Path(tempfile.mkdtemp(prefix="kvw-", dir="/tmp"))
        self.time = 1000.0
        self.server = LocalServer(self.folder, **SETTINGS)
        self.server.__enter__()
        self.server.core.now = lambda: self.time
        self.parties: list[Party] = []
        self.writes: list[Write] = []
        self.reads: list[Read] = []
        self.committed: dict[bytes, bytes] = {}
        # Something lies below the memory, and lookups may bring it.
        self.below = FakeSource()
        self.server.core.prefetcher.add(self.below)
        self.watcher = RawClient(self.server.channel(), "watcher")
        self.watcher.negotiate()
        self.made = 0

    def close(self):
        for party in self.parties:
            party.client.let_go()
        self.server.__exit__(None, None, None)
        shutil.rmtree(self.folder)

    def join(self, path):
        self.made += 1
        client = RawClient(self.server.channel(), f"engine-{self.made}").register(path, attach=True)
        self.parties.append(Party(client))

    def live_writes(self):
        return [write for write in self.writes if write.live]

    def pick(self, found, number):
        return found[number % len(found)] if number >= 0 else found[-1]

    def present(self):
        return [party for party in self.parties if party.here]

    def call(self, party, function, *args):
        """The reply, or None from a registration that has gone."""
        try:
            reply = function(*args)
        except grpc.RpcError as error:
            failed = Failure.of(error)
            assert failed.reason == "NOT_REGISTERED", failed
            assert not party.here
            return None
        assert party.here
        return reply

    def look_up(self, party, session_id, packed):
        """The reply, or None. What it has brought has been published, too."""
        found = self.call(party, party.client.lookup, session_id, packed)
        for name in self.below.fetched:
            if name not in self.below.damaged:
                self.committed[name[0]] = content(name, OBJECT_BYTES)
        self.below.fetched.clear()
        return found

    def keys(self, packed):
        return self.watcher.keys(packed)

    def touchable(self):
        """Where somebody may write right now, on shared memory."""
        return {
            slot.arena_offset
            for write in self.writes
            if write.party.client.path == "shm"
            for slot in write.ticket.slots
        }

    def finish(self, write):
        """Its owner is done with it: a second word about it changes nothing."""
        self.writes.remove(write)
        client, lease_id = write.party.client, write.ticket.lease_id
        assert client.abort(lease_id) == 0
        assert client.commit(lease_id).committed == 0

    def by_stream(self, party):
        """The connection is lost; the process lives on and writes on."""
        party.client.attachment.close()
        self.left(party)

    def by_unregister(self, party):
        party.client.unregister()
        self.writes = [write for write in self.writes if write.party is not party]
        self.left(party)
        party.client.attachment.close()

    def by_death(self, party):
        """The process is gone: its stream, its mapping and its lock."""
        self.by_stream(party)
        party.client.let_go()
        self.parties.remove(party)
        self.writes = [write for write in self.writes if write.party is not party]

    def left(self, party):
        party.here = False
        self.reads = [read for read in self.reads if read.party is not party]
        for write in self.writes:
            write.live = write.live and write.party is not party
        registration_id = party.client.registration_id
        eventually(lambda: not self.server.engine.is_registered(registration_id), every=0.001)

    def all_ends(self):
        for party in [*self.parties]:
            self.by_death(party)
        self.server.sweep()
        status = self.server.status()
        assert not any(status.leases.values())
        assert not status.waiting_leases
        assert not status.sessions
        assert not status.registrations
        assert status.l1.used_bytes == status.l1.resident_bytes
        assert self.server.run(self.server.engine.clear)[1] == 0
        assert self.server.status().l1.used_bytes == 0
        self.server.check()


def contents(key, lease_id):
    return hashlib.shake_128(key + lease_id.to_bytes(8, "little")).digest(OBJECT_BYTES)

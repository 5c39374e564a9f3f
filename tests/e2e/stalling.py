"""The connector, of which one rank stops for ever in the middle of its first store that is long enough.

`stall.rank` is the rank, `stall.file` where it writes its process id when it has stopped.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from kvwire.client.binding import LivePath
from kvwire.vllm.connector import KvwireConnector as _KvwireConnector


class KvwireConnector(_KvwireConnector):
    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        if self._worker is not None and vllm_config.parallel_config.rank == extra["stall.rank"]:
            stop_in_the_middle(Path(extra["stall.file"]))


def stop_in_the_middle(file):
    write = LivePath.write

    def stalling(self, ticket, fill, deadline):
        copied = []

        def fill_some(slot, start, stop, data):
            if len(copied) == 1:
                file.write_text(str(os.getpid()))
                time.sleep(3600)
            copied.append(slot)
            fill(slot, start, stop, data)

        return write(self, ticket, fill_some if len(ticket.slots) > 1 else fill, deadline)

    LivePath.write = stalling

"""Real servers and real engines for the end-to-end tests. One engine lives at a time in this process."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from e2e.models import VOCABULARY, model_path
from kvwire.v1 import admin_service_pb2, admin_service_pb2_grpc

BLOCK = 32
CHUNK = 64
NUM_TOKENS = 16
LENGTHS = (200, 137, 96, 65, 3 * CHUNK, 3 * CHUNK + 1, 3 * CHUNK - 1, CHUNK, CHUNK - 1, 40)
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def prompt(num_tokens, seed=7):
    """The same tokens for the same seed; a shorter prompt is the head of a longer one."""
    source = random.Random(seed)
    return [source.randrange(3, VOCABULARY) for _ in range(num_tokens)]


SHELF = [prompt(length, seed=length) for length in LENGTHS]
"""Prompts of all lengths around a chunk's."""
FOUND = [192, 128, 64, 64]
"""What a fresh engine finds of the first four, in tokens."""


def expected(model, length):
    """What a fresh engine finds of a prompt that is stored as a whole."""
    if model == "llama":
        found = length // CHUNK * CHUNK
        return found if found < length else found - BLOCK
    return (length - 1) // CHUNK * CHUNK


class Server:
    """A `kvwire server` process on a socket file. `prefix` goes before its command."""

    def __init__(self, folder, *flags, chunk_size=CHUNK, l1_size="64MiB", prefix=()):
        self.address = f"unix:{folder / 'kvwire.sock'}"
        self._log = folder / "server.log"
        self._prefix = prefix
        self._flags = ("--chunk-size", str(chunk_size), "--l1-size", l1_size, *flags)
        self._process = None
        self.start()

    def start(self):
        command = [sys.executable, "-m", "kvwire.cli", "server", "--listen", self.address]
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [*self._prefix, *command, *self._flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            assert self._process.poll() is None, self.log()
            try:
                self.status(timeout=1)
            except grpc.RpcError:
                time.sleep(0.05)
            else:
                return
        raise TimeoutError(self.log())

    @property
    def pid(self):
        return self._process.pid

    def status(self, timeout=5.0):
        with grpc.insecure_channel(self.address) as channel:
            admin = admin_service_pb2_grpc.AdminServiceStub(channel)
            return admin.GetStatus(admin_service_pb2.GetStatusRequest(), timeout=timeout)

    def assert_at_rest(self):
        """Nothing is leased, reserved or remembered of requests that are over; nobody gave back too much."""
        deadline = time.monotonic() + 5
        while True:
            status = self.status()
            left = {
                "sessions": status.sessions,
                "lookups": status.leases.lookup,
                "reads": status.leases.read,
                "writes": status.leases.write,
                "reserved": status.memory.reserved_bytes,
                "quarantined": status.memory.quarantined_bytes,
                "surplus": status.counters.surplus_releases,
            }
            if not any(left.values()):
                return
            assert time.monotonic() < deadline, left
            time.sleep(0.05)

    def log(self):
        return self._log.read_text()

    def kill(self):
        self._process.kill()
        self._process.wait()

    def pause(self):
        self._process.send_signal(signal.SIGSTOP)

    def resume(self):
        self._process.send_signal(signal.SIGCONT)

    def close(self):
        if self._process.poll() is None:
            self.resume()
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()


@dataclass(frozen=True)
class Answer:
    """`cached` counts the tokens of the prompt that were not computed: local ones and those from kvwire."""

    tokens: tuple[int, ...]
    cached: int
    reason: str


@contextmanager
def without_collections():
    """vLLM collects garbage eight times per engine: nine tenths of the time that one takes here."""
    names = ("collect", "freeze", "unfreeze")
    real = {name: getattr(gc, name) for name in names}
    for name in names:
        setattr(gc, name, lambda *args: 0)
    try:
        yield
    finally:
        for name in names:
            setattr(gc, name, real[name])


class Engine:
    """One vLLM engine. `model` is a tiny model's name, or a folder.

    `transfer` is the connector's configuration, None for an engine without it.
    """

    def __init__(self, model, transfer=None, **options):
        with without_collections():
            self._start(model, transfer, options)

    def _start(self, model, transfer, options):
        from vllm import LLM
        from vllm.config import KVTransferConfig

        self._llm = LLM(
            model=model if "/" in model else model_path(model),
            enforce_eager=True,
            skip_tokenizer_init=True,
            seed=0,
            kv_transfer_config=KVTransferConfig(**transfer) if transfer else None,
            **{
                "dtype": "float32",
                "block_size": BLOCK,
                "max_model_len": 512,
                "max_num_seqs": 8,
                "max_num_batched_tokens": 512,
                "kv_cache_memory_bytes": 32 << 20,
                "enable_prefix_caching": False,
                "disable_log_stats": True,
                **options,
            },
        )

    def run(self, *prompts, num_tokens=NUM_TOKENS, salt=None, lora=None, **sampling):
        from vllm import SamplingParams

        asked = [{"prompt_token_ids": tokens, **({"cache_salt": salt} if salt else {})} for tokens in prompts]
        params = SamplingParams(
            temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, **sampling
        )
        outputs = self._llm.generate(asked, params, use_tqdm=False, lora_request=lora)
        self.settle()
        return [
            Answer(
                tuple(output.outputs[0].token_ids), output.num_cached_tokens, output.outputs[0].finish_reason
            )
            for output in outputs
        ]

    def abort_after(self, steps, *prompts, salt=None):
        from vllm import SamplingParams

        running = self._llm.llm_engine
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, detokenize=False)
        ids = [
            running.add_request(f"a{steps}-{i}", {"prompt_token_ids": tokens, "cache_salt": salt}, params)
            for i, tokens in enumerate(prompts)
        ]
        for _ in range(steps):
            running.step()
        running.abort_request(ids, internal=True)
        self.settle()

    @property
    def core(self):
        return self._llm.llm_engine.engine_core.engine_core

    @property
    def scheduler_connector(self):
        return self.core.scheduler.connector

    @property
    def worker_connector(self):
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()

    def settle(self, timeout=10.0):
        """Step on, as an engine's server does, until no finished request waits for its stores."""
        deadline = time.monotonic() + timeout
        while self.core.scheduler.has_requests():
            assert time.monotonic() < deadline, "the engine does not come to rest"
            self._llm.llm_engine.step()

    def free_blocks(self):
        return self.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def close(self):
        from vllm.distributed import cleanup_dist_env_and_memory

        with without_collections():
            self._llm.llm_engine.engine_core.shutdown()
            del self._llm
            cleanup_dist_env_and_memory()
        gc.collect()


def transfer_config(address, *, policy="recompute", role="kv_both", **extra):
    return {
        "kv_connector": "KvwireConnector",
        "kv_connector_module_path": "kvwire.vllm",
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {
            "kvwire.address": address,
            "kvwire.heartbeat_interval": 0.2,
            **{f"kvwire.{name}": value for name, value in extra.items()},
        },
    }


@contextmanager
def engine(model, server=None, *, policy="recompute", role="kv_both", extra=None, **options):
    transfer = transfer_config(server.address, policy=policy, role=role, **(extra or {})) if server else None
    running = Engine(model, transfer, **options)
    try:
        yield running
    finally:
        running.close()


def wait_until_healthy(running, timeout=10.0):
    parts = (running.scheduler_connector._scheduler, running.worker_connector._worker)
    deadline = time.monotonic() + timeout
    while not all(part.adapter.is_healthy for part in parts):
        assert time.monotonic() < deadline, [part.adapter.degraded_reason for part in parts]
        time.sleep(0.02)
    # The worker tells the scheduler of its health with the next step.
    running.run(prompt(3), num_tokens=1)


class Library:
    """One server per model in which an engine has stored the shelf."""

    def __init__(self, folder):
        self._folder = folder
        self._servers = {}

    def __call__(self, model):
        if model not in self._servers:
            folder = self._folder / model
            folder.mkdir()
            self._servers[model] = Server(folder)
            with engine(model, self._servers[model]) as first:
                assert [answer.cached for answer in first.run(*SHELF)] == [0] * len(SHELF)
        return self._servers[model]

    def close(self):
        for server in self._servers.values():
            server.close()


class Baseline:
    """What an engine without a connector says, each prompt asked once."""

    def __init__(self):
        self._known = {}

    def __call__(self, model, *prompts, num_tokens=NUM_TOKENS, **options):
        """Not while another engine lives."""
        name = (model, num_tokens, tuple(sorted(options.items())))
        known = self._known.setdefault(name, {})
        missing = [tokens for tokens in prompts if tuple(tokens) not in known]
        if missing:
            with engine(model, **options) as alone:
                for tokens, answer in zip(missing, alone.run(*missing, num_tokens=num_tokens), strict=True):
                    known[tuple(tokens)] = answer.tokens
        return [known[tuple(tokens)] for tokens in prompts]


def set_up():
    os.environ.update(ENVIRONMENT)
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    import vllm.entrypoints.llm  # noqa: F401  the objects of its modules are never garbage

    gc.collect()
    gc.freeze()

"""From an engine's request to its tracker: who may share its KV, and whether it can be cached at all."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvwire import telemetry
from kvwire.errors import KvwireError
from kvwire.vllm.identity import AdapterId, adapter_of, extra_inputs, session_id
from kvwire.vllm.params import RequestParams, request_params
from kvwire.vllm.tracker import RequestTracker

if TYPE_CHECKING:
    from kvwire.keys import Namespace

logger = logging.getLogger(__name__)

_MAX_EXTRA_INPUTS: Final = 1024
_MAX_ADAPTERS: Final = 1024
_MAX_WARNINGS: Final = 100


class TrackerFactory:
    """Makes the trackers of one engine, whose namespace is given.

    `defaults` hold where a request says nothing.
    """

    def __init__(self, namespace: Namespace, defaults: RequestParams | None = None) -> None:
        self._namespace = namespace
        self._defaults = defaults or RequestParams()
        self._warned: set[str] = set()
        self._adapters: dict[tuple[object, ...], AdapterId] = {}

    def __call__(self, request: Any) -> RequestTracker:
        namespace, extras, cacheable = self._namespace, extra_inputs(request.mm_features or ()), True
        try:
            adapter = self._adapter(request.lora_request)
            namespace = replace(
                namespace,
                adapter=adapter.name,
                adapter_revision=adapter.revision,
                salt=request.cache_salt or "",
            )
            namespace.validate()
        except (KvwireError, OSError) as error:
            # The text names the field and never quotes it: it may be a tenant's salt.
            logger.warning("kvwire: request %s is not cached: %s", request.request_id, error)
            cacheable = False
        return RequestTracker(
            request=request,
            session_id=session_id(request.request_id),
            namespace=namespace,
            extras=extras,
            params=self._params(request),
            trace=_trace(request),
            cacheable=cacheable and _can_be_cached(request) and len(extras) <= _MAX_EXTRA_INPUTS,
            preemptions=request.num_preemptions,
        )

    def _params(self, request: Any) -> RequestParams:
        """A client that sends the same mistake with every request is told of it once."""
        parsed = request_params(getattr(request, "kv_transfer_params", None), self._defaults)
        new = [each for each in parsed.problems if each not in self._warned]
        if new and len(self._warned) < _MAX_WARNINGS:
            self._warned.update(new)
            logger.warning(
                "kvwire: kv_transfer_params of request %s, ignored: %s", request.request_id, "; ".join(new)
            )
        return parsed.params

    def _adapter(self, lora_request: Any) -> AdapterId:
        if lora_request is None:
            return AdapterId()
        state = _state(lora_request)
        if state not in self._adapters:
            if len(self._adapters) >= _MAX_ADAPTERS:
                self._adapters.clear()
            self._adapters[state] = adapter_of(lora_request)
        return self._adapters[state]


def _trace(request: Any) -> dict[str, str]:
    """The headers of the request's trace, or of one that begins here; empty while tracing is off."""
    if telemetry.active() is None:
        return {}
    headers = getattr(request, "trace_headers", None)
    if headers:
        return dict(headers)
    with telemetry.span("kvwire.request", request_id=request.request_id):
        return telemetry.headers_from_context()


def _can_be_cached(request: Any) -> bool:
    # Embeddings are not told by tokens, and a resumable request changes what has been told.
    return getattr(request, "prompt_embeds", None) is None and not getattr(request, "resumable", False)


def _state(lora_request: Any) -> tuple[object, ...]:
    """What changes when an adapter's files do: reading the weights for every request would cost too much."""
    folder = Path(lora_request.lora_path)
    stats = [(path.name, path.stat()) for path in folder.iterdir()] if folder.is_dir() else []
    files = tuple(sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats))
    return (lora_request.lora_name, lora_request.lora_int_id, str(folder), files)

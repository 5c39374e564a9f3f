"""`kvwire lookup`."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Parameter

from kvwire.cli import render, units
from kvwire.cli.commands.prompts import read_prompt
from kvwire.cli.connect import ClientSettings, open_client
from kvwire.cli.flags import command_app, with_settings
from kvwire.errors import ConfigError
from kvwire.keys import Namespace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.client import Client, LookupResult
    from kvwire.v1 import namespace_pb2

TEXT = """How much of a prompt has a server in memory? Only looks: no session, no lease, no hit counted.

  kvwire lookup --tokens 1,2,3,4
  kvwire lookup --tokens-file prompt.json --model my-model
  kvwire lookup --text "Once upon a time" --tokenizer ./my-model

Nothing is brought from lower tiers or other servers: `kvwire prefetch` does that.

The prompt is token ids; with --text a tokenizer makes them (a folder or a tokenizer.json, read by the package
`tokenizers`). The namespace is taken from the server when exactly one is registered there, or one of that
--model; else name it as the engine does (`kvwire status` lists the registered ones)."""

command = command_app("lookup", TEXT)


@dataclass(frozen=True, kw_only=True)
class PromptFlags:
    """A prompt and its namespace, as the commands take them."""

    tokens: Annotated[str, Parameter(help="Token ids, separated by commas.", show_default=False)] = ""
    tokens_file: Annotated[
        str,
        Parameter(
            help="File with token ids: a JSON list, or separated by spaces, commas or lines. - is stdin.",
            show_default=False,
        ),
    ] = ""
    text: Annotated[str, Parameter(help="Text of the prompt; needs --tokenizer.", show_default=False)] = ""
    tokenizer: Annotated[
        str, Parameter(help="The model's folder, or its tokenizer.json.", show_default=False)
    ] = ""
    model: Annotated[str, Parameter(help="Model of the namespace.", show_default=False)] = ""
    revision: Annotated[str, Parameter(help="Revision of the model.", show_default=False)] = ""
    kv_dtype: Annotated[str, Parameter(help="Element type of the KV cache.", show_default=False)] = ""
    layout_fingerprint: Annotated[str, Parameter(help="Layout fingerprint, in hex.", show_default=False)] = ""
    adapter: Annotated[str, Parameter(help="LoRA adapter.", show_default=False)] = ""
    adapter_revision: Annotated[str, Parameter(help="Revision of the adapter.", show_default=False)] = ""
    salt_file: Annotated[
        str, Parameter(help="File with the tenant's salt, which is never shown.", show_default=False)
    ] = ""

    @property
    def given(self) -> bool:
        return bool(self.tokens or self.tokens_file or self.text)

    def read(self) -> Sequence[int]:
        """Raises ConfigError, TokensInvalid."""
        return read_prompt(self.tokens, self.tokens_file, self.text, self.tokenizer)

    def names(self) -> dict[str, Any]:
        """The fields of the namespace that were given. Raises ConfigError."""
        found = {
            "model": self.model,
            "revision": self.revision,
            "kv_dtype": self.kv_dtype,
            "layout_fingerprint": fingerprint(self.layout_fingerprint),
            "adapter": self.adapter,
            "adapter_revision": self.adapter_revision,
            "salt": _salt(self.salt_file),
        }
        return {name: value for name, value in found.items() if value}


NO_PROMPT: Final = PromptFlags()


@command.default
@with_settings(ClientSettings, "client")
def lookup(
    settings: ClientSettings,
    *,
    prompt: Annotated[PromptFlags, Parameter(name="*")] = NO_PROMPT,
    output: render.Output = "table",
) -> int:
    tokens = prompt.read()
    given = prompt.names()
    with open_client(settings, "lookup") as client:
        namespace = choose_namespace(client, given, settings)
        started = time.perf_counter()
        found = client.lookup(namespace, tokens, timeout=settings.deadline)
        seconds = time.perf_counter() - started
    chunk_size = found.hit_tokens // found.hit_chunks if found.hit_chunks else 0
    _show(found, len(tokens), namespace, seconds, chunk_size, output)
    return 0


def namespace_of(prompt: PromptFlags, server: str, settings: ClientSettings) -> Namespace:
    """For a program that knows no namespaces: as it was named, completed by the one of a cache server."""
    given = prompt.names()
    if server:
        with open_client(replace(settings, address=server), "namespace") as client:
            return choose_namespace(client, given, settings)
    if not given.get("model"):
        raise ConfigError(
            "Which namespace? Name it by --model and the rest of it, or take it from a cache server "
            "by --namespace-from.",
            setting="model",
        )
    return Namespace(**given)


def choose_namespace(client: Client, given: dict[str, Any], settings: ClientSettings) -> Namespace:
    """What was given, completed by the one registered namespace that agrees with it."""
    if given.get("model") and given.get("layout_fingerprint"):
        return Namespace(**given)
    registered = [entry.namespace for entry in client.status(timeout=settings.deadline).namespaces]
    fitting = [each for each in registered if _agrees(each, given)]
    if len(fitting) == 1:
        (found,) = fitting
        base = {
            "model": found.model,
            "revision": found.revision,
            "kv_dtype": found.kv_dtype,
            "layout_fingerprint": found.layout_fingerprint,
        }
        return Namespace(**{**base, **given})
    if given.get("model"):
        return Namespace(**given)
    models = sorted({each.model for each in fitting})
    told = f"these are registered: {', '.join(models)}" if models else "no engine is registered there"
    raise ConfigError(f"Which namespace? Name it by --model: {told}.", setting="model")


def _agrees(registered: namespace_pb2.Namespace, given: dict[str, Any]) -> bool:
    fixed = ("model", "revision", "kv_dtype", "layout_fingerprint")
    return all(getattr(registered, name) == given[name] for name in fixed if name in given)


def _show(
    found: LookupResult, tokens: int, namespace: Namespace, seconds: float, chunk_size: int, output: str
) -> None:
    if output == "json":
        render.print_json(
            {
                "model": namespace.model,
                "prompt_tokens": tokens,
                "asked_chunks": found.asked_chunks,
                "hit_chunks": found.hit_chunks,
                "hit_tokens": found.hit_tokens,
                "seconds": round(seconds, 6),
            }
        )
        return
    chunks = f"{found.hit_chunks} of {found.asked_chunks} whole chunks"
    if chunk_size:
        chunks += f" of {chunk_size} tokens"
    if not found.asked_chunks:
        chunks = "the prompt is shorter than one chunk"
    render.print_fields(
        [
            ("model", namespace.model),
            ("prompt", f"{tokens} tokens"),
            ("found", f"{found.hit_tokens} tokens ({chunks})"),
            ("answered in", units.format_duration(seconds)),
        ]
    )


def fingerprint(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise ConfigError(
            "--layout-fingerprint is written in hex, as `kvwire status -o json` shows it.",
            setting="layout_fingerprint",
        ) from error


def _salt(path: str) -> str:
    if not path:
        return ""
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        raise ConfigError(f"--salt-file {path}: {error.strerror}.", setting="salt_file") from error

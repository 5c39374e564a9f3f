"""A page in a headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--no-proxy-server",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-sync",
    "--remote-debugging-port=0",
)
START_S = 30.0


class Page:
    def __init__(self, socket) -> None:
        self._socket = socket
        self._number = 0
        self.complaints: list[Any] = []
        """What the browser logged as an error: exceptions, and what the page's policy has blocked."""

    async def do(self, method: str, **params: Any) -> Any:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json(timeout=START_S)
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]
            if message.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(message["params"])
            if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.complaints.append(message["params"]["entry"])

    async def value(self, script: str) -> Any:
        result = await self.do("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def text(self, where: str = "body") -> str:
        return await self.value(f"(document.querySelector({where!r}) || {{}}).innerText || ''")

    async def until(self, script: str, within: float = 20.0) -> Any:
        deadline = time.monotonic() + within
        while not (found := await self.value(script)):
            assert time.monotonic() < deadline, f"{script}\n{await self.text()}"
            await asyncio.sleep(0.05)
        return found

    async def resize(self, width: int, height: int, *, dark: bool = False, scale: int = 1) -> None:
        await self.do(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.do("Emulation.setEmulatedMedia", features=[scheme])

    async def screenshot(self, file: Path) -> None:
        shot = base64.b64decode((await self.do("Page.captureScreenshot"))["data"])
        await asyncio.to_thread(file.write_bytes, shot)


@contextlib.asynccontextmanager
async def browse(url: str):
    import aiohttp

    folder = Path(tempfile.mkdtemp(prefix="kvw-chromium-", dir="/tmp"))
    process = await asyncio.create_subprocess_exec(
        str(CHROMIUM),
        *FLAGS,
        f"--user-data-dir={folder}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        port = await _port(folder / "DevToolsActivePort")
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as reply:
                target = next(each for each in await reply.json() if each["type"] == "page")
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page = Page(socket)
                for domain in ("Page", "Runtime", "Log"):
                    await page.do(f"{domain}.enable")
                await page.do("Page.navigate", url=url)
                yield page
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 10)
        except TimeoutError:
            process.kill()
            await process.wait()
        shutil.rmtree(folder, ignore_errors=True)


async def _port(file: Path) -> int:
    deadline = time.monotonic() + START_S
    while True:
        with contextlib.suppress(OSError, IndexError, ValueError):
            return int((await asyncio.to_thread(file.read_text)).splitlines()[0])
        assert time.monotonic() < deadline, "chromium does not start"
        await asyncio.sleep(0.05)

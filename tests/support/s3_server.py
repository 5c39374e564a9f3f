"""A real S3 protocol server in a process of its own: moto, in memory. What an ended one had is gone."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from dataclasses import dataclass

import pytest

BUCKET = "kvwire-test"
KEYS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "secret-of-the-test",
    "AWS_REGION": "us-east-1",
    "no_proxy": "127.0.0.1",
}
"""The environment in which clients find their credentials, and no way around through a proxy."""

PROGRAM = f"""
import logging, os, sys
os.environ.update({KEYS!r})
logging.getLogger("werkzeug").setLevel(logging.ERROR)
import boto3
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
url = "http://127.0.0.1:%d" % server.get_host_and_port()[1]
boto3.client("s3", endpoint_url=url).create_bucket(Bucket={BUCKET!r})
print(url, flush=True)
sys.stdin.read()
"""


@dataclass
class S3Server:
    endpoint: str
    process: subprocess.Popen

    @property
    def address(self) -> str:
        return self.endpoint.removeprefix("http://")

    def client(self):
        """boto3's, to look at it from outside."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=KEYS["AWS_REGION"],
            aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
        )

    def names(self) -> list[str]:
        found = self.client().list_objects_v2(Bucket=BUCKET).get("Contents", [])
        return sorted(entry["Key"] for entry in found)

    def uploads(self) -> list[str]:
        """Uploads in parts that nobody has finished."""
        found = self.client().list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
        return [entry["Key"] for entry in found]


@contextlib.contextmanager
def s3_server():
    pytest.importorskip("moto.server", reason="moto is not installed")
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            endpoint = process.stdout.readline().strip()
            if not endpoint:
                errors.seek(0)
                pytest.fail(errors.read())
            yield S3Server(endpoint, process)
        finally:
            process.kill()
            process.wait(10)
            process.stdin.close()
            process.stdout.close()
